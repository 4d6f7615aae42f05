"""Simulation: it agrees with replay and the pencil, emits the log once, keeps time, and answers the same every time."""

import math
import random
import time
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_logs import logs
from rollout_samples import rollout

from das import FixedBudget, LatencyModel, NoDraft, PriceBudget, Rollout, ThroughputBudget, UnlimitedBudget
from das.analysis.generation_time import generation_time
from das.analysis.projection import amdahl_speedup, covered_s
from das.analysis.replay import replay
from das.analysis.simulate import simulate

PASSES = LatencyModel(c_base_ms=1000.0, c_tok_ms=0.0)  # a pass takes a second, whatever is in it
MODEL = LatencyModel(c_base_ms=5.0, c_tok_ms=0.025, c_kv_ms=1e-4, c_engine_ms=0.5)
ASSIGNMENTS = ["prompt", "round-robin", "longest-first", "shared-queue"]
POLICIES = [FixedBudget(3), PriceBudget(), UnlimitedBudget(), NoDraft(), ThroughputBudget(latency=MODEL)]
TWENTY = list(range(100, 120))  # no token twice


def num_generated(log):
    return sum(len(r.response_token_ids) if r.response_mask is None else int(r.response_mask.sum()) for r in log)


def plain(*lengths, step=0):
    """Rollouts of prompts of their own, of text that never repeats."""
    return [
        rollout(range(1000 * (i + 1) + 100_000 * step, 1000 * (i + 1) + 100_000 * step + length), step, prompt=[i + 1])
        for i, length in enumerate(lengths)
    ]


def undrafted(log, **settings):
    return simulate(log, policy=NoDraft(), latency=PASSES, **settings).with_drafts


def ends(schedule):
    return [batch.ended_s for batch in schedule.batches]


# ---------------------------------------------------------------- replay


@given(log=logs(max_rollouts=8), group_size=st.integers(1, 3), shape=st.sampled_from(["chain", "tree"]))
def test_one_worker_without_limit_is_the_replay(log, group_size, shape):
    for policy in POLICIES:
        projected = simulate(iter(log), policy=policy, latency=MODEL, group_size=group_size, shape=shape)
        replayed = replay(iter(log), policy=policy, group_size=group_size, shape=shape)
        assert projected.with_drafts.counters == replayed.counters
        assert projected.with_drafts.workers[0].num_forwards == sum(b.num_batch_steps for b in replayed.batches)
        for batch, ended in zip(replayed.batches, projected.with_drafts.batches, strict=True):
            assert (batch.training_step, batch.group) == (ended.training_step, ended.group)
            assert (len(batch.requests), batch.longest_response_tokens) == (
                ended.num_requests,
                ended.longest_response_tokens,
            )
            assert ended.makespan_s == pytest.approx(generation_time([batch], MODEL).with_drafts_s, abs=1e-9)
        assert projected.without_drafts.makespan_s == pytest.approx(
            generation_time(replayed.batches, MODEL).without_drafts_s, abs=1e-9
        )


def test_widths_are_those_of_the_replay():
    log = [rollout(TWENTY, step) for step in (0, 1)]
    settings = {"policy": ThroughputBudget(latency=MODEL), "widths": (0, 3, 7)}
    projected, replayed = simulate(log, latency=MODEL, **settings), replay(log, **settings)
    assert projected.with_drafts.counters == replayed.counters
    assert projected.with_drafts.num_padded_tokens == sum(batch.num_padded_tokens for batch in replayed.batches)
    assert projected.makespan_s == pytest.approx(generation_time(replayed.batches, MODEL).with_drafts_s)


# ---------------------------------------------------------------- laws


