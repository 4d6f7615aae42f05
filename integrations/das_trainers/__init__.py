"""das for RL trainers: what each must be told so that its engine drafts with das, and hooks that feed rollouts.

One module a trainer: `verl`, `trl`, `openrlhf`, `slime`, `nemo_rl`, `prime_rl`. docs/trainers.md is the page to start
with. Nothing here imports a trainer or an engine before one of them calls.
"""

from das_trainers.configuration import Configuration
from das_trainers.feed import Feed, FeedStatistics
from das_trainers.rollout_log import RolloutLog

__all__ = ["Configuration", "Feed", "FeedStatistics", "RolloutLog"]
