"""save_state and load_state: what comes back, what is written, and what a refused call leaves."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from rollout_samples import PROMPT, rollout, run
from state_samples import SAMPLES, advance, as_values, contents, samples_history

import das
from das import Drafter, RolloutHistory, StateError, compact_state, load_state, plan_step, save_state
from das import state_directory as directory_module


@pytest.fixture(autouse=True)
def _without_syncs(monkeypatch):
    """They take most of the time here, and mean nothing unless the power fails: test_state_crashes.py is about that."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def loaded(path, **options):
    history = RolloutHistory(window_epochs=1000)
    load_state(path, history=history, **options)
    return history


def sizes(path):
    return {entry.name: entry.stat().st_size for entry in path.iterdir() if entry.name != "lock"}


# ---------------------------------------------------------------- what comes back


@pytest.mark.parametrize("mapped", [True, False])
def test_every_field_of_every_rollout_comes_back(tmp_path, mapped):
    history = samples_history()
    save_state(tmp_path, history=history)
    again = loaded(tmp_path, mapped=mapped)
    assert contents(again) == contents(history)
    assert again.prompt_keys() == history.prompt_keys()
    for key in history.prompt_keys():
        for before, after in zip(history.rollouts(key), again.rollouts(key), strict=True):
            for name in ("prompt_token_ids", "response_token_ids", "response_mask"):
                one, other = getattr(before, name), getattr(after, name)
                if one is not None:
                    assert (one.dtype, other.flags.writeable) == (other.dtype, False)
    before, after = history.statistics(), again.statistics()
    for name in ("num_prompts", "num_rollouts", "num_tokens", "rollout_bytes"):
        assert getattr(before, name) == getattr(after, name)
    assert (after.num_added, after.num_restored) == (0, len(SAMPLES))


def test_a_loaded_state_is_read_where_it_lies_and_survives_its_files(tmp_path):
    save_state(tmp_path, history=samples_history())
    mapped, copied = loaded(tmp_path), loaded(tmp_path, mapped=False)
    key = SAMPLES[5].key
    assert mapped.rollouts(key)[0].response_token_ids.base is not None
    assert copied.rollouts(key)[0].response_token_ids.base is None
    for entry in tmp_path.iterdir():
        entry.unlink()
    assert contents(mapped) == contents(copied) == contents(samples_history())


