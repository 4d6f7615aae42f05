"""The entry point `sglang.srt.plugins`: SGLang calls `register` once in each of its processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from das_sglang import compatibility
from das_sglang.settings import Settings, wants_ngram

logger = logging.getLogger("das")


def register() -> None:
    """Register the algorithm DAS, and with the setting `replace_ngram` let NGRAM be das.

    Where this SGLang does not fit, or the settings are wrong, selecting DAS fails with the reason, and so does NGRAM
    where the settings ask for `replace_ngram`; engines that select neither are left alone. Never raises: SGLang would
    log it and go on, and the user would read of an unknown algorithm later, or get SGLang's own n-gram trie.
    """
    reason = _reason_not_to()
    if reason is not None:
        logger.error("das is not available in SGLang: %s", reason)
    try:
        if wants_ngram(os.environ):  # first: a failure below leaves DAS unknown, which is told, but NGRAM a trie
            _replace_ngram(reason)
        if reason is None:
            _register_algorithm()
        else:
            _register_refusal(reason)
    except Exception:  # an SGLang that has no such registry or hooks
        logger.exception("das could not be registered in SGLang")


def _reason_not_to() -> str | None:
    try:
        Settings.from_environment(os.environ)
        return compatibility.reason_not_to_start()
    except Exception as error:
        return str(error)


def _register_algorithm() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from das_sglang.algorithm import NAME, DasAlgorithm

    if _is_registered(NAME):
        return
    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=DasAlgorithm)(_worker_class)


def _register_refusal(reason: str) -> None:
    """Make selecting DAS an error that says why, instead of one that says it is unknown."""
    try:
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    except ImportError:
        return

    def refuse(server_args: Any) -> None:
        raise ValueError(f"--speculative-algorithm DAS: {reason}")

    if not _is_registered("DAS"):
        SpeculativeAlgorithm.register("DAS", supports_overlap=True, validate_server_args=refuse)(_worker_class)


def _is_registered(name: str) -> bool:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    try:
        SpeculativeAlgorithm.from_string(name)
    except ValueError:
        return False
    return True


def _worker_class(server_args: Any) -> type:
    """Load the worker in the process that runs it, and nowhere else."""
    from das_sglang.worker import DasWorker

    return DasWorker


def _replace_ngram(reason: str | None) -> None:
    """Let the builtin NGRAM create das' worker: for frameworks and endpoints that know only builtin names.

    Args:
        reason: why it cannot; creating the worker fails with it, as the user would take SGLang's trie for das.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def create_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
        if not algorithm.is_ngram():
            return original(algorithm, server_args)
        if reason is not None:
            raise ValueError(f"--speculative-algorithm NGRAM, with replace_ngram: {reason}")
        from das_sglang.algorithm import check_replaced_ngram

        check_replaced_ngram(server_args)
        return _worker_class(server_args)

    HookRegistry.register(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker", create_worker, HookType.AROUND
    )
