"""What a shard keeps: acknowledged is durable, known counts once, a limit drops the oldest training steps, and a file
that is damaged or missing is named."""

import os
import random
import signal
import sys
import time

import pytest
from history_shards import MANY_BYTES, held, numbered
from rollout_samples import rollout
from state_samples import SAMPLES, as_values

from das import StateError
from das_ray import shard_store as store_module
from das_ray.messages import MessageError, rollouts_message, shard_of
from das_ray.shard_store import ShardStore


def opened(path, **settings):
    return ShardStore(path, **{"index": 0, "num_shards": 1, "window_epochs": 4, "max_bytes": MANY_BYTES, **settings})


def message(*rollouts, worker="w"):
    return rollouts_message(rollouts, worker=worker)


def reopened(store, **settings):
    store.close()
    return opened(store.directory, **settings)


def test_a_store_that_is_opened_again_holds_the_same(tmp_path):
    store = opened(tmp_path / "deep" / "shard")
    store.publish(message(*SAMPLES))
    store.publish(message(numbered(1), numbered(2, step=3)))
    before, version, store_id = held(store), store.version, store.store_id
    assert sum(map(len, before.values())) == len(SAMPLES) + 2
    for _ in range(2):
        store = reopened(store)
        assert (held(store), store.version, store.store_id) == (before, version, store_id)
        store.compact()
    store = reopened(store)
    assert (held(store), store.version) == (before, version)
    assert store.held_bytes == sum(prompt.record.rollout_bytes for prompt in store._prompts.values())
    store.close()


def test_a_publish_that_comes_twice_counts_once(tmp_path):
    store = opened(tmp_path)
    parts = [message(numbered(1), rollout([5, 6], 2)), message(numbered(2))]
    for part in [*parts, *parts, parts[0]]:
        store.publish(part)
    assert (store.num_rollouts, store.counts["num_added"], store.counts["num_known"]) == (3, 3, 5)
    (key,) = held(store)
    assert len(store.changed_since(key, 0, worker="other").rollouts) == 3
    assert store.changed_since(key, 2, worker="other").rollouts == ()  # nothing came with what was sent again
    store.close()


def test_who_published_is_told_nothing_of_it_and_versions_tell_what_is_new(tmp_path):
    store = opened(tmp_path)
    store.publish(message(numbered(1), worker="a"))
    store.publish(message(numbered(2), worker="b"))
    (key,) = held(store)

    def told(version, worker):
        return [stored.request_id for stored in store.changed_since(key, version, worker=worker).rollouts]

    assert told(0, "a") == ["r2"]
    assert told(0, "c") == ["r1", "r2"]
    assert told(1, "c") == ["r2"]
    assert told(2, "c") == []
    assert store.changed_since(12345, 0, worker="c").rollouts == ()
    store = reopened(store)
    assert told(0, "a") == ["r2"]
    store.compact()
    store = reopened(store)
    assert told(1, "c") == ["r1", "r2"]  # a snapshot does not know with which publish each came: told again
    assert told(2, "c") == []
    store.close()


def test_a_malformed_publish_changes_nothing(tmp_path):
    store = opened(tmp_path, index=1, num_shards=2)
    ours, others = (next(k for k in range(100) if shard_of(k, 2) == shard) for shard in (1, 0))
    good = rollout([1, 2], 0, prompt_key=ours)
    store.publish(message(good))
    before, files = held(store), sorted(entry.name for entry in tmp_path.iterdir())
    for bad in (b"", b"x" * 500, "text", message(good)[:-1], message(rollout([1], 0, prompt_key=others))):
        with pytest.raises(MessageError, match="publish"):
            store.publish(bad)
    assert (held(store), store.version) == (before, 1)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == files
    store.publish(message())  # nothing in it: nothing to keep
    assert store.version == 1
    store.close()