def test_a_state_that_is_copied_is_in_memory_once(tmp_path):
    history = RolloutHistory()
    random = np.random.default_rng(0)
    history.add_many([rollout(random.integers(0, 1000, 50_000), 1, prompt=[number]) for number in range(80)])
    save_state(tmp_path, history=history)  # 16 MB
    code = f"""
import das

def most_bytes():
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = most_bytes()
das.load_state({str(tmp_path)!r}, history=das.RolloutHistory(), mapped=False)
print(most_bytes() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert 16_000_000 < int(done.stdout) < 24_000_000


def test_a_file_that_is_cut_short_while_it_is_copied_is_an_error(tmp_path):
    """Mapped, it would end the process."""
    save_state(tmp_path, history=samples_history())
    _, segments = directory_module.read_state(tmp_path, mapped=False)
    windows = directory_module.windows_of(segments)
    next(windows)
    (file,) = tmp_path.glob("rollouts-*.das")
    os.truncate(file, 70)
    with pytest.raises(StateError, match=rf"{file}: it became shorter while it was read"):
        list(windows)


def test_rollouts_share_the_array_of_their_prompt(tmp_path):
    save_state(tmp_path, history=samples_history())
    rollouts = loaded(tmp_path).rollouts(SAMPLES[0].key)
    assert len({id(stored.prompt_token_ids) for stored in rollouts}) == 1


def test_equal_texts_are_written_once(tmp_path):
    history = RolloutHistory()
    history.add_many([rollout(range(5000), step) for step in range(4)])
    assert save_state(tmp_path, history=history).num_bytes < 4 * 5000 * 2
    assert contents(loaded(tmp_path)) == contents(history)


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_epochs_are_counted_on(tmp_path, epochs):
    """Where nobody names a training step, a prompt started again opens its next epoch, after a restart too."""
    drafter = Drafter()
    for number in range(epochs):
        run(drafter, f"{number}", [5, 6, number])
    save_state(tmp_path, drafter=drafter)
    history = RolloutHistory()
    load_state(tmp_path, history=history)
    run(Drafter(history), "later", [9])
    run(drafter, "later", [9])
    assert contents(history) == contents(drafter.history)
    assert history.rollouts(SAMPLES[0].key)[-1].training_step == epochs


def test_a_smaller_window_and_a_smaller_limit_hold_for_what_is_loaded(tmp_path):
    history = RolloutHistory()
    history.add_many([rollout(range(1000), step, prompt=[prompt]) for prompt in range(10) for step in range(4)])
    save_state(tmp_path, history=history)
    small = RolloutHistory(window_epochs=2, max_bytes=history.memory_bytes() // 4)
    load_state(tmp_path, history=small)
    assert small.memory_bytes() <= small.max_bytes
    kept = small.prompt_keys()
    assert kept == history.prompt_keys()[-len(kept) :]
    assert len(kept) == 4
    for key in kept:
        assert [stored.training_step for stored in small.rollouts(key)] == [2, 3]
    assert small.statistics().num_expired == 20
    save_state(tmp_path, history=small)  # writes what it holds, not what the directory held
    assert contents(loaded(tmp_path)) == contents(small)


def test_loading_updates_what_is_known(tmp_path):
    saved = RolloutHistory()
    saved.add_many([rollout([1, 2], 0, request_id="a", reward=1.0), rollout([3], 1), rollout([4], 0, prompt=[9])])
    save_state(tmp_path, history=saved)
    history = RolloutHistory()
    history.add_many([rollout([1, 2], 0, request_id="a"), rollout([5], 2)])
    load_state(tmp_path, history=history)
    texts = [(s.training_step, s.response_token_ids.tolist(), s.reward) for s in history.rollouts(SAMPLES[0].key)]
    assert texts == [(0, [1, 2], 1.0), (1, [3], None), (2, [5], None)]
    assert history.statistics().num_restored == 2
    save_state(tmp_path, history=history)
    assert contents(loaded(tmp_path)) == contents(history)


def test_policies_hear_of_no_rollout_twice(tmp_path):
    drafter, policy = Drafter(), das.LengthAwareBudget()
    for number in range(5):
        run(drafter, f"{number}", [1] * (number + 1))
    plan_step(drafter, [], policy=policy)
    assert policy.lengths.num_rollouts == 5
    save_state(tmp_path, drafter=drafter, policy=policy)
    drafter, policy = Drafter(), das.LengthAwareBudget()
    load_state(tmp_path, drafter=drafter, policy=policy)
    plan_step(drafter, [], policy=policy)
    assert policy.lengths.num_rollouts == 5


def test_reading_alone_changes_nothing(tmp_path):
    summary = save_state(tmp_path, history=samples_history(window_epochs=7, max_bytes=1 << 20))
    state = load_state(tmp_path)
    assert sorted(map(as_values, state.rollouts()), key=str) == sorted(map(as_values, SAMPLES), key=str)
    assert state.history_settings == {"window_epochs": 7, "max_bytes": 1 << 20, "max_common_tokens": 1 << 20}
    assert (state.confidence, state.policy, state.policy_name) == (None, None, None)
    assert (state.greatest_token_id, state.num_segments) == (2**31 - 1, 1)
    assert (summary.num_prompts, summary.num_rollouts) == (4, len(SAMPLES))
    assert summary.num_tokens == sum(len(sample.response_token_ids) for sample in SAMPLES)


def test_an_empty_history_is_a_state(tmp_path):
    save_state(tmp_path / "new" / "folder", history=RolloutHistory())
    assert contents(loaded(tmp_path / "new" / "folder")) == {}


# ---------------------------------------------------------------- what was learned


POLICIES = [
    das.LengthAwareBudget,
    das.ThroughputBudget,
    das.LengthClassBudget,
    das.NoDraft,
    lambda: das.FixedBudget(3),
    *(lambda name=name: das.AdaptiveBudget(name) for name in ("aimd", "beg-mab", "goodput", "batch-threshold")),
]


def as_plain(value):
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    return (str(value.dtype), value.tolist()) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("make", POLICIES)
def test_what_confidence_and_policies_learned_comes_back(tmp_path, make):
    drafter, policy = Drafter(), make()
    for number in range(12):
        drafter.start(f"{number}", prompt_token_ids=PROMPT, training_step=number // 4)
        for step in range(8):
            plan_step(drafter, [f"{number}"], policy=policy, step_ms=7.0 + step)
            drafter.extend(f"{number}", [step % 3, 5])
        drafter.finish(f"{number}")
    plan_step(drafter, [], policy=policy)
    save_state(tmp_path, drafter=drafter, policy=policy)
    other, restored = Drafter(), make()
    state = load_state(tmp_path, drafter=other, policy=restored)
    assert as_plain(restored.state()) == as_plain(policy.state()) == as_plain(state.policy)
    assert state.policy_name == type(policy).__name__
    assert as_plain(other.confidence.state()) == as_plain(drafter.confidence.state())
    assert drafter.confidence.hits.sum() > 0 or make is das.NoDraft


class Stateful:
    """A policy with a state of the test's own."""

    def __init__(self, state):
        self.content = state

    def budgets(self, requests):
        pytest.fail("to save and to load asks for no budgets")

    observe = budgets

    def state(self):
        return self.content

    def load_state(self, state):
        self.content = state


