"""The worker: SGLang's n-gram worker with das' drafts, a width for each decode step, and exact sampling."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.runtime_context import get_exec, get_parallel, get_serving, get_spec
from sglang.srt.speculative import ngram_worker
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from das.verify import request_seed
from das_ray.rank_broadcast import broadcast_in
from das_sglang import control, engine_request
from das_sglang.corpus import PushedText
from das_sglang.drafting import Drafting
from das_sglang.settings import Settings
from das_sglang.verification import sample_then_match
from das_sglang.verify_arrays import verify_arrays

logger = logging.getLogger("das")

_BUFFERS = (
    "draft_tokens",
    "retrieve_indexes",
    "retrieve_next_token",
    "retrieve_next_sibling",
    "positions",
    "tree_mask",
    "draft_tokens_batch",
    "tree_mask_batch",
    "retrieve_indexes_batch",
    "retrieve_next_token_batch",
    "retrieve_next_sibling_batch",
    "positions_batch",
)
_STATIC_WIDTH = ("num_draft_tokens", "speculative_num_draft_tokens")


class DasWorker(ngram_worker.NGRAMWorker):  # type: ignore[misc]  # SGLang is not installed where this is checked
    """Drafts with das; passes, memory, log-probabilities and grammars are SGLang's.

    A decode step: what requests emitted goes to the drafter (`_plan`), which says what to verify and how wide; the pass
    runs at that width; `sample_then_match` verifies. What is handed from step to step stays at the greatest width,
    because SGLang's buffers between steps have one.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        settings = Settings.from_environment(os.environ).within(get_spec().speculative_num_draft_tokens)
        self.drafting = Drafting(
            settings,
            num_ranks=get_parallel().tp_size,
            vocabulary_size=target_worker.model_runner.model_config.vocab_size,
            is_first_rank=get_parallel().tp_rank == 0,
            broadcast=None if getattr(server_args, "enable_dp_attention", False) else broadcast_in(_ranks),
        )
        self._planned: tuple[Any, Any] | None = None
        self._buffers: dict[int, dict[str, Any]] = {}
        self._warned: set[str] = set()
        with _own_corpus(self.drafting):
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self._num_nodes_at_most: int = get_spec().speculative_num_draft_tokens
        # SGLang's worker looks the function up in its own module at every step.
        ngram_worker.eagle_sample = partial(sample_then_match, sampler=self.model_runner.sampler)
        control.install()
        logger.info("das drafts: %s", settings.as_dict())

    # ---------------------------------------------------------------- a step

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Any = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """Run a pass: prefill as SGLang does, a decode step with das' drafts."""
        if batch.forward_mode.is_decode():
            self._plan(batch)
        else:
            self._use_num_nodes(self._num_nodes_at_most)
            self.drafting.prefill(batch.reqs)
        self._key_the_noise(batch)
        result = super().forward_batch_generation(batch, on_publish, pp_proxy_tensors)
        self._widen(result.next_draft_input)
        return result

    def _plan(self, batch: ScheduleBatch) -> None:
        """Decide what this step verifies, before SGLang lays out its tensors."""
        unprocessed = self._unprocessed_tokens(batch)
        plan = self.drafting.plan(batch.reqs, unprocessed, weight_version=get_serving().weight_version)
        roots = [
            (tail or request.output_ids or request.origin_input_ids)[-1]
            for request, tail in zip(batch.reqs, unprocessed, strict=True)
        ]
        self._planned = verify_arrays(plan.drafts, roots, width=plan.width)
        self._use_num_nodes(1 + plan.width)

    def _unprocessed_tokens(self, batch: ScheduleBatch) -> list[list[int]]:
        """Return what each request has emitted and `output_ids` does not have yet: nothing, unless scheduling overlaps.

        The results of grammars are processed before the next step in any case.
        """
        if not self.enable_overlap or batch.grammar_needs_sync():
            return [[] for _ in batch.reqs]
        lengths = batch.spec_info.accept_lens.tolist()  # waits for the last pass
        rows = batch.spec_info.accept_tokens.view(len(lengths), -1).tolist()
        return [
            engine_request.unprocessed_tokens(request, num_cached_tokens=cached, last_emitted=row[:length])
            for request, cached, row, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), rows, lengths, strict=True)
        ]

    def _prepare_draft_tokens(self, batch: ScheduleBatch) -> tuple[np.ndarray, np.ndarray]:
        assert self._planned is not None  # SGLang asks in a decode step, which begins with `_plan`
        planned, self._planned = self._planned, None
        return planned

    def _update_ngram_corpus(self, batch: ScheduleBatch) -> None:
        """The drafter hears of tokens in `_plan`."""

    def _key_the_noise(self, batch: ScheduleBatch) -> None:
        """Seed the samples of each request, unless it has a seed from SGLang's deterministic inference."""
        sampling, noise_seed = batch.sampling_info, self.drafting.settings.noise_seed
        if noise_seed is None or sampling is None or sampling.is_all_greedy or sampling.sampling_seed is not None:
            return
        if sampling.need_min_p_sampling or get_exec().kernel.sampling_backend != "pytorch":
            self._warn_once("noise_seed needs --sampling-backend pytorch and no min_p; these samples are unkeyed")
            return
        seeds = [request_seed(noise_seed, request.rid) for request in batch.reqs]
        sampling.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=self.device)

    # ---------------------------------------------------------------- width

    def init_attention_backends(self) -> None:
        """The attention backend is there: see whether the width may vary."""
        super().init_attention_backends()
        if not self._width_may_vary():
            if len(self.drafting.settings.widths) > 1:
                self._warn_of_one_width()
            self.drafting.keep_width()

    def _init_preallocated_tensors(self) -> None:
        super()._init_preallocated_tensors()
        self._buffers[self.draft_token_num] = {name: getattr(self, name) for name in _BUFFERS}

    def _width_may_vary(self) -> bool:
        """Whether the attention backend takes the width of a pass from the pass: FlashInfer's does, others keep one."""
        backend = self.model_runner.attn_backend
        if any(isinstance(getattr(backend, name, None), int) for name in _STATIC_WIDTH):
            return False
        return self.device == "cpu" or type(backend).__name__ == "FlashInferAttnBackend"

    def _warn_of_one_width(self) -> None:
        width = self.draft_token_num - 1
        self._warn_once(
            f"the attention backend {type(self.model_runner.attn_backend).__name__} has one verify width: every decode "
            f"step verifies {width} draft tokens a request, worth it or not; --attention-backend flashinfer varies it"
        )

    def _use_num_nodes(self, num_nodes: int) -> None:
        if num_nodes == self.draft_token_num:
            return
        self.draft_token_num: int = num_nodes
        self.speculative_num_draft_tokens = num_nodes
        if num_nodes in self._buffers:
            self.__dict__.update(self._buffers[num_nodes])
        else:
            self._init_preallocated_tensors()

    def _widen(self, handed_on: NgramVerifyInput) -> None:
        """Bring what goes to the next step to the greatest width."""
        missing = self._num_nodes_at_most - handed_on.draft_token_num
        if missing:
            rows = handed_on.accept_tokens.view(-1, handed_on.draft_token_num)
            handed_on.accept_tokens = torch.nn.functional.pad(rows, (0, missing)).flatten()
            handed_on.draft_token_num = self._num_nodes_at_most
            handed_on.num_tokens_per_req = handed_on.num_tokens_for_logprob_per_req = self._num_nodes_at_most

    # ---------------------------------------------------------------- what SGLang tells

    def clear_cache_pool(self) -> None:
        """The cache was flushed: rollouts are no cache, and stay."""
        self._prev_decode_rids: set[str] = set()

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        """Weights are being updated; none of them is das'."""
        self.drafting.training_step.note_update()
        return []

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """A request has ended."""
        self.drafting.finish(rid)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("das: %s", message)


def _ranks() -> Any:
    return get_parallel().tp_group.cpu_group


@contextmanager
def _own_corpus(drafting: Drafting) -> Iterator[None]:
    """Keep SGLang's worker from compiling and filling a trie of its own."""
    stock = ngram_worker.NgramCorpus
    ngram_worker.NgramCorpus = lambda **options: PushedText(drafting, num_ranks=get_parallel().tp_size)
    try:
        yield
    finally:
        ngram_worker.NgramCorpus = stock
