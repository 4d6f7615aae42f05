"""The makespan optimum: against brute force, its laws, its limits, and the examples that DESIGN.md quotes."""

import math

import numpy as np
import pytest
from cpu_cost import least_us
from hypothesis import given, settings
from hypothesis import strategies as st

from das import optimal_budgets
from das.makespan import forwards_needed, makespan_ms, step_caps, step_prices

# ---------------------------------------------------------------- the oracle: the paper's model, not its solution


def forwards_with(draft_tokens, lengths, k, alpha):
    """Eq. 4, request by request."""
    batch = zip(draft_tokens, lengths, k, alpha, strict=True)
    return max(length * (1 - share + share * math.exp(-speed * p / length)) for p, length, share, speed in batch)


def cost_ms(draft_tokens, lengths, k, alpha, c_base_ms, c_tok_ms):
    """Eq. 5."""
    return c_base_ms * forwards_with(draft_tokens, lengths, k, alpha) + c_tok_ms * sum(draft_tokens)


def least_drafts(targets, lengths, k, alpha):
    """By bisection on Eq. 3: the least draft tokens of each request that end it within each target, (targets, n)."""
    low, high = np.zeros((len(targets), len(lengths))), np.full((len(targets), len(lengths)), 50.0)
    for _ in range(45):
        middle = (low + high) / 2  # of alpha p / l
        enough = lengths * (1 - k * (1 - np.exp(-middle))) <= targets[:, None]
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where(lengths <= targets[:, None], 0.0, high * lengths / alpha)


def brute_force_ms(lengths, k, alpha, c_base_ms, c_tok_ms, *, verified=False):
    """The least cost over many targets, each reached with as few draft tokens as can be."""
    least = (lengths * (1 - k)).max()
    targets = np.append(least + (lengths.max() - least) * np.geomspace(1e-9, 1.0, 200), lengths[lengths > least])
    drafts = least_drafts(targets, lengths, k, alpha)
    tokens = drafts.sum(axis=1)
    if verified:
        free = lengths / alpha * np.log(np.maximum(1.0, k * alpha))  # up to there a draft token brings more than one
        drafts = np.maximum(drafts, free)
        steps = lengths * (1 - k + k * np.exp(-alpha * drafts / lengths))
        tokens, targets = (drafts + steps).sum(axis=1), steps.max(axis=1)
    return float((c_base_ms * targets + c_tok_ms * tokens).min())


shares, speeds = st.floats(0.02, 1.0) | st.just(1.0), st.floats(0.02, 20.0)
requests = st.lists(
    st.tuples(st.integers(1, 30_000) | st.sampled_from([500, 500, 4000]), shares, speeds), min_size=1, max_size=12
).map(lambda rows: tuple(np.array(column, np.float64) for column in zip(*rows, strict=True)))
costs = st.tuples(st.floats(1e-3, 1e3), st.floats(1e-4, 1e2))


def optimum(batch, cost, **options):
    lengths, k, alpha = batch
    return optimal_budgets(lengths, k=k, alpha=alpha, c_base_ms=cost[0], c_tok_ms=cost[1], **options)


# ---------------------------------------------------------------- against brute force


@settings(max_examples=300)
@given(batch=requests, cost=costs)
def test_optimum_is_feasible_and_no_brute_force_beats_it(batch, cost):
    forwards, draft_tokens = optimum(batch, cost)
    assert (draft_tokens.dtype, draft_tokens.shape) == (np.float64, batch[0].shape)
    assert np.isfinite(draft_tokens).all()
    assert (draft_tokens >= 0).all()
    assert forwards_with(draft_tokens, *batch) == pytest.approx(forwards, rel=1e-9)
    found_ms, best_ms = cost_ms(draft_tokens, *batch, *cost), brute_force_ms(*batch, *cost)
    assert found_ms <= best_ms * (1 + 1e-9)
    assert found_ms >= best_ms * (1 - 0.1)  # the brute force is as close as its grid


