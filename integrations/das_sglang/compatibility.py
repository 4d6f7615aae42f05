"""Does the installed SGLang have what the plugin builds on? Read from its sources: nothing of it is imported.

A list of what is called, overridden and read, so that a release that moved something is told by name, at start, and not
by an AttributeError in the middle of a run.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

TESTED = ("0.5.23",)
OLDEST, BELOW = (0, 5, 23), (0, 5, 24)


@dataclass(frozen=True, slots=True)
class Seam:
    """One thing of SGLang's that the plugin relies on.

    Args:
        module: dotted, without the leading "sglang.".
        name: of a function, a class or a module-level name; "Class.method" for a method.
        parameters: that are passed by name, or stand in this order in front.
        why: what it is for.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    why: str = ""


_WORKER = "srt.speculative.ngram_worker"
SEAMS = (
    Seam("srt.plugins", "load_plugins", why="loads this plugin"),
    Seam("srt.plugins.hook_registry", "HookRegistry.register", ("target", "hook", "hook_type"), "/server_info, NGRAM"),
    Seam("srt.plugins.hook_registry", "HookRegistry.apply_hooks", why="/server_info"),
    Seam("srt.speculative.spec_info", "SpeculativeAlgorithm.register", ("name",), "the name DAS"),
    Seam("srt.speculative.spec_info", "SpeculativeAlgorithm.create_worker", ("server_args",), "NGRAM replaced"),
    Seam("srt.arg_groups.overrides", "resolving_view", ("server_args",), "NGRAM replaced"),
    Seam("srt.speculative.spec_registry", "CustomSpecAlgo.handle_server_args", ("server_args",), "arguments"),
    Seam("srt.speculative.spec_registry", "CustomSpecAlgo.is_ngram", why="n-gram verification"),
    Seam("srt.managers.overlap_utils", "FutureMap", why="overlap scheduling"),
    Seam(_WORKER, "NGRAMWorker.__init__", ("server_args", "gpu_id", "nccl_port", "target_worker"), "the worker"),
    Seam(_WORKER, "NGRAMWorker.forward_batch_generation", ("batch", "on_publish", "pp_proxy_tensors"), "a pass"),
    Seam(_WORKER, "NGRAMWorker._prepare_for_speculative_decoding", ("batch",), "a decode step"),
    Seam(_WORKER, "NGRAMWorker._prepare_draft_tokens", ("batch",), "handing over drafts"),
    Seam(_WORKER, "NGRAMWorker._update_ngram_corpus", ("batch",), "after a step"),
    Seam(_WORKER, "NGRAMWorker._init_preallocated_tensors", why="a width's tensors"),
    Seam(_WORKER, "NGRAMWorker.clear_cache_pool", why="keeping history over a flush"),
    Seam(_WORKER, "NgramCorpus", why="keeping SGLang's own trie out"),
    Seam(_WORKER, "eagle_sample", why="exact sampling"),
    Seam("srt.speculative.eagle_utils", "eagle_sample", ("verify_input", "batch", "logits_output", "grammar_mask")),
    Seam("srt.speculative.base_spec_worker", "BaseSpecWorker.note_request_finished", ("rid", "natural_stop")),
    Seam("srt.speculative.base_spec_worker", "BaseSpecWorker.weight_update_runners", why="seeing weight updates"),
    Seam("srt.speculative.base_spec_worker", "BaseSpecWorker.init_attention_backends", why="width"),
    Seam("srt.speculative.ngram_info", "NgramVerifyInput.__init__", ("draft_token_num", "accept_tokens")),
    Seam(
        "kernels.ops.speculative.spec_tree",
        "verify_tree_greedy_func",
        ("predicts", "accept_index", "accept_token_num", "candidates", "target_predict", "topk"),
        "following drafts",
    ),
    Seam("srt.layers.sampler", "Sampler.forward", ("logits_output", "sampling_info", "return_logprob"), "sampling"),
    Seam(
        "srt.layers.sampler", "apply_custom_logit_processor", ("logits", "sampling_batch_info", "num_tokens_in_batch")
    ),
    Seam("srt.sampling.penaltylib.repetition_penalty", "apply_scaling_penalties", why="penalties"),
    Seam("srt.sampling.sampling_batch_info", "SamplingBatchInfo", why="sampling"),
    Seam("srt.runtime_context", "get_exec", why="sampling backend"),
    Seam("srt.runtime_context", "get_parallel", why="ranks"),
    Seam("srt.runtime_context", "get_serving", why="weight version"),
    Seam("srt.runtime_context", "get_spec", why="width"),
    Seam("srt.managers.schedule_batch", "Req.output_ids_through_stop", why="responses"),
    Seam("srt.managers.schedule_batch", "ScheduleBatch.grammar_needs_sync", why="emitted tokens"),
    Seam(
        "srt.managers.scheduler_components.internal_state",
        "SchedulerInternalStateController._add_speculative",
        ("state",),
        "/server_info",
    ),
    Seam("srt.managers.scheduler", "Scheduler.handle_rpc_request", ("recv_req",), "collective_rpc"),
)


def installed_version() -> str | None:
    """Return the version of the installed SGLang, or None. It is not imported."""
    if importlib.util.find_spec("sglang") is None:
        return None
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def is_in_range(version: str) -> bool:
    """Return whether the extra `das-drafter[sglang]` allows a version; one with local or development parts, too."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdecimal())
    return OLDEST <= numbers < BELOW


@cache
def problems() -> tuple[str, ...]:
    """Return what of `SEAMS` the installed SGLang lacks, one line each. Takes a second: it parses the sources."""
    root = importlib.util.find_spec("sglang")
    if root is None or not root.submodule_search_locations:
        return ("sglang is not installed",)
    folder = Path(next(iter(root.submodule_search_locations)))
    trees: dict[str, ast.Module | None] = {}
    for seam in SEAMS:
        if seam.module not in trees:
            trees[seam.module] = _parsed(folder.joinpath(*seam.module.split(".")))
    found = (_problem(seam, trees[seam.module]) for seam in SEAMS)
    return tuple(problem for problem in found if problem is not None)


def reason_not_to_start() -> str | None:
    """Return why das cannot run in the installed SGLang, and what to do; None: it can."""
    missing = problems()
    if not missing:
        return None
    version = installed_version()
    return (
        f"SGLang {version} lacks {len(missing)} of {len(SEAMS)} things that das builds on ({'; '.join(missing)}). "
        f"Use SGLang {', '.join(TESTED)}, or a version of das-drafter that knows {version}"
    )


def _parsed(path: Path) -> ast.Module | None:
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None


def _problem(seam: Seam, tree: ast.Module | None) -> str | None:
    where = f"{seam.module}.{seam.name}"
    if tree is None:
        return f"{where} (no such module)"
    body = tree.body
    node: ast.AST | None = None
    for part in seam.name.split("."):
        node = next((found for found in body if part in _names(found)), None)
        if node is None:
            return where
        body = getattr(node, "body", [])
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        arguments = node.args
        names = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        absent = [name for name in seam.parameters if name not in names]
        if absent:
            return f"{where}({', '.join(absent)})"
    return None


def _names(node: ast.AST) -> set[str]:
    """Return the names that a statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {node.target.id} if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else set()
