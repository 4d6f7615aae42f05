"""vLLM's engine with das and without; its rejection sampler draws other random numbers where tokens are drafted."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from pathlib import Path

from generation import LONGEST_DRAFT, MIN_SURVIVAL, Generation
from task import MAX_RESPONSE_TOKENS

from bench.bench_vllm import counts, environment, repair_sampling_on_cpu


class VLLMEngine:
    """An engine in this process.

    Args:
        model: folder of the first weights.
        drafts: False: vLLM without speculation.
        seed: of the engine's random numbers.
        max_running: prompts of a call, at most.
    """

    def __init__(self, model: Path, *, drafts: bool, seed: int, max_running: int) -> None:
        os.environ.update(environment())
        repair_sampling_on_cpu()
        from vllm import LLM, SamplingParams

        price = {"policy": "price", "policy_options": {"min_survival": MIN_SURVIVAL, "max_draft_tokens": LONGEST_DRAFT}}
        das_drafts = {
            "method": "custom_class",
            "model": "das_vllm.DasProposer",
            "num_speculative_tokens": LONGEST_DRAFT,
        }
        self._drafts = drafts
        self._sampling = SamplingParams(temperature=1.0, max_tokens=MAX_RESPONSE_TOKENS, detokenize=False)
        self._llm = LLM(
            str(model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=max_running,
            enable_prefix_caching=False,
            disable_log_stats=False,
            seed=seed,
            speculative_config=das_drafts if drafts else None,
            additional_config={"das": price} if drafts else {},
        )

    def load(self, folder: Path) -> None:
        """See `Engine`. das sees the update, and takes it for the next training step."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})

    def generate(self, prompts: Sequence[list[int]], *, request_ids: Sequence[str]) -> Generation:
        """See `Engine`. Passes are the engine's iterations but the first, which is the prefill of all prompts."""
        num_steps, num_iterations = self._num_decode_steps(), counts(self._llm)["engine_steps"]
        started_s = time.perf_counter()
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(asked, self._sampling, use_tqdm=False)
        wall_s = time.perf_counter() - started_s
        responses = [list(output.outputs[0].token_ids) for output in outputs]
        num_tokens = sum(map(len, responses)) - len(responses)
        return Generation(
            responses,
            self._num_decode_steps() - num_steps if self._drafts else num_tokens,
            counts(self._llm)["engine_steps"] - num_iterations - 1,
            wall_s,
        )

    def close(self) -> None:
        """See `Engine`."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()

    def _num_decode_steps(self) -> int:
        """Of all requests so far, as das counts them, less the one of each that is its prefill."""
        if not self._drafts:
            return 0
        self._llm.collective_rpc("das_flush")
        (told,) = self._llm.collective_rpc("das_statistics")
        return int(told["das_num_decode_steps"] - told["das_num_requests_finished"])
