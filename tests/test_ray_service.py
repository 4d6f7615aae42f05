"""The history service on real Ray processes: workers and shards that are killed, come back, and lose nothing."""

import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from history_shards import Worker, numbered, pull_message, settle
from rollout_samples import rollout
from state_samples import as_values

import das
from das_ray.delta import Delta
from das_ray.exchange import ServiceError
from das_ray.messages import MessageError, rollouts_message, shard_of

pytestmark = pytest.mark.ray

TESTS = Path(__file__).parent
NUM_PROMPTS, ROLLOUTS_PER_STEP, WINDOW = 5, 5, 4
TEXT = list(range(40))


@pytest.fixture(scope="module")
def ray():
    import ray

    paths = os.pathsep.join([str(TESTS.parent), str(TESTS.parent / "integrations"), str(TESTS)])
    ray.init(
        num_cpus=6,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200_000_000,
        logging_level="ERROR",
        namespace="das",
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield ray
    ray.shutdown()


@pytest.fixture
def service(ray, tmp_path, request):
    """Starts a service of this test's own name, and ends it: (name, shards)."""
    from das_ray.service import RayShards, start_history, stop_history

    name = request.node.name.split("[")[0][-60:]

    def start(**options):
        start_history(name, directory=tmp_path, **{"num_shards": 2, **options})
        return name, RayShards(name)

    yield start
    stop_history(name)


def kill(process):
    os.kill(process, signal.SIGKILL)


def pulled(shards, keys):
    """All rollouts of these prompts that the service has; waits for shards that are coming back."""
    end_s = time.monotonic() + 60.0
    found = []
    for shard in range(shards.num_shards):
        own = [key for key in keys if shard_of(key, shards.num_shards) == shard]
        while isinstance(answer := shards.call({shard: ("pull", (pull_message(own),))})[shard], Exception):
            assert isinstance(answer, ServiceError), answer
            assert time.monotonic() < end_s, answer
            time.sleep(0.05)
        delta = Delta.from_bytes(answer)
        assert delta.num_answered == len(own)
        found += delta.rollouts
    return found


class Engine:
    """A worker process: a drafter that shares its history, and runs requests when it is told to."""

    def __init__(self, name, number):
        from das_ray.service import RayShards

        self.worker = Worker(lambda: RayShards(name))
        self.number = number

    def process(self):
        return os.getpid()

    def finish(self, prompts):
        for prompt in prompts:
            self.worker.start(f"{self.number}-{prompt}", prompt=[prompt])
            self.worker.drafter.extend(f"{self.number}-{prompt}", [self.number, *TEXT])
            self.worker.drafter.finish(f"{self.number}-{prompt}")
        settle(self.worker, until=lambda: not self.worker.shared.statistics()["num_queued_rollouts"])
        return self.worker.shared.statistics()

    def know(self, prompts, num_rollouts):
        """Announce prompts, and wait until so many rollouts of them are known; return their texts by prompt."""
        keys = [das.prompt_key([prompt]) for prompt in prompts]
        self.worker.shared.announce(keys)
        settle(self.worker, until=lambda: self.worker.history.statistics().num_rollouts >= num_rollouts)
        return {prompt: sorted(self.worker.responses([prompt])) for prompt in prompts}


def test_four_worker_processes_know_what_each_of_them_saw(ray, service):
    name, shards = service()
    engine_class = ray.remote(num_cpus=1)(Engine)
    engines = [engine_class.remote(name, number) for number in range(4)]
    prompts = list(range(12))
    statistics = ray.get([engine.finish.remote(prompts) for engine in engines], timeout=120)
    assert [one["num_published_rollouts"] for one in statistics] == [12] * 4
    found = ray.get([engine.know.remote(prompts, 48) for engine in engines], timeout=120)
    expected = {prompt: [[number, *TEXT] for number in range(4)] for prompt in prompts}
    assert found == [expected] * 4
    # One dies, and another takes its place: it is told of everything, also of what its predecessor saw.
    kill(ray.get(engines[0].process.remote()))
    successor = engine_class.remote(name, 9)
    assert ray.get(successor.know.remote(prompts, 48), timeout=120) == expected
    # The shards die, and Ray brings them back.
    before = shards.statistics()
    for shard in before:
        kill(shard["process"])
    assert len(pulled(shards, [das.prompt_key([prompt]) for prompt in prompts])) == 48
    after = shards.statistics()
    assert all(one["process"] != other["process"] for one, other in zip(before, after, strict=True))
    assert [one["num_rollouts"] for one in after] == [one["num_rollouts"] for one in before]


class Publisher:
    """Publishes numbered rollouts, one after the other, and writes down each number that was acknowledged."""

    def process(self):
        return os.getpid()

    def publish_for_ever(self, name, path):
        from das_ray.service import RayShards

        shards = RayShards(name)
        number = Path(path).stat().st_size // 4
        with open(path, "ab", buffering=0) as acknowledged:
            while True:
                stored = sample(number)
                shard = shard_of(stored.key, shards.num_shards)
                message = rollouts_message([stored], worker=f"w{os.getpid()}")
                while isinstance(shards.call({shard: ("publish", (message,))})[shard], Exception):
                    time.sleep(0.02)
                acknowledged.write(number.to_bytes(4, "little"))
                number += 1


def sample(number):
    """Rollouts of 100,000 tokens, so that snapshots are written and killed as well."""
    return numbered(number, prompt=(number % NUM_PROMPTS,), step=number // ROLLOUTS_PER_STEP, length=100_000)


def window_of(num_published):
    """What must be there after so many publishes: of each prompt, the last epochs."""
    by_key = {}
    for number in range(max(0, num_published - ROLLOUTS_PER_STEP * (WINDOW + 1)), num_published):
        by_key.setdefault(sample(number).key, []).append(sample(number))
    kept = []
    for of_prompt in by_key.values():
        steps = sorted({stored.training_step for stored in of_prompt})[-WINDOW:]
        kept += [as_values(stored) for stored in of_prompt if stored.training_step in steps]
    return sorted(kept)


@pytest.mark.parametrize("num_kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_publishing_loses_nothing_acknowledged_and_doubles_nothing(ray, service, tmp_path, num_kills):
    """The worker, or the shard it is talking to, is killed at a random moment; what it left is read and compared."""
    name, shards = service(window_epochs=WINDOW)
    path = tmp_path / "acknowledged"
    path.touch()
    source = random.Random(num_kills)
    publisher_class = ray.remote(num_cpus=1)(Publisher)
    publisher, num_in_doubt = None, 0
    keys = [sample(number).key for number in range(NUM_PROMPTS)]
    for kill_number in range(num_kills):
        if publisher is None:
            publisher = publisher_class.remote()
            process = ray.get(publisher.process.remote(), timeout=60)
            publisher.publish_for_ever.remote(name, str(path))
        num_before = path.stat().st_size
        victims = [shard["process"] for shard in shards.statistics()]
        while path.stat().st_size == num_before:
            time.sleep(0.001)
        time.sleep(source.uniform(0.0, 0.15))
        kills_worker = source.random() < 0.4
        kill(process if kills_worker else source.choice(victims))
        if kills_worker:
            publisher = None
            time.sleep(0.1)  # a call of the worker that died may still be on its way
        else:
            os.kill(process, signal.SIGSTOP)  # shards are read one after the other
        num_acknowledged = path.stat().st_size // 4
        found = sorted(map(as_values, pulled(shards, keys)))
        num_published = 1 + max(int(stored[6][1:]) for stored in found)
        assert num_published >= num_acknowledged, f"kill {kill_number}"
        expected = window_of(num_published)
        assert [stored[6] for stored in found] == [stored[6] for stored in expected], f"kill {kill_number}"
        assert found == expected, f"kill {kill_number}"
        num_in_doubt += num_published > num_acknowledged
        if not kills_worker:
            os.kill(process, signal.SIGCONT)
    assert path.stat().st_size // 4 > num_kills
    if publisher is not None:
        kill(process)
    print(f"{num_kills} kills, {path.stat().st_size // 4} publishes acknowledged, {num_in_doubt} in doubt")


def test_a_shard_that_dies_while_a_worker_shares_is_reported_once_and_caught_up(ray, service, caplog):
    name, shards = service()
    from das_ray.service import RayShards

    worker = Worker(lambda: RayShards(name))
    with caplog.at_level(logging.WARNING, logger="das"):
        for number in range(30):
            worker.history.add(rollout([number, *TEXT], 0, prompt=[number % 6], request_id=str(number)))
            worker.shared.between_steps()
            if number == 10:
                settle(worker)
                for shard in shards.statistics():
                    kill(shard["process"])
            time.sleep(0.02)
        settle(worker, until=lambda: worker.shared.statistics()["num_published_rollouts"] == 30, timeout_s=60)
    assert {record.levelname for record in caplog.records} <= {"ERROR", "WARNING"}
    found = pulled(shards, [das.prompt_key([n]) for n in range(6)])
    assert sorted(int(stored.request_id) for stored in found) == list(range(30))
    worker.shared.close()


def test_an_engine_that_starts_before_the_service_finds_it_later(ray, service, monkeypatch):
    monkeypatch.setattr("das_ray.exchange.RETRY_S", 0.2)
    name = "test_an_engine_that_starts_before_the_service_finds_it_later"[-60:]
    from das_ray.service import RayShards

    worker = Worker(lambda: RayShards(name))
    worker.history.add(rollout(TEXT, 0, request_id="early"))
    settle(worker)
    assert worker.shared.statistics()["state"].startswith("alone: there is no service")
    _, shards = service()
    settle(worker, until=lambda: worker.shared.statistics()["state"] == "sharing", timeout_s=60)
    settle(worker, until=lambda: worker.shared.statistics()["num_published_rollouts"] == 1)
    assert [stored.request_id for stored in pulled(shards, [das.prompt_key([1, 2, 3])])] == ["early"]
    worker.shared.close()


def test_a_service_that_was_stopped_and_started_again_is_found_again(ray, service, tmp_path, monkeypatch):
    """Its actors are others; those that a worker knew are dead for good."""
    monkeypatch.setattr("das_ray.exchange.RETRY_S", 0.2)
    name, _ = service()
    from das_ray.service import RayShards, start_history, stop_history

    worker = Worker(lambda: RayShards(name))

    def state():
        return worker.shared.statistics()["state"]

    def settle_until(condition):
        settle(worker, until=condition, timeout_s=60)

    worker.history.add(rollout(TEXT, 0, request_id="before"))
    settle_until(lambda: state() == "sharing")
    assert stop_history(name) == 2
    worker.history.add(rollout([7, *TEXT], 0, request_id="meanwhile"))
    settle_until(lambda: state().startswith("alone: shard"))
    start_history(name, directory=tmp_path, num_shards=2)
    settle_until(lambda: state() == "sharing")
    settle_until(lambda: worker.shared.statistics()["num_published_rollouts"] == 2)
    found = pulled(RayShards(name), [das.prompt_key([1, 2, 3])])
    assert sorted(stored.request_id for stored in found) == ["before", "meanwhile"]
    stop_history(name)
    start_history(name, directory=tmp_path / "other", num_shards=3)
    worker.history.add(rollout([8, *TEXT], 0, request_id="after"))
    settle_until(lambda: "it runs with 3 shards now, not with 2 as before" in state())
    assert RayShards(name).statistics()[0]["num_shards"] == 3
    worker.shared.close()


OUTSIDER = """
import sys, time, das
from das_ray import SharedHistory, SharedHistorySettings

drafter = das.Drafter(das.RolloutHistory())
settings = SharedHistorySettings(service=f"ray:{sys.argv[1]}", address=sys.argv[2])
shared = SharedHistory(settings, drafter=drafter, policy=das.NoDraft)
shared.announce([das.prompt_key([1, 2, 3])])
end_s = time.monotonic() + 90
while not drafter.history.statistics().num_rollouts and time.monotonic() < end_s:
    shared.between_steps()
    time.sleep(0.05)
print(shared.statistics()["state"], drafter.history.statistics().num_rollouts)
shared.close()
"""


def test_an_engine_outside_of_the_cluster_joins_it_by_its_address(ray, service):
    """In the background thread: an engine's main thread is busy."""
    name, shards = service(num_shards=1)
    shards.call({0: ("publish", (rollouts_message([numbered(1)], worker="w"), b""))})
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS.parent / "integrations")])
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDER, name, ray.get_runtime_context().gcs_address],
        capture_output=True, text=True, timeout=150, env=os.environ | {"PYTHONPATH": paths}, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["sharing", "1"], done.stdout + done.stderr[-2000:]


