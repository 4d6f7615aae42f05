"""The general plugin: vLLM calls `register` in every process, before it makes an engine or a worker.

It connects a DasProposer to its model runner, and adds the RPC methods to the worker. It changes nothing of an engine
that does not draft with das. Each connection is made at most once in a process, and one that does not fit this vLLM is
left out with a line in the log: the engine starts in any case.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

from das_vllm.proposer import DasProposer
from das_vllm.seam import check_installed
from das_vllm.settings import ENVIRONMENT_VARIABLE, read_settings
from das_vllm.worker_methods import WORKER_METHODS

logger = logging.getLogger("vllm.das_vllm")
_MARK = "_das_vllm_wraps"
_Action = Callable[[Any], None]


def register() -> None:
    """Make the connections; never raises. Idempotent: vLLM calls it more than once in some processes."""
    for connect in (_bind_runners, _add_worker_methods, _follow_weight_updates, _inject):
        try:
            connect()
        except Exception as error:  # a vLLM that is built differently
            missing = "; ".join(f"{hook.name} is missing: {hook.remedy}" for hook in check_installed() if not hook.fits)
            logger.warning(
                "das: %s does not fit this vLLM (%s: %s). %s",
                connect.__name__.strip("_"),
                type(error).__name__,
                error,
                missing or "Run `das doctor`.",
            )


def _bind_runners() -> None:
    """Tell each DasProposer its model runner: propose() itself is given no request ids."""
    runner_class = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner

    def bind(runner: Any) -> None:
        drafter = getattr(runner, "drafter", None)
        if isinstance(drafter, DasProposer):
            drafter.bind(runner, how="general plugin")

    _wrap(runner_class, "__init__", after=bind)


def _add_worker_methods() -> None:
    worker_class = importlib.import_module("vllm.v1.worker.worker_base").WorkerBase
    for method in WORKER_METHODS:
        setattr(worker_class, method.__name__, method)


def _follow_weight_updates() -> None:
    """A weight update that goes through vLLM's own interface opens the next training step.

    Trainers that load weights in their own way call `das_new_training_step`, or leave it to das to count the epochs of
    each prompt.
    """
    worker_class = importlib.import_module("vllm.v1.worker.gpu_worker").Worker

    def open_next_step(worker: Any) -> None:
        drafter = getattr(getattr(worker, "model_runner", None), "drafter", None)
        if isinstance(drafter, DasProposer):
            drafter.weights_changed()

    for name in ("finish_weight_update", "reload_weights"):
        if hasattr(worker_class, name):
            _wrap(worker_class, name, after=open_next_step)


def _inject() -> None:
    """Give engines made without a speculative_config das: for trainers with no way in, and only if told to."""
    if not os.environ.get(ENVIRONMENT_VARIABLE):
        return
    num_tokens = read_settings(None, os.environ).inject_num_speculative_tokens
    if num_tokens is None:
        return
    arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs

    def fill_in(engine_arguments: Any) -> None:
        if engine_arguments.speculative_config is None:
            engine_arguments.speculative_config = {
                "method": "custom_class",
                "model": "das_vllm.DasProposer",
                "num_speculative_tokens": num_tokens,
            }
            logger.info("das: speculative_config injected, as %s says", ENVIRONMENT_VARIABLE)

    _wrap(arguments, "create_speculative_config", before=fill_in)


def _wrap(owner: type, name: str, *, before: _Action | None = None, after: _Action | None = None) -> None:
    """Have an action called with `self` before or after a method of a class, once however often this is asked for."""
    original = getattr(owner, name)
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(self)
        result = original(self, *args, **kwargs)
        if after is not None:
            after(self)
        return result

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)
