"""What drafting brings on one GPU, without an engine: forward passes of a random model, and logged rollouts on them.

python -m bench.gpu_rollout [--out out/gpu_rollout.jsonl] [--minutes 8] [--log LOG] [--shape 7b]    needs torch

1. Measures a forward pass over batch x tokens a request, each a CUDA graph, at a fixed context.
2. Fits das.LatencyModel to it. c_engine_ms is what passes of requests of different widths take beyond that.
3. Runs the second step of a rollout log for each policy: every decode step is a pass on the device with as many tokens
   as the policy drafts, verified by the log, with the first step as history. Prints the makespans.

Resumable: each finished row is a JSON line in --out, and what is there is not measured again. Rows by "kind":
  environment  device, torch, shape, context
  pass         batch, width, num_tokens, uniform, step_ms (median of repeats)
  latency      c_base_ms, c_tok_ms, c_engine_ms, median_relative_error, num_passes
  rollout      policy, requests, makespan_s, model_s (passes alone), drafting_s, decode_steps, drafted, accepted,
               emitted
--minutes is a limit for everything; what does not fit is left out, and said.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import das
from bench.rollouts import EXAMPLE
from das.analysis import read_log

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
WIDTHS = (1, 2, 4, 8, 16)
Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Of a decoder-only model with grouped keys and a gated feed-forward part."""

    layers: int
    hidden: int
    feed: int
    heads: int
    key_heads: int
    vocabulary: int


SHAPES = {"7b": Shape(28, 3584, 18944, 28, 4, 152_064), "tiny": Shape(2, 64, 128, 2, 1, 256)}


class RandomModel:
    """Weights and keys of random numbers: the time of a pass does not depend on them.

    Attention reads `context` tokens of each request at any time. Requests of different widths go through the linear
    layers packed, and through attention padded to the widest.
    """

    def __init__(self, shape: Shape, *, batch: int, context: int, device: torch.device) -> None:
        kind = torch.bfloat16 if device.type == "cuda" else torch.float32
        head = shape.hidden // shape.heads

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, device=device, dtype=kind) * sizes[-1] ** -0.5

        self.shape, self.head, self.device = shape, head, device
        width = (shape.heads + 2 * shape.key_heads) * head
        self.layers = [
            (
                random(width, shape.hidden),
                random(shape.hidden, shape.hidden),
                random(2 * shape.feed, shape.hidden),
                random(shape.hidden, shape.feed),
            )
            for _ in range(shape.layers)
        ]
        self.embeddings = random(shape.vocabulary, shape.hidden)
        self.keys = [random(2, batch, shape.key_heads, context, head) for _ in range(shape.layers)]

    def run(self, token_ids: torch.Tensor, places: torch.Tensor | None, batch: int, width: int) -> torch.Tensor:
        """One pass: the likeliest token after each of [num_tokens]; places: where each lies in batch x width."""
        shape = self.shape
        hidden = functional.embedding(token_ids, self.embeddings)
        sizes = [shape.heads * self.head, shape.key_heads * self.head, shape.key_heads * self.head]
        for layer, (mixing, output, gates, down) in enumerate(self.layers):
            query, _, _ = (functional.rms_norm(hidden, (shape.hidden,)) @ mixing.T).split(sizes, -1)
            if places is not None:
                query = query.new_zeros(batch * width, query.shape[1]).index_copy(0, places, query)
            query = query.view(batch, width, shape.heads, self.head).transpose(1, 2)
            keys, values = self.keys[layer][:, :batch]
            mixed = functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
            mixed = mixed.transpose(1, 2).reshape(batch * width, -1)
            hidden = hidden + (mixed if places is None else mixed[places]) @ output.T
            gate, up = (functional.rms_norm(hidden, (shape.hidden,)) @ gates.T).chunk(2, -1)
            hidden = hidden + (functional.silu(gate) * up) @ down.T
        return (hidden @ self.embeddings.T).argmax(-1)


