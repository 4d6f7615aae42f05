"""The acceptance numbers, by hand: one request of ten tokens, then sums and means over several."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_samples import PROMPT, draft, filled, rollout

from das import AcceptanceCounters, Drafter, summarise
from das.metrics import METRIC_NAMES, RequestMeans

# Ten tokens in five decode steps:
#   drafted 4 accepted 3 emitted 4 | no draft, emitted 1 | drafted 2 accepted 0 emitted 1
#   | drafted 2 accepted 2 emitted 3 | no draft, emitted 1
TEN = AcceptanceCounters(
    num_decode_steps=5, num_verification_steps=3, num_drafted_tokens=8, num_accepted_tokens=5, num_emitted_tokens=10
)


def test_ten_tokens():
    assert TEN.draft_acceptance_rate == 5 / 8
    assert TEN.mean_acceptance_length == 1 + 5 / 3  # vLLM: steps without a draft left out
    assert TEN.tokens_per_decode_step == 10 / 5  # SGLang, slime: all steps
    assert TEN.drafted_per_decode_step == 8 / 5


def test_a_drafter_counts_the_same_ten_tokens():
    drafter = Drafter(filled(rollout([4, 5, 6, 7, 8, 9], 0)))
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    for cap, emitted in ((4, [4, 5, 6, 0]), (0, [4]), (2, [4]), (2, [5, 6, 7]), (0, [8])):
        assert len(draft(drafter, "a", cap)) == cap
        drafter.extend("a", emitted)
    assert drafter.counters("a") == drafter.finish("a") == TEN


def test_nothing_yet():
    none = AcceptanceCounters()
    assert [getattr(none, name) for name in METRIC_NAMES] == [0.0, 1.0, 0.0, 0.0]
    assert summarise([])["mean_acceptance_length"] == 1.0
    assert all(value == 0 for name, value in summarise([]).items() if name != "mean_acceptance_length")


def test_counters_add_up_and_are_values():
    assert TEN + AcceptanceCounters() == TEN
    twice = TEN + TEN
    assert twice == AcceptanceCounters(10, 6, 16, 10, 20)
    assert hash(twice) == hash(AcceptanceCounters(10, 6, 16, 10, 20))
    with pytest.raises(dataclasses.FrozenInstanceError):
        TEN.num_decode_steps = 1


def test_token_weighted_and_request_means_differ():
    """Beside TEN: a request that never drafted, and one that never decoded."""
    plain = AcceptanceCounters(num_decode_steps=30, num_emitted_tokens=30)
    eager = AcceptanceCounters(2, 2, 8, 6, 8)
    summary = summarise([TEN, plain, AcceptanceCounters(), eager])
    assert summary == {
        "num_decode_steps": 37,
        "num_verification_steps": 5,
        "num_drafted_tokens": 16,
        "num_accepted_tokens": 11,
        "num_emitted_tokens": 48,
        "draft_acceptance_rate": 11 / 16,
        "mean_acceptance_length": 1 + 11 / 5,
        "tokens_per_decode_step": 48 / 37,
        "drafted_per_decode_step": 16 / 37,
        "request_mean_draft_acceptance_rate": (5 / 8 + 6 / 8) / 2,
        "request_mean_mean_acceptance_length": (1 + 5 / 3 + 1 + 6 / 2) / 2,
        "request_mean_tokens_per_decode_step": pytest.approx((10 / 5 + 1 + 8 / 2) / 3),
        "request_mean_drafted_per_decode_step": pytest.approx((8 / 5 + 0 + 8 / 2) / 3),
    }


@st.composite
def counters(draw):
    """Those of a run: each step emits what it accepted, and one token."""
    steps = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6))
    drafted = [max(pair) for pair in steps]
    accepted = [min(pair) for pair in steps]
    return AcceptanceCounters(
        len(steps), sum(d > 0 for d in drafted), sum(drafted), sum(accepted), sum(accepted) + len(steps)
    )


@given(st.lists(counters(), min_size=1, max_size=5))
def test_relations(requests):
    total = sum(requests, AcceptanceCounters())
    summary = summarise(requests)
    assert 0 <= total.draft_acceptance_rate <= 1
    assert 1 <= total.tokens_per_decode_step <= total.mean_acceptance_length + 1e-9
    if total.num_verification_steps == total.num_decode_steps:
        assert total.tokens_per_decode_step == pytest.approx(total.mean_acceptance_length)
    for name in METRIC_NAMES:
        assert summary[name] == getattr(total, name)
        values = [getattr(one, name) for one in requests]
        if all(one.num_verification_steps for one in requests):
            assert min(values) - 1e-9 <= summary[f"request_mean_{name}"] <= max(values) + 1e-9
    assert summarise(iter(requests)) == summary


@given(st.lists(counters() | st.just(AcceptanceCounters()), max_size=5))
def test_request_means_need_not_keep_the_requests(requests):
    means, summary = RequestMeans(), summarise(requests)
    for one in requests:
        means.add(one)
    assert means.means() == {f"request_mean_{name}": summary[f"request_mean_{name}"] for name in METRIC_NAMES}