@settings(max_examples=100)
@given(batch=requests, cost=costs, seed=st.integers(0, 2**32 - 1))
def test_no_change_of_the_budgets_improves_them(batch, cost, seed):
    """J is convex in the budgets, so what no small change improves is the optimum."""
    _, draft_tokens = optimum(batch, cost)
    best_ms = cost_ms(draft_tokens, *batch, *cost)
    rng = np.random.default_rng(seed)
    for size in (1e-3, 1e-2, 0.1, 1.0):
        for _ in range(5):
            step = rng.normal(size=len(draft_tokens)) * size * (draft_tokens + rng.choice([0.0, 10.0]))
            changed = np.maximum(0.0, draft_tokens + step)
            assert cost_ms(changed, *batch, *cost) >= best_ms * (1 - 1e-12)


@settings(max_examples=50)
@given(batch=requests, cost=costs)
def test_exact_cost_counts_the_verified_tokens_too(batch, cost):
    lengths, k, alpha = batch
    forwards, draft_tokens = optimum(batch, cost, exact_cost=True)
    options = {"lengths": lengths, "k": k, "alpha": alpha, "c_base_ms": cost[0], "c_tok_ms": cost[1]}
    found_ms = makespan_ms(draft_tokens, **options, exact_cost=True)
    steps = sum(forwards_with([p], [length], [a], [b]) for p, length, a, b in zip(draft_tokens, *batch, strict=True))
    assert found_ms == pytest.approx(cost_ms(draft_tokens, *batch, *cost) + cost[1] * steps)
    assert forwards_with(draft_tokens, *batch) == pytest.approx(forwards, rel=1e-9)
    assert found_ms <= brute_force_ms(*batch, *cost, verified=True) * (1 + 1e-9)
    assert forwards <= optimum(batch, cost)[0] * (1 + 1e-9)  # a forward costs more, so more of them are spared
    brings_more_than_one = k * alpha > 1 + 1e-9
    assert (draft_tokens[brings_more_than_one] > 0).all()


# ---------------------------------------------------------------- laws


@given(batch=requests, cost=costs, scale=st.floats(0.1, 10))
def test_equal_requests_get_equal_budgets_wherever_they_stand_and_only_ratios_count(batch, cost, scale):
    forwards, draft_tokens = optimum(batch, cost)
    twice = tuple(np.concatenate([part, part[::-1]]) for part in batch)
    first, second = np.split(optimum(twice, cost)[1], 2)
    assert first.tolist() == second[::-1].tolist()
    shuffled = tuple(part[::-1] for part in batch)
    assert optimum(shuffled, cost)[1] == pytest.approx(draft_tokens[::-1], rel=1e-9, abs=1e-9)
    dearer = optimum(batch, (cost[0] * scale, cost[1] * scale))
    assert dearer[0] == pytest.approx(forwards)
    longer = optimum((batch[0] * scale, *batch[1:]), cost)
    assert longer[0] == pytest.approx(forwards * scale)
    assert longer[1] == pytest.approx(draft_tokens * scale, rel=1e-5, abs=1e-5 * scale * batch[0].max())


@given(lengths=st.lists(st.integers(0, 9000), min_size=2, max_size=20), k=shares, alpha=speeds, cost=costs)
def test_longer_requests_of_equal_k_and_alpha_draft_no_less(lengths, k, alpha, cost):
    _, draft_tokens = optimal_budgets(lengths, k=k, alpha=alpha, c_base_ms=cost[0], c_tok_ms=cost[1])
    order = np.argsort(lengths, kind="stable")
    assert (np.diff(draft_tokens[order]) >= 0).all()
    arrays = [np.full(len(lengths), value) for value in (k, alpha)]
    same = optimal_budgets(lengths, k=arrays[0], alpha=arrays[1], c_base_ms=cost[0], c_tok_ms=cost[1])
    assert same[1].tolist() == draft_tokens.tolist()


@given(batch=requests, cost=costs)
def test_cheaper_tokens_or_dearer_forwards_never_mean_more_forwards(batch, cost):
    forwards, _ = optimum(batch, cost)
    assert optimum(batch, (cost[0] * 1.5, cost[1]))[0] <= forwards * (1 + 1e-9)
    assert optimum(batch, (cost[0], cost[1] * 1.5))[0] >= forwards * (1 - 1e-9)
    least = (batch[0] * (1 - batch[1])).max()
    assert least * (1 - 1e-12) <= forwards <= batch[0].max() * (1 + 1e-12)


