"""The speculative algorithm DAS, as SGLang's registry wants it: a class that answers for n-gram speculation."""

from __future__ import annotations

import logging
import os
from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from das_sglang.settings import Settings

NAME = "DAS"

logger = logging.getLogger("das")


class DasAlgorithm(CustomSpecAlgo):  # type: ignore[misc]  # SGLang ships no types that hold
    """Takes SGLang's branches for NGRAM (relay buffers, verification input, CUDA graphs), with a worker of its own."""

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    # SGLang calls the following on every algorithm, but its base class for registered ones has none of them.

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def get_platform_worker_cls(self) -> None:
        return None

    def create_future_map(self, device: Any, req_to_token_pool: Any, *args: Any, **options: Any) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, *args, **options)

    def handle_server_args(self, server_args: Any) -> None:
        """Fill in what speculation needs, and refuse what does not work with it.

        Args:
            server_args: takes assignments, which SGLang records.

        Raises:
            ValueError: an argument, or a setting of `DAS_SGLANG`, that does not work; it says which and why.
        """
        settings = Settings.from_environment(os.environ)
        refuse_server_args(server_args, settings)
        num_nodes = 1 + settings.within(server_args.speculative_num_draft_tokens).widths[-1]
        server_args.speculative_num_draft_tokens = num_nodes
        # A chain has one branch; attention backends that tell chains from trees go by this.
        num_branches = 1 if settings.shape == "chain" else 4
        server_args.speculative_eagle_topk = num_branches
        server_args.speculative_num_steps = -(-(num_nodes - 1) // num_branches)
        server_args.enable_mixed_chunk = False
        if settings.noise_seed is not None and server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"


def check_replaced_ngram(server_args: Any) -> None:
    """See whether das can take the place of NGRAM, for which SGLang has filled in the arguments, not `DasAlgorithm`.

    Args:
        server_args: as given, with what SGLang has decided beside it; it is too late to change that.

    Raises:
        ValueError: an argument, or a setting of `DAS_SGLANG`, that does not work; it says which and what to give.
    """
    settings = Settings.from_environment(os.environ)
    decided = resolving_view(server_args)
    refuse_server_args(decided, settings, name="NGRAM, with replace_ngram,")
    if settings.shape == "tree" and decided.speculative_eagle_topk == 1:
        raise ValueError(
            "shape is 'tree', but --speculative-ngram-max-bfs-breadth 1 sets attention backends up for chains; leave "
            "it out, or set shape to 'chain'"
        )
    settings.within(decided.speculative_num_draft_tokens)
    if server_args.max_running_requests is None:
        logger.warning(
            "das: SGLang lets NGRAM run %s requests at once where --max-running-requests is not given; give it",
            decided.max_running_requests,
        )


def refuse_server_args(server_args: Any, settings: Settings, *, name: str = NAME) -> None:
    """Raise ValueError, with the reason and what to do, for arguments that das does not work with.

    Args:
        server_args: of the engine.
        settings: of das.
        name: of the algorithm, as the message tells it.

    `max_running_requests` is left as it is, where SGLang's n-gram speculation sets it to 48.
    """
    sampling_backend = server_args.sampling_backend
    refused = {
        "--pp-size above 1: not tested with das; use tensor parallelism": server_args.pp_size > 1,
        "--enable-dp-attention: SGLang's n-gram verification has no idle ranks; leave it out": (
            server_args.enable_dp_attention
        ),
        "--disaggregation-mode: drafts need prefill and decode in one engine; leave it out": (
            server_args.disaggregation_mode != "null"
        ),
        "--enable-watermark: watermarked sampling has no exact verification in das; leave one of them out": (
            server_args.enable_watermark
        ),
        "--page-size above 1 with shape 'tree', unless --attention-backend flashinfer: backends mix up the pages of "
        "branches; set shape to 'chain'": (
            settings.shape == "tree"
            and (server_args.page_size or 1) > 1
            and server_args.attention_backend != "flashinfer"
        ),
        f"noise_seed with the sampling backend {sampling_backend}, which takes no seeds; give --sampling-backend "
        "pytorch": settings.noise_seed is not None and sampling_backend not in (None, "pytorch"),
    }
    reasons = [reason for reason, is_refused in refused.items() if is_refused]
    if reasons:
        raise ValueError(f"--speculative-algorithm {name} does not work with " + "; nor with ".join(reasons))
