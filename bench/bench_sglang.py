"""SGLang's engine over epochs of the same prompts with weight updates between: no speculation, its n-gram trie, das.

    python -m bench.bench_sglang          # a model trained here, on a CPU; bench/README.md says in which environment
    python -m bench.bench_sglang --model DIR --updates DIR DIR --prompts FILE --device cuda

Each side runs in an engine of its own. Greedy, so that all sides generate the same. For das, the replay of its rollouts
predicts the passes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import das
from bench import tiny_llama
from bench.harness import print_table
from das.analysis.replay import ReplayResult, replay
from das.drafter import Shape

NUM_NODES = 8  # that a pass verifies of each request, at most: all sides alike
LATENCY_MS = (8.0, 0.04)  # fixed, so that the replay weighs as the engine does
SIDES: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": NUM_NODES},
    "das": {"speculative_algorithm": "DAS", "speculative_num_draft_tokens": NUM_NODES},
    "das-tree": {"speculative_algorithm": "DAS", "speculative_num_draft_tokens": NUM_NODES},
}
CPU = {"attention_backend": "torch_verify", "sampling_backend": "pytorch", "disable_cuda_graph": True}


def main() -> None:
    """Run all sides and print what they took."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", type=Path, help="folder of a model; none: a tiny one is trained")
    options.add_argument("--updates", type=Path, nargs="*", help="folders of its weights after each update")
    options.add_argument("--prompts", type=Path, help="JSON lines with prompt_token_ids")
    options.add_argument("--samples", type=int, default=4, help="of each prompt and epoch (%(default)s)")
    options.add_argument("--max-new-tokens", type=int, default=64)
    options.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    options.add_argument("--out", type=Path, default=Path("out/bench_sglang.jsonl"))
    options.add_argument("--measure", help=argparse.SUPPRESS)  # one side, in a process of its own
    arguments = options.parse_args()
    if arguments.measure:
        print(json.dumps(measure(json.loads(arguments.measure))))
        return
    with tempfile.TemporaryDirectory() as folder:
        job = _job(arguments, Path(folder))
        rows = [_in_a_process(job | {"side": side}) for side in arguments.sides]
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with arguments.out.open("a") as out:
            out.writelines(json.dumps({"job": job, **row}) + "\n" for row in rows)
        prompts = [prompt for prompt in job["prompts"] for _ in range(job["samples"])]
        for row in rows:
            if row["das"] is not None:
                told = row["das"]["settings"]
                latency = das.LatencyModel(c_base_ms=LATENCY_MS[0], c_tok_ms=LATENCY_MS[1])
                policy = das.ThroughputBudget(latency=latency, max_draft_tokens=told["widths"][-1])
                row["replayed_passes"] = predicted(
                    prompts, row["rollouts"], policy=policy, shape=told["shape"], widths=told["widths"]
                )
        report(rows)