@given(batch=requests, c_tok_ms=st.floats(1e-3, 10), nearly=st.floats(1e-6, 0.5))
def test_drafting_pays_if_and_only_if_a_forward_costs_more_than_sparing_one(batch, c_tok_ms, nearly):
    lengths, k, alpha = batch
    longest = lengths == lengths.max()
    one_fewer_ms = c_tok_ms * (1 / (alpha * k))[longest].sum()
    forwards, draft_tokens = optimum(batch, (one_fewer_ms * (1 - nearly), c_tok_ms))
    assert (forwards, draft_tokens.max()) == (lengths.max(), 0)
    forwards, draft_tokens = optimum(batch, (one_fewer_ms * (1 + nearly), c_tok_ms))
    assert forwards < lengths.max() or (lengths[~longest] == forwards).any()
    assert draft_tokens[longest].min() > 0


@given(batch=requests, cost=costs)
def test_prices_are_what_the_last_drafted_token_brings(batch, cost):
    lengths, k, alpha = batch
    forwards, draft_tokens = optimum(batch, cost)
    prices = step_prices(lengths, num_forwards=forwards, k=k, alpha=alpha)
    drafts = draft_tokens > 0
    assert np.isinf(prices[~drafts & (lengths < forwards)]).all()
    by_hand = k * alpha * np.exp(-alpha * draft_tokens / lengths)
    assert prices[drafts] == pytest.approx(np.minimum(by_hand, 1)[drafts], rel=1e-4, abs=1e-9)
    if drafts.any() and not np.isclose(forwards, lengths).any():
        assert (cost[1] / by_hand[drafts]).sum() == pytest.approx(cost[0], rel=1e-6)  # values of a token saved


# ---------------------------------------------------------------- special cases, by hand


def test_with_k_1_there_is_a_formula_and_the_paper_is_right():
    """N = (c_tok / c_base) sum over those that draft of l / alpha."""
    lengths = [1000, 400, 10]
    for formula in ("corrected", "printed"):
        forwards, draft_tokens = optimal_budgets(lengths, k=1, alpha=0.5, c_base_ms=10, c_tok_ms=1, formula=formula)
        assert forwards == pytest.approx(0.1 * (1400 / 0.5))
        expected = [2000 * math.log(1000 / 280), 800 * math.log(400 / 280), 0]
        assert draft_tokens == pytest.approx(expected, rel=1e-9)


def test_the_optimum_may_lie_exactly_at_a_length():
    """There the next request would have to draft too: below 800 a forward less costs 2 (1 / .5) > 3 tokens."""
    forwards, draft_tokens = optimal_budgets([1000, 800, 800], k=1, alpha=0.5, c_base_ms=3, c_tok_ms=1)
    assert forwards == 800
    assert draft_tokens == pytest.approx([2000 * math.log(1000 / 800), 0, 0])


@pytest.mark.parametrize("num_longest", [1, 2, 5])
def test_equal_longest_requests_share_the_price_of_a_forward(num_longest):
    lengths = [500] * num_longest + [100]
    options = {"k": 0.5, "alpha": 2.0, "c_tok_ms": 1.0}  # a forward less costs a token for each of the longest
    assert optimal_budgets(lengths, c_base_ms=num_longest, **options)[0] == 500
    forwards, draft_tokens = optimal_budgets(lengths, c_base_ms=num_longest + 0.1, **options)
    assert 250 < forwards < 500
    assert len(set(draft_tokens[:-1])) == 1
    assert draft_tokens[-1] == 0


