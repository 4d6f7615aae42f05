"""What fails in the middle: allocations, garbage collection, odd times. Nothing emitted is lost, nothing half moved."""

import numpy as np
import pytest
from das._tree_arrays import _fail_allocation_after
from rollout_samples import draft, filled, rollout, run, stored, tree_of

from das import Drafter, FixedBudget, RolloutHistory, ThroughputBudget, plan_step, prompt_key
from das.latency import DEFAULT_LATENCY, LatencyEstimator

PROMPT = [1, 2, 3]


@pytest.fixture(autouse=True)
def allocations_work_again():
    yield
    _fail_allocation_after(-1)


def with_environment(names="ab", history=None):
    drafter = Drafter(history or RolloutHistory(max_common_tokens=0))
    for name in names:
        drafter.start(name, prompt_token_ids=PROMPT, training_step=0)
        drafter.extend(name, [5, 6])
        drafter.extend(name, [9], generated=False)
        drafter.extend(name, [7])
    return drafter


@pytest.mark.parametrize("num_allocations", range(12))
def test_a_batch_that_finds_no_memory_half_way_keeps_tokens_and_masks(num_allocations):
    drafter = with_environment()
    before = {name: [5, 6, 9, 7] for name in "ab"}
    emitted = {"a": list(range(100, 130)), "b": list(range(1000, 9000))}
    _fail_allocation_after(num_allocations)
    try:
        drafter.extend_batch(emitted)
        grown = "ab"
    except MemoryError:
        grown = [name for name in "ab" if drafter.counters(name).num_emitted_tokens > 3]
    _fail_allocation_after(-1)
    for name in "ab":
        drafter.finish(name)
    (a, b) = sorted(drafter.history.rollouts(prompt_key(PROMPT)), key=lambda r: r.request_id)
    for name, kept in (("a", a), ("b", b)):
        response = before[name] + (emitted[name] if name in grown else [])
        assert kept.response_token_ids.tolist() == response
        assert kept.response_mask.tolist() == [True, True, False, *[True] * (len(response) - 3)]


@pytest.mark.parametrize("num_allocations", range(0, 36, 2))
def test_requests_move_to_a_new_tree_together_or_not_at_all(num_allocations):
    history = RolloutHistory(max_common_tokens=0)
    drafter = with_environment(history=history)
    before = tree_of(history)
    _fail_allocation_after(num_allocations)
    try:
        drafter.start("new", prompt_token_ids=PROMPT, training_step=1)
        moved = True
    except MemoryError:
        moved = False
    _fail_allocation_after(-1)
    tree = tree_of(history)
    requests = [drafter._requests[name] for name in drafter.request_ids()]
    assert {id(request.tree.tree) for request in requests} == {id(tree)}
    assert (tree is not before) or not moved
    assert tree.num_open_sequences == len(requests)
    drafter.extend_batch({name: [8] for name in drafter.request_ids()})
    tree.check_invariants()
    drafter.start("later", prompt_token_ids=PROMPT, training_step=2)
    assert tree_of(history) is not tree, "what failed is made up for"
    for name in drafter.request_ids():
        drafter.finish(name)
    assert history.statistics().tree_bytes == sum(
        record.tree.tree.memory_bytes() for record in history._prompts.values() if record.tree
    )


def test_a_drafter_collected_while_its_requests_move(monkeypatch):
    history = RolloutHistory()
    lost, kept = Drafter(history), Drafter(history)
    for drafter, name in ((lost, "lost"), (kept, "kept")):
        drafter.start(name, prompt_token_ids=PROMPT, training_step=0)
        drafter.extend(name, [5, 6])
    record = history.record_for(prompt_key(PROMPT))
    victim = next(iter(record.open_requests))
    open_in = type(victim).open_in

    def collecting(request, tree):
        sequence = open_in(request, tree)
        if request is victim:
            lost.close()  # as the garbage collector may do at any allocation
        return sequence

    monkeypatch.setattr(type(victim), "open_in", collecting)
    kept.start("new", prompt_token_ids=PROMPT, training_step=1)
    assert tree_of(history).num_open_sequences == 2
    kept.extend("kept", [7])
    assert draft(kept, "new", 1).draft_token_ids in ([5], [])
    kept.close()


