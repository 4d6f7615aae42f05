"""One history for several workers: acceptance, throughput, lag, bytes on the wire; and batches with prefetched trees.

    python -m bench.bench_ray [acceptance] [lag] [throughput] [prefetch] [--log LOG] [--step-ms MS] [--workers N] ...

Needs Ray (`pip install 'das-drafter[ray]'`), and starts it on this machine. Without a name, all four.

acceptance  The log's two training steps are two epochs. The samples of each prompt are spread over the workers, which
            decode at once, a step every `--step-ms`, as engines do; `PriceBudget(min_survival=0.15)`. Shared: through
            the service. Siloed: each with a history of its own. One process: all requests in one, no service.
lag         The same in one process and without a clock: what others send arrives so many steps later. No service.
throughput  Workers publish rollouts as fast as shards acknowledge them, then another worker pulls all. Lag: from the
            end of a rollout on one worker until another has it in its history, between two steps 10 ms apart.
prefetch    1,024 requests of 256 prompts start, with and without trees that were built before. No service.
"""

import argparse
import time
from pathlib import Path

import numpy as np

import das
from bench.harness import percentile, print_table
from bench.rollouts import EXAMPLE, Prompt
from bench.sharing_lag import epochs_of, lagged, share_of
from bench.sharing_worker import NUM_SHARDS, Worker, random_rollouts, service, start_ray
from das_ray import SharedHistorySettings

AHEAD_S = 10.0  # before a batch starts


def acceptance(options: argparse.Namespace) -> None:
    """Print tokens per decode step of each epoch: one process, shared, siloed."""
    epochs = epochs_of(options.log)
    rows, wire = [], []
    for mode in ("one process", "shared", "siloed"):
        num_workers = 1 if mode == "one process" else options.workers
        for number, results in enumerate(generations(mode, epochs, num_workers, options)):
            tokens = sum(one["num_emitted"] for one in results)
            steps = sum(one["num_steps"] for one in results)
            rows.append([mode, number, tokens / steps, sum(one["num_drafted"] for one in results) / steps, steps])
            if mode == "shared":
                wire.append([number, *wire_figures(results, tokens)])
    of_one = {row[1]: row[2] for row in rows if row[0] == "one process"}
    print_table(
        f"{options.workers} workers, {options.log.name}, a step every {options.step_ms:g} ms",
        ("", "epoch", "tokens per decode step", "of one process", "drafted per step", "decode steps"),
        [[mode, epoch, tokens, tokens / of_one[epoch], drafted, steps] for mode, epoch, tokens, drafted, steps in rows],
    )
    print_table(
        "the same, of a worker: what sharing takes",
        (
            "epoch",
            "sent B/token made",
            "received B/token made",
            "kB/s both",
            "publish lag ms",
            "max",
            "us a step",
            "of CPU",
            "CPU % beside",
        ),
        wire,
    )


def lag(options: argparse.Namespace) -> None:
    """Print what it costs that others' text comes late, in steps."""
    epochs = epochs_of(options.log)
    of_one = [one.tokens_per_step for one in lagged(epochs, num_workers=1, lag_steps=0)]
    rows = []
    for lag_steps in (0, 5, 10, 20, 40, None):
        for epoch, tally in enumerate(lagged(epochs, num_workers=options.workers, lag_steps=lag_steps)):
            label = "siloed" if lag_steps is None else f"{lag_steps} steps"
            rows.append([label, epoch, tally.tokens_per_step, tally.tokens_per_step / of_one[epoch]])
    print_table(
        f"{options.workers} workers, {options.log.name}, by lag",
        ("lag", "epoch", "tokens per decode step", "of one process"),
        rows,
    )


def wire_figures(results: list[dict[str, float]], num_tokens: int) -> list[float]:
    """Return what a worker sends and receives, and what it works for that."""
    sent, received = (sum(one[f"num_{name}_bytes"] for one in results) for name in ("sent", "received"))
    seconds = max(one["generation_s"] for one in results)
    return [
        sent / num_tokens,
        received / num_tokens,
        (sent + received) / len(results) / seconds / 1e3,
        float(np.median([one["publish_lag_ms_median"] for one in results])),
        max(one["publish_lag_ms_max"] for one in results),
        *(float(np.mean([one[name] for one in results])) for name in ("between_steps_us", "between_steps_cpu_us")),
        100 * float(np.mean([one["exchange_cpu_share"] for one in results])),
    ]


def generations(
    mode: str, epochs: list[list[Prompt]], num_workers: int, options: argparse.Namespace
) -> list[list[dict[str, float]]]:
    """Return each worker's figures of each epoch."""
    import ray

    settings = {"pull_interval_ms": options.pull_interval_ms}
    if mode == "one process":
        worker = Worker(0, False, {})
        return [[worker.generate(step, prompts, 0.0)] for step, prompts in enumerate(epochs)]
    with service(mode == "shared"):
        actor = ray.remote(num_cpus=1)(Worker)
        workers = [actor.remote(number, mode == "shared", settings) for number in range(num_workers)]
        ray.get([worker.ready.remote() for worker in workers])
        figures = []
        for step, prompts in enumerate(epochs):
            shares = [share_of(prompts, number, num_workers, step) for number in range(num_workers)]
            running = [
                worker.generate.remote(step, share, options.step_ms)
                for worker, share in zip(workers, shares, strict=True)
            ]
            figures.append(ray.get(running))
        for worker in workers:
            ray.kill(worker)
        return figures


