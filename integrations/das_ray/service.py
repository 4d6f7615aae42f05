"""The history service on Ray: one named, detached actor a shard. The only module of das that imports Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from das.checked_values import check_int
from das_ray.exchange import ServiceError
from das_ray.messages import MessageError, count_in, read_note
from das_ray.settings import check_name
from das_ray.shard import HistoryShard

CALL_TIMEOUT_S = 30.0  # a snapshot of a large shard takes seconds
_CONNECT_TIMEOUT_S = 10.0

# Ray ends a process that has joined a cluster when that does not answer for so long, a minute if nothing is said. An
# engine that joined it for its history only has to go on.
_OUTLIVE_THE_CLUSTER = ("RAY_gcs_rpc_server_reconnect_timeout_s", str(10 * 365 * 24 * 3600))


def start_history(
    name: str,
    *,
    directory: str | Path,
    num_shards: int = 1,
    window_epochs: int = 4,
    max_bytes: int = 8 << 30,
    namespace: str = "das",
    actor_options: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Start a history service in the Ray cluster of this process, or find the one that runs; wait until it answers.

    Its shards are detached actors: they outlive this process, and Ray starts them again where they die. They then read
    what they have acknowledged from their directories.

    Args:
        name: of the service, 1 to 100 letters, digits, _, . or -; an engine's settings name it as "ray:NAME".
        directory: of the service; each shard has its own in it. Where a shard may come back on another machine, on a
            file system that all of them have.
        num_shards: over which prompts are spread, >= 1. A directory goes with one number.
        window_epochs: epochs that each prompt keeps.
        max_bytes: of all shards together, in memory.
        namespace: of Ray.
        actor_options: further options of the actors, as Ray's `.options()` takes them: `resources`,
            `scheduling_strategy`, ...

    Returns:
        the actors.

    Raises:
        TypeError, ValueError: a bad argument, or a service of that name runs with other settings. ServiceError: a shard
        does not start; it says why.
    """
    check_name(name, "name")
    check_name(namespace, "namespace")
    for label, value in (("num_shards", num_shards), ("window_epochs", window_epochs), ("max_bytes", max_bytes)):
        check_int(value, label, below=1 << 62)
        if value == 0:
            raise ValueError(f"{label} is 0; it must be at least 1")
    options = {
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,  # workers send again by themselves
        "lifetime": "detached",
        "namespace": namespace,
        "get_if_exists": True,
        **(actor_options or {}),
    }
    settings = {"num_shards": num_shards, "window_epochs": window_epochs, "max_bytes": max_bytes // num_shards}
    shard_class = ray.remote(HistoryShard)
    actors = [
        shard_class.options(name=_actor_name(name, index), **options).remote(
            str(Path(directory).absolute() / f"shard-{index:04d}"),
            index,
            num_shards,
            window_epochs,
            max_bytes // num_shards,
        )
        for index in range(num_shards)
    ]
    for index, actor in enumerate(actors):
        try:
            note = read_note(ray.get(actor.describe.remote(), timeout=CALL_TIMEOUT_S), "shard", "shard")
        except RayError as error:
            stop_history(name, namespace=namespace)
            raise ServiceError(f"shard {index} of {name} does not start: {_reason(error)}") from None
        running = {label: note.values.get(label) for label in settings}
        if running != settings:
            raise ValueError(f"the service {name} runs with {running}, not with {settings}; stop it first")
    return actors


def stop_history(name: str, *, namespace: str = "das") -> int:
    """End a service; return how many shards there were. Its directory stays."""
    num_stopped = 0
    while True:
        try:
            actor = ray.get_actor(_actor_name(name, num_stopped), namespace=namespace)
        except ValueError:
            return num_stopped
        ray.kill(actor, no_restart=True)
        num_stopped += 1


class RayShards:
    """The shards of a running service, as a worker calls them.

    A shard that has died for good, as all do when their service is stopped, is looked for by its name at the next call:
    a service that was started again is another set of actors.

    Args:
        name, namespace: of the service.
        address: of the cluster, if this process is part of none yet; None: as Ray finds it.

    Raises:
        ServiceError: there is no such cluster or service, or its first shard does not answer.
    """

    def __init__(self, name: str, *, namespace: str = "das", address: str | None = None) -> None:
        self._name, self._namespace = name, namespace
        self._actors: dict[int, Any] = {}  # those that are there, by shard
        try:
            if not ray.is_initialized():
                os.environ.setdefault(*_OUTLIVE_THE_CLUSTER)
                ray.init(address=address or "auto", namespace=namespace, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise ServiceError(f"there is no Ray cluster to join: {_reason(error)}") from error
        try:
            self.num_shards = self._ask_num_shards(self._find(0))
            self._actors |= {shard: self._find(shard) for shard in range(self.num_shards)}
        except (ValueError, RayError) as error:
            raise ServiceError(f"there is no service {name!r} in namespace {namespace!r}: {_reason(error)}") from error

    def call(self, calls: Mapping[int, tuple[str, tuple[bytes, ...]]]) -> dict[int, bytes | Exception]:
        """Call a method of each of these shards, all at once; see das_ray.exchange.Shards."""
        answers: dict[int, Any] = {}
        for shard, (method, arguments) in calls.items():
            try:
                if shard not in self._actors:
                    self._actors[shard] = self._found_again(shard)
                answers[shard] = getattr(self._actors[shard], method).remote(*arguments)
            except (ServiceError, ValueError, RayError) as error:
                answers[shard] = ServiceError(f"shard {shard} of {self._name} is not there: {_reason(error)}")
        return {shard: self._answer(shard, answer) for shard, answer in answers.items()}

    def statistics(self) -> list[dict[str, Any]]:
        """Return the counters of each shard. Raises ServiceError."""
        found = []
        for answer in self.call({shard: ("statistics", ()) for shard in range(self.num_shards)}).values():
            if isinstance(answer, Exception):
                raise answer
            found.append(read_note(answer, "statistics", "statistics").values)
        return found

    def _find(self, shard: int) -> Any:
        return ray.get_actor(_actor_name(self._name, shard), namespace=self._namespace)

    def _found_again(self, shard: int) -> Any:
        actor = self._find(shard)
        num_shards = self._ask_num_shards(actor)
        if num_shards != self.num_shards:
            raise ServiceError(f"it runs with {num_shards} shards now, not with {self.num_shards} as before")
        return actor

    def _ask_num_shards(self, actor: Any) -> int:
        answer = ray.get(actor.describe.remote(), timeout=_CONNECT_TIMEOUT_S)
        return count_in(read_note(answer, "shard", "shard"), "num_shards", "shard")

    def _answer(self, shard: int, answer: Any) -> bytes | Exception:
        if isinstance(answer, ServiceError):
            return answer
        try:
            found = ray.get(answer, timeout=CALL_TIMEOUT_S)
        except RayTaskError as error:
            if isinstance(error.cause, MessageError):
                return MessageError(str(error.cause))
            return ServiceError(f"shard {shard} of {self._name} failed: {error.cause!r}")
        except RayError as error:
            if isinstance(error, ActorDiedError):
                self._actors.pop(shard, None)
            return ServiceError(f"shard {shard} of {self._name} does not answer: {_reason(error)}")
        return found if isinstance(found, bytes) else MessageError(f"shard {shard} answers {type(found).__name__}")


def _actor_name(name: str, index: int) -> str:
    return f"das-history-{name}-{index}"


def _reason(error: BaseException) -> str:
    """Ray's messages have many lines; the last says most where it quotes a traceback, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    quoted = [line for line in lines if "Error: " in line]
    return f"{type(error).__name__}: {(quoted or lines or ['no reason given'])[-1 if quoted else 0]}"
