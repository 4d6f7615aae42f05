"""A history service in a Ray cluster of its own process, and what is done there: for tests with real engines.

The process that runs the tests is no part of the cluster. Its engines join as users' do, by the environment.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path

import das

TESTS = Path(__file__).parent
NAME = "engines"
NUM_SHARDS = 2
ANSWER_TIMEOUT_S = 180.0
_PATHS = [str(TESTS.parent), str(TESTS.parent / "integrations"), str(TESTS), str(TESTS / "engine_vllm")]


class _Host:
    """The methods that the other process answers by. It starts the service, and is a worker that shares its history."""

    def __init__(self, temporary, directory):
        import ray

        context = ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100_000_000,
            logging_level="ERROR",
            namespace="das",
            _temp_dir=temporary,
        )
        self.address = context.address_info["gcs_address"]
        self._directory = directory
        self._actor = self._worker = None
        self.start()

    def start(self):
        from das_ray.service import start_history

        start_history(NAME, directory=self._directory, num_shards=NUM_SHARDS)

    def stop(self):
        """`ray.kill` of all shards: Ray does not start them again."""
        from das_ray.service import stop_history

        return stop_history(NAME)

    def kill(self):
        """SIGKILL to all shards: Ray starts them again."""
        for shard in self.statistics():
            os.kill(shard["process"], signal.SIGKILL)

    def statistics(self):
        from das_ray.service import RayShards

        return RayShards(NAME).statistics()

    def publish(self, rollouts):
        """Share these as a worker, and wait until they are acknowledged."""
        from history_shards import settle

        worker = self._as_worker()
        worker.history.add_many(rollouts)
        settle(worker, until=lambda: not worker.shared.statistics()["num_queued_rollouts"], timeout_s=60.0)

    def known(self, prompts, num_rollouts):
        """As a worker, wait for so many rollouts of these prompts, and return the responses to each, sorted."""
        from history_shards import settle

        worker = self._as_worker()

        def knows_them():
            worker.shared.announce([das.prompt_key(prompt) for prompt in prompts])
            return sum(len(worker.responses(prompt)) for prompt in prompts) >= num_rollouts

        settle(worker, until=knows_them, timeout_s=60.0)
        return [sorted(worker.responses(prompt)) for prompt in prompts]

    def make_actor(self, actor_class, *arguments):
        """Make an actor of the cluster, of an importable class."""
        import ray

        self._actor = ray.remote(num_cpus=1)(actor_class).remote(*arguments)

    def ask_actor(self, method, *arguments):
        import ray

        return ray.get(getattr(self._actor, method).remote(*arguments), timeout=ANSWER_TIMEOUT_S)

    def close(self):
        import ray

        if self._worker is not None:
            self._worker.shared.close()
        self.stop()
        ray.shutdown()

    def _as_worker(self):
        from history_shards import Worker

        from das_ray.service import RayShards

        if self._worker is None:
            self._worker = Worker(lambda: RayShards(NAME))
        return self._worker


def _serve(socket, temporary, directory):
    host = None
    with Client(socket) as connection:
        try:
            host = _Host(temporary, directory)
            connection.send((True, host.address))
            while True:
                method, arguments = connection.recv()
                if method == "close":
                    break
                try:
                    connection.send((True, getattr(host, method)(*arguments)))
                except Exception as error:
                    connection.send((False, f"{type(error).__name__}: {error}"))
        except EOFError:
            pass  # the tests have ended
        except Exception as error:
            connection.send((False, f"{type(error).__name__}: {error}"))
        finally:
            if host is not None:
                host.close()


class HistoryService:
    """The running service: `ask` calls a method of the process that has it."""

    def __init__(self, connection):
        self._connection = connection
        self.address = self._answer()

    def ask(self, method, *arguments):
        self._connection.send((method, arguments))
        return self._answer()

    def _answer(self):
        assert self._connection.poll(ANSWER_TIMEOUT_S), "the history service's process does not answer"
        is_done, answer = self._connection.recv()
        assert is_done, answer
        return answer


@contextmanager
def history_service(directory):
    """Start it; engines that start meanwhile find its cluster by RAY_ADDRESS."""
    temporary = tempfile.mkdtemp(prefix="das", dir="/tmp")  # short: Ray makes sockets below it
    before = dict(os.environ)
    environment = before | {"PYTHONPATH": os.pathsep.join([*_PATHS, before.get("PYTHONPATH", "")])}
    with Listener(f"{temporary}/tests") as listener:
        subprocess.run(
            [sys.executable, __file__, listener.address, temporary, str(directory)], env=environment, check=True
        )
        connection = listener.accept()
    try:
        service = HistoryService(connection)
        # A cluster that ray.init() makes asks for a token since Ray 2.60, and who joins by an address has to say so.
        os.environ |= {"RAY_ADDRESS": service.address, "RAY_AUTH_MODE": "token"}
        yield service
    finally:
        os.environ.clear()
        os.environ |= before
        with connection, suppress(EOFError):
            connection.send(("close", ()))
            connection.poll(60.0)
        shutil.rmtree(temporary, ignore_errors=True)


def documented_statistics():
    """The names of the table in docs/ray.md of what to watch."""
    text = (TESTS.parent / "docs" / "ray.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"## What to watch\n(.*?)\n## ", text, re.DOTALL)
    names = []
    for row in re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE):
        of_row = re.findall(r"`(.+?)`", row)
        names += [name if not name.startswith("_") else of_row[0].rsplit("_", 1)[0] + name for name in of_row]
    return names


def wait_until(condition, *, timeout_s=60.0, what=""):
    """Call a condition until it holds."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, what or "it takes too long"
        time.sleep(0.05)


if __name__ == "__main__":
    if os.fork() == 0:  # no child of the tests' process: SGLang ends all of those when an engine of it ends
        _serve(*sys.argv[1:])