def _job(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if arguments.model is not None:
        prompts = [json.loads(line)["prompt_token_ids"] for line in arguments.prompts.read_text().splitlines()]
        models = [arguments.model, *(arguments.updates or ())]
    else:
        prompts = tiny_llama.prompts(8)
        models = [tiny_llama.train(folder / "0"), *(folder / str(number) for number in (1, 2, 3))]
        for before, after in pairwise(models):
            tiny_llama.update(before, after)
    return {
        "models": [str(model) for model in models],
        "prompts": prompts,
        "samples": arguments.samples,
        "max_new_tokens": arguments.max_new_tokens,
        "device": arguments.device,
    }


def _in_a_process(job: dict[str, Any]) -> dict[str, Any]:
    settings = {"policy": "throughput", "latency_ms": LATENCY_MS, "shape": "tree" if "tree" in job["side"] else "chain"}
    environment = os.environ | {"DAS_SGLANG": json.dumps(settings)}
    command = [sys.executable, "-m", "bench.bench_sglang", "--measure", json.dumps(job)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"side": job["side"], **result}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Generate every epoch on one side; return a row for each, and what they generated."""
    import sglang

    options = SIDES[job["side"]] | (CPU if job["device"] == "cpu" else {})
    prompts = [prompt for prompt in job["prompts"] for _ in range(job["samples"])]
    sampling = {"temperature": 0, "max_new_tokens": job["max_new_tokens"]}
    epochs, rollouts = [], []
    engine = sglang.Engine(
        model_path=job["models"][0],
        skip_tokenizer_init=True,
        device=job["device"],
        dtype="float32",
        max_running_requests=len(prompts),
        max_total_tokens=len(prompts) * (max(map(len, prompts)) + job["max_new_tokens"] + 4 * NUM_NODES),
        log_level="warning",
        **options,
    )
    try:
        for epoch, model in enumerate(job["models"]):
            if epoch:
                update(engine, model)
            started_s = time.perf_counter()
            answers = engine.generate(input_ids=prompts, sampling_params=sampling)
            wall_s = time.perf_counter() - started_s
            epochs.append(_epoch(answers) | {"wall_s": wall_s})
            rollouts.append([answer["output_ids"] for answer in answers])
        state = engine.get_server_info()["internal_states"][0].get("das")
    finally:
        engine.shutdown()
    return {"epochs": epochs, "rollouts": rollouts, "das": state}


def update(engine: Any, model: str) -> None:
    """Load other weights as trainers do, and flush the cache, which SGLang refuses until its last pass is processed."""
    engine.update_weights_from_disk(model)
    deadline_s = time.monotonic() + 60
    while not engine.flush_cache().success:
        if time.monotonic() > deadline_s:
            raise TimeoutError("the cache could not be flushed within 60 s")
        time.sleep(0.05)


def _epoch(answers: list[dict[str, Any]]) -> dict[str, int]:
    told = [answer["meta_info"] for answer in answers]
    return {
        "num_tokens": sum(meta["completion_tokens"] for meta in told),
        "num_passes": sum(meta.get("spec_verify_ct", meta["completion_tokens"] - 1) for meta in told),
        "num_accepted": sum(meta.get("spec_num_correct_drafts", 0) for meta in told),
        "num_verified": sum(meta.get("spec_num_proposed_drafts", 0) for meta in told),
    }


def predicted(
    prompts: list[list[int]],
    rollouts: list[list[list[int]]],
    *,
    policy: das.BudgetPolicy,
    shape: Shape,
    widths: Sequence[int] | None,
) -> list[int]:
    """Passes of each epoch by replay, summed over requests; arguments as `replayed`."""
    result = replayed(prompts, rollouts, policy=policy, shape=shape, widths=widths)
    return [sum(counters.num_decode_steps for counters in batch.requests) for batch in result.batches]


def replayed(
    prompts: list[list[int]],
    rollouts: list[list[list[int]]],
    *,
    policy: das.BudgetPolicy,
    shape: Shape,
    widths: Sequence[int] | None,
) -> ReplayResult:
    """Replay epochs of rollouts, which are training steps, as the engine ran them: all prompts of an epoch at once.

    The first token of a response comes from the prefill, so it belongs to the prompt here.
    """
    log = [
        das.Rollout(
            prompt_token_ids=np.array([*prompt, response[0]], np.int32),
            response_token_ids=np.array(response[1:], np.int32),
            training_step=epoch,
            prompt_key=das.prompt_key(prompt),
            ordinal=number,
        )
        for epoch, responses in enumerate(rollouts)
        for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
        if len(response) > 1
    ]
    return replay(log, policy=policy, group_size=len(prompts), shape=shape, widths=widths)


def report(rows: list[dict[str, Any]]) -> None:
    """Print a line for each side and epoch."""
    table = []
    for row in rows:
        replayed = row.get("replayed_passes", [])
        for epoch, counts in enumerate(row["epochs"]):
            per_pass = counts["num_tokens"] / max(1, counts["num_passes"])
            table.append(
                [
                    row["side"], epoch, counts["num_tokens"], counts["num_passes"],
                    replayed[epoch] if epoch < len(replayed) else "", per_pass,
                    counts["num_accepted"], counts["wall_s"],
                ]
            )  # fmt: skip
    header = ["side", "epoch", "tokens", "passes", "replayed", "tokens per pass", "accepted", "wall s"]
    print_table("SGLang, weights updated between epochs; passes summed over requests", header, table)
    same = all(row["rollouts"] == rows[0]["rollouts"] for row in rows)
    print("all sides generated the same tokens" if same else "SIDES GENERATED DIFFERENT TOKENS")
    for row in rows:
        if row["das"] is not None:
            told = row["das"]
            print(
                f"{row['side']}: drafted {told['num_drafted_tokens']}, accepted {told['num_accepted_tokens']}, "
                f"{told['tokens_per_decode_step']:.3f} tokens per decode step, padding {told['num_padded_tokens']}, "
                f"passes by width {told['num_passes_by_width']}, {told['plan_us_per_pass']:.0f} us to plan a pass"
            )


if __name__ == "__main__":
    main()
