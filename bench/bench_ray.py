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
import os
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

import das
from bench.decode import Decode
from bench.harness import percentile, print_table
from bench.rollouts import EXAMPLE, EndToken, Prompt, Tokens, load
from das_ray import SharedHistory, SharedHistorySettings
from das_ray.delta import Delta
from das_ray.installer import Installer
from das_ray.messages import Piece, note_message, rollouts_message, shard_of

SERVICE = "bench"
ROOT = Path(__file__).parent.parent
NUM_SHARDS = 2
MIN_SURVIVAL = 0.15
AHEAD_S = 10.0  # before a batch starts
SETTLE_S = 3.0  # between epochs, where a trainer takes minutes


class SharingSide:
    """das as an engine drives it, for `bench.decode`; with a share in a service, or none.

    Args:
        worker: makes the names of its requests its own.
        is_shared: through the service.
        settings: of the share.
    """

    def __init__(self, worker: int, *, is_shared: bool, settings: Mapping[str, Any]) -> None:
        self.history = das.RolloutHistory()
        self.drafter = das.Drafter(self.history)
        self.training_step = 0
        self._worker = worker
        self._policy = das.PriceBudget(min_survival=MIN_SURVIVAL)
        self.shared: SharedHistory | None = None
        if is_shared:
            self.shared = SharedHistory(
                SharedHistorySettings(service=f"ray:{SERVICE}", **settings),
                drafter=self.drafter,
                policy=lambda: self._policy,
            )

    def start(self, name: str, key: int, prompt: Tokens) -> None:
        self.drafter.start(self._name(name), prompt_token_ids=prompt, prompt_key=key, training_step=self.training_step)

    def draft(self, names: Sequence[str], num_running: int) -> list[list[int]]:
        own = [self._name(name) for name in names]
        planned = das.plan_step(self.drafter, own, policy=self._policy, num_running=num_running)
        return [draft.draft_token_ids for draft in planned.values()]

    def extend(self, tokens: Mapping[str, list[int]]) -> None:
        self.drafter.extend_batch({self._name(name): emitted for name, emitted in tokens.items()})

    def finish(self, name: str) -> None:
        self.drafter.finish(self._name(name))

    def between_steps(self) -> None:
        """What an engine's adapter does before each step."""
        if self.shared is not None:
            self.shared.between_steps()

    def _name(self, name: str) -> str:
        return f"{self.training_step}-{self._worker}-{name}"


