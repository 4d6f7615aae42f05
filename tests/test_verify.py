"""das.verify against exact distributions: every way to verify a draft emits what decoding without drafts emits."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from das.verify import accept_or_resample, match_samples, position_noise, request_seed, sample_token

VOCABULARY = 4
MODEL = np.random.default_rng(7).dirichlet(np.full(VOCABULARY, 0.6), size=64)

# (tokens, parents): nothing, a chain, a tree with siblings, a tree with a branch that cannot be reached in order
DRAFTS = [
    ([], []),
    ([1], [-1]),
    ([1, 2, 0], [-1, 0, 1]),
    ([1, 3, 2, 0, 1], [-1, -1, 0, 0, 1]),
    ([0, 1, 2, 3, 3], [-1, -1, -1, -1, 2]),
]


def distribution_after(path):
    """A model that looks at the last three tokens."""
    return MODEL[sum(4**place * token for place, token in enumerate(reversed(path[-3:])))]


def path_to(node, tokens, parents):
    path = []
    while node != -1:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def rows_of(tokens, parents):
    return np.array([distribution_after(path_to(node, tokens, parents)) for node in range(-1, len(tokens))])


def decoded(next_token, length):
    """Decoding without drafts, token by token."""
    path = []
    while len(path) < length:
        path.append(next_token(path))
    return path


def total_variation(counts, exact):
    total = sum(counts.values())
    return 0.5 * sum(abs(counts[path] / total - probability) for path, probability in exact.items())


def emitted_then_decoded(emitted, sample, length):
    """What a request emits in the end: a verified draft, then tokens without drafts, cut to the same length."""
    path = emitted[:length]
    while len(path) < length:
        path.append(sample(distribution_after(path)))
    return tuple(path)


@pytest.mark.parametrize(("tokens", "parents"), DRAFTS)
@pytest.mark.parametrize("rule", ["accept_or_resample", "match_samples"])
def test_emitted_tokens_have_the_targets_distribution(rule, tokens, parents):
    random = np.random.default_rng(3)
    rows, length, num_samples = rows_of(tokens, parents), 3, 2_000
    uniform = random.random((num_samples, len(rows) + length))
    cumulative = rows.cumsum(axis=1)

    def verified(number):
        if rule == "accept_or_resample":
            return accept_or_resample(tokens, rows, parents=parents, random_generator=random)
        samples = [int(np.searchsorted(row, u)) for row, u in zip(cumulative, uniform[number], strict=False)]
        return match_samples(tokens, samples, parents=parents)

    def sample(row):
        return int(np.searchsorted(row.cumsum(), random.random()))

    counts = Counter(emitted_then_decoded(verified(n), sample, length) for n in range(num_samples))
    exact = {
        path: np.prod([distribution_after(path[:place])[token] for place, token in enumerate(path)])
        for path in itertools.product(range(VOCABULARY), repeat=length)
    }
    # Of so many samples of the exact distribution itself, no total variation came near this in 1,000 tries.
    noise_floor = 0.5 * sum(np.sqrt(2 * p * (1 - p) / (np.pi * num_samples)) for p in exact.values())
    assert total_variation(counts, exact) < 1.4 * noise_floor


@given(seed=st.integers(0, 2**63 - 1), draft=st.sampled_from(DRAFTS), start=st.integers(0, 40))
def test_with_the_noise_of_the_position_drafts_do_not_change_a_token(seed, draft, start):
    def sampled(path):
        noise = position_noise(seed, "request", start + len(path), num_tokens=VOCABULARY)
        return sample_token(distribution_after(path), noise)

    tokens, parents = draft
    samples = [sampled(path_to(node, tokens, parents)) for node in range(-1, len(tokens))]
    emitted = match_samples(tokens, samples, parents=parents)
    assert emitted == decoded(sampled, len(emitted))


@given(data=st.data())
def test_matching_follows_the_draft_as_far_as_it_can(data):
    """The longest path of the draft whose every token was sampled before it, by trying all of them."""
    num_tokens = data.draw(st.integers(0, 6))
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=num_tokens, max_size=num_tokens))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(num_tokens)]
    samples = data.draw(st.lists(st.integers(0, 2), min_size=num_tokens + 1, max_size=num_tokens + 1))
    best = [samples[0]]
    for node in range(num_tokens):
        nodes, at = [], node
        while at != -1:
            nodes.insert(0, at)
            at = parents[at]
        before = [-1, *nodes[:-1]]
        if all(samples[1 + b] == tokens[n] for b, n in zip(before, nodes, strict=True)) and len(nodes) >= len(best):
            best = [tokens[n] for n in nodes] + [samples[1 + node]]
    emitted = match_samples(tokens, samples, parents=parents)
    assert emitted[0] == samples[0]
    if len(set(zip(parents, tokens, strict=True))) == num_tokens:  # no token twice: there is one such path
        assert emitted == best
    else:
        assert len(emitted) <= len(best)


def test_noise_is_the_same_everywhere_and_differs_by_each_of_its_keys():
    noise = position_noise(5, "a", 17, num_tokens=3)
    assert noise == pytest.approx([-0.4336084, -0.71658978, 0.32822736], abs=1e-8)
    others = [(6, "a", 17), (5, "b", 17), (5, "a", 18)]
    assert all((position_noise(*key, num_tokens=3) != noise).all() for key in others)
    assert request_seed(5, "a") == 1568152091704842453
    assert 0 <= request_seed(2**63 - 1, "\ud800") < 2**63


def test_noise_of_positions_is_independent_gumbel():
    noise = np.array([position_noise(1, "a", position, num_tokens=8) for position in range(4000)])
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.03)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.08)  # four standard errors
    correlations = np.corrcoef(noise[1:].T, noise[:-1].T)
    assert abs(correlations - np.eye(16)).max() < 0.06


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: match_samples([1], [1]), ValueError, "sampled_token_ids has 1 entries; it must have 2"),
        (lambda: match_samples([1], [1, 2], parents=[0]), ValueError, "parents[0] is 0; it must be -1 <= parents[0]"),
        (lambda: match_samples([1], [1, 2], parents=[True]), TypeError, "parents[0] is True, of type bool"),
        (lambda: match_samples([1], [1, 2], parents=[]), ValueError, "parents has 0 entries; it must have 1"),
        (lambda: match_samples([-1], [1, 2]), ValueError, "draft_token_ids"),
        (lambda: resampled([1], [[1.0, 0.0]]), ValueError, "probabilities has shape (1, 2); it must be (2, vocab"),
        (lambda: resampled([], [[0.5, 0.4]]), ValueError, "probabilities[0] sums to 0.9; it must sum to 1"),
        (lambda: resampled([], [[1.5, -0.5]]), ValueError, "negative"),
        (lambda: resampled([2], [[0.5, 0.5]] * 2), ValueError, "draft_token_ids holds 2; the vocabulary"),
        (lambda: resampled([1, 1], [[0.5, 0.5]] * 3, parents=[-1, -1]), ValueError, "holds 1 twice at one position"),
        (lambda: sample_token([0.5, 0.5], [0.0]), ValueError, "probabilities has shape (2,), noise (1,)"),
        (lambda: sample_token([0.0, 0.0], [0.0, 0.0]), ValueError, "some must be greater than 0"),
        (lambda: position_noise(-1, "a", 0, num_tokens=1), ValueError, "seed is -1"),
        (lambda: position_noise(1, "a", -1, num_tokens=1), ValueError, "position is -1"),
        (lambda: request_seed(1, 2), TypeError, "request_id must be a str, not int"),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)


def resampled(tokens, rows, **options):
    return accept_or_resample(tokens, rows, random_generator=np.random.default_rng(0), **options)
