"""Exact verification at any temperature: sample every position of the draft, then follow the draft while it matches.

`das.verify.match_samples` is the same in plain Python. SGLang's own is exact at temperature 0 only: on CPUs
it takes the likeliest token whatever the temperature; on CUDA it ignores min_p, and adds the probability of a token
once for each of a node's children that hold it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler, apply_custom_logit_processor
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


def sample_then_match(
    verify_input: Any,
    batch: Any,
    logits_output: LogitsProcessorOutput,
    grammar_mask: Any = None,
    *,
    sampler: Sampler,
    watermark_state: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Verify a batch of drafts; takes the place of SGLang's `eagle_sample` for n-gram trees.

    Args:
        verify_input: of SGLang's class NgramVerifyInput; n nodes a request.
        batch: the ScheduleBatch that was verified.
        logits_output: of its pass, [requests * n, vocabulary]; penalties, bias and grammar are applied in place.
        grammar_mask: of the batch, or None.
        sampler: the engine's own; temperature, top-k, top-p, min_p and seeds are its business.
        watermark_state: None; the plugin refuses engines with watermarks.

    Returns:
        emitted tokens by node, int32 [requests * n]; tokens emitted a request, the one after the draft included; nodes
        they were emitted at, int32 [requests, n], filled up with -1.
    """
    num_requests, num_nodes = len(batch.seq_lens), verify_input.draft_token_num
    sampling = batch.sampling_info
    logits = logits_output.next_token_logits
    _apply_to_logits(logits, sampling, grammar_mask, num_nodes)
    samples = sampler(
        LogitsProcessorOutput(next_token_logits=logits if sampling.is_all_greedy else logits.clone()),
        _for_each_node(sampling, num_nodes),
        return_logprob=False,
        top_logprobs_nums=[],
        token_ids_logprobs=[],
        positions=verify_input.positions,
    )
    samples = _agreed(samples.to(torch.int64)).view(num_requests, num_nodes)
    emitted, accept_index, num_accepted = verify_tree_greedy_func(
        predicts=torch.zeros(num_requests * num_nodes, dtype=torch.int32, device=logits.device),
        accept_index=torch.full((num_requests, num_nodes), -1, dtype=torch.int32, device=logits.device),
        accept_token_num=torch.empty(num_requests, dtype=torch.int32, device=logits.device),
        candidates=verify_input.draft_token.view(num_requests, num_nodes),
        retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=verify_input.retrieve_next_token,
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=samples,
        topk=verify_input.tree_topk,
    )
    return emitted, num_accepted + 1, accept_index


def _apply_to_logits(logits: torch.Tensor, sampling: SamplingBatchInfo, grammar_mask: Any, num_nodes: int) -> None:
    """Apply what belongs to a request to each of its nodes.

    Penalties and custom processors are those of the first node. Requests that have any are not drafted for.
    """
    if sampling.acc_additive_penalties is not None:
        logits.add_(sampling.acc_additive_penalties.repeat_interleave(num_nodes, dim=0))
    if sampling.acc_scaling_penalties is not None:
        apply_scaling_penalties(logits, sampling.acc_scaling_penalties.repeat_interleave(num_nodes, dim=0))
    if sampling.logit_bias is not None:
        logits.add_(sampling.logit_bias.repeat_interleave(num_nodes, dim=0))
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if sampling.has_custom_logit_processor:
        apply_custom_logit_processor(logits, sampling, num_tokens_in_batch=num_nodes)


def _for_each_node(sampling: SamplingBatchInfo, num_nodes: int) -> SamplingBatchInfo:
    """Return the parameters with a row a node instead of one a request, without what is applied already."""
    per_row = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
    repeated = {
        name: None if values is None else values.repeat_interleave(num_nodes, dim=0)
        for name, values in ((name, getattr(sampling, name)) for name in per_row)
    }
    return dataclasses.replace(
        sampling,
        **repeated,
        grammars=None,
        has_custom_logit_processor=False,
        sampling_mask_batch_indices=None,
        sampling_support_logprobs_capture_indices=None,
    )


def _agreed(samples: torch.Tensor) -> torch.Tensor:
    """Return the first rank's samples on every rank: sums of probabilities differ in their last bits."""
    parallel = get_parallel()
    group = parallel.attn_tp_group if is_dp_attention_enabled() else parallel.tp_group
    if group.world_size > 1:
        group.broadcast(samples, src=0)
    return samples