def test_what_costs_nothing():
    options = {"k": [0.5, 0.5, 1.0], "alpha": 1.0}
    forwards, draft_tokens = optimal_budgets([100, 80, 50], c_base_ms=1, c_tok_ms=0, **options)
    assert forwards == 50  # 100 (1 - .5): no draft spares more
    assert draft_tokens.tolist() == pytest.approx([math.inf, 80 * math.log(40 / 10), 0])
    assert makespan_ms(draft_tokens, lengths=[100, 80, 50], c_base_ms=1, c_tok_ms=0, **options) == 50
    for c_tok_ms in (0, 1):
        forwards, draft_tokens = optimal_budgets([100, 80, 50], c_base_ms=0, c_tok_ms=c_tok_ms, **options)
        assert (forwards, draft_tokens.tolist()) == (100, [0, 0, 0])
    everything, infinite = optimal_budgets([100, 80], k=1, alpha=1, c_base_ms=1, c_tok_ms=0)
    assert (everything, infinite.tolist()) == (0, [math.inf, math.inf])


@pytest.mark.parametrize("formula", ["corrected", "printed"])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_nothing_to_emit(lengths, formula):
    forwards, draft_tokens = optimal_budgets(lengths, k=0.6, alpha=1, c_base_ms=8, c_tok_ms=0.1, formula=formula)
    assert (forwards, draft_tokens.tolist()) == (0, [0] * len(lengths))
    assert forwards_needed(draft_tokens, lengths=lengths, k=0.6, alpha=1) == 0


@pytest.mark.parametrize("formula", ["corrected", "printed"])
def test_requests_that_are_done_change_nothing(formula):
    options = {"c_base_ms": 80, "c_tok_ms": 0.1, "formula": formula}
    forwards, draft_tokens = optimal_budgets([300, 0, 70, 0], k=[0.6, 1, 0.5, 0.1], alpha=1, **options)
    expected = optimal_budgets([300, 70], k=[0.6, 0.5], alpha=1, **options)
    assert (forwards, draft_tokens[[0, 2]].tolist()) == (expected[0], expected[1].tolist())
    assert draft_tokens[[1, 3]].tolist() == [0, 0]


extreme = {
    "lengths": st.lists(st.sampled_from([0, 1e-300, 1, 3, 1e9, 1e15]), max_size=6),
    "k": st.sampled_from([1e-9, 0.3, 1 - 1e-16, 1]),
    "alpha": st.sampled_from([1e-9, 1, 1e9]),
    "c_base_ms": st.sampled_from([0, 1e-300, 1, 1e9]),
    "c_tok_ms": st.sampled_from([0, 1e-300, 1, 1e9]),
    "formula": st.sampled_from(["corrected", "printed"]),
}


@settings(max_examples=200)
@given(batch=st.fixed_dictionaries(extreme))
def test_no_input_in_range_gives_nan_or_a_negative_budget(batch):
    forwards, draft_tokens = optimal_budgets(**batch)
    assert 0 <= forwards <= max(batch["lengths"], default=0) * (1 + 1e-12)
    assert (draft_tokens >= 0).all()
    for part in (forwards, draft_tokens):
        assert (step_caps(draft_tokens, num_forwards=forwards) <= 16).all(), part
    assert not np.isnan(step_prices(batch["lengths"], num_forwards=forwards, k=batch["k"], alpha=batch["alpha"])).any()


# ---------------------------------------------------------------- the printed formula


@settings(max_examples=50)
@given(batch=requests, cost=costs)
def test_the_printed_formula_solves_its_own_equations_and_is_never_better(batch, cost):
    lengths, k, alpha = batch
    promised, draft_tokens = optimum(batch, cost, formula="printed")
    active = lengths > promised
    printed = -(lengths / alpha) * np.log(1 - k * np.clip(1 - promised / lengths, 0, None))  # Eq. 7
    if promised > 0 or (k < 1).all():
        assert draft_tokens[active] == pytest.approx(printed[active], rel=1e-6, abs=1e-6)

    def demand(forwards):  # the right side of Eq. 9, with c_tok
        drafting = lengths > forwards
        return cost[1] * (k / (alpha * (1 - k + k * forwards / lengths)))[drafting].sum()

    assert demand(promised + 1e-9 * lengths.max()) <= cost[0] * (1 + 1e-6)
    if promised > 0:
        assert demand(promised - 1e-9 * lengths.max()) >= cost[0] * (1 - 1e-6)
    assert cost_ms(draft_tokens, *batch, *cost) >= cost_ms(optimum(batch, cost)[1], *batch, *cost) * (1 - 1e-9)


