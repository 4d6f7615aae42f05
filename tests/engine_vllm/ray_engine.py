"""An engine in processes of its own, that shares its history: of this process, or of an actor of Ray, as trainers'."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine_runs import Case, counters, engine, set_environment, since

from bench.bench_vllm import repair_sampling_on_cpu


class SharingEngine:
    """vLLM with das in its engine core's process.

    Args:
        model: its folder.
        das: settings.
    """

    def __init__(self, model: str, das: Mapping[str, Any]) -> None:
        set_environment()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        repair_sampling_on_cpu()
        self._open = ExitStack()
        self.llm = self._open.enter_context(engine(Path(model), das=das))

    def prepare(self, prompts: list[list[int]]) -> None:
        self.llm.collective_rpc("das_prepare", args=(prompts,))

    def set_policy(self, policy: str) -> None:
        self.llm.collective_rpc("das_set_policy", args=(policy,))

    def statistics(self) -> dict[str, Any]:
        (found,) = self.llm.collective_rpc("das_statistics")
        return dict(found)

    def generate(self, cases: list[Case], **changes: Any) -> tuple[list[list[int]], dict[str, int]]:
        """Return the tokens of each case, under changed parameters, and vLLM's counts of it."""
        from vllm import SamplingParams

        before = counters(self.llm)
        outputs = self.llm.generate(
            [{"prompt_token_ids": case.prompt_token_ids} for case in cases],
            [SamplingParams(**case.parameters | changes) for case in cases],
            use_tqdm=False,
        )
        self.llm.collective_rpc("das_flush")
        return [list(output.outputs[0].token_ids) for output in outputs], since(self.llm, before)

    def close(self) -> None:
        self._open.close()
