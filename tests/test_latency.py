"""The latency model: its formula, fits that recover what made the data, and an estimate that follows an engine."""

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from das import LatencyEstimator, LatencyModel, fit_latency, latency_preset
from das.latency import DEFAULT_LATENCY

coefficients = st.tuples(st.floats(0.5, 50), st.floats(1e-3, 1), st.sampled_from([0.0, 1e-5, 1e-3]))


def model(base, tok, kv=0.0, engine=0.0):
    return LatencyModel(c_base_ms=base, c_tok_ms=tok, c_kv_ms=kv, c_engine_ms=engine)


def sizes(seed, *, num_steps=60):
    """(tokens, tokens of context) of steps of all sizes."""
    steps = random.Random(seed)
    return [(steps.randint(1, 1500), steps.randint(0, 300_000)) for _ in range(num_steps)]


def squared_error(latency, steps, times):
    return sum((latency.step_ms(n, num_context_tokens=c) / t - 1) ** 2 for (n, c), t in zip(steps, times, strict=True))


def as_tuple(latency):
    return latency.c_base_ms, latency.c_tok_ms, latency.c_kv_ms


# ---------------------------------------------------------------- the model


def test_formula_by_hand():
    latency = model(8, 0.5, 0.01, 3)
    assert latency.step_ms(10) == 8 + 5 + 3
    assert latency.step_ms(10, speculating=False) == 13
    assert latency.step_ms(10, num_context_tokens=200) == 18
    assert latency.step_ms(np.array([1, 2]), num_context_tokens=np.array([100, 0])).tolist() == [12.5, 12.0]
    assert repr(latency) == "LatencyModel(c_base_ms=8.0, c_tok_ms=0.5, c_kv_ms=0.01, c_engine_ms=3.0)"
    assert as_tuple(model(1, 0)) == (1, 0, 0)
    assert model(0, 1).c_engine_ms == 0
    assert DEFAULT_LATENCY.c_base_ms / DEFAULT_LATENCY.c_tok_ms == 200


def test_speedup_says_when_to_leave_it_off():
    """Acceptance rises with draft length while the speed-up falls below 1 (NeMo-RL, k = 3, 5, 7), at a large batch."""
    latency = model(8, 0.1)
    longer = [
        latency.speedup(128, tokens_per_decode_step=t, drafted_per_decode_step=k)
        for k, t in ((3, 1.9), (5, 2.1), (7, 2.2))
    ]
    assert longer == sorted(longer, reverse=True)
    assert longer[0] < 1 < latency.speedup(1, tokens_per_decode_step=1.9, drafted_per_decode_step=3)
    assert latency.speedup(7, tokens_per_decode_step=1, drafted_per_decode_step=0) == 1
    assert model(8, 0.1, 0, 2).speedup(20, tokens_per_decode_step=1, drafted_per_decode_step=0) == 10 / 12
    context = model(8, 0.1, 1e-3).speedup(
        10, tokens_per_decode_step=2, drafted_per_decode_step=1, num_context_tokens=1000
    )
    assert context == pytest.approx(2 * 10 / 11)


@pytest.mark.parametrize("name", ["c_base_ms", "c_tok_ms", "c_kv_ms", "c_engine_ms"])
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (-1, ValueError, r"is -1; it must be 0 <= {} <= 1e\+09"),
        (math.nan, ValueError, r"is nan; it must be 0 <= {} <= 1e\+09"),
        (math.inf, ValueError, r"is inf; it must be 0 <= {} <= 1e\+09"),
        ("5", TypeError, "must be a number, not str"),
        (True, TypeError, "must be a number, not bool"),
        (None, TypeError, "must be a number, not NoneType"),
    ],
)
def test_bad_coefficients(name, bad, error, message):
    with pytest.raises(error, match=f"^{name} {message.format(name)}$"):
        LatencyModel(**{"c_base_ms": 1, "c_tok_ms": 1, name: bad})


def test_a_model_is_a_frozen_value_that_takes_time():
    with pytest.raises(ValueError, match="c_base_ms and c_tok_ms are both 0"):
        model(0, 0, 1)
    with pytest.raises(TypeError, match="argument"):
        LatencyModel(1, 2)
    with pytest.raises(AttributeError):
        model(1, 2).c_base_ms = 3
    assert model(1, 2) == model(1.0, np.float64(2))


# ---------------------------------------------------------------- the fit