class Worker:
    """A rollout worker: an actor of Ray, or an object of this process."""

    def __init__(self, number: int, is_shared: bool, settings: Mapping[str, Any]) -> None:
        self.side = SharingSide(number, is_shared=is_shared, settings=settings)

    def ready(self) -> None:
        """Answers once the process has started."""

    def generate(self, training_step: int, prompts: list[Prompt], step_ms: float) -> dict[str, float]:
        """Decode the targets of these prompts, all at once, and return what that took."""
        self.side.training_step = training_step
        self._settle([prompt.key for prompt in prompts])
        before = self._numbers()
        busy_s = busy_cpu_s = 0.0
        start_s = time.monotonic()
        self.side.history.prepare([prompt.key for prompt in prompts])
        decode = Decode(self.side, prompts)
        while decode.num_running:
            begun_s, begun_cpu_s = time.monotonic(), time.thread_time()
            self.side.between_steps()
            busy_s += time.monotonic() - begun_s
            busy_cpu_s += time.thread_time() - begun_cpu_s
            decode.step()
            time.sleep(max(0.0, step_ms / 1e3 - (time.monotonic() - begun_s)))
        tally = decode.tally
        after = self._numbers()
        cpu_s = after.get("exchange_cpu_s", 0.0) - before.get("exchange_cpu_s", 0.0)
        return {
            "num_steps": tally.num_steps,
            "num_emitted": tally.num_emitted,
            "num_drafted": tally.num_drafted,
            "num_passes": tally.num_passes,
            "generation_s": time.monotonic() - start_s,
            "between_steps_us": 1e6 * busy_s / tally.num_passes,
            "between_steps_cpu_us": 1e6 * busy_cpu_s / tally.num_passes,
            "exchange_cpu_share": cpu_s / (time.monotonic() - start_s),
            **{name: value - before[name] * name.startswith("num_") for name, value in after.items()},
        }

    def _numbers(self) -> dict[str, float]:
        shared = self.side.shared.statistics() if self.side.shared else {}
        return {name: value for name, value in shared.items() if not isinstance(value, str)}

    def _settle(self, keys: list[int]) -> None:
        """As between a trainer's steps: the next prompts are announced, and what is new of them arrives."""
        if self.side.shared is None:
            return
        self.side.shared.announce(keys)
        end_s = time.monotonic() + SETTLE_S
        while time.monotonic() < end_s:
            self.side.between_steps()
            time.sleep(0.02)

    # ---------------------------------------------------------------- throughput and lag

    def publish(self, number: int, num_rollouts: int, num_tokens: int) -> dict[str, float]:
        """Finish so many rollouts at once, and wait until all are acknowledged."""
        shared = self.side.shared
        assert shared is not None  # a worker that shares
        rollouts = random_rollouts(number, num_rollouts, num_tokens)
        start_s = time.monotonic()
        self.side.history.add_many(rollouts)
        while shared.statistics()["num_published_rollouts"] < num_rollouts:
            time.sleep(0.001)
        return {"s": time.monotonic() - start_s, "num_sent_bytes": float(shared.statistics()["num_sent_bytes"])}

    def pull(self, keys: list[int], num_rollouts: int) -> dict[str, float]:
        """Announce prompts, and wait until their rollouts are in the history."""
        shared = self.side.shared
        assert shared is not None  # a worker that shares
        start_s = time.monotonic()
        shared.announce(keys)
        while self.side.history.statistics().num_rollouts < num_rollouts:
            shared.between_steps()
            time.sleep(0.001)
        received = float(shared.statistics()["num_received_bytes"])
        return {"s": time.monotonic() - start_s, "num_received_bytes": received}

    def calls(self, num_calls: int) -> dict[str, list[float]]:
        """Call a shard, one call after another; return how long each took, in ms."""
        from das_ray.service import RayShards

        shards = RayShards(SERVICE)
        stored = random_rollouts(77, num_calls, 1000)
        none = np.zeros(0, np.uint64)
        keys = np.arange(256, dtype=np.uint64) + np.uint64(1 << 60)  # nobody has rollouts of them
        arrays = {"prompt_key": keys, "known_version": keys, "following": none, "following_length": none}
        messages = {
            "publish": [(shard_of(one.key, NUM_SHARDS), (rollouts_message([one], worker="w"),)) for one in stored],
            "pull": [(0, (note_message("pull", {"worker": "w", "store_id": None}, arrays),))] * num_calls,
        }
        times_ms: dict[str, list[float]] = {}
        for method, to_send in messages.items():
            times_ms[method] = []
            for shard, arguments in to_send:
                start_s = time.monotonic()
                shards.call({shard: (method, arguments)})
                times_ms[method].append(1e3 * (time.monotonic() - start_s))
        return times_ms

    def tell(self, key: int, number: int) -> None:
        """Finish a rollout whose reward is the time."""
        self.side.history.add(
            das.Rollout(
                prompt_token_ids=[1],
                response_token_ids=[number, *range(1000)],
                prompt_key=key,
                training_step=0,
                request_id=f"lag-{number}",
                reward=time.monotonic(),
            )
        )

    def hear(self, key: int, num_rollouts: int) -> list[float]:
        """Run a request of that prompt until so many rollouts have come; return how old each was, in ms."""
        lags_ms: list[float] = []
        self.side.history.subscribe(lambda stored: lags_ms.append(1e3 * (time.monotonic() - (stored.reward or 0.0))))
        self.side.drafter.start("listens", prompt_token_ids=[1], prompt_key=key, training_step=0)
        while len(lags_ms) < num_rollouts:
            self.side.between_steps()
            time.sleep(0.01)
        return lags_ms


def random_rollouts(worker: int, num_rollouts: int, num_tokens: int) -> list[das.Rollout]:
    """Return random rollouts, 16 of a prompt."""
    random = np.random.default_rng(worker)
    return [
        das.Rollout(
            prompt_token_ids=np.arange(200, dtype=np.int32),
            response_token_ids=random.integers(0, 100_000, num_tokens).astype(np.int32),
            prompt_key=(worker << 32) + number // 16,
            training_step=0,
            request_id=f"{worker}-{number}",
        )
        for number in range(num_rollouts)
    ]


# ---------------------------------------------------------------- the three


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