def throughput(options: argparse.Namespace) -> None:
    """Print how fast rollouts are published and pulled, what they take on the wire, and how late they are."""
    import ray

    settings = {"pull_interval_ms": options.pull_interval_ms, "max_queue_bytes": 1 << 30}
    actor = ray.remote(num_cpus=1)(Worker)
    num_rollouts, num_tokens = options.rollouts, 1000
    with service(True):
        publishers = [actor.remote(number, True, settings) for number in range(2)]
        listener = actor.remote(9, True, settings)
        done = ray.get([one.publish.remote(n, num_rollouts, num_tokens) for n, one in enumerate(publishers)])
        seconds = max(one["s"] for one in done)
        total = 2 * num_rollouts
        keys = [(worker << 32) + number for worker in range(2) for number in range(-(-num_rollouts // 16))]
        pulled = ray.get(listener.pull.remote(keys, total))
        print_table(
            f"2 workers, {NUM_SHARDS} shards, rollouts of {num_tokens} tokens, 16 a prompt",
            ("", "rollouts/s", "MB/s", "bytes/token"),
            [
                [
                    "published, acknowledged",
                    total / seconds,
                    total * num_tokens * 4e-6 / seconds,
                    wire(done, "sent", total),
                ],
                [
                    "pulled",
                    total / pulled["s"],
                    total * num_tokens * 4e-6 / pulled["s"],
                    wire([pulled], "received", total),
                ],
            ],
        )
        times_ms = ray.get(listener.calls.remote(options.calls))
        print_table(
            "one call after another, of a worker",
            ("", "median ms", "90 % ms"),
            [
                ["publish one rollout", *(percentile(times_ms["publish"], percent) for percent in (50, 90))],
                ["look for 256 prompts, nothing new", *(percentile(times_ms["pull"], percent) for percent in (50, 90))],
            ],
        )
        hearing = listener.hear.remote(7, options.lags)
        time.sleep(1.0)
        for number in range(options.lags):
            ray.get(publishers[0].tell.remote(7, number))
            time.sleep(0.137)  # not in step with the pulls
        lags = ray.get(hearing)
        print_table(
            f"lag, pulls every {options.pull_interval_ms} ms",
            ("rollouts", "median ms", "90 % ms", "max ms"),
            [[len(lags), percentile(lags, 50), percentile(lags, 90), max(lags)]],
        )


def wire(results: list[dict[str, float]], way: str, num_rollouts: int) -> float:
    """Return bytes a token."""
    return sum(one[f"num_{way}_bytes"] for one in results) / (num_rollouts * 1000)


def prefetch(options: argparse.Namespace) -> None:
    """Print how long a batch of 1,024 requests of 256 prompts takes to start."""
    rows = []
    for is_ahead in (True, False):
        history = das.RolloutHistory(max_bytes=16 << 30, num_threads=2)
        history.add_many(random_rollouts(0, 256 * 16, 1000))
        keys = history.prompt_keys()
        if is_ahead:
            history.prepare(keys)
            time.sleep(AHEAD_S)
        drafter = das.Drafter(history)
        times_ms = []
        for number in range(1024):
            key = keys[number // 4]
            start_s = time.monotonic()
            drafter.start(
                f"r{number}", prompt_token_ids=np.arange(200, dtype=np.int32), prompt_key=key, training_step=1
            )
            times_ms.append(1e3 * (time.monotonic() - start_s))
        statistics = history.statistics()
        rows.append(
            [
                "prefetched" if is_ahead else "built at the start",
                statistics.num_builds_ahead,
                statistics.num_builds_on_start,
                sum(times_ms) / 1e3,
                percentile(times_ms, 50),
                max(times_ms),
            ]
        )
    print_table(
        "1,024 requests of 256 prompts with 16 rollouts of 1,000 tokens each",
        ("trees", "built ahead", "at the start", "all starts s", "a start ms, median", "max"),
        rows,
    )


PARTS = {"acceptance": acceptance, "lag": lag, "throughput": throughput, "prefetch": prefetch}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    options.add_argument("--log", type=Path, default=EXAMPLE)
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--step-ms", type=float, default=20.0)
    options.add_argument(
        "--pull-interval-ms", type=int, default=SharedHistorySettings(service="ray:x").pull_interval_ms
    )
    options.add_argument("--rollouts", type=int, default=4096, help="that each of two workers publishes")
    options.add_argument("--calls", type=int, default=300, help="calls that are timed one by one")
    options.add_argument("--lags", type=int, default=60, help="rollouts whose lag is measured")
    given = options.parse_args()
    parts = given.parts or list(PARTS)
    if {"acceptance", "throughput"} & set(parts):
        start_ray(given.workers + NUM_SHARDS)
    for part in parts:
        PARTS[part](given)


if __name__ == "__main__":
    main()
