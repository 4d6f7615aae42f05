"""What an SGLang engine has learned goes through a restart: `das_save_state`, another engine, `das_load_state`."""

from collections import Counter

import pytest
from sglang_engines import call, engine, generate, statistics, tokens_of, trained_model
from state_samples import unreadable_copies

from bench import tiny_llama

pytestmark = pytest.mark.sglang

PROMPTS = tiny_llama.prompts(6)
GREEDY = {"temperature": 0, "max_new_tokens": 48}
SETTINGS = {"latency_ms": [8.0, 0.04], "widths": [0, 1, 3, 7]}  # a clock would let two engines weigh differently
COUNTED = ("num_decode_steps", "num_drafted_tokens", "num_accepted_tokens")


@pytest.fixture(scope="module")
def model(request):
    return trained_model(request.config.cache)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """A state, the answers of the engine that saved it, and what it did when it was asked again."""
    path = tmp_path_factory.mktemp("saved") / "state"
    with engine(model, settings=SETTINGS, speculative_algorithm="DAS") as running:
        call(running, "das_new_training_step", training_step=3)
        expected, _ = answered(running)
        call(running, "das_save_state", path=str(path))
        answers, took = answered(running)
        assert answers == expected
    return path, expected, took


def counts(running):
    told = statistics(running)
    counted = Counter({name: told[name] for name in COUNTED})
    return counted + Counter({f"width {width}": number for width, number in told["num_passes_by_width"].items()})


def answered(running):
    """Answers to all prompts, and what they took; one after the other, so that no arrival decides what runs beside."""
    before = counts(running)
    answers = [tokens for prompt in PROMPTS for tokens in tokens_of(generate(running, [prompt], GREEDY))]
    return answers, counts(running) - before


def test_a_restarted_engine_drafts_what_it_would_have_drafted(model, saved, tmp_path):
    path, expected, took_without_restart = saved
    with engine(model, settings=SETTINGS, speculative_algorithm="DAS") as restarted:
        call(restarted, "das_load_state", path=str(path))
        assert statistics(restarted)["history"]["num_rollouts"] == len(PROMPTS)
        assert answered(restarted) == (expected, took_without_restart)
        call(restarted, "das_save_state", path=str(tmp_path / "again"))
        call(restarted, "das_forget")
        call(restarted, "das_load_state", path=str(tmp_path / "again"))
        assert statistics(restarted)["history"]["num_rollouts"] == 2 * len(PROMPTS)
    assert took_without_restart["num_decode_steps"] < sum(map(len, expected)) / 3


def test_a_damaged_state_is_refused_and_the_engine_goes_on_with_what_it_has(model, saved):
    """A history with hardly any room is no fault either, nor is a cost of passes that is learned from them."""
    path, expected, _ = saved
    with engine(model, settings={"max_bytes": 1}, speculative_algorithm="DAS") as running:
        assert answered(running)[0] == expected
        before = statistics(running)["history"]
        assert before["num_rollouts"] <= 1
        for folder, name in unreadable_copies(path):
            with pytest.raises(Exception, match=name):
                call(running, "das_load_state", path=str(folder))
        assert statistics(running)["history"] == before
        assert statistics(running)["state"] == "drafting"
        assert answered(running)[0] == expected
