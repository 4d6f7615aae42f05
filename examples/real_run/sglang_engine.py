"""SGLang's engine with das and without, both with noise keyed by (seed, request id, position)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from generation import LONGEST_DRAFT, MIN_SURVIVAL, WIDTHS, Generation
from sglang.srt.entrypoints.engine import Engine, run_scheduler_process
from task import MAX_RESPONSE_TOKENS

from bench.bench_sglang import CPU, update
from das.verify import request_seed


class SGLangEngine:
    """Sample-then-match verification and keyed noise: one token for each (seed, request id, position), drafted or not.

    Args:
        model: folder of the first weights.
        drafts: False: SGLang without speculation, and without any part of das in its processes.
        seed: of the noise.
        max_running: prompts of a call, at most.
    """

    def __init__(self, model: Path, *, drafts: bool, seed: int, max_running: int) -> None:
        self._drafts, self._seed = drafts, seed
        options: dict[str, Any] = {}
        if drafts:
            settings = {"policy": f"price:{MIN_SURVIVAL}", "widths": WIDTHS, "noise_seed": seed}
            os.environ["DAS_SGLANG"] = json.dumps(settings)
            options["speculative_algorithm"] = "DAS"
        make = Engine if drafts else SeededEngine
        self._engine = make(
            model_path=str(model),
            skip_tokenizer_init=True,
            device="cpu",
            dtype="float32",
            max_running_requests=max_running,
            max_total_tokens=max_running * (MAX_RESPONSE_TOKENS + 16 + 4 * LONGEST_DRAFT),
            log_level="warning",
            **CPU | options,
        )

    def load(self, folder: Path) -> None:
        """See `Engine`."""
        update(self._engine, str(folder))

    def generate(self, prompts: Sequence[list[int]], *, request_ids: Sequence[str]) -> Generation:
        """See `Engine`. A request's passes are counted from its prefill; all prompts are there from the start."""
        sampling = [
            {"temperature": 1.0, "max_new_tokens": MAX_RESPONSE_TOKENS, "sampling_seed": self._seed_of(request_id)}
            for request_id in request_ids
        ]
        started_s = time.perf_counter()
        answers = self._engine.generate(input_ids=list(prompts), sampling_params=sampling, rid=list(request_ids))
        wall_s = time.perf_counter() - started_s
        told = [answer["meta_info"] for answer in answers]
        num_steps = [meta.get("spec_verify_ct", meta["completion_tokens"] - 1) for meta in told]
        return Generation([answer["output_ids"] for answer in answers], sum(num_steps), max(num_steps), wall_s)

    def close(self) -> None:
        """See `Engine`."""
        self._engine.shutdown()

    def _seed_of(self, request_id: str) -> int | None:
        return None if self._drafts else request_seed(self._seed, request_id)  # das makes the same of its noise_seed


class SeededEngine(Engine):  # type: ignore[misc]
    """SGLang, but a request's `sampling_seed` counts: as it ships, in deterministic mode only, which CPUs lack."""

    @staticmethod
    def run_scheduler_process_func(*args: Any, **options: Any) -> None:
        """Start the scheduler's process."""
        _honour_sampling_seeds()
        run_scheduler_process(*args, **options)


def _honour_sampling_seeds() -> None:
    import torch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    unseeded = SamplingBatchInfo.from_schedule_batch

    def seeded(batch: Any, vocab_size: int) -> SamplingBatchInfo:
        info = unseeded(batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        if all(seed is not None for seed in seeds):  # SGLang's own warm-up has none
            info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)
        return info

    SamplingBatchInfo.from_schedule_batch = seeded
