"""LengthModel and LengthForecast: a slow oracle, laws, named examples, and what they refuse."""

import copy
import json
import pickle
from itertools import pairwise

import numpy as np
import pytest
from cpu_cost import least_us
from hypothesis import given, settings
from hypothesis import strategies as st
from length_oracle import EDGES, Oracle

from das import LengthModel
from das._length_counts import LengthCounts, longer_than_each, tokens_beyond_each
from das.length_grid import LENGTH_EDGES

KEYS = [0, 7, 2**64 - 1]
lengths = st.one_of(st.integers(1, 40), st.integers(1, 5000), st.sampled_from(EDGES[1:]), st.just(1 << 21))
rollouts = st.lists(st.tuples(st.sampled_from(KEYS), lengths), max_size=40)
requests = st.lists(st.tuples(st.sampled_from([*KEYS, 99]), st.one_of(st.just(0), lengths)), min_size=1, max_size=6)


def columns(pairs):
    keys, tokens = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(keys, np.uint64), np.array(tokens, np.int64)


def learned(pairs, running=(), **options):
    model = LengthModel(**options)
    model.observe_finished(*columns(pairs))
    if running:
        model.observe_running(np.array(running))
    return model


def of_one(model, so_far=0, key=99):
    return model.forecast(np.array([key], np.uint64), np.array([so_far]))