LENGTHS = [5143, 4314, 3237, 3129, 2578, 2500, 1960, 1866, 1383, 1138, 1042, 1037, 975, 928, 764, 204]
K = [0.60, 0.79, 0.79, 0.64, 0.73, 0.71, 0.75, 0.60, 0.66, 0.81, 0.75, 0.74, 0.63, 0.78, 0.53, 0.59]
ALPHA = [1.51, 1.54, 1.42, 1.43, 1.40, 1.45, 1.35, 1.40, 1.43, 1.48, 1.50, 1.50, 1.51, 1.34, 1.39, 1.38]


def test_sixteen_requests_by_the_corrected_and_by_the_printed_formula():
    """Lognormal lengths, k about .62, alpha about 1.43; 8 ms a forward, .025 ms a token: 41.1 s without drafts."""
    batch = {"lengths": LENGTHS, "k": K, "alpha": ALPHA, "c_base_ms": 8.0, "c_tok_ms": 0.025}
    forwards, draft_tokens = optimal_budgets(**batch)
    assert forwards == pytest.approx(2068, abs=0.5)
    assert makespan_ms(draft_tokens, **batch) == pytest.approx(17.2e3, abs=50)
    assert draft_tokens.round().tolist() == [19213, 3014, 1392, 1651, 582, 481] + [0] * 10
    assert step_caps(draft_tokens, num_forwards=forwards).tolist() == [9, 1, 1, 1] + [0] * 12
    assert makespan_ms([0] * 16, **batch) == pytest.approx(41.1e3, abs=50)
    # The printed formula promises that all tokens can be spared, and takes 3,292 forwards.
    promised, printed = optimal_budgets(**batch, formula="printed")
    assert promised == 0
    assert forwards_needed(printed, lengths=LENGTHS, k=K, alpha=ALPHA) == pytest.approx(3292, abs=0.5)
    assert makespan_ms(printed, **batch) == pytest.approx(27.0e3, abs=50)
    # Its budgets for any number of forwards that can be reached at all are worse still.
    lengths, k, alpha = (np.array(part) for part in (LENGTHS, K, ALPHA))
    within_reach = np.linspace((lengths * (1 - k)).max(), lengths.max(), 500)
    eq_7 = [-(lengths / alpha) * np.log(1 - k * np.clip(1 - n / lengths, 0, None)) for n in within_reach]
    assert min(makespan_ms(budgets, **batch) for budgets in eq_7) == pytest.approx(32.4e3, abs=50)


def test_one_request_that_shall_need_70_percent_of_the_forwards():
    """l = 10,000, alpha = .7, k = .6: 9,902 draft tokens; the printed 2,835 leave it at 89.2 % of the forwards."""
    request = {"lengths": [10_000], "k": 0.6, "alpha": 0.7}
    # One request: c_base = c_tok / (alpha (k - 1 + N / l)), so that N / l = .7 at c_base / c_tok = 1 / (.7 * .3).
    forwards, draft_tokens = optimal_budgets(**request, c_base_ms=1 / (0.7 * 0.3), c_tok_ms=1)
    assert forwards == pytest.approx(7000)
    assert draft_tokens == pytest.approx([9902], abs=0.5)
    promised, printed = optimal_budgets(
        **request, c_base_ms=0.6 / (0.7 * (0.4 + 0.6 * 0.7)), c_tok_ms=1, formula="printed"
    )
    assert promised == pytest.approx(7000)
    assert printed == pytest.approx([2835], abs=0.5)
    assert forwards_needed(printed, **request) == pytest.approx(8920, abs=0.5)


# ---------------------------------------------------------------- caps, arguments, time