def test_a_limit_drops_the_oldest_training_steps_of_all_prompts(tmp_path):
    limit = 40_000
    store = opened(tmp_path, max_bytes=limit)
    for step in range(4):
        for prompt in range(6):
            rollouts = [
                numbered(100 * step + 10 * prompt + n, prompt=(prompt,), step=step, length=200) for n in range(2)
            ]
            store.publish(message(*rollouts))
            assert store.held_bytes <= limit
    steps = [stored[4] for window in held(store).values() for stored in window]
    assert store.counts["num_evicted"] == 48 - len(steps) > 0
    assert len(steps) >= 18
    # What is left is the newest: no prompt has lost a step while another still has an older one.
    oldest = {key: min(stored[4] for stored in window) for key, window in held(store).items()}
    assert len(oldest) == 6
    assert max(oldest.values()) - min(oldest.values()) <= 1
    again = reopened(store, max_bytes=limit)
    assert again.held_bytes <= limit
    again.close()


def test_snapshots_replace_what_came_before(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_MIN_SNAPSHOT_BYTES", 20_000)
    store = opened(tmp_path, window_epochs=2)
    most = 0
    for number in range(60):
        store.publish(message(numbered(number, step=number, length=500)))
        most = max(most, sum(entry.stat().st_size for entry in tmp_path.iterdir()))
    assert store.counts["num_snapshots"] > 3
    assert most < 20_000 + 3 * 8_000 + 2 * 8_000
    assert len(list(tmp_path.glob("snapshot-*"))) == 1
    before = held(store)
    assert [stored[4] for stored in before.popitem()[1]] == [58, 59]
    store.close()


def test_only_one_process_may_write(tmp_path):
    store = opened(tmp_path)
    with pytest.raises(StateError, match="is writing to it"):
        opened(tmp_path)
    store.close()


@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_or_missing_file_is_named(tmp_path, damage):
    store = opened(tmp_path)
    for number in range(4):
        store.publish(message(numbered(number)))
    store.close()
    path = tmp_path / "published-000000000002.das"
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-9] if damage == "cut" else data[:100] + bytes([data[100] ^ 4]) + data[101:])
    with pytest.raises(StateError, match=r"published-000000000002\.das: "):
        opened(tmp_path)
    path.write_bytes(data)
    opened(tmp_path).close()
    (tmp_path / "shard.das").unlink()
    with pytest.raises(StateError, match=r"shard\.das: it is missing"):
        opened(tmp_path)


def test_a_directory_goes_with_one_number_of_shards(tmp_path):
    opened(tmp_path).close()
    with pytest.raises(StateError, match="it is shard 0 of 1, not 0 of 2: start the service with as many shards"):
        opened(tmp_path, num_shards=2)


# ---------------------------------------------------------------- sudden ends


def publish_for_ever(path, acknowledgements):
    """The process that is going to be killed."""
    store_module._MIN_SNAPSHOT_BYTES = 4_000  # snapshots are killed as well
    store = opened(path)
    while True:
        number = store.version
        store.publish(message(numbered(number, prompt=(number % 7,), step=number // 50)))
        os.write(acknowledgements, number.to_bytes(4, "little"))


def killed_after(path, wait_s):
    """Run the process for so long after its first publish; return the last number that it acknowledged."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            publish_for_ever(path, writing)
        except BaseException as error:
            print(f"the publishing process failed: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    os.close(writing)
    told = os.read(reading, 4)
    time.sleep(wait_s)
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status), "the publishing process ended by itself"
    with open(reading, "rb") as pipe:
        told += pipe.read()
    return int.from_bytes(told[-4:], "little")


@pytest.mark.parametrize("num_kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_killed_store_has_all_that_it_acknowledged(tmp_path, num_kills):
    source = random.Random(0)
    num_inside = 0
    for _ in range(num_kills):
        acknowledged = killed_after(tmp_path, source.uniform(0.0, 0.03))
        num_inside += any(entry.name.endswith(".tmp") for entry in tmp_path.iterdir())
        store = opened(tmp_path, window_epochs=1 << 20)
        assert acknowledged + 1 <= store.version <= acknowledged + 2
        found = sorted(stored for window in held(store).values() for stored in window)
        expected = [as_values(numbered(n, prompt=(n % 7,), step=n // 50)) for n in range(store.version)]
        last = {key: [stored for stored in expected if stored[0] == key] for key in {stored[0] for stored in expected}}
        kept = [s for of_prompt in last.values() for s in of_prompt if s[4] in sorted({t[4] for t in of_prompt})[-4:]]
        assert found == sorted(kept)
        store.close()
    assert store.version > num_kills
    assert num_inside > 0