def test_interleaved_training_steps_do_not_rebuild_the_tree():
    history = RolloutHistory()
    history.add(rollout(range(50), 0))
    drafter = Drafter(history)
    for number in range(6):
        drafter.start(str(number), prompt_token_ids=PROMPT, training_step=5 - number % 2)
    assert history.statistics().num_builds_on_start == 1


def test_prompts_of_which_nothing_was_kept_are_forgotten():
    drafter = Drafter()
    for number in range(50):
        drafter.start("r", prompt_token_ids=[number + 10])
        drafter.extend("r", [5])
        drafter.finish("r", keep=number % 2 == 0)
    statistics = drafter.history.statistics()
    assert (statistics.num_prompts, statistics.num_rollouts) == (25, 25)
    assert run(drafter, "again", [5, 6], prompt=[11]) != [], "others' text is still there"
    assert stored(drafter.history, prompt_key([11])) == [(0, [5, 6])]


@pytest.mark.parametrize("policy", [FixedBudget(4), ThroughputBudget()])
@pytest.mark.parametrize("bad", ["5", [1.0], True, object()])
def test_a_time_that_is_no_number_changes_nothing(policy, bad):
    drafter = with_environment("a")
    before = repr(policy), policy.state()
    with pytest.raises(TypeError, match=r"^step_ms must be a number or None"):
        plan_step(drafter, ["a"], policy=policy, step_ms=bad)
    assert (repr(policy), policy.state()) == before
    assert len(drafter.take_feedback()[0]) == 2


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1.0, 0, 10**400, np.float32(1)])
def test_a_measured_time_that_is_no_time_takes_nothing_down(odd):
    drafter = with_environment("a")
    plan_step(drafter, ["a"], policy=ThroughputBudget(), step_ms=odd)


@pytest.mark.parametrize("scale", [(1e308, 1e308), (1e-300, 1e300)])
def test_sums_that_fit_no_latency_model_are_refused_and_change_nothing(scale):
    estimator = LatencyEstimator(DEFAULT_LATENCY)
    before = repr(estimator.state())
    state = {**estimator.state(), "gram": np.full((3, 3), scale[0]), "moment": np.full(3, scale[1])}
    with pytest.raises(ValueError, match=r"gram and moment"):
        estimator.load_state(state)
    assert repr(estimator.state()) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_running", 0), ("tokens_per_decode_step", 0.5), ("drafted_per_decode_step", -1), ("num_running", np.nan)],
)
def test_speedup_checks_its_arguments(name, value):
    arguments = {"num_running": 4, "tokens_per_decode_step": 2.0, "drafted_per_decode_step": 1.0, name: value}
    with pytest.raises(ValueError, match=f"^{name} is"):
        DEFAULT_LATENCY.speedup(arguments.pop("num_running"), **arguments)


@pytest.mark.parametrize("num_allocations", range(12))
def test_a_request_that_finds_no_memory_to_join_joins_later(num_allocations):
    drafter = Drafter(filled(rollout([4, 5, 6], 0)))
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    drafter.extend("a", range(100, 4100))
    drafter.confidence.load_state({**drafter.confidence.state(), "explained": [0.0, 256.0]})
    _fail_allocation_after(num_allocations)
    try:
        draft(drafter, "a")
    except MemoryError:
        assert all(tree.tree.num_open_sequences == 0 for tree in drafter.history._common._trees)
    _fail_allocation_after(-1)
    draft(drafter, "a")
    drafter.extend("a", [1, 2, 3])
    drafter.start("b", prompt_token_ids=[9], training_step=1)
    drafter.extend("b", [4090, 4091])
    assert draft(drafter, "b").draft_token_ids[:5] == list(range(4092, 4097))
    drafter.extend("b", [200, 201])
    assert draft(drafter, "b").draft_token_ids[:1] != [202], "of a long response only the end is shared"
    drafter.finish("a")
