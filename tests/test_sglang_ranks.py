"""Two tensor-parallel ranks draft the same and accept the same: answers are those of one rank without drafts."""

import os

import pytest
from sglang_engines import call, engine, generate, num_passes, statistics, tokens_of, trained_model

from bench import tiny_llama

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

SETTINGS = {"shape": "tree", "widths": [0, 1, 3, 7]}
PROMPTS = tiny_llama.prompts(6)
GREEDY = {"temperature": 0, "max_new_tokens": 48}
SAMPLED = {"temperature": 1.0, "max_new_tokens": 48, "top_k": 20, "top_p": 0.95}


@pytest.fixture(scope="module")
def model(request):
    return trained_model(request.config.cache)


@pytest.fixture(scope="module")
def expected(model):
    with engine(model) as running:
        return tokens_of(generate(running, PROMPTS, GREEDY))


@pytest.fixture(scope="module")
def two_ranks(model, expected):
    cores = sorted(os.sched_getaffinity(0))
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    try:
        with engine(model, settings=SETTINGS, speculative_algorithm="DAS", tp_size=2) as running:
            yield running
    finally:
        del os.environ["SGLANG_CPU_OMP_THREADS_BIND"]


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_two_ranks_agree(two_ranks, expected, shape):
    call(two_ranks, "das_forget")
    call(two_ranks, "das_configure", policy="fixed:7", shape=shape, noise_seed=-1)
    cold, warm = (generate(two_ranks, PROMPTS, GREEDY) for _ in range(2))
    assert tokens_of(cold) == tokens_of(warm) == expected
    assert sum(num_passes(warm)) < sum(num_passes(cold)) / 2
    rids = [f"keyed-{number}" for number in range(2 * len(PROMPTS))]
    call(two_ranks, "das_configure", policy="none", noise_seed=7)
    undrafted = tokens_of(generate(two_ranks, PROMPTS * 2, SAMPLED, rid=rids))
    call(two_ranks, "das_configure", policy="fixed:7")
    assert tokens_of(generate(two_ranks, PROMPTS * 2, SAMPLED, rid=rids)) == undrafted


def test_unkeyed_samples_do_not_part_the_ranks(two_ranks):
    """Each rank's generator says something else; ranks that accepted differently would hang or fail."""
    call(two_ranks, "das_configure", policy="throughput", noise_seed=-1)
    for _ in range(6):
        answers = generate(two_ranks, PROMPTS * 2, SAMPLED)
        assert all(tokens[-1] == tiny_llama.END or len(tokens) == 48 for tokens in tokens_of(answers))
    assert statistics(two_ranks)["state"] == "drafting"


def test_ranks_take_in_what_was_saved_or_nothing(two_ranks, expected, tmp_path):
    call(two_ranks, "das_forget")
    call(two_ranks, "das_configure", policy="fixed:7", shape="chain", noise_seed=-1)
    generate(two_ranks, PROMPTS, GREEDY)
    call(two_ranks, "das_save_state", path=str(tmp_path / "state"))
    kept = statistics(two_ranks)["history"]["num_tokens"]
    call(two_ranks, "das_forget")
    with pytest.raises(Exception, match="absent"):
        call(two_ranks, "das_load_state", path=str(tmp_path / "absent"))
    call(two_ranks, "das_load_state", path=str(tmp_path / "state"))
    assert statistics(two_ranks)["history"]["num_tokens"] == kept
    warm = generate(two_ranks, PROMPTS, GREEDY)
    assert tokens_of(warm) == expected
    assert sum(num_passes(warm)) < sum(map(len, expected)) / 3
