"""The entry point `sglang.srt.plugins`: SGLang calls `register` once in each of its processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("das")


def register() -> None:
    """Register the algorithm DAS, and with the setting `replace_ngram` let NGRAM be das.

    Where this SGLang does not fit, or the settings are wrong, selecting DAS fails with the reason; engines that do not
    select it are left alone. Never raises: SGLang would log it and go on, and the user would read of an unknown
    algorithm later.
    """
    reason = _reason_not_to()
    if reason is not None:
        logger.error("das is not available in SGLang: %s", reason)
        _register_refusal(reason)
        return
    from das_sglang.settings import Settings

    _register_algorithm()
    if Settings.from_environment(os.environ).replace_ngram:
        _replace_ngram()


def _reason_not_to() -> str | None:
    from das_sglang import compatibility
    from das_sglang.settings import Settings

    try:
        Settings.from_environment(os.environ)
    except ValueError as error:
        return str(error)
    return compatibility.reason_not_to_start()


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


def _replace_ngram() -> None:
    """Let the builtin NGRAM create das' worker: for frameworks and endpoints that know only builtin names."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def create_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
        if not algorithm.is_ngram():
            return original(algorithm, server_args)
        return _worker_class(server_args)

    HookRegistry.register(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker", create_worker, HookType.AROUND
    )
