"""NeMo-RL: das in its vLLM workers; what it has sampled is fed from the files that it writes each step.

Read in NeMo-RL 0.6 (vLLM 0.25): `vllm_kwargs` go to vLLM as they are; the training loop has no hook, but writes
`train_data_step{N}.jsonl` with token ids, masks and rewards.
"""

from __future__ import annotations

import os

from das_trainers.configuration import Configuration, vllm_speculative_config
from das_trainers.feed import Feed
from das_trainers.following import LogFollower


def configuration(*, num_speculative_tokens: int = 16) -> Configuration:
    """Return settings of the master configuration. Raises: as `vllm_speculative_config`."""
    vllm = {"speculative_config": vllm_speculative_config(num_speculative_tokens)}
    return Configuration(settings={"policy": {"generation": {"vllm_kwargs": vllm}}})


def follower(log_directory: str | os.PathLike[str], feed: Feed) -> LogFollower:
    """Return what feeds the training data of a run.

    Args:
        log_directory: `{logger.log_dir}/exp_NNN` of the run, or the folder above it. Each file is written in one go,
            and read at the second look that finds it unchanged.
        feed: where rollouts go.
    """
    return LogFollower(log_directory, feed)
