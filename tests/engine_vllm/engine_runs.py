"""Engines for the tests on the real vLLM, CPU build: a tiny model, and requests that ask for much."""

import gc
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NUM_CHARACTERS = 19  # that prompts are made of; the model's vocabulary has 32 tokens
MAX_MODEL_LEN = 256
COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:num_preemptions": "preemptions",
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def random_model(folder: Path, *, seed: int) -> Path:
    """Save a Llama of two layers and two heads, which two ranks can share, with random weights and definite choices."""
    import torch

    sys.path.insert(0, str(ROOT / "examples" / "tiny_reasoner"))
    try:
        import model
    finally:
        sys.path.pop(0)
    hidden, feed, layers, source = 64, 128, 2, torch.Generator().manual_seed(seed)

    def random(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*sizes, generator=source) * scale * sizes[-1] ** -0.5

    weights = {"model.norm.weight": torch.ones(hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        weights |= {f"{at}self_attn.{name}_proj.weight": random(hidden, hidden) for name in "qkvo"}
        weights |= {f"{at}mlp.{name}_proj.weight": random(feed, hidden) for name in ("gate", "up")}
        weights[f"{at}mlp.down_proj.weight"] = random(hidden, feed)
        weights |= {f"{at}{name}_layernorm.weight": torch.ones(hidden) for name in ("input", "post_attention")}
    weights["model.embed_tokens.weight"] = random(model.NUM_TOKENS, hidden, scale=8.0)
    weights["lm_head.weight"] = random(model.NUM_TOKENS, hidden, scale=4.0)
    model.save(weights, folder)
    sizes = {"hidden_size": hidden, "intermediate_size": feed, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(model.CONFIG | sizes | heads))
    return folder


@contextmanager
def engine(
    model: Path, *, num_speculative_tokens: int | None = 8, das: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[Any]:
    """Make an engine and shut it down; None speculative tokens: without drafting."""
    from vllm import LLM

    if num_speculative_tokens is not None:
        options["speculative_config"] = {
            "method": "custom_class",
            "model": "das_vllm.DasProposer",
            "num_speculative_tokens": num_speculative_tokens,
        }
        options["additional_config"] = {"das": dict(das or {})}
    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
        "disable_log_stats": False,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    llm = LLM(str(model), **(defaults | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def runner_of(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


@contextmanager
def recorded_drafts(llm: Any) -> Iterator[list[list[list[int]]]]:
    """The drafts of each engine step of an engine in this process, one a row, while it runs here."""
    drafter = runner_of(llm).drafter
    drafts: list[list[list[int]]] = []
    propose = drafter.propose

    def recorded(*args: Any, **kwargs: Any) -> list[list[int]]:
        drafts.append(propose(*args, **kwargs))
        return drafts[-1]

    drafter.propose = recorded
    try:
        yield drafts
    finally:
        drafter.propose = propose


def counters(llm: Any) -> dict[str, int]:
    """vLLM's own counts since the engine started."""
    found = dict.fromkeys([*COUNTERS.values(), "steps"], 0)
    for metric in llm.get_metrics():
        if metric.name in COUNTERS and hasattr(metric, "value"):
            found[COUNTERS[metric.name]] += int(metric.value)
        if metric.name == "vllm:iteration_tokens_total":
            found["steps"] += metric.count
    return found


def since(llm: Any, before: Mapping[str, int]) -> dict[str, int]:
    """vLLM's own counts since `before`."""
    return {name: count - before[name] for name, count in counters(llm).items()}


@dataclass(frozen=True)
class Case:
    """A prompt and what it asks for."""

    name: str
    prompt_token_ids: list[int]
    parameters: dict[str, Any]


def workload(*, seed: int = 1, max_tokens: int = 70) -> list[Case]:
    """Greedy requests that ask for about everything a request may ask for beside drafts."""
    source = random.Random(seed)
    asked: dict[str, dict[str, Any]] = {
        "plain": {},
        "long": {"max_tokens": 2 * max_tokens},
        "own key": {"extra_args": {"das_prompt_key": "problem 17"}},
        "logprobs": {"logprobs": 2},
        "prompt logprobs": {"prompt_logprobs": 1},
        "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        "repetition": {"repetition_penalty": 1.2},
        "three samples": {"n": 3, "temperature": 1.0, "top_k": 1},
        "stop string": {"stop": ["7", "22"]},
        "stop token": {"stop_token_ids": [5, 6]},
        "end of sequence": {"ignore_eos": False},
        "at least": {"min_tokens": 30, "stop_token_ids": [1, 2, 3]},
        "allowed": {"allowed_token_ids": list(range(4, 15))},
        "one token": {"max_tokens": 1},
        "two tokens": {"max_tokens": 2},
    }
    cases = []
    for name, extra in asked.items():
        prompt = [source.randrange(NUM_CHARACTERS) for _ in range(source.randrange(5, 40))]
        cases.append(Case(name, prompt, {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | extra))
    return cases


def generate(llm: Any, cases: list[Case]) -> dict[str, list[Any]]:
    """Everything the engine returns for each case that drafts must not change: tokens, text, ends, logprobs."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": case.prompt_token_ids} for case in cases]
    outputs = llm.generate(prompts, [SamplingParams(**case.parameters) for case in cases], use_tqdm=False)
    return {
        case.name: [
            [
                (list(sample.token_ids), sample.text, sample.finish_reason, sample.stop_reason)
                for sample in sorted(output.outputs, key=lambda sample: sample.index)
            ],
            _logprobs(output.outputs[0].logprobs),
            _logprobs(output.prompt_logprobs),
        ]
        for case, output in zip(cases, outputs, strict=True)
    }


def token_ids(output: list[Any]) -> list[list[int]]:
    """The tokens of each sample of an output of `generate`."""
    return [tokens for tokens, *_ in output[0]]


def _logprobs(positions: Any) -> Any:
    if positions is None:
        return None
    return [p if p is None else {token: round(entry.logprob, 3) for token, entry in p.items()} for p in positions]


def set_environment() -> None:
    """vLLM reads these when it is imported, or when an engine is made."""
    os.environ.update(ENVIRONMENT)