class Passes:
    """Passes of a model, one CUDA graph for each shape; plain calls on a CPU."""

    def __init__(self, model: RandomModel) -> None:
        self.model = model
        self._graphs: dict[tuple[int, int, int, bool], Callable[[], object]] = {}

    def run(self, batch: int, width: int, num_tokens: int, *, uniform: bool) -> float:
        """Run one pass and return the milliseconds it took, waiting for the device."""
        key = (batch, width, num_tokens, uniform)
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        started_s = time.perf_counter()
        self._graphs[key]()
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started_s) * 1e3

    def _capture(self, batch: int, width: int, num_tokens: int, uniform: bool) -> Callable[[], object]:
        device = self.model.device
        token_ids = torch.zeros(num_tokens, dtype=torch.long, device=device)
        places = None if uniform else torch.randperm(batch * width, device=device)[:num_tokens].sort().values

        @torch.inference_mode()
        def call() -> object:
            return self.model.run(token_ids, places, batch, width)

        call()
        if device.type != "cuda":
            return call
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("out/gpu_rollout.jsonl"))
    options.add_argument("--minutes", type=float, default=8.0)
    options.add_argument("--log", type=Path, default=EXAMPLE)
    options.add_argument("--shape", choices=list(SHAPES), default="7b")
    options.add_argument("--context", type=int, default=1024)
    options.add_argument("--requests", type=int, default=128, help="rollouts that run at once")
    options.add_argument("--tokens", type=int, default=1024, help="rollouts are cut to so many")
    options.add_argument("--repeats", type=int, default=7)
    given = options.parse_args()
    end_s = time.monotonic() + 60 * given.minutes
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    with given.out.open("a") as file:

        def keep(row: Row) -> Row:
            file.write(json.dumps(row) + "\n")
            file.flush()
            done.append(row)
            return row

        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        environment = {"device": name, "torch": torch.__version__, "shape": given.shape, "context": given.context}
        if not done:
            keep({"kind": "environment"} | environment)
        elif done[0] != {"kind": "environment"} | environment:
            raise SystemExit(f"{given.out} is of another environment: {done[0]}; choose another --out")
        batch = max(given.requests, *(b for b in BATCHES if b <= given.requests))
        passes = Passes(RandomModel(SHAPES[given.shape], batch=batch, context=given.context, device=device))
        measure_passes(passes, done, keep, given, end_s)
        latency = fit(done, keep)
        for policy_name, policy in policies(latency).items():
            if any(row["kind"] == "rollout" and row["policy"] == policy_name for row in done):
                continue
            if time.monotonic() > end_s:
                print(f"left out for lack of time: {policy_name}")
                continue
            print(keep(run_rollouts(passes, policy_name, policy, given)), flush=True)
    show(done)