def test_a_policy_of_ones_own_keeps_numbers_texts_lists_and_arrays(tmp_path):
    given = {
        "numbers": [1, -(2**70), 0.1, float("inf"), True, None],
        "nested": [{"a": [[], {}]}, "text ☃"],
        "arrays": [np.arange(6, dtype=np.uint16).reshape(2, 3), np.zeros(0), np.array(7, np.int64), np.array([True])],
        "scalar": np.float32(0.5),
    }
    save_state(tmp_path, drafter=Drafter(), policy=Stateful(given))
    policy = Stateful(None)
    load_state(tmp_path, policy=policy)
    assert as_plain(policy.content["numbers"]) == given["numbers"]
    assert policy.content["nested"] == given["nested"]
    for one, other in zip(given["arrays"], policy.content["arrays"], strict=True):
        assert (one.dtype, one.shape, one.tolist()) == (other.dtype, other.shape, other.tolist())
    assert policy.content["scalar"] == 0.5


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"a": [{1, 2}]}, r"learned\.policy\.a\[0\] is of type set"),
        ({"a": {3: 1}}, r"learned\.policy\.a has the key 3; it must be a str"),
        ({"$array": 1}, r"learned\.policy has the key '\$array'"),
        ({"a": np.array(["x"])}, r"learned\.policy\.a is of type ndarray"),
        ({"a": np.array([None])}, r"learned\.policy\.a is of type ndarray"),
        ({"a": np.zeros((1, 1, 1))}, r"learned\.policy\.a is of type ndarray"),
    ],
)
def test_a_state_that_cannot_be_stored_is_refused_before_anything_is_written(tmp_path, bad, message):
    drafter = Drafter(samples_history())
    save_state(tmp_path, drafter=drafter)
    before = sizes(tmp_path)
    drafter.history.add(rollout([1], 9))
    with pytest.raises(TypeError, match=message):
        save_state(tmp_path, drafter=drafter, policy=Stateful(bad))
    assert sizes(tmp_path) == before
    save_state(tmp_path, drafter=drafter)
    assert contents(loaded(tmp_path)) == contents(drafter.history)


# ---------------------------------------------------------------- what is written


def test_only_what_changed_is_written(tmp_path):
    history = RolloutHistory()
    history.add_many([rollout(range(n, n + 3000), 0, prompt=[n]) for n in range(20)])
    first = save_state(tmp_path, history=history)
    assert first.num_written_bytes == first.num_bytes > 20 * 3000 * 4
    assert save_state(tmp_path, history=history).num_written_bytes < 2000
    history.add(rollout(range(50), 1, prompt=[3]))
    second = save_state(tmp_path, history=history)
    assert second.num_written_bytes < 3000
    assert second.num_segments == 2
    history.add(rollout(range(3, 3003), 0, prompt=[3], reward=1.0))  # known: no token is written again
    assert save_state(tmp_path, history=history).num_written_bytes < 3000
    assert contents(loaded(tmp_path)) == contents(history)


def test_a_restarted_process_goes_on_writing_only_what_changed(tmp_path):
    history = RolloutHistory()
    history.add_many([rollout(range(3000), 0, prompt=[n]) for n in range(20)])
    save_state(tmp_path, history=history)
    restarted = loaded(tmp_path)
    restarted.add(rollout([1], 1))
    assert save_state(tmp_path, history=restarted).num_written_bytes < 3000
    assert contents(loaded(tmp_path)) == contents(restarted)
    history.add(rollout([2], 1))  # the old process is still there: what it saves replaces the state
    assert save_state(tmp_path, history=history).num_segments == 1
    assert contents(loaded(tmp_path)) == contents(history)


