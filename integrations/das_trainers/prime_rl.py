"""prime-rl: das in its vLLM servers; what it has sampled is fed from the token exports that its trainer writes.

Read in prime-rl 0.8 (vLLM 0.26): `[inference.vllm]` goes to vLLM as it is; with `trainer.enable_token_export` the
trainer writes `token_exports/step_{N}/rank_{r}.jsonl`, and a file STABLE beside them when the step is complete.
"""

from __future__ import annotations

import os

from das_trainers.configuration import Configuration, vllm_speculative_config
from das_trainers.feed import Feed
from das_trainers.following import LogFollower


def configuration(*, num_speculative_tokens: int = 16) -> Configuration:
    """Return settings of the TOML file. Raises: as `vllm_speculative_config`."""
    return Configuration(
        settings={
            "inference": {"vllm": {"speculative_config": vllm_speculative_config(num_speculative_tokens)}},
            "trainer": {"enable_token_export": True},
        }
    )


def follower(output_directory: str | os.PathLike[str], feed: Feed) -> LogFollower:
    """Return what feeds the token exports of a run.

    Args:
        output_directory: of the trainer; `token_exports` in it. A step is read when its STABLE is there.
        feed: where rollouts go.
    """
    exports = os.path.join(output_directory, "token_exports")
    return LogFollower(exports, feed, is_complete=lambda file: (file.parent / "STABLE").exists())