@given(coefficients=coefficients, seed=st.integers(0, 99))
def test_a_fit_recovers_what_made_the_data(coefficients, seed):
    truth, steps = model(*coefficients), sizes(seed)
    tokens, context = zip(*steps, strict=True)
    times = [truth.step_ms(n, num_context_tokens=c) for n, c in steps]
    fitted = fit_latency(tokens, times, num_context_tokens=context)
    assert as_tuple(fitted.latency) == pytest.approx(coefficients, rel=1e-6, abs=1e-10)
    assert fitted.num_steps == len(steps)
    assert max(fitted.mean_relative_error, fitted.median_relative_error, fitted.p90_relative_error) < 1e-6
    alone = fit_latency(np.array(tokens), [model(*coefficients[:2]).step_ms(n) for n in tokens]).latency
    assert as_tuple(alone) == pytest.approx((*coefficients[:2], 0))


@given(
    times=st.lists(st.floats(0.01, 100), min_size=4, max_size=12),
    seed=st.integers(0, 99),
    other=st.tuples(st.floats(0, 60), st.floats(0, 0.1), st.floats(0, 1e-3)),
)
def test_no_non_negative_model_fits_better(times, seed, other):
    steps = sizes(seed, num_steps=len(times))
    tokens, context = zip(*steps, strict=True)
    try:
        fitted = fit_latency(tokens, times, num_context_tokens=context).latency
    except ValueError:  # only the context seems to take time, which is no model
        reject()
    assert min(as_tuple(fitted)) >= 0
    least = squared_error(fitted, steps, times)
    near = [tuple(c * f for c, f in zip(as_tuple(fitted), by, strict=True)) for by in ((1.01, 1, 1), (1, 1.01, 1.01))]
    for c in (other, *near):
        if c[0] + c[1] > 0:
            assert least <= squared_error(model(*c), steps, times) * (1 + 1e-9) + 1e-24  # that of an exact fit rounds


def test_times_that_fall_with_size_give_no_negative_coefficient():
    latency = fit_latency([1, 10, 100], [9.0, 6.0, 3.0]).latency
    assert latency.c_tok_ms == 0
    assert latency.c_base_ms == pytest.approx((1 / 9 + 1 / 6 + 1 / 3) / (1 / 81 + 1 / 36 + 1 / 9))
    assert as_tuple(fit_latency([1, 10, 100], [0.5, 5, 50]).latency) == pytest.approx((0, 0.5, 0), abs=1e-12)


def test_terms_that_cannot_be_told_apart_are_left_out():
    steps = fit_latency([1, 2, 4], [6.0, 7.0, 9.0], num_context_tokens=[10, 20, 40]).latency
    assert as_tuple(steps) == pytest.approx((5, 1, 0))


def test_errors_of_a_fit_by_hand():
    fitted = fit_latency([1, 2] * 2, [1.0, 1.0, 3.0, 3.0])  # a constant: sum(1/t) / sum(1/t^2) = 1.2
    assert fitted.latency.c_base_ms == pytest.approx(1.2)
    assert fitted.mean_relative_error == pytest.approx((0.2 + 0.6) / 2)
    assert fitted.median_relative_error == pytest.approx(0.4)
    assert fitted.p90_relative_error == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("tokens", "times", "context", "message"),
    [
        ([1, 2], [1.0], None, "differ in length"),
        ([1, 2], [1.0, 2.0], [1], "differ in length"),
        ([], [], None, "num_tokens holds fewer than two different values"),
        ([5, 5], [1.0, 2.0], None, "num_tokens holds fewer than two different values"),
        ([1, 0], [1.0, 2.0], None, r"num_tokens\[1\] is 0\.0; it must be finite and greater than 0"),
        ([1, 2], [1.0, math.nan], None, r"step_ms\[1\] is nan; it must be finite and greater than 0"),
        ([1, 2], [math.inf, 1.0], None, r"step_ms\[0\] is inf; it must be finite and greater than 0"),
        ([1, 2], [1.0, 2.0], [0, -1], r"num_context_tokens\[1\] is -1\.0; it must be finite and at least 0"),
        ([1, 2, 1], [1.0, 2.0, 9.0], [1, 2, 9], "step_ms depends on num_context_tokens alone"),
        ([[1, 2]], [1.0, 2.0], None, "num_tokens has 2 dimensions; it must have 1"),
    ],
)
def test_bad_measurements(tokens, times, context, message):
    with pytest.raises(ValueError, match=message):
        fit_latency(tokens, times, num_context_tokens=context)


# ---------------------------------------------------------------- presets