def same(one, other):
    assert one.keys() == other.keys()
    return all(np.array_equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------- the grid


def test_edges():
    assert LENGTH_EDGES.tolist() == EDGES
    assert {512, 1536, 2048, 4096, 8192, 16384, 32768} <= set(EDGES)
    widths = np.diff(LENGTH_EDGES)
    assert (widths[:8] == 1).all()
    assert (widths[4:] / LENGTH_EDGES[4:-1]).max() == 0.25
    with pytest.raises(ValueError, match="read-only"):
        LENGTH_EDGES[3] = 4


# ---------------------------------------------------------------- against the oracle


@settings(max_examples=40)
@given(
    pairs=rollouts,
    asked=requests,
    running=st.lists(lengths, max_size=5),
    window=st.sampled_from([3, 10, 2048]),
    prompt_window=st.sampled_from([1, 4, 32]),
    shrinkage=st.sampled_from([0.01, 1.0, 16.0]),
    at=lengths,
)
def test_as_the_oracle_says(pairs, asked, running, window, prompt_window, shrinkage, at):
    options = {"window_rollouts": window, "prompt_window_rollouts": prompt_window, "shrinkage_rollouts": shrinkage}
    forecast = learned(pairs, running, **options).forecast(*columns(asked))
    oracle = Oracle(pairs, running, window=window, prompt_window=prompt_window, shrinkage=shrinkage)
    survival, expected = forecast.survival(at), forecast.expected_remaining_tokens()
    at_edges = forecast.survival_at_edges()
    for row, (key, so_far) in enumerate(asked):
        so_far = min(so_far, EDGES[-2])
        assert survival[row] == pytest.approx(oracle.survival(key, so_far, at), rel=1e-9, abs=1e-12)
        assert expected[row] == pytest.approx(oracle.expected_remaining_tokens(key, so_far), rel=1e-9)
        assert at_edges[row] == pytest.approx([oracle.survival(key, so_far, edge) for edge in EDGES], rel=1e-9, abs=0)


# ---------------------------------------------------------------- laws


@given(pairs=rollouts, asked=requests, running=st.lists(lengths, max_size=5))
def test_a_forecast_is_a_distribution_over_what_is_left(pairs, asked, running):
    forecast = learned(pairs, running).forecast(*columns(asked))
    survival, mass = forecast.survival_at_edges(), forecast.remaining_distribution()
    so_far = forecast.num_response_tokens[:, None]
    assert mass.shape == (len(asked), len(EDGES) - 1)
    assert mass.sum(axis=1) == pytest.approx(1.0)
    assert (mass >= 0).all()
    assert (mass[LENGTH_EDGES[1:] <= so_far] == 0).all()
    assert (survival[so_far >= LENGTH_EDGES] == 1).all()
    assert (survival[:, -1] == 0).all()
    assert (survival[:, :-1] > 0).all()  # nothing is impossible
    expected = forecast.expected_remaining_tokens()
    assert (expected >= 1 - 1e-9).all()
    assert np.isfinite(expected).all()


@given(pairs=rollouts, asked=requests, probability=st.floats(0.01, 0.99), more=st.lists(st.integers(-5, 10**6)))
def test_the_questions_agree_with_each_other(pairs, asked, probability, more):
    forecast = learned(pairs).forecast(*columns(asked))
    so_far = forecast.num_response_tokens
    quantiles = forecast.quantile(probability)
    assert forecast.survival(quantiles) == pytest.approx(1 - probability)
    assert (quantiles > so_far).all()
    horizons = forecast.remaining_survival(more)
    assert horizons.shape == (len(asked), len(more))
    for column, tokens in enumerate(more):
        assert np.array_equal(horizons[:, column], forecast.survival(so_far + tokens))
    for position in (0, 5, 30, 75, 76):
        at_edge = forecast.survival_at_edges()[:, position]
        beyond = LENGTH_EDGES[position] >= so_far
        assert forecast.survival(LENGTH_EDGES[position])[beyond] == pytest.approx(at_edge[beyond], abs=1e-12)


@given(pairs=rollouts, key=st.sampled_from(KEYS), so_far=st.integers(0, 3000), more=st.integers(0, 3000))
def test_to_have_got_further_is_to_be_given_more(pairs, key, so_far, more):
    """P(L > x | L > b) P(L > b | L > a) = P(L > x | L > a)."""
    model = learned(pairs)
    early, late = of_one(model, so_far, key), of_one(model, so_far + more, key)
    product = early.survival(so_far + more) * late.survival_at_edges()
    beyond = so_far + more <= LENGTH_EDGES
    assert product[:, beyond] == pytest.approx(early.survival_at_edges()[:, beyond], rel=1e-9)


@given(pairs=rollouts, order=st.randoms(use_true_random=False), cut=st.integers(0, 40))
def test_order_and_chunks_inside_the_windows_do_not_matter(pairs, order, cut):
    shuffled = list(pairs)
    order.shuffle(shuffled)
    one, other = learned(pairs, prompt_window_rollouts=64), learned(shuffled[:cut], prompt_window_rollouts=64)
    other.observe_finished(*columns(shuffled[cut:]))
    asked = columns([(key, so_far) for key in (*KEYS, 99) for so_far in (0, 100)])
    assert np.array_equal(one.forecast(*asked).survival_at_edges(), other.forecast(*asked).survival_at_edges())


@given(pairs=rollouts, window=st.integers(1, 10), prompt_window=st.integers(1, 5))
def test_only_the_windows_count(pairs, window, prompt_window):
    model = learned(pairs, window_rollouts=window, prompt_window_rollouts=prompt_window)
    assert (model.num_rollouts, model.num_prompts) == (min(window, len(pairs)), len({key for key, _ in pairs}))
    last = learned(pairs[-window:], window_rollouts=window)
    assert np.array_equal(model.survival_at_edges(), last.survival_at_edges())
    for key in KEYS:
        own = [pair for pair in pairs if pair[0] == key][-prompt_window:]
        counts = model.prompt_rollouts_longer_than(LENGTH_EDGES, prompt_keys=np.array([key], np.uint64))
        fresh = learned(own).prompt_rollouts_longer_than(LENGTH_EDGES, prompt_keys=np.array([key], np.uint64))
        assert np.array_equal(counts, fresh)


@given(pairs=rollouts.filter(len), so_far=st.integers(0, 3000))
def test_limits_of_shrinkage(pairs, so_far):
    key = pairs[0][0]
    prior_only = of_one(learned(pairs), so_far).survival_at_edges()  # of a prompt without rollouts
    shrunk = of_one(learned(pairs, shrinkage_rollouts=1e12), so_far, key).survival_at_edges()
    assert shrunk == pytest.approx(prior_only, abs=1e-6)
    model = learned(pairs, shrinkage_rollouts=1e-12)
    own = model.prompt_rollouts_longer_than(np.array([so_far, 2 * so_far]), prompt_keys=np.array([key], np.uint64))[0]
    if own[0] > 0.01:
        survival = of_one(model, so_far, key).survival(2 * so_far)
        assert survival == pytest.approx(own[1] / own[0], abs=1e-6)


@given(pairs=rollouts, asked=requests)
def test_state_round_trip_through_json(pairs, asked):
    options = {"window_rollouts": 12, "prompt_window_rollouts": 4}
    model = learned(pairs, **options)
    state = json.loads(json.dumps({name: part.tolist() for name, part in model.state().items()}))
    copy = learned([(5, 5)] * 20, [3, 4], **options)
    copy.load_state(state)
    assert same(copy.state(), model.state())
    for one in (model, copy):
        one.observe_finished(*columns(asked))
    assert same(copy.state(), model.state())
    forecasts = [one.forecast(*columns(asked)) for one in (model, copy)]
    assert np.array_equal(*(forecast.expected_remaining_tokens() for forecast in forecasts))


# ---------------------------------------------------------------- named examples


def test_cold_start_expects_as_much_again_as_has_passed_and_1024_tokens():
    """Lomax: E[L - l | L > l] = mean + l; the end of the grid takes a little."""
    for so_far in (0, 10, 100, 1000, 10_000):
        expected = of_one(LengthModel(), so_far).expected_remaining_tokens()[0]
        assert expected == pytest.approx(1024 + so_far, rel=0.05)
    assert LengthModel().quantile(0.5) == pytest.approx(1024 * (2**0.5 - 1), rel=0.01)


def test_requests_longer_than_all_before_have_a_tail():
    model = learned([(7, 500 + number) for number in range(100)])
    expected = [float(of_one(model, so_far, 7).expected_remaining_tokens()[0]) for so_far in (0, 700, 1400, 5600)]
    assert expected[0] == pytest.approx(550, rel=0.05)
    assert expected[1:] == sorted(expected[1:])
    assert expected[1] == pytest.approx(550 + 700, rel=0.1)
    beyond = of_one(model, 5 << 20, 7)
    assert beyond.num_response_tokens.tolist() == [EDGES[-2]]
    assert 1 < beyond.expected_remaining_tokens()[0] < EDGES[-1] - EDGES[-2]
    assert beyond.survival(9 << 20) == 0


def test_lengths_at_a_limit_end_there():
    model = learned([(key, 2048) for key in range(200)])
    nearly = of_one(model, 2040)
    assert nearly.survival(2048)[0] < 0.05
    assert nearly.quantile(0.9)[0] <= 2048


def test_a_prompts_own_rollouts_pull_away_from_those_of_all():
    model = learned([(key, 100) for key in range(64)] + [(7, 1000)] * 16)
    assert of_one(model).expected_remaining_tokens()[0] < 400
    assert of_one(model, 0, 7).expected_remaining_tokens()[0] > 500  # 16 own, 16 of all
    assert of_one(model, 300, 7).survival(900)[0] > 0.9


def test_the_prompt_seen_longest_ago_is_dropped():
    model = LengthModel(max_prompts=2)
    for key, length in [(1, 1000), (2, 10), (1, 1000), (3, 10)]:
        model.observe_finished(*columns([(key, length)]))
    state = model.state()
    assert (state["prompt_keys"].tolist(), state["prompt_num_rollouts"].tolist()) == ([1, 3], [2, 1])
    counts = model.prompt_rollouts_longer_than(np.array([0, 500]), prompt_keys=np.array([1, 2, 3], np.uint64))
    assert counts.tolist() == [[2, 2], [0, 0], [1, 0]]
    assert (model.num_prompts, model.num_rollouts) == (2, 4)


@given(pairs=rollouts, cuts=st.sets(st.integers(0, 40)), max_prompts=st.integers(1, 3), window=st.integers(1, 4))
def test_in_one_call_or_in_several_the_same_is_learned(pairs, cuts, max_prompts, window):
    """Prompts leave and come back between rollouts of one call."""
    options = {"max_prompts": max_prompts, "prompt_window_rollouts": window, "window_rollouts": 5}
    at_once, in_parts = LengthModel(**options), LengthModel(**options)
    at_once.observe_finished(*columns(pairs))
    for start, end in pairwise(sorted({0, len(pairs), *(cut for cut in cuts if cut < len(pairs))})):
        in_parts.observe_finished(*columns(pairs[start:end]))
    assert same(at_once.state(), in_parts.state())
    asked = columns([(key, so_far) for key in KEYS for so_far in (0, 100)])
    assert np.array_equal(at_once.forecast(*asked).survival_at_edges(), in_parts.forecast(*asked).survival_at_edges())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_goes_on_by_itself(copied):
    """The simulator gives each worker a copy of the policy."""
    model = LengthModel(window_rollouts=5, prompt_window_rollouts=2)
    assert copied(model).num_rollouts == 0
    for key, length in [(1, 100), (2, 7), (1, 200), (1, 300), (3, 9), (2, 40), (2, 41)]:
        model.observe_finished(*columns([(key, length)]))
    other = copied(model)
    before = model.state()
    assert same(other.state(), before)
    for key, length in [(4, 1), (1, 500), (4, 2)]:
        other.observe_finished(*columns([(key, length)]))
    assert same(model.state(), before)
    for key, length in [(4, 1), (1, 500), (4, 2)]:
        model.observe_finished(*columns([(key, length)]))
    assert same(model.state(), other.state())
    asked = columns([(key, 0) for key in (1, 2, 3, 4, 5)])
    assert np.array_equal(model.forecast(*asked).survival_at_edges(), other.forecast(*asked).survival_at_edges())


@pytest.mark.parametrize("counts", [[2**62] * 4, [2**62] * 4 + [1], [2**63 - 1, 2**63 - 1, 3]])
def test_hostile_counts_of_a_state_are_refused_and_change_nothing(counts):
    """Their sum overflows to the number of bins; to repeat keys so often would end the process."""
    model = learned([(1, 10), (2, 20)])
    before = model.state()
    bins = np.zeros(sum(counts) % 2**64, np.uint8)
    hostile = before | {
        "prompt_keys": np.arange(len(counts), dtype=np.uint64),
        "prompt_num_rollouts": np.array(counts, np.int64),
        "prompt_bins": bins,
    }
    with pytest.raises(ValueError, match="do not belong together"):
        model.load_state(hostile)
    assert same(model.state(), before)


def test_a_state_of_other_ints_is_the_same_state():
    model, other = learned([(1, 10), (2, 20), (1, 30)]), LengthModel()
    state = model.state()
    other.load_state(state | {"prompt_num_rollouts": state["prompt_num_rollouts"].astype(np.uint64)})
    assert same(other.state(), state)


def test_lengths_and_probabilities_beyond_what_int64_and_float_can_tell():
    model = LengthModel()
    model.observe_finished(np.array([1], np.uint64), np.array([2**63], np.uint64))
    assert model.state()["window"].tolist() == [75]
    assert model.quantile(5e-324) == 0.0
    with pytest.raises(TypeError, match=r"prompt_keys holds 5\.9, of type float"):
        model.prompt_rollouts_longer_than(np.array([0]), prompt_keys=np.array([5.9]))
    for sizes in ((0, 1, 1), (1, 0, 1), (1, 256, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="are no sizes of windows"):
            LengthCounts(*sizes)


def test_counts_refuse_what_does_not_fit_and_change_nothing():
    counts, keys = LengthCounts(10, 4, 10), np.array([1, 2], np.uint64)
    good, bad = np.array([3, 75], np.uint8), np.array([3, 76], np.uint8)
    for window, bins in ((bad, good), (good, bad)):
        with pytest.raises(ValueError, match="bins holds 76; there are 76 bins"):
            counts.load(window, keys, bins)
    with pytest.raises(ValueError, match="keys has 2 entries, bins 1"):
        counts.load(good, keys, good[:1])
    with pytest.raises(ValueError, match="keys has 2 entries, lengths 3"):
        counts.observe(keys, np.arange(3))
    assert (counts.num_prompts, counts.num_rollouts, counts.histogram.sum(), counts.above.sum()) == (0, 0, 0, 0)
    with pytest.raises(ValueError, match="overall has 76 entries; it must have 77"):
        counts.of_prompts(keys, np.zeros(76))
    with pytest.raises(ValueError, match=r"above has shape \(1, 76\); it must be \(2, 77\)"):
        longer_than_each(np.zeros((1, 76)), np.zeros((2, 1)))
    with pytest.raises(ValueError, match=r"above has shape \(1, 77\); it must be \(2, 77\)"):
        tokens_beyond_each(np.zeros((1, 77)), np.zeros(2, np.int64))


def test_memory_is_bounded_and_rows_grow():
    model = LengthModel(max_prompts=300)
    for start in range(0, 2000, 100):
        model.observe_finished(np.arange(start, start + 100, dtype=np.uint64), np.arange(1, 101))
    assert model.num_prompts == 300
    assert len(model._counts.above) == 512
    kept = np.arange(1700, 2000, dtype=np.uint64)
    counts = model.prompt_rollouts_longer_than(np.array([0]), prompt_keys=kept)
    assert counts.ravel().tolist() == [1] * 300


def test_a_look_up_remembered_is_not_one_out_of_date():
    model, asked = LengthModel(max_prompts=1), np.array([7, 8], np.uint64)
    before = model.forecast(asked, np.array([0, 0])).survival(100)
    model.observe_finished(*columns([(7, 1000)]))
    after = model.forecast(asked, np.array([0, 0])).survival(100)
    assert before[0] == before[1]
    assert after[0] > after[1]
    model.observe_finished(*columns([(8, 1000)]))
    latest = model.forecast(asked, np.array([0, 0])).survival(100)
    assert latest[1] > latest[0]


def test_a_forecast_stays_what_it_was():
    model = learned([(7, 100)])
    forecast = of_one(model, 50, 7)
    before = forecast.survival_at_edges(), forecast.expected_remaining_tokens()
    model.observe_finished(*columns([(7, 3000)] * 50))
    for one, other in zip(before, (forecast.survival_at_edges(), forecast.expected_remaining_tokens()), strict=True):
        assert np.array_equal(one, other)


def test_odd_arrays_on_the_decode_path():
    model = learned([(7, 100)] * 3)
    nobody = model.forecast(np.array([], np.uint64), np.array([], np.int64))
    shapes = [nobody.survival_at_edges(), nobody.remaining_distribution(), nobody.remaining_survival([1, 2])]
    assert [part.shape for part in shapes] == [(0, 77), (0, 76), (0, 2)]
    assert len(nobody) == len(nobody.quantile(0.5)) == len(nobody.survival(5)) == 0
    assert len(nobody.expected_remaining_tokens()) == 0
    model.observe_finished([], [])
    model.observe_running([])
    odd = model.forecast(np.array([7, 7, 7], np.uint64), np.array([-5, 0, 2**62]))
    assert odd.num_response_tokens.tolist() == [0, 0, EDGES[-2]]
    assert np.isfinite(odd.expected_remaining_tokens()).all()
    model.observe_finished(np.array([7, 7], np.uint64), np.array([0, 2**62]))
    assert model.num_rollouts == 5
    small = model.forecast(np.array([7], np.uint64), np.array([3], np.int32))
    assert small.num_response_tokens.dtype == np.int64


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("method", ["forecast", "observe_finished"])
@pytest.mark.parametrize(
    ("keys", "tokens", "error", "message"),
    [
        ([1, 2], [3], ValueError, "prompt_keys has 2 entries, num_response_tokens 1; they describe the same"),
        ([[1]], [3], ValueError, "prompt_keys has 2 dimensions; it must have one"),
        ([1], 3, ValueError, "num_response_tokens has 0 dimensions"),
        ([1], [3.0], TypeError, "num_response_tokens holds 3.0, of type float; it must hold ints"),
        ([None], [3], TypeError, "prompt_keys holds None, of type NoneType"),
        ([-1], [3], ValueError, "prompt_keys holds an int beyond uint64"),
        ([True], [3], TypeError, "prompt_keys holds True, of type bool"),
    ],
)
def test_bad_arrays_change_nothing(method, keys, tokens, error, message):
    model = learned([(7, 100)])
    before = model.state()
    with pytest.raises(error, match=message):
        getattr(model, method)(keys, tokens)
    with pytest.raises(TypeError, match=r"num_response_tokens holds 1\.5, of type float"):
        model.observe_running([1.5])
    assert same(model.state(), before)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window_rollouts": 0}, ValueError, "window_rollouts is 0; it must be 1 <= window_rollouts <= 16777216"),
        ({"window_rollouts": 5.0}, TypeError, "window_rollouts must be an int, not float"),
        ({"prompt_window_rollouts": 256}, ValueError, "prompt_window_rollouts is 256; it must be 1 <= .* <= 255"),
        ({"max_prompts": True}, TypeError, "max_prompts must be an int, not bool"),
        ({"shrinkage_rollouts": 0}, ValueError, "shrinkage_rollouts is 0; it must be 0 < shrinkage_rollouts"),
        ({"shrinkage_rollouts": float("nan")}, ValueError, "shrinkage_rollouts is nan"),
        ({"shrinkage_rollouts": "1"}, TypeError, "shrinkage_rollouts must be a number, not str"),
    ],
)
def test_bad_settings(options, error, message):
    with pytest.raises(error, match=message):
        LengthModel(**options)