def test_what_a_request_changes_is_written(tmp_path):
    drafter = Drafter()
    run(drafter, "a", [1, 2])
    save_state(tmp_path, drafter=drafter)
    drafter.start("b", prompt_token_ids=PROMPT, training_step=7)
    save_state(tmp_path, drafter=drafter)
    assert contents(loaded(tmp_path)) == contents(drafter.history)
    drafter.extend("b", [1])
    drafter.finish("b", keep=False)
    save_state(tmp_path, drafter=drafter)
    assert contents(loaded(tmp_path)) == contents(drafter.history)


def test_forgotten_prompts_are_forgotten(tmp_path):
    history = RolloutHistory(max_bytes=100_000)
    for number in range(40):
        history.add(rollout(range(1000), 0, prompt=[number]))
        save_state(tmp_path, history=history)
    assert history.statistics().num_evicted_rollouts > 20
    assert len(load_state(tmp_path).windows) == history.statistics().num_prompts
    assert contents(loaded(tmp_path)) == contents(history)


def test_files_do_not_grow_without_end(tmp_path):
    history = RolloutHistory(window_epochs=2)
    most = 0
    for number in range(150):
        history.add(rollout(np.random.default_rng(number).integers(0, 99, 2000), number))
        summary = save_state(tmp_path, history=history)
        most = max(most, summary.num_bytes)
        assert summary.num_bytes == sum(sizes(tmp_path).values())
    assert most < 8 * 2 * 2000 * 4
    assert contents(loaded(tmp_path)) == contents(history)


def test_there_are_never_too_many_segments(tmp_path, monkeypatch):
    assert directory_module._MAX_SEGMENTS == 64
    monkeypatch.setattr(directory_module, "_MAX_SEGMENTS", 6)
    history = RolloutHistory(window_epochs=1000)
    numbers = []
    for number in range(13):
        history.add(rollout([number], number))
        numbers.append(save_state(tmp_path, history=history).num_segments)
    assert numbers == [*range(1, 7), *range(1, 7), 1]
    assert contents(loaded(tmp_path)) == contents(history)


def test_compaction_keeps_everything_but_what_is_of_no_use(tmp_path):
    drafter, policy = Drafter(), das.LengthAwareBudget()
    for number in range(30):
        advance(drafter.history, number)
        save_state(tmp_path, drafter=drafter, policy=policy)
    mapped = loaded(tmp_path)
    before = load_state(tmp_path)
    summary = compact_state(tmp_path)
    after = load_state(tmp_path)
    assert summary.num_segments == after.num_segments == 1 < before.num_segments
    assert summary.num_bytes == sum(sizes(tmp_path).values())
    assert after.num_bytes < before.num_bytes
    assert (as_plain(after.policy), as_plain(after.confidence)) == (
        as_plain(before.policy),
        as_plain(before.confidence),
    )
    assert contents(loaded(tmp_path)) == contents(mapped) == contents(drafter.history)


# ---------------------------------------------------------------- what is refused


def test_arguments_of_the_wrong_kind(tmp_path):
    with pytest.raises(TypeError, match="neither history nor drafter is given"):
        save_state(tmp_path)
    with pytest.raises(TypeError, match="history must be a RolloutHistory or None, not list"):
        save_state(tmp_path, history=[])
    with pytest.raises(TypeError, match="drafter must be a Drafter or None, not int"):
        load_state(tmp_path, drafter=3)
    with pytest.raises(ValueError, match="history is not the drafter's"):
        save_state(tmp_path, history=RolloutHistory(), drafter=Drafter())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", [load_state, compact_state])