def test_presets_say_what_they_are():
    preset = latency_preset("qwen2.5-7b-a100")
    assert (preset.model, preset.device) == ("Qwen2.5-7B", "NVIDIA A100")
    assert "Apache-2.0" in preset.source
    assert "commit" in preset.source
    with pytest.raises(ValueError, match=r"name is 'h100'; it must be one of qwen2.5-7b-a100, llama3.1-8b-a100"):
        latency_preset("h100")


# ---------------------------------------------------------------- the estimate


def fed(estimator, truth, *, num_steps, seed=0, noise=0.0, size=None):
    steps = random.Random(seed)
    for n, c in sizes(seed, num_steps=num_steps):
        n, c = size or (n, c)
        estimator.observe(n, c, truth.step_ms(n, num_context_tokens=c) * math.exp(steps.gauss(0, noise)))
    return estimator


@given(base=st.floats(0.5, 50), tok=st.floats(1e-3, 1), share=st.sampled_from([0, 3e-4, 1e-3]), seed=st.integers(0, 99))
def test_an_estimate_finds_what_made_the_steps(base, tok, share, seed):
    truth = model(base, tok, share * tok)
    estimator = fed(LatencyEstimator(), truth, num_steps=300, seed=seed, noise=0.05)
    checked = sizes(seed + 1)
    errors = [
        abs(estimator.latency.step_ms(n, num_context_tokens=c) / truth.step_ms(n, num_context_tokens=c) - 1)
        for n, c in checked
    ]
    assert np.median(errors) < 0.1
    median, p90 = estimator.prediction_error()
    assert 0 < median <= p90 < 0.3
    assert estimator.num_observed + estimator.num_outliers == 300


def test_recursive_sums_are_those_of_weighted_least_squares():
    """Without noise and outliers the estimate is the batch fit, whatever is forgotten."""
    truth = model(9, 0.04, 2e-5)
    for memory_steps in (50, 1000):
        estimator = fed(LatencyEstimator(truth, memory_steps=memory_steps), truth, num_steps=200)
        assert as_tuple(estimator.latency) == pytest.approx(as_tuple(truth), rel=1e-6)
        assert (estimator.num_observed, estimator.num_outliers, estimator.num_ignored) == (200, 0, 0)
    one = LatencyEstimator(memory_steps=1)
    one.observe(100, 0, 7.5)
    assert as_tuple(one.latency) == pytest.approx((5, 0.025, 0))
    one.observe(100, 0, 9)
    assert one.latency.step_ms(100) == pytest.approx(9)


def test_steps_of_one_size_keep_the_proportions_of_the_start():
    estimator = fed(LatencyEstimator(model(8, 0.04)), model(16, 0.08), num_steps=50, size=(64, 0))
    assert as_tuple(estimator.latency) == pytest.approx((16, 0.08, 0), rel=1e-6)


def test_a_lasting_change_is_followed_and_a_spike_is_not():
    truth, slower = model(9, 0.04), model(36, 0.16)
    estimator = fed(LatencyEstimator(memory_steps=100), truth, num_steps=100)
    before = as_tuple(estimator.latency)
    for spike in (1e6, 500.0, 1e-3, 0.1):
        estimator.observe(100, 0, spike)
    assert as_tuple(estimator.latency) == before
    assert estimator.num_outliers == 4
    fed(estimator, slower, num_steps=24, seed=1)
    assert as_tuple(estimator.latency) == before
    fed(estimator, slower, num_steps=600, seed=2)
    assert as_tuple(estimator.latency) == pytest.approx(as_tuple(slower), rel=0.05, abs=1e-4)


@pytest.mark.parametrize("first_ms", [1e-5, 1e6])
def test_garbage_in_the_first_steps_is_forgiven(first_ms):
    estimator = LatencyEstimator(model(9, 0.04))
    estimator.observe(50, 0, first_ms)
    fed(estimator, model(9, 0.04), num_steps=300)
    for num_tokens in (200, 1000):
        assert estimator.latency.step_ms(num_tokens) == pytest.approx(9 + 0.04 * num_tokens, rel=0.15)


@pytest.mark.parametrize(
    "step",
    [
        *((10, 0, bad) for bad in (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-9, 1e12)),
        *((bad, 0, 10.0) for bad in (0, -1, math.nan, math.inf, 10**400)),
        *((10, bad, 10.0) for bad in (-1, math.nan, math.inf, 10**400)),
    ],
)
def test_what_cannot_be_is_ignored_and_counted(step):
    estimator = fed(LatencyEstimator(), model(9, 0.04), num_steps=20)
    before = estimator.state()
    estimator.observe(*step)
    assert estimator.num_ignored == 1
    assert estimator.state() == before | {"num_ignored": 1}


