"""Shards of a history service in this process, workers that share them, and what a store holds as plain values."""

import threading
import time

from rollout_samples import rollout
from state_samples import as_values

import das
from das_ray import SharedHistory, SharedHistorySettings
from das_ray.exchange import ServiceError
from das_ray.messages import MessageError, note_message
from das_ray.shard import HistoryShard

MANY_BYTES = 1 << 30


class ShardsHere:
    """The shards of a service, called as Ray calls them: one call at a time each, from any thread.

    A shard that is None is dead.
    """

    def __init__(self, directory, *, num_shards=2, window_epochs=4, max_bytes=MANY_BYTES):
        self.num_shards = num_shards
        self._make = lambda index: HistoryShard(
            str(directory / f"shard-{index}"), index, num_shards, window_epochs, max_bytes
        )
        self.shards = [self._make(index) for index in range(num_shards)]
        self.num_bytes = 0
        self._lock = threading.Lock()

    def kill(self, index):
        """End a shard; its memory is gone, and its directory free."""
        with self._lock:
            self.shards[index]._store.close()
            self.shards[index] = None

    def revive(self, index):
        with self._lock:
            self.shards[index] = self._make(index)

    def call(self, calls):
        answers = {}
        for index, (method, arguments) in calls.items():
            with self._lock:
                if self.shards[index] is None:
                    answers[index] = ServiceError(f"shard {index} is dead")
                    continue
                try:
                    answers[index] = getattr(self.shards[index], method)(*arguments)
                    self.num_bytes += len(answers[index]) + sum(map(len, arguments))
                except MessageError as error:
                    answers[index] = error
        return answers

    def close(self):
        for shard in self.shards:
            if shard is not None:
                shard._store.close()


class Worker:
    """A drafter whose history is shared; steps are taken by `settle`."""

    def __init__(self, connect, *, policy=None, max_bytes=MANY_BYTES, **settings):
        self.history = das.RolloutHistory(max_bytes=max_bytes)
        self.drafter = das.Drafter(self.history)
        self.policy = policy or das.PriceBudget(min_survival=0.15)
        settings = SharedHistorySettings(service="ray:test", **{"pull_interval_ms": 10, "piece_tokens": 1, **settings})
        self.shared = SharedHistory(settings, drafter=self.drafter, policy=lambda: self.policy, connect=connect)

    def start(self, name, *, prompt, step=0):
        self.drafter.start(name, prompt_token_ids=prompt, training_step=step)

    def responses(self, prompt):
        return [r.response_token_ids.tolist() for r in self.history.rollouts(das.prompt_key(prompt))]


def settle(*workers, until=lambda: True, timeout_s=60.0):
    """Take steps until what is queued has been sent and taken in, and `until` holds."""
    end_s = time.monotonic() + timeout_s
    rounds = 0
    while rounds < 3 or not until():
        assert time.monotonic() < end_s, [worker.shared.statistics() for worker in workers]
        for worker in workers:
            worker.shared._next_look_s = 0.0  # running requests are looked at every 100 ms
            worker.shared.between_steps()
        for worker in workers:
            worker.shared.flush(timeout_s=5.0)
        time.sleep(0.01)
        rounds += 1


def held(store):
    """The rollouts of a ShardStore, as plain values, by prompt key."""
    return {key: [as_values(stored) for _, stored in prompt.record.window()] for key, prompt in store._prompts.items()}


def numbered(number, *, prompt=(1, 2, 3), step=0, length=20):
    """A rollout that has a name, and text of its own."""
    text = [number, *range(length - 1)]
    return rollout(text, step, prompt=list(prompt), request_id=f"r{number}", reward=float(number))


def pull_message(keys, versions=None, *, worker="w", store_id=None):
    import numpy as np

    versions = [0] * len(keys) if versions is None else versions
    none = np.zeros(0, np.uint64)
    arrays = {"prompt_key": np.array(keys, np.uint64), "known_version": np.array(versions, np.uint64)}
    return note_message(
        "pull", {"worker": worker, "store_id": store_id}, {**arrays, "following": none, "following_length": none}
    )