@given(
    log=logs(max_rollouts=8),
    group_size=st.integers(1, 3),
    num_workers=st.integers(1, 3),
    max_running=st.sampled_from([None, 1, 2]),
    assignment=st.sampled_from(ASSIGNMENTS),
    lag=st.integers(0, 2),
    train_s=st.sampled_from([0.0, 0.03]),
    execution=st.sampled_from(["coupled", "decoupled", "fastest-of-n"]),
    policy=st.sampled_from(POLICIES),
)
def test_conservation(log, group_size, num_workers, max_running, assignment, lag, train_s, execution, policy):
    lag = 0 if execution == "fastest-of-n" else lag
    settings = {
        "group_size": group_size, "num_workers": num_workers, "max_running": max_running, "assignment": assignment,
        "lag": lag, "train_s": train_s, "execution": execution, "draft_token_ms": 0.2,
    }  # fmt: skip
    projected = simulate(log, policy=policy, latency=MODEL, **settings)
    most = 1 if isinstance(policy, NoDraft) and execution != "fastest-of-n" else 1 + 16  # copies draft in any case
    for schedule, tokens_a_step in ((projected.with_drafts, most), (projected.without_drafts, 1)):
        assert schedule.counters.num_emitted_tokens - schedule.num_raced_tokens == num_generated(log)
        assert (schedule.num_raced_tokens > 0) <= (execution == "fastest-of-n" and num_workers > 1)
        assert sum(worker.num_requests for worker in schedule.workers) == len(log)
        assert sum(batch.num_requests for batch in schedule.batches) == len(log)
        assert sum(batch.num_emitted_tokens for batch in schedule.batches) == num_generated(log)
        assert 0 <= schedule.utilisation <= 1 + 1e-9
        assert all(worker.idle_s >= -1e-9 for worker in schedule.workers)
        assert schedule.makespan_s <= schedule.duration_s + 1e-9
        assert schedule.duration_s == pytest.approx(schedule.exposed_generation_s + train_s * len(schedule.batches))
        for batch in schedule.batches:
            assert batch.released_s <= batch.ended_s
            assert batch.ended_s + train_s <= batch.trained_s + 1e-9
            least_passes = math.ceil(batch.longest_response_tokens / tokens_a_step)
            assert batch.makespan_s >= least_passes * 0.005 - 1e-9
        for before, after in pairwise(schedule.batches):
            assert after.trained_s >= before.trained_s + train_s - 1e-9
        for number, batch in enumerate(schedule.batches[lag + 1 :]):
            assert batch.released_s == schedule.batches[number].trained_s
        if schedule.duration_s:
            width_s = schedule.duration_s / len(schedule.num_running)
            lived_s = sum(schedule.num_running) * width_s
            assert max(schedule.num_running) <= len(log) + 1e-9
            assert lived_s <= sum(worker.num_requests for worker in schedule.workers) * schedule.makespan_s + 1e-9
    assert simulate(log, policy=policy, latency=MODEL, **settings).with_drafts == projected.with_drafts