def measure_passes(
    passes: Passes, done: list[Row], keep: Callable[[Row], Row], given: argparse.Namespace, end_s: float
) -> None:
    """Uniform and packed passes over the grid; packed ones have half the tokens of the uniform one."""
    known = {(row["batch"], row["width"], row["uniform"]) for row in done if row["kind"] == "pass"}
    for batch in (size for size in BATCHES if size <= given.requests):
        for width in WIDTHS:
            for uniform in (True, False):
                if (batch, width, uniform) in known or (width == 1 and not uniform):
                    continue
                if time.monotonic() > end_s:
                    print("left out for lack of time: passes")
                    return
                num_tokens = batch * width if uniform else max(batch, batch * width // 2)
                passes.run(batch, width, num_tokens, uniform=uniform)
                times = [passes.run(batch, width, num_tokens, uniform=uniform) for _ in range(given.repeats)]
                keep(
                    {
                        "kind": "pass",
                        "batch": batch,
                        "width": width,
                        "num_tokens": num_tokens,
                        "uniform": uniform,
                        "step_ms": statistics.median(times),
                    }
                )


def fit(done: list[Row], keep: Callable[[Row], Row]) -> das.LatencyModel:
    """Fit base and token to uniform passes, and c_engine to what packed ones take beyond that, never below 0."""
    for row in done:
        if row["kind"] == "latency":
            return das.LatencyModel(**{name: row[name] for name in ("c_base_ms", "c_tok_ms", "c_engine_ms")})
    uniform = [row for row in done if row["kind"] == "pass" and row["uniform"]]
    packed = [row for row in done if row["kind"] == "pass" and not row["uniform"]]
    found = das.fit_latency([row["num_tokens"] for row in uniform], [row["step_ms"] for row in uniform])
    beyond = [row["step_ms"] - found.latency.step_ms(row["num_tokens"]) for row in packed]
    engine_ms = max(0.0, statistics.median(beyond)) if beyond else 0.0
    row = {
        "kind": "latency",
        "c_base_ms": found.latency.c_base_ms,
        "c_tok_ms": found.latency.c_tok_ms,
        "c_engine_ms": engine_ms,
        "median_relative_error": found.median_relative_error,
        "num_passes": found.num_steps,
    }
    print(keep(row), flush=True)
    return das.LatencyModel(c_base_ms=row["c_base_ms"], c_tok_ms=row["c_tok_ms"], c_engine_ms=engine_ms)


def policies(latency: das.LatencyModel) -> dict[str, das.BudgetPolicy]:
    """The policies compared, each new."""
    return {
        "none": das.NoDraft(),
        "fixed 4": das.FixedBudget(4),
        "unlimited 16": das.UnlimitedBudget(max_draft_tokens=16),
        "price 0.15": das.PriceBudget(min_survival=0.15),
        "throughput": das.ThroughputBudget(latency=latency),
    }


def run_rollouts(passes: Passes, name: str, policy: das.BudgetPolicy, given: argparse.Namespace) -> Row:
    """Run the log's second step, all requests at once, each decode step a pass on the device."""
    rollouts = [record.rollout for record in read_log(given.log)]
    first, second = sorted({rollout.training_step or 0 for rollout in rollouts})[:2]
    history = das.RolloutHistory()
    history.add_many(rollout for rollout in rollouts if rollout.training_step == first)
    drafter = das.Drafter(history)
    texts = {}
    for number, rollout in enumerate([r for r in rollouts if r.training_step == second][: given.requests]):
        texts[str(number)] = rollout.response_token_ids[: given.tokens].tolist()
        drafter.start(str(number), prompt_token_ids=rollout.prompt_token_ids, training_step=second)
    position = dict.fromkeys(texts, 0)
    num_requests, model_ms, drafting_s = len(texts), 0.0, 0.0
    while position:
        started_s = time.perf_counter()
        drafts = das.plan_step(drafter, list(position), policy=policy)
        drafting_s += time.perf_counter() - started_s
        widths = [1 + len(draft) for draft in drafts.values()]
        model_ms += _pass_of(passes, widths)
        emitted = {request: _verified(texts[request][position[request] :], drafts[request]) for request in position}
        started_s = time.perf_counter()
        drafter.extend_batch(emitted)
        for request, tokens in emitted.items():
            position[request] += len(tokens)
            if position[request] >= len(texts[request]):
                del position[request]
                drafter.finish(request)
        drafting_s += time.perf_counter() - started_s
    counters = drafter.counters()
    return {
        "kind": "rollout",
        "policy": name,
        "requests": num_requests,
        "makespan_s": model_ms / 1e3 + drafting_s,  # capturing graphs is no part of it
        "model_s": model_ms / 1e3,
        "drafting_s": drafting_s,
        "decode_steps": counters.num_decode_steps,
        "drafted": counters.num_drafted_tokens,
        "accepted": counters.num_accepted_tokens,
        "emitted": counters.num_emitted_tokens,
    }


def _pass_of(passes: Passes, widths: list[int]) -> float:
    """A pass of requests of these widths, its shape rounded up to one of few, as engines' graphs are."""
    batch = min(size for size in (*BATCHES, len(widths)) if size >= len(widths))
    width = min(size for size in (*WIDTHS, max(widths)) if size >= max(widths))
    uniform = min(widths) == width
    wanted = sum(widths) + batch - len(widths)
    num_tokens = batch * width if uniform else next(s for s in _sizes(batch, width) if s >= wanted)
    return passes.run(batch, width, num_tokens, uniform=uniform)


def _sizes(batch: int, width: int) -> Iterator[int]:
    """Numbers of tokens that passes are captured for: eight steps from one a request to all."""
    for eighth in range(9):
        yield batch + -(-batch * (width - 1) * eighth // 8)


def _verified(text: list[int], draft: das.Draft) -> list[int]:
    accepted = 0
    tokens = draft.draft_token_ids
    while accepted < len(tokens) and accepted < len(text) and tokens[accepted] == text[accepted]:
        accepted += 1
    return text[: accepted + 1]


def show(done: list[Row]) -> None:
    """Print makespans beside that of no drafting."""
    rows = [row for row in done if row["kind"] == "rollout"]
    undrafted_s = next((row["makespan_s"] for row in rows if row["policy"] == "none"), None)
    print(
        "\n| policy | makespan s | of it passes s | drafting s | decode steps | drafted | accepted | of no drafting |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        share = "" if undrafted_s is None else f"{row['makespan_s'] / undrafted_s:.1%}"
        print(
            f"| {row['policy']} | {row['makespan_s']:.2f} | {row['model_s']:.2f} | {row['drafting_s']:.2f} "
            f"| {row['decode_steps']:,} | {row['drafted']:,} | {row['accepted']:,} | {share} |"
        )


if __name__ == "__main__":
    main()
