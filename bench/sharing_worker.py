"""A rollout worker that shares its history, and the service it shares it through: what `bench_ray` starts on Ray."""

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import das
from bench.decode import Decode
from bench.rollouts import Prompt, Tokens
from das_ray import SharedHistory, SharedHistorySettings
from das_ray.messages import note_message, rollouts_message, shard_of

SERVICE = "bench"
ROOT = Path(__file__).parent.parent
NUM_SHARDS = 2
MIN_SURVIVAL = 0.15
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