def test_a_copy_starts_from_what_its_original_has_emitted_by_then():
    """A batch that ends at once leaves one worker idle at the moment at which the other begins its first pass."""
    log = [
        Rollout(prompt_token_ids=[1], response_token_ids=[0] * 3, response_mask=[False] * 3),
        Rollout(prompt_token_ids=[1], response_token_ids=[0] * 3, ordinal=1),
    ]
    raced = simulate(
        log, policy=NoDraft(), latency=MODEL, group_size=1, num_workers=2, train_s=0.03, execution="fastest-of-n"
    )
    assert raced.with_drafts.batches[1].makespan_s >= 3 * 0.005


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12), max_running=st.sampled_from([None, 1, 3]))
def test_without_drafts_twice_as_many_workers_are_not_slower(lengths, max_running):
    """Of contiguous blocks of prompts, half a block each."""
    makespans = [
        simulate(plain(*lengths), policy=NoDraft(), latency=MODEL, num_workers=n, max_running=max_running).makespan_s
        for n in (1, 2, 4)
    ]
    assert makespans[0] >= makespans[1] - 1e-9 >= makespans[2] - 2e-9


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_without_drafts_a_batch_takes_what_the_formula_says(lengths):
    """The longest response's passes, and each token, whose context is a prompt of one token and what came before."""
    base_s, tok_s, kv_s = MODEL.c_base_ms / 1e3, MODEL.c_tok_ms / 1e3, MODEL.c_kv_ms / 1e3
    context = sum(length + length * (length - 1) // 2 for length in lengths)
    expected = base_s * max(lengths) + tok_s * sum(lengths) + kv_s * context
    projected = simulate(plain(*lengths), policy=NoDraft(), latency=MODEL)
    assert projected.without_drafts.makespan_s == pytest.approx(expected)
    assert projected.makespan_s == pytest.approx(expected + MODEL.c_engine_ms / 1e3 * max(lengths))
    assert projected.verdict == "leave off"


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_utilisation_is_the_mean_over_time(assignment):
    schedule = undrafted(plain(5, 1, 4, 2), num_workers=2, assignment=assignment)
    busy_s = [worker.busy_s for worker in schedule.workers]
    assert schedule.utilisation == sum(busy_s) / (2 * max(busy_s))
    assert schedule.makespan_s == max(busy_s)
    assert sum(schedule.num_running) * schedule.duration_s / 100 == pytest.approx(12)  # seconds that requests ran


# ---------------------------------------------------------------- by hand


def test_places_are_refilled_in_order():
    """Two places: the third request starts when the second one ends, the fourth when the first one does."""
    schedule = undrafted(plain(3, 2, 2, 1), max_running=2)
    assert (ends(schedule), schedule.workers[0].num_forwards) == ([4.0], 4)
    assert schedule.num_running == pytest.approx([2.0] * 100)


@pytest.mark.parametrize(
    ("assignment", "busy_s"),
    [
        ("prompt", [6, 4]),  # 6 1 | 2 4
        ("round-robin", [6, 4]),  # 6 2 | 1 4
        ("longest-first", [6, 4]),  # 6 1 | 4 2
        ("shared-queue", [6, 4]),  # all start on the first that asks, which has room for all
    ],
)
def test_assignments_without_limit(assignment, busy_s):
    schedule = undrafted(plain(6, 1, 2, 4), num_workers=2, assignment=assignment)
    assert schedule.makespan_s == 6
    if assignment == "shared-queue":
        assert [worker.num_requests for worker in schedule.workers] == [4, 0]
    else:
        assert [worker.busy_s for worker in schedule.workers] == busy_s


@pytest.mark.parametrize(
    ("assignment", "busy_s"),
    [("prompt", [7, 6]), ("round-robin", [8, 5]), ("longest-first", [7, 6]), ("shared-queue", [6, 7])],
)
def test_assignments_one_at_a_time(assignment, busy_s):
    """prompt: 6 1 | 2 4. round-robin: 6 2 | 1 4. longest-first: 6 1 | 4 2. shared-queue: 6 | 1 2 4."""
    schedule = undrafted(plain(6, 1, 2, 4), num_workers=2, assignment=assignment, max_running=1)
    assert [worker.busy_s for worker in schedule.workers] == busy_s


def test_samples_of_a_prompt_stay_together():
    log = [rollout([4] * (prompt + 1), 0, prompt=[prompt]) for prompt in (1, 2, 3) for _ in range(2)]
    schedule = undrafted(log, num_workers=3, assignment="prompt", max_running=1)
    assert [worker.busy_s for worker in schedule.workers] == [4, 6, 8]


def test_synchronous_training_waits_and_asynchronous_training_does_not():
    """Three batches of four seconds, three seconds of training each."""
    log = [r for step in range(3) for r in plain(4, 2, step=step)]
    synchronous = undrafted(log, train_s=3.0)
    assert ends(synchronous) == [4, 11, 18]
    assert [batch.trained_s for batch in synchronous.batches] == [7, 14, 21]
    assert (synchronous.exposed_generation_s, synchronous.makespan_s, synchronous.duration_s) == (12, 12, 21)
    ahead = undrafted(log, train_s=3.0, lag=1)
    assert ends(ahead) == [4, 4, 11]  # the third starts at 7, with the first training step
    assert [batch.trained_s for batch in ahead.batches] == [7, 10, 14]
    assert [batch.exposed_generation_s for batch in ahead.batches] == [4, 0, 1]
    assert ahead.makespan_s == 4 + 4


def test_the_next_batch_takes_the_places_that_stragglers_leave():
    """Lag 1, two places: of the second batch 2 starts at 1, in the place of the first batch's shorter request."""
    log = [*plain(4, 1), *plain(2, 2, step=1)]
    assert ends(undrafted(log, max_running=2, lag=1)) == [4, 5]
    assert ends(undrafted(log, max_running=2)) == [4, 6]


def test_workers_learn_from_each_other_between_batches():
    """Prompt 1 changes the worker: what it drafts from was generated by the other one, 8 + 1, 8 + 1 and 2 tokens."""
    first = [rollout(TWENTY, 0, prompt=[1]), rollout([7], 0, prompt=[2])]
    second = [rollout([7], 1, prompt=[2]), rollout(TWENTY, 1, prompt=[1])]
    settings = {"policy": FixedBudget(), "latency": PASSES, "num_workers": 2, "assignment": "round-robin"}
    schedule = simulate([*first, *second], **settings).with_drafts
    assert ends(schedule) == [20, 23]
    known = simulate(second, history=first, **settings)
    assert ends(known.with_drafts) == [3]
    assert known.settings["num_known_rollouts"] == 2


def test_drafts_that_take_device_time():
    """The second time, 20 tokens as 4 + 1, four times; each draft of 4 tokens takes two seconds before its pass."""
    log = [rollout(TWENTY, step) for step in (0, 1)]
    settings = {"policy": FixedBudget(4), "latency": PASSES}
    makespans = [
        simulate(log, execution=execution, draft_token_ms=draft_token_ms, **settings).with_drafts.batches[1].makespan_s
        for execution, draft_token_ms in product(["coupled", "decoupled"], [0.0, 100.0, 500.0])
    ]
    # Decoupled: four tokens a pass, five passes; drafting is the slower side where a draft takes two seconds.
    assert makespans == pytest.approx([4, 4 * 1.4, 4 * 3, 5, 5, 5 * 2])


def test_a_rejected_window_costs_a_pass():
    """100 101 and another token come out of the first pass; then two seconds for the new draft, and the last token."""
    log = [rollout(TWENTY, 0), rollout([100, 101, 500, 501], 1)]
    schedule = simulate(
        log, policy=FixedBudget(4), latency=PASSES, execution="decoupled", draft_token_ms=500.0
    ).with_drafts
    assert schedule.batches[1].makespan_s == 2 + 2 + 1
    assert schedule.workers[0].num_forwards == 20 + 2


def test_an_idle_worker_runs_a_copy_and_the_first_to_end_wins():
    """At 2 s, worker 1 has nothing left. At 3 s it copies a request, computes its context until 4 s."""
    log = [rollout(TWENTY[:10], 0, prompt=[1]), rollout([7, 8], 0, prompt=[2])]
    settings = {"policy": NoDraft(), "latency": PASSES, "num_workers": 2, "execution": "fastest-of-n"}
    vain = simulate(log, racing_policy=NoDraft(), **settings).with_drafts
    assert (ends(vain), vain.num_raced_tokens) == ([10], 6)
    assert [worker.num_requests for worker in vain.workers] == [1, 1]
    assert [worker.num_forwards for worker in vain.workers] == [10, 2 + 1 + 6]
    again = [*log, *(rollout(r.response_token_ids, 1, prompt=r.prompt_token_ids) for r in log)]
    won = simulate(again, racing_policy=UnlimitedBudget(), **settings).with_drafts
    assert ends(won) == [10, 14]  # 2 s, as worker 0 is between passes; a pass over the context, one for eight tokens
    assert won.num_raced_tokens == 6 + 2  # two more tokens came out of worker 0 meanwhile
    assert [worker.num_requests for worker in won.workers] == [1, 1 + 2]


# ---------------------------------------------------------------- policies, and what is said of them


def test_each_worker_has_a_policy_of_its_own():
    made = []

    def make():
        made.append(FixedBudget(2))
        return made[-1]

    simulate(plain(3, 3), policy=make, num_workers=2)
    assert len(made) == 2
    policy = ThroughputBudget(latency=MODEL)
    before = policy.state()
    simulate([rollout(TWENTY, 0), rollout(TWENTY, 1)], policy=policy, latency=MODEL)
    assert policy.state() == before


class Oracle(NoDraft):
    """A policy that hears of the future."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def foretell(self, remaining, waiting):
        self.heard.append((remaining, waiting))

    def budgets(self, requests):
        self.heard[-1] += (requests.num_running, requests.num_waiting)
        return super().budgets(requests)


def test_a_policy_may_hear_the_future_and_knows_the_queue():
    made = []
    simulate(plain(3, 1, 2, 1), policy=lambda: made.append(Oracle()) or made[-1], max_running=2)
    assert made[0].heard == [([3, 1], [2, 1], 2, 2), ([2, 2], [1], 2, 1), ([1, 1], [1], 2, 1), ([1], [], 1, 0)]


def test_step_times_reach_the_policy():
    """An estimator that starts far off finds the model that the clock goes by."""
    policy = ThroughputBudget()
    made = []
    simulate(plain(*range(5, 60, 3)), policy=lambda: made.append(policy) or policy, latency=MODEL)
    assert policy.latency.step_ms(10, speculating=False) == pytest.approx(MODEL.step_ms(10), rel=0.05)


def test_speedups_and_verdict():
    log = [rollout(TWENTY, step) for step in (0, 1)]
    projected = simulate(log, policy=FixedBudget(), latency=PASSES, train_s=10.0)
    assert projected.speedup == 40 / 23
    assert projected.generation_share == 40 / 60
    assert projected.step_speedup == pytest.approx(60 / 43)
    assert projected.amdahl_speedup == pytest.approx(projected.step_speedup)
    assert projected.verdict == "enable"
    hidden = simulate([*log, rollout(TWENTY, 2)], policy=FixedBudget(), latency=PASSES, train_s=100.0, lag=1)
    assert hidden.speedup > 1.2
    assert hidden.step_speedup < 1.01  # generation is hardly ever waited for
    assert hidden.verdict == "leave off"


def test_amdahl_and_unions_of_intervals():
    assert amdahl_speedup(2.0, generation_share=0.5) == pytest.approx(4 / 3)
    assert amdahl_speedup(1e9, generation_share=0.65) == pytest.approx(1 / 0.35)
    for bad in (
        {"generation_speedup": 0.0, "generation_share": 0.5},
        {"generation_speedup": 2.0, "generation_share": 2},
    ):
        with pytest.raises(ValueError, match=r"it must be 0 <"):
            amdahl_speedup(bad["generation_speedup"], generation_share=bad["generation_share"])
    assert covered_s([(3.0, 5.0), (0.0, 1.0), (4.0, 6.0), (4.5, 5.0)]) == 4.0


def test_everything_is_plain_values():
    found = simulate(plain(3, 2), num_workers=2, train_s=1).as_dict()
    assert found["settings"]["num_workers"] == 2
    assert found["with_drafts"]["batches"][0]["makespan_s"] == pytest.approx(0.015 + 0.000075)
    assert len(found["with_drafts"]["workers"]) == 2
    assert len(found["with_drafts"]["num_running"]) == 100
    assert found["drafting_us"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 0}, "group_size is 0; it must be at least 1"),
        ({"num_workers": 0}, "num_workers or max_running is 0; each must be at least 1"),
        ({"max_running": 0}, "num_workers or max_running is 0; each must be at least 1"),
        ({"lag": -1}, r"lag is -1; it must be 0 <= lag < "),
        ({"train_s": -1.0}, r"train_s is -1\.0; it must be 0 <= train_s <= 1e9"),
        ({"draft_token_ms": math.nan}, "draft_token_ms is nan; it must be 0 <="),
        ({"assignment": "random"}, "assignment is 'random'; it must be one of prompt, round-robin, "),
        ({"execution": "fast"}, "execution is 'fast'; it must be one of coupled, decoupled, fastest-of-n"),
        ({"execution": "decoupled", "shape": "tree"}, "execution is 'decoupled'; it goes with shape 'chain'"),
        ({"execution": "decoupled", "widths": (0, 3)}, "execution is 'decoupled'; it goes with shape 'chain'"),
        (
            {"execution": "fastest-of-n", "lag": 1},
            "execution is 'fastest-of-n' and lag 1; idle workers race with lag 0",
        ),
        ({"shape": "bush"}, "shape is 'bush'; it must be 'chain' or 'tree'"),
    ],
)
def test_bad_values(settings, message):
    with pytest.raises(ValueError, match=message):
        simulate(plain(2), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": 1.5}, "num_workers must be an int, not float"),
        ({"lag": True}, "lag must be an int, not bool"),
        ({"train_s": "1"}, "train_s must be a number, not str"),
        ({"latency": 3}, "latency must be a LatencyModel, not int"),
        ({"policy": 3}, "policy must be a budget policy, or make one, not int"),
    ],
)
def test_bad_types(settings, message):
    with pytest.raises(TypeError, match=message):
        simulate(plain(2), **settings)


@pytest.mark.slow
def test_four_thousand_rollouts_of_500_tokens_take_half_a_minute():
    """Process time, so that a busy machine does not count: the drafters' work, and the same without drafts."""
    words = random.Random(0)
    log = []
    for prompt in range(250):
        text = [words.randrange(2000) for _ in range(100)]
        for sample in range(16):
            response: list[int] = []
            while len(response) < 500:  # pieces of one text, so that much is drafted, and much of it rejected
                start = words.randrange(80)
                response += text[start : start + words.randrange(2, 20)]
            log.append(rollout(response[:500], sample // 8, prompt=[prompt]))
    start_s = time.process_time()
    projected = simulate(log, latency=LatencyModel(c_base_ms=5.0, c_tok_ms=0.025), max_running=256)
    assert time.process_time() - start_s < 30
    assert projected.with_drafts.counters.num_emitted_tokens == 2_000_000
    assert projected.speedup > 1.1


def test_empty_log():
    with pytest.raises(ValueError, match="log is empty"):
        simulate([])