def test_caps_are_the_nearest_whole_number_of_tokens_a_step():
    assert step_caps([0, 49, 50, 149, 1e9, math.inf], num_forwards=100).tolist() == [0, 0, 1, 1, 16, 16]
    assert step_caps([1000, 10], num_forwards=100, max_draft_tokens=4).tolist() == [4, 0]
    assert step_caps([0, 5, math.inf], num_forwards=0).tolist() == [0, 16, 16]
    caps = step_caps(np.zeros(3), num_forwards=math.inf, max_draft_tokens=0)
    assert (caps.dtype, caps.tolist()) == (np.int64, [0, 0, 0])
    for bad, message in (([-1.0], "draft_tokens holds"), ([math.nan], "draft_tokens holds")):
        with pytest.raises(ValueError, match=message):
            step_caps(bad, num_forwards=1)
    with pytest.raises(ValueError, match="num_forwards is nan; it must be at least 0"):
        step_caps([1.0], num_forwards=math.nan)
    with pytest.raises(ValueError, match="num_forwards is -1; it must be at least 0"):
        step_prices([1.0], num_forwards=-1, k=1, alpha=1)
    with pytest.raises(ValueError, match="max_draft_tokens is 65"):
        step_caps([1.0], num_forwards=1, max_draft_tokens=65)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"lengths": [3, -1]}, ValueError, r"lengths\[1\] is -1\.0; it must be 0 <= lengths <= 1e\+15"),
        ({"lengths": [3, math.inf]}, ValueError, r"lengths\[1\] is inf"),
        ({"lengths": [math.nan, 3]}, ValueError, r"lengths\[0\] is nan"),
        ({"lengths": 3}, ValueError, "lengths has 0 dimensions; it must have one, with an entry a request"),
        ({"lengths": "ab"}, TypeError, "lengths must be a number, or numbers of one shape, not 'ab'"),
        ({"k": 0}, ValueError, r"k is 0\.0; it must be 1e-09 <= k <= 1"),
        ({"k": [0.5, 1.01]}, ValueError, r"k\[1\] is 1\.01"),
        ({"k": [0.5]}, ValueError, r"k has shape \(1,\); it must be one number, or 2, one a request"),
        ({"alpha": [1, 2, 3]}, ValueError, r"alpha has shape \(3,\); it must be one number, or 2, one a request"),
        ({"alpha": 0}, ValueError, r"alpha is 0\.0; it must be 1e-09 <= alpha <= 1e\+09"),
        ({"alpha": None}, ValueError, "alpha is nan"),
        ({"c_base_ms": -1}, ValueError, "c_base_ms is -1"),
        ({"c_tok_ms": math.nan}, ValueError, "c_tok_ms is nan"),
        ({"c_tok_ms": [1, 2]}, ValueError, "c_tok_ms has 1 dimensions; it must be one number"),
        ({"formula": "Eq. 7"}, ValueError, "formula is 'Eq. 7'; it must be 'corrected' or 'printed'"),
        ({"formula": "printed", "exact_cost": True}, ValueError, "exact_cost goes with formula 'corrected'"),
    ],
)
def test_bad_arguments(changes, error, message):
    good = {"lengths": [3, 4], "k": 0.5, "alpha": 1, "c_base_ms": 8, "c_tok_ms": 0.1}
    optimal_budgets(**good)
    with pytest.raises(error, match=message):
        optimal_budgets(**(good | changes))


def test_bad_budgets():
    batch = {"lengths": [3, 4], "k": 0.5, "alpha": 1}
    with pytest.raises(ValueError, match=r"draft_tokens has shape \(1,\); it must have 2 entries, one a request"):
        forwards_needed([1], **batch)
    with pytest.raises(ValueError, match="draft_tokens holds a budget that is not at least 0"):
        makespan_ms([1, -1], **batch, c_base_ms=1, c_tok_ms=1)


def test_the_optimum_of_256_requests_takes_less_than_a_millisecond():
    """About 0.13 ms."""
    rng = np.random.default_rng(0)
    lengths, k = rng.lognormal(7, 0.8, 256), np.clip(rng.normal(0.62, 0.1, 256), 0.1, 1)
    assert least_us(lambda: optimal_budgets(lengths, k=k, alpha=1.43, c_base_ms=8, c_tok_ms=0.025)) < 1000