@dataclass(frozen=True, slots=True)
class Sums:
    """Of all workers in an epoch."""

    num_emitted: int
    num_steps: int

    @property
    def tokens_per_step(self) -> float:
        """Tokens per decode step."""
        return self.num_emitted / self.num_steps


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


def lagged(epochs: list[list[Prompt]], *, num_workers: int, lag_steps: int | None) -> list[Sums]:
    """Decode in workers of this process that take steps in turn, and return each epoch's sums.

    Args:
        lag_steps: after which what a worker has generated reaches the others; None: never.
    """
    sides = [SharingSide(number, is_shared=False, settings={}) for number in range(num_workers)]
    installers = [Installer(side.history) for side in sides]
    finished: list[list[das.Rollout]] = [[] for _ in sides]
    for side, installer, own in zip(sides, installers, finished, strict=True):
        side.history.subscribe(
            lambda stored, installer=installer, own=own: None if installer.is_installing else own.append(stored)
        )
    found = []
    for step, prompts in enumerate(epochs):
        for side in sides:
            side.training_step = step
        decodes = [Decode(side, share_of(prompts, number, num_workers, step)) for number, side in enumerate(sides)]
        told: list[dict[str, int]] = [{} for _ in sides]
        on_their_way: deque[tuple[int, int, Delta]] = deque()
        for number_of_pass in count():
            is_over = not any(decode.num_running for decode in decodes)
            while on_their_way and (is_over or on_their_way[0][0] <= number_of_pass):
                _, sender, delta = on_their_way.popleft()
                for number, installer in enumerate(installers):
                    if number != sender:
                        installer.add(delta)
                        installer.run(max_tokens=1 << 40)
            if is_over:
                break
            for number, decode in enumerate(decodes):
                if decode.num_running:
                    decode.step()
                if lag_steps is not None:
                    pieces = pieces_since(str(number), sides[number].drafter, told[number])
                    delta = Delta("", 1, 1, list(finished[number]), pieces, [])
                    on_their_way.append((number_of_pass + 1 + lag_steps, number, delta))
                finished[number].clear()
        tallies = [decode.tally for decode in decodes]
        found.append(Sums(sum(one.num_emitted for one in tallies), sum(one.num_steps for one in tallies)))
    return found


def pieces_since(worker: str, drafter: das.Drafter, told: dict[str, int]) -> list[Piece]:
    """Return what running requests have generated beyond what was told, which is noted."""
    pieces = []
    for request_id in drafter.request_ids():
        start = told.get(request_id, 0)
        rollout = drafter.running_rollout(request_id, start=start)
        if rollout is not None:
            told[request_id] = start + len(rollout.response_token_ids)
            pieces.append(Piece(worker, start, rollout))
    return pieces


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


def epochs_of(log: Path) -> list[list[Prompt]]:
    """Return the prompts of each of the log's training steps, with its samples as targets."""
    questions, by_step = load(log, EndToken())
    return [
        [Prompt(key, question, targets=by_step[step][key]) for key, question in enumerate(questions)]
        for step in sorted(by_step)
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


def share_of(prompts: list[Prompt], worker: int, num_workers: int, epoch: int) -> list[Prompt]:
    """Return what a worker generates: of each prompt some samples, other ones in each epoch."""
    return [
        Prompt(
            prompt.key,
            prompt.token_ids,
            targets=[
                target
                for number, target in enumerate(prompt.targets)
                if (prompt.key + number + epoch) % num_workers == worker
            ],
        )
        for prompt in prompts
    ]


class service:
    """A history service in a folder that goes with it; or, not `is_wanted`, nothing."""

    def __init__(self, is_wanted: bool) -> None:
        self._is_wanted = is_wanted

    def __enter__(self) -> None:
        from das_ray.service import start_history

        if self._is_wanted:
            self._folder = tempfile.TemporaryDirectory()
            start_history(SERVICE, directory=self._folder.name, num_shards=NUM_SHARDS)

    def __exit__(self, *_: object) -> None:
        from das_ray.service import stop_history

        if self._is_wanted:
            stop_history(SERVICE)
            time.sleep(1.0)  # until its processes have let go of the folder
            self._folder.cleanup()


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


def start_ray(num_cpus: int) -> None:
    """Start Ray on this machine, for as long as this process lives."""
    import ray

    paths = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
    ray.init(
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=200_000_000,
        namespace="das",
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )


if __name__ == "__main__":
    main()