OUTLIVES = """
import os, sys, time, das, ray
from das_ray import SharedHistory, SharedHistorySettings
from das_ray.service import start_history

if sys.argv[1] == "cluster":
    cluster = ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100_000_000, namespace="das")
    start_history("short", directory=sys.argv[2])
    print(cluster.address_info["gcs_address"], flush=True)
    sys.stdin.read()
else:
    drafter = das.Drafter(das.RolloutHistory())
    settings = SharedHistorySettings(service="ray:short", address=sys.argv[2])
    shared = SharedHistory(settings, drafter=drafter, policy=das.NoDraft)
    while shared.statistics()["state"] != "sharing":
        time.sleep(0.05)
    print("joined", flush=True)
    sys.stdin.read()
    end_s = time.monotonic() + 90  # Ray ends its processes after 60
    while time.monotonic() < end_s:
        drafter.history.add(das.Rollout(prompt_token_ids=[1], response_token_ids=[2], training_step=0))
        shared.between_steps()
        time.sleep(0.1)
    print(shared.statistics()["state"], flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_an_engine_outside_of_the_cluster_outlives_it(tmp_path):
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS.parent / "integrations")])
    environment = os.environ | {"PYTHONPATH": paths, "RAY_AUTH_MODE": "token"}

    def process(*arguments):
        return subprocess.Popen(
            [sys.executable, "-c", OUTLIVES, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    with process("cluster", str(tmp_path)) as cluster, process("engine", cluster.stdout.readline().strip()) as engine:
        assert engine.stdout.readline() == "joined\n"
        cluster.communicate(timeout=60)
        found, _ = engine.communicate(timeout=150)
    assert found.startswith("alone: shard 0 of short does not answer")
    assert engine.returncode == 0


def test_a_process_forked_from_one_that_uses_ray_says_so(ray):
    from das_ray import SharedHistorySettings
    from das_ray.shared_history import _connect_to_ray

    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            _connect_to_ray(SharedHistorySettings(service="ray:any"))
        except ServiceError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(process, 0)
    assert b"this process was forked from one that uses Ray" in os.read(reader, 1000)
    for end in (reader, writer):
        os.close(end)


def test_a_shard_refuses_strangers_bytes_and_goes_on(ray, service):
    _, shards = service(num_shards=1)
    for bad in (b"", b"\x80\x04N.", b"x" * 100_000):
        answer = shards.call({0: ("publish", (b"rollouts" + bad, b""))})[0]
        assert isinstance(answer, MessageError), answer
        assert isinstance(shards.call({0: ("pull", (bad,))})[0], MessageError)
        assert isinstance(shards.call({0: ("put_learned", (bad,))})[0], MessageError)
    message = rollouts_message([numbered(1)], worker="w")
    assert isinstance(shards.call({0: ("publish", (message, b""))})[0], bytes)
    (statistics,) = shards.statistics()
    assert (statistics["num_rollouts"], statistics["version"]) == (1, 1)


def test_what_cannot_start_says_why(ray, service, tmp_path):
    from das_ray.service import start_history, stop_history

    name, shards = service(num_shards=1)
    with pytest.raises(ValueError, match=r"runs with \{'num_shards': 1.*stop it first"):
        start_history(name, directory=tmp_path, num_shards=1, window_epochs=9)
    shards.call({0: ("publish", (rollouts_message([numbered(1)], worker="w"), b""))})
    assert stop_history(name) == 1
    assert stop_history(name) == 0
    path = tmp_path / "shard-0000" / "published-000000000001.das"
    path.write_bytes(path.read_bytes()[:-1])
    time.sleep(0.5)  # until the actor's process has gone
    with pytest.raises(ServiceError, match=r"shard 0 of .* does not start: .*published-000000000001\.das: it is cut"):
        start_history(name, directory=tmp_path, num_shards=1)
    for options in ({"num_shards": 0}, {"max_bytes": 0}, {"window_epochs": 0}):
        with pytest.raises(ValueError, match="it must be at least 1"):
            start_history(name, directory=tmp_path, **options)
    for bad, options in (("my run", {}), ("x" * 101, {}), (name, {"namespace": "a/b"})):  # no engine takes them
        with pytest.raises(ValueError, match="it must be 1 to 100 letters, digits"):
            start_history(bad, directory=tmp_path, **options)


def test_the_command_starts_shows_and_stops_a_service(ray, tmp_path):
    address = ray.get_runtime_context().gcs_address

    def command(*arguments):
        paths = os.pathsep.join([str(TESTS.parent), str(TESTS.parent / "integrations")])
        return subprocess.run(
            [sys.executable, "-m", "das_ray", *arguments, "--address", address],
            capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": paths}, check=False,
        )  # fmt: skip

    started = command("start", "run-1", "--directory", str(tmp_path), "--shards", "2")
    assert started.returncode == 0, started.stderr
    assert '"shared_history": "ray:run-1"' in started.stdout
    assert '"num_shards": 2' in command("status", "run-1").stdout
    assert "2 shards ended" in command("stop", "run-1").stdout
    failed = command("status", "run-1")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "das_ray: there is no service 'run-1'" in failed.stderr
