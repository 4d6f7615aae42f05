"""What a replayed log would have taken to generate, with drafts and without, by a latency model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from das.analysis.replay import BatchResult
from das.latency import LatencyModel


@dataclass(frozen=True, slots=True)
class GenerationTime:
    """Time in target forwards of the batches that were replayed to the end, one batch after the other.

    Args:
        with_drafts_s: as replayed.
        without_drafts_s: the same responses, one token a decode step, with speculation switched off in the engine.
    """

    with_drafts_s: float
    without_drafts_s: float

    @property
    def speedup(self) -> float:
        """Time without drafts / time with them; 1 where nothing was generated."""
        return self.without_drafts_s / self.with_drafts_s if self.with_drafts_s else 1.0


def generation_time(batches: Iterable[BatchResult], latency: LatencyModel) -> GenerationTime:
    """Return what the batches take by a latency model. The drafter's own time is not in it.

    Args:
        batches: of a ReplayResult; those that were stopped in the middle are left out.
        latency: what a pass costs.

    Complexity: O(requests).

    Source: DAS (arXiv 2511.13841), Eq. 1, summed over passes.
    """
    with_ms = without_ms = 0.0
    for batch in batches:
        if not batch.is_complete:
            continue
        num_steps = sum(request.num_decode_steps for request in batch.requests)
        num_drafted = sum(request.num_drafted_tokens for request in batch.requests)
        num_emitted = sum(request.num_emitted_tokens for request in batch.requests)
        with_ms += batch.num_batch_steps * latency.step_ms(0) + (
            latency.c_tok_ms * (num_steps + num_drafted + batch.num_padded_tokens)
            + latency.c_kv_ms * batch.num_context_tokens
        )
        without_ms += batch.longest_response_tokens * latency.step_ms(0, speculating=False) + (
            latency.c_tok_ms * num_emitted + latency.c_kv_ms * batch.num_context_tokens_without_drafts
        )
    return GenerationTime(with_drafts_s=with_ms / 1e3, without_drafts_s=without_ms / 1e3)