@given(
    st.lists(st.tuples(st.floats(0, 1e15), st.floats(0, 1e15), st.floats(0, 1e10)), max_size=40),
    st.sampled_from([DEFAULT_LATENCY, model(1e-6, 0), model(0, 1e-6), model(1e9, 1e9, 1e9, 1e9)]),
    st.sampled_from([1, 7, 1000]),
)
def test_whatever_the_clock_says_the_estimate_is_a_model(steps, start, memory_steps):
    estimator = LatencyEstimator(start, memory_steps=memory_steps)
    for step in steps:
        estimator.observe(*step)
        assert all(math.isfinite(c) and c >= 0 for c in as_tuple(estimator.latency))
    assert estimator.num_ignored + estimator.num_observed + estimator.num_outliers == len(steps)


def test_the_engine_share_stays_and_is_not_counted_twice():
    truth = model(9, 0.04, 0, 2)
    estimator = fed(LatencyEstimator(model(5, 0.025, 0, 2)), truth, num_steps=200)
    assert estimator.latency.c_engine_ms == 2
    assert as_tuple(estimator.latency) == pytest.approx((9, 0.04, 0), rel=0.01, abs=1e-6)
    estimator.observe(1, 0, 1.5)  # less than the engine's share
    assert estimator.num_ignored == 1


def test_prediction_error_by_hand():
    estimator = LatencyEstimator(model(8, 1))
    assert estimator.prediction_error() == (0, 0)
    estimator.observe(8, 0, 32.0)  # predicted 16
    assert estimator.prediction_error() == pytest.approx((0.5, 0.5))
    assert repr(estimator).startswith("LatencyEstimator(LatencyModel(c_base_ms=")
    assert LatencyEstimator().memory_steps == 1000
    assert LatencyEstimator().latency == DEFAULT_LATENCY


def test_state_round_trip():
    estimator = fed(LatencyEstimator(), model(9, 0.04, 1e-5), num_steps=90, noise=0.1)
    estimator.observe(1, 1, math.nan)
    state = json.loads(json.dumps(estimator.state()))
    copy = LatencyEstimator()
    copy.load_state(state)
    assert copy.latency == estimator.latency
    for one in (copy, estimator):
        fed(one, model(11, 0.05), num_steps=5, noise=0.1)
    assert copy.state() == estimator.state()
    copy.load_state(LatencyEstimator().state())
    assert (copy.latency, copy.num_observed) == (DEFAULT_LATENCY, 0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"gram": [1, 2, 3]}, ValueError, r"gram has shape \(3,\); it must be \(3, 3\)"),
        ({"moment": [1, 2]}, ValueError, r"moment has shape \(2,\); it must be \(3,\)"),
        ({"moment": [1, -2, 1]}, ValueError, "moment holds a negative or non-finite number"),
        ({"recent": [math.nan]}, ValueError, "recent holds a negative or non-finite number"),
        ({"num_observed": -1}, ValueError, "num_observed holds a negative or non-finite number"),
        ({"gram": np.zeros((3, 3))}, ValueError, "gram and moment do not belong together"),
        ({"moment": [0, 0, 0]}, ValueError, "gram and moment do not belong together"),
        ({"moment": None}, KeyError, "moment"),
        ({"recent": None}, KeyError, "recent"),
        ({"num_outliers": None}, KeyError, "num_outliers"),
    ],
)
def test_a_bad_state_changes_nothing(changes, error, message):
    estimator = fed(LatencyEstimator(), model(9, 0.04), num_steps=20)
    before, latency = estimator.state(), estimator.latency
    state = {**before, **changes}
    with pytest.raises(error, match=message):
        estimator.load_state({name: part for name, part in state.items() if part is not None})
    assert (estimator.state(), estimator.latency) == (before, latency)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"start": (5, 1)}, TypeError, "start must be a LatencyModel, not tuple"),
        ({"start": LatencyModel(c_base_ms=1e-9, c_tok_ms=0)}, ValueError, "must take at least 1e-06 ms"),
        ({"memory_steps": 0}, ValueError, "memory_steps is 0; it must be at least 1"),
        ({"memory_steps": 5.0}, TypeError, "memory_steps must be an int, not float"),
        ({"memory_steps": True}, TypeError, "memory_steps must be an int, not bool"),
    ],
)
def test_bad_estimators(arguments, error, message):
    with pytest.raises(error, match=message):
        LatencyEstimator(**arguments)