@pytest.mark.parametrize("bad", [0, 1, -0.1, float("nan")])
def test_bad_probabilities(bad):
    model = LengthModel()
    for one in (model, of_one(model)):
        with pytest.raises(ValueError, match=r"probability is .*; it must be 0 < probability < 1"):
            one.quantile(bad)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"window": None}, KeyError, "window"),
        ({"window": [76]}, ValueError, "window holds 76 to 76; it must be 0 <= entry < 76"),
        ({"window": [0.5]}, TypeError, "window holds 0.5, of type float"),
        ({"prompt_bins": [3, -1]}, ValueError, "prompt_bins holds -1 to 3"),
        ({"prompt_keys": [1, 2, 3]}, ValueError, "do not belong together"),
        ({"prompt_num_rollouts": [1, 2]}, ValueError, "do not belong together"),
        ({"prompt_num_rollouts": [2, 0]}, ValueError, "do not belong together"),
        ({"prompt_keys": [1, 1]}, ValueError, "prompt_keys names a prompt twice"),
    ],
)
def test_a_bad_state_changes_nothing(changes, error, message):
    model = learned([(1, 20), (2, 30)])
    before = model.state()
    state = {name: part for name, part in {**model.state(), **changes}.items() if part is not None}
    with pytest.raises(error, match=message):
        model.load_state(state)
    assert same(model.state(), before)


def test_repr_names_the_settings():
    text = "LengthModel(window_rollouts=2048, prompt_window_rollouts=32, max_prompts=16384, shrinkage_rollouts=16)"
    assert repr(LengthModel()) == text
    assert repr(LengthModel(shrinkage_rollouts=0.5)).endswith("shrinkage_rollouts=0.5)")


# ---------------------------------------------------------------- cost


@pytest.mark.timed
def test_questions_about_256_requests_take_less_than_150_us():
    """About 50 us."""
    keys = np.arange(256, dtype=np.uint64)
    model = LengthModel()
    for number in range(10):
        model.observe_finished(keys, 50 + keys.astype(np.int64) * (number + 1) % 1000)
    so_far = np.arange(256) * 7 % 900

    def questions():
        forecast = model.forecast(keys, so_far)
        forecast.expected_remaining_tokens()
        forecast.survival(500)

    assert least_us(questions, tries=3000) < 150  # half a second: longer than what else runs keeps the caches
