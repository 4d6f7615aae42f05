"""The general plugin: vLLM calls `register` in every process, before it makes an engine or a worker.

It connects a DasProposer to its model runner, and adds the RPC methods to the worker. It changes nothing of an engine
that does not draft with das. Each connection is made at most once in a process, and one that does not fit this vLLM is
left out with a line in the log: the engine starts in any case. What stops it is a bad setting only.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

from das_vllm.proposer import DasProposer
from das_vllm.seam import check_installed, installed_version
from das_vllm.settings import ENVIRONMENT_VARIABLE, may_inject, read_settings
from das_vllm.worker_methods import WORKER_METHODS

logger = logging.getLogger("vllm.das_vllm")

# Of EngineArgs, where a speculation is chosen; newer vLLMs have flags beside the one argument.
_SPECULATION = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
_MARK = "_das_vllm_wraps"
_Action = Callable[..., None]


def register() -> None:
    """Make the connections; never raises. Idempotent: vLLM calls it more than once in some processes."""
    for connect in (_bind_runners, _add_worker_methods, _tell_of_the_queue, _follow_weight_updates, _inject):
        try:
            connect()
        except Exception as error:  # a vLLM that is built differently
            misfits = "; ".join(str(hook) for hook in check_installed() if not hook.fits)
            logger.warning(
                "das: %s does not fit %s (%s: %s). %s",
                connect.__name__.strip("_"),
                installed_version(),
                type(error).__name__,
                error,
                misfits or "Run `das doctor`.",
            )


def _bind_runners() -> None:
    """Tell each DasProposer its model runner: propose() itself is given no request ids."""
    runner_class = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner

    def bind(runner: Any, _: Any) -> None:
        drafter = _drafter_of(runner)
        if drafter is not None:
            drafter.bind(runner, how="general plugin")

    _wrap(runner_class, "__init__", after=bind)


def _add_worker_methods() -> None:
    worker_class = importlib.import_module("vllm.v1.worker.worker_base").WorkerBase
    for method in WORKER_METHODS:
        setattr(worker_class, method.__name__, method)


def _tell_of_the_queue() -> None:
    """Policies that know of lengths ask how many requests wait for a place; the scheduler's output carries it along.

    It also tells which requests are new: their prompts' trees are built while the step prefills them.
    """
    scheduler_class = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    runner_class = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner

    def note(scheduler: Any, output: Any) -> None:
        config = getattr(scheduler.vllm_config, "speculative_config", None)
        if getattr(config, "model", None) == "das_vllm.DasProposer":
            output.das_num_waiting = len(scheduler.waiting)

    def read(runner: Any, scheduler_output: Any, *_: Any, **__: Any) -> None:
        drafter = _drafter_of(runner)
        if drafter is not None:
            drafter.num_waiting = getattr(scheduler_output, "das_num_waiting", 0)
            drafter.scheduled(getattr(scheduler_output, "scheduled_new_reqs", ()))

    _wrap(scheduler_class, "schedule", after=note)
    _wrap(runner_class, "execute_model", before=read)


def _follow_weight_updates() -> None:
    """A weight update that goes through vLLM's own interface opens the next training step.

    Trainers that load weights in their own way call `das_new_training_step`, or leave it to das to count the epochs of
    each prompt.
    """
    worker_class = importlib.import_module("vllm.v1.worker.gpu_worker").Worker

    def open_next_step(worker: Any, _: Any) -> None:
        drafter = _drafter_of(worker)
        if drafter is not None:
            drafter.weights_changed()

    for name in ("finish_weight_update", "reload_weights"):
        if hasattr(worker_class, name):
            _wrap(worker_class, name, after=open_next_step)


def _inject() -> None:
    """Give engines made without a speculative_config das: for trainers with no way in, and only if told to.

    Settings that are wrong stop these engines when they are made: here is too early, in every process of vLLM.
    """
    if not may_inject(os.environ):
        try:
            read_settings(None, os.environ)
        except (TypeError, ValueError) as error:
            logger.warning(
                "das: %s. An engine whose speculative_config names das will not start; others start without das", error
            )
        return
    arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs

    def fill_in(engine_arguments: Any, *_: Any, **__: Any) -> None:
        if any(getattr(engine_arguments, name, None) is not None for name in _SPECULATION):
            return
        num_tokens = read_settings(None, os.environ).inject_num_speculative_tokens
        if num_tokens is not None:
            engine_arguments.speculative_config = {
                "method": "custom_class",
                "model": "das_vllm.DasProposer",
                "num_speculative_tokens": num_tokens,
            }
            logger.info("das: speculative_config injected, as %s says", ENVIRONMENT_VARIABLE)

    _wrap(arguments, "create_speculative_config", before=fill_in)


def _wrap(owner: type, name: str, *, before: _Action | None = None, after: _Action | None = None) -> None:
    """Have a method of a class call `before(self, *arguments)` and `after(self, result)`, once however often asked."""
    original = getattr(owner, name)
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(self, *args, **kwargs)
        result = original(self, *args, **kwargs)
        if after is not None:
            after(self, result)
        return result

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)


def _drafter_of(owner: Any) -> DasProposer | None:
    """The das drafter of a model runner or of a worker, if it has one."""
    drafter = getattr(getattr(owner, "model_runner", owner), "drafter", None)
    return drafter if isinstance(drafter, DasProposer) else None