def test_a_directory_without_a_state(tmp_path, call):
    with pytest.raises(FileNotFoundError, match=r"state\.das"):
        call(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asked", ["drafter", "policy"])
def test_what_was_not_saved_cannot_be_loaded(tmp_path, asked):
    save_state(tmp_path, history=samples_history())
    drafter, policy = Drafter(), Stateful("before")
    with pytest.raises(StateError, match=f"saved without a {asked}"):
        load_state(tmp_path, **{"history": drafter.history, asked: {"drafter": drafter, "policy": policy}[asked]})
    assert drafter.history.prompt_keys() == ()
    assert policy.content == "before"


def test_a_state_that_does_not_fit_changes_nothing(tmp_path):
    save_state(tmp_path, drafter=Drafter(samples_history()), policy=das.PriceBudget())
    drafter, policy = Drafter(), das.ThroughputBudget()
    before = policy.state()
    with pytest.raises(StateError, match=r"its state of a PriceBudget does not fit ThroughputBudget.*tokens_per"):
        load_state(tmp_path, drafter=drafter, policy=policy)
    assert (drafter.history.prompt_keys(), policy.state()) == ((), before)


def test_one_process_writes_at_a_time(tmp_path):
    history = samples_history()
    save_state(tmp_path, history=history)
    with directory_module.writing(tmp_path):
        for call in (lambda: save_state(tmp_path, history=history), lambda: compact_state(tmp_path)):
            with pytest.raises(StateError, match=rf"{tmp_path}: process {os.getpid()} is writing to it; only one"):
                call()
        assert contents(loaded(tmp_path)) == contents(history)  # readers need no lock
    save_state(tmp_path, history=history)


def test_the_lock_goes_where_a_save_fails(tmp_path, monkeypatch):
    history = samples_history()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            save_state(tmp_path, history=history)
    assert sizes(tmp_path) == {}
    save_state(tmp_path, history=history)
    assert contents(loaded(tmp_path)) == contents(history)


@pytest.mark.parametrize("num_syncs", range(4))
def test_a_failed_save_keeps_the_state_before_and_the_next_one_lacks_nothing(tmp_path, monkeypatch, num_syncs):
    history = samples_history()
    save_state(tmp_path, history=history)
    before = contents(history)
    history.add(rollout([4, 4], 6))
    after = contents(history)
    synced = []

    def fsync(descriptor):
        if len(synced) == num_syncs:
            raise OSError(5, "Input/output error")
        synced.append(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="Input/output"):
            save_state(tmp_path, history=history)
    assert contents(loaded(tmp_path)) == (after if num_syncs == 3 else before)
    assert not [name for name in sizes(tmp_path) if name.endswith(".tmp")]
    save_state(tmp_path, history=history)
    assert contents(loaded(tmp_path)) == after


def test_a_state_of_a_newer_das_is_not_written_over(tmp_path):
    save_state(tmp_path, history=samples_history())
    head = tmp_path / "state.das"
    data = bytearray(head.read_bytes())
    data[8] = 2
    head.write_bytes(data)
    with pytest.raises(StateError, match="format 2"):
        save_state(tmp_path, history=samples_history())
    assert head.read_bytes() == data


# ---------------------------------------------------------------- while others are at work


def test_a_reader_begins_again_where_a_compaction_came_between(tmp_path, monkeypatch):
    history = RolloutHistory()
    for number in range(3):
        advance(history, number)
        save_state(tmp_path, history=history)
    original, calls = directory_module.Segment, []

    def segment(path, number, **options):
        calls.append(number)
        if len(calls) == 2:
            monkeypatch.setattr(directory_module, "Segment", original)
            compact_state(tmp_path)
        return original(path, number, **options)

    monkeypatch.setattr(directory_module, "Segment", segment)
    assert contents(loaded(tmp_path)) == contents(history)
    assert calls == [1, 2]


def test_saving_beside_a_running_drafter(tmp_path):
    drafter, policy = Drafter(), das.LengthAwareBudget()
    stop, errors = threading.Event(), []

    def save():
        while not stop.is_set():
            try:
                save_state(tmp_path, drafter=drafter, policy=policy)
            except BaseException as error:
                errors.append(error)
                return

    saver = threading.Thread(target=save)
    saver.start()
    for number in range(150):
        drafter.start(f"{number}", prompt_token_ids=[number % 7], training_step=number // 14)
        plan_step(drafter, [f"{number}"], policy=policy)
        drafter.extend(f"{number}", [number % 5, 1, 2])
        drafter.finish(f"{number}")
    stop.set()
    saver.join()
    assert errors == []
    save_state(tmp_path, drafter=drafter, policy=policy)
    history = RolloutHistory()
    load_state(tmp_path, history=history)
    assert contents(history) == contents(drafter.history)
