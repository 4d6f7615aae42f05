"""SGLang's real engine drafts with das and says what it says without: greedy, sampled, interrupted, broken."""

import asyncio
import itertools
import json
from collections import Counter

import numpy as np
import pytest
from sglang_engines import (
    OPTIONS,
    call,
    engine,
    generate,
    num_passes,
    statistics,
    tokens_of,
    trained_model,
    update_weights,
)

import das
from bench import tiny_llama
from bench.bench_sglang import predicted

pytestmark = pytest.mark.sglang

PROMPTS = tiny_llama.prompts(6)
GREEDY = {"temperature": 0, "max_new_tokens": 48}
WIDEST = 7

# Sampling parameters whose answers must be the same with and without drafts; one for all prompts or one for each.
CASES = {
    "to the end token": GREEDY,
    "a stop token": GREEDY | {"stop_token_ids": tiny_llama.encode(",")},
    "short": [GREEDY | {"max_new_tokens": length} for length in (1, 2, 3, 5, 8, 13)],
    "to the end of the context": [
        {"temperature": 0, "max_new_tokens": OPTIONS["context_length"] - len(prompt), "ignore_eos": True}
        for prompt in PROMPTS
    ],
    "frequency penalty": GREEDY | {"frequency_penalty": 0.4},
    "presence penalty of some": [GREEDY, GREEDY | {"presence_penalty": 1.5}] * 3,
    "repetition penalty": GREEDY | {"repetition_penalty": 1.3},
    "bias": GREEDY | {"logit_bias": {"3": 4.0}},
}
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 3}


@pytest.fixture(scope="module")
def model(request):
    return trained_model(request.config.cache)


@pytest.fixture(scope="module")
def other_model(model, tmp_path_factory):
    """The same model after an update of its weights."""
    return tiny_llama.update(model, tmp_path_factory.mktemp("updated"))


@pytest.fixture(scope="module", params=["overlap", "sync"])
def scheduling(request):
    """SGLang's two kinds of scheduling. With overlap, penalties lag by a token, with and without speculation."""
    return {"disable_overlap_schedule": request.param == "sync"}


@pytest.fixture(scope="module")
def undrafted(model, scheduling):
    """What an engine without speculation answers in each case."""
    with engine(model, **scheduling) as running:
        return {name: generate(running, PROMPTS, sampling, **LOGPROBS) for name, sampling in CASES.items()}


@pytest.fixture(scope="module")
def das_engine(model, scheduling, undrafted):
    """An engine that may draft trees with das; no clock weighs, as a crowded machine's may say that nothing pays."""
    settings = {"shape": "tree", "widths": [0, 1, 3, WIDEST], "latency_ms": [8.0, 0.04]}
    with engine(model, settings=settings, speculative_algorithm="DAS", **scheduling) as running:
        yield running


@pytest.fixture
def fresh(das_engine):
    """The engine with an empty history and settings that draft much."""
    call(das_engine, "das_forget")
    call(das_engine, "das_configure", policy="fixed:7", shape="chain", widths=f"0,1,3,{WIDEST}", noise_seed=-1)
    yield das_engine
    assert statistics(das_engine)["num_live_requests"] == 0
    assert statistics(das_engine)["state"] == "drafting"


def assert_same_answers(answers, expected):
    assert tokens_of(answers) == tokens_of(expected)
    for answer, other in zip(answers, expected, strict=True):
        assert answer["meta_info"]["finish_reason"] == other["meta_info"]["finish_reason"]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            ours, theirs = answer["meta_info"][name], other["meta_info"][name]
            ours, theirs = (list(itertools.chain(*rows)) if "top" in name else rows for rows in (ours, theirs))
            assert [token for _, token, *_ in ours] == [token for _, token, *_ in theirs]
            assert [row[0] for row in ours] == pytest.approx([row[0] for row in theirs], abs=1e-4)


# ---------------------------------------------------------------- greedy


@pytest.mark.parametrize("case", CASES)
def test_greedy_answers_are_those_without_drafts(fresh, undrafted, case):
    for _ in range(2):  # without and with history
        assert_same_answers(generate(fresh, PROMPTS, CASES[case], **LOGPROBS), undrafted[case])


@pytest.mark.parametrize(
    ("shape", "widths", "policy"),
    [
        ("chain", "0,1,3,7", "throughput"),
        ("chain", "7", "price:0.15"),
        ("chain", "0,1,2,3,4,5,6,7", "price:0.5"),
        ("tree", "0,1,3,7", "fixed:7"),
        ("tree", "7", "throughput"),
    ],
)
def test_shapes_widths_and_policies_change_no_answer(fresh, undrafted, shape, widths, policy):
    call(fresh, "das_configure", shape=shape, widths=widths, policy=policy)
    passes = []
    for _ in range(3):
        answers = generate(fresh, PROMPTS, GREEDY, **LOGPROBS)
        assert_same_answers(answers, undrafted["to the end token"])
        passes.append(sum(num_passes(answers)))
    assert passes[-1] <= passes[0] / 2


def test_widths_vary_from_step_to_step(fresh):
    before = statistics(fresh)["num_passes_by_width"]
    for _ in range(2):
        generate(fresh, PROMPTS, GREEDY)
    after = statistics(fresh)["num_passes_by_width"]
    used = {width for width, count in after.items() if count > before.get(width, 0)}
    assert used >= {"7"}
    assert len(used) >= 2


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_passes_are_those_that_a_replay_predicts(fresh, model, shape):
    """Four epochs at temperature 1, a weight update before each."""
    call(fresh, "das_configure", shape=shape, policy="price:0.15")
    passes, rollouts = [], []
    for _ in range(4):
        update_weights(fresh, model)
        answers = generate(fresh, PROMPTS * 2, {"temperature": 1.0, "max_new_tokens": 48})
        passes.append(sum(num_passes(answers)))
        rollouts.append(tokens_of(answers))
    policy = das.PriceBudget(min_survival=0.15, max_draft_tokens=WIDEST)
    replayed = predicted(PROMPTS * 2, rollouts, policy=policy, shape=shape, widths=(0, 1, 3, WIDEST))
    assert sum(passes) == pytest.approx(sum(replayed), rel=0.05)


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_with_keyed_noise_drafts_change_no_sampled_token(fresh, shape):
    sampling = {"temperature": 1.0, "max_new_tokens": 48, "top_k": 20, "top_p": 0.95}
    rids = [f"keyed-{number}" for number in range(2 * len(PROMPTS))]
    call(fresh, "das_configure", policy="none", noise_seed=7)
    expected = tokens_of(generate(fresh, PROMPTS * 2, sampling, rid=rids))
    assert expected[: len(PROMPTS)] != expected[len(PROMPTS) :]  # samples, not the likeliest tokens
    call(fresh, "das_configure", policy="fixed:7", shape=shape)
    accepted = statistics(fresh)["num_accepted_tokens"]
    assert tokens_of(generate(fresh, PROMPTS * 2, sampling, rid=rids)) == expected
    assert tokens_of(generate(fresh, PROMPTS * 2, sampling, rid=rids[::-1])) != expected
    assert statistics(fresh)["num_accepted_tokens"] > accepted + 50


def exact_distribution(probabilities, prompt, length, keep):
    """The probability of each answer of so many tokens, cut off by `keep` at each."""
    exact = {(): 1.0}
    for _ in range(length):
        paths = [path for path in exact if not path or path[-1] != tiny_llama.END]
        rows = probabilities([prompt + list(path) for path in paths])
        longer = {path: p for path, p in exact.items() if path not in set(paths)}
        for path, row in zip(paths, rows, strict=True):
            kept = keep(row)
            longer |= {(*path, token): exact[path] * kept[token] / kept.sum() for token in np.flatnonzero(kept)}
        exact = longer
    return exact


def nucleus(row, *, top_k, top_p):
    order = np.argsort(-row)
    before = np.cumsum(row[order]) - row[order]
    kept = np.zeros_like(row)
    chosen = order[(before <= top_p) & (np.arange(len(row)) < top_k)]
    kept[chosen] = row[chosen]
    return kept


def noise_floor(exact, num_samples):
    """The greatest total variation that 10,000 samples of so many answers have from the distribution they are of."""
    probabilities = np.array(list(exact.values()))
    samples = np.random.default_rng(0).multinomial(num_samples, probabilities / probabilities.sum(), size=10_000)
    return 0.5 * np.abs(samples / num_samples - probabilities).sum(axis=1).max()


@pytest.mark.parametrize(
    ("sampling", "keep"),
    [
        ({"temperature": 1.0, "top_k": 6, "top_p": 0.95}, lambda row: nucleus(row, top_k=6, top_p=0.95)),
        ({"temperature": 1.0, "min_p": 0.05}, lambda row: np.where(row >= 0.05 * row.max(), row, 0.0)),
    ],
    ids=["top-k and top-p", "min-p"],
)
def test_samples_have_the_models_distribution(fresh, model, sampling, keep):
    """Against exact probabilities, at every prefix length, with drafts that are accepted and drafts that are not."""
    probabilities, prompt = tiny_llama.next_token_probabilities(model), PROMPTS[0]
    length, num_samples = 4, 960
    call(fresh, "das_configure", shape="tree" if "min_p" in sampling else "chain")
    options = sampling | {"max_new_tokens": length}
    answers = [
        tuple(tokens) for _ in range(num_samples // 48) for tokens in tokens_of(generate(fresh, [prompt] * 48, options))
    ]
    for cut in range(1, length + 1):
        exact = exact_distribution(probabilities, prompt, cut, keep)
        counts = Counter(answer[:cut] for answer in answers)
        distance = 0.5 * sum(abs(counts[path] / num_samples - p) for path, p in exact.items())
        distance += 0.5 * sum(count for path, count in counts.items() if path not in exact) / num_samples
        assert distance < noise_floor(exact, num_samples), (cut, distance)
    counters = statistics(fresh)
    assert counters["num_accepted_tokens"] > num_samples / 4
    assert counters["num_drafted_tokens"] > 1.2 * counters["num_accepted_tokens"]


# ---------------------------------------------------------------- what trainers do to an engine


def test_history_outlives_flushes_updates_and_released_memory(fresh, model, other_model, undrafted):
    cold = sum(num_passes(generate(fresh, PROMPTS, GREEDY)))
    warm = sum(num_passes(generate(fresh, PROMPTS, GREEDY)))
    assert warm < cold / 2
    fresh.flush_cache()
    assert sum(num_passes(generate(fresh, PROMPTS, GREEDY))) <= warm
    before = statistics(fresh)["history"]
    try:
        update_weights(fresh, other_model)
        generate(fresh, PROMPTS[:1], GREEDY)
    finally:
        update_weights(fresh, model, version="5")
    answers = generate(fresh, PROMPTS, GREEDY, **LOGPROBS)
    assert_same_answers(answers, undrafted["to the end token"])
    assert sum(num_passes(answers)) <= 1.2 * warm
    fresh.release_memory_occupation(tags=["kv_cache"])
    fresh.resume_memory_occupation(tags=["kv_cache"])
    fresh.begin_weight_update()
    fresh.update_weights_from_tensor(list(tensors_of(model).items()))
    fresh.end_weight_update()
    assert sum(num_passes(generate(fresh, PROMPTS, GREEDY))) <= 1.2 * warm
    after = statistics(fresh)["history"]
    assert after["num_rollouts"] == before["num_rollouts"] + 2 * len(PROMPTS) + 1
    assert after["num_expired"] == 0


def tensors_of(model):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(model).state_dict()


def test_a_weight_version_is_a_training_step_and_old_epochs_leave(fresh, model):
    for version in range(100, 106):
        update_weights(fresh, model, version=str(version))
        generate(fresh, PROMPTS[:1], GREEDY)
    history = statistics(fresh)["history"]
    assert history["num_rollouts"] == 4  # window_epochs
    assert history["num_expired"] == 2


def test_pushed_rollouts_are_drafted_from(fresh, undrafted, tmp_path):
    answers = tokens_of(undrafted["to the end token"])
    rollouts = [
        {"prompt_token_ids": prompt, "response_token_ids": answer}
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(json.dumps(rollout) for rollout in rollouts[3:]))
    call(fresh, "das_push", rollouts=json.dumps(rollouts[:3]))
    call(fresh, "das_push", path=str(tmp_path / "rollouts.jsonl"))
    passes = num_passes(generate(fresh, PROMPTS, GREEDY))
    assert sum(passes) < sum(map(len, answers)) / 3
    call(fresh, "das_statistics", path=str(tmp_path / "statistics.json"))
    assert json.loads((tmp_path / "statistics.json").read_text())["history"]["num_rollouts"] == 12


def test_the_history_holds_what_was_answered_whatever_ran_in_between(fresh, tmp_path):
    """More requests than run at once, of different lengths: decode steps and prefills of others alternate."""
    sampling = {"temperature": 1.0, "max_new_tokens": 48}
    prompts = PROMPTS * 7
    answers = tokens_of(generate(fresh, prompts, sampling))
    generate(fresh, PROMPTS[:1], sampling | {"max_new_tokens": 2})  # by now the last ends are processed
    call(fresh, "show_das_history", path=str(tmp_path / "history.json"))
    kept = json.loads((tmp_path / "history.json").read_text())
    for prompt, answer in zip(prompts, answers, strict=True):
        if len(answer) > 1:
            kept.remove([prompt, answer])
    assert len(kept) <= 1


def test_a_prompt_key_makes_two_prompts_one(fresh):
    sampling = GREEDY | {"custom_params": {"das_prompt_key": "sums"}}
    generate(fresh, PROMPTS[:2], [sampling, sampling])
    assert statistics(fresh)["history"]["num_prompts"] == 1


def test_bad_requests_to_das_are_refused_and_change_nothing(fresh):
    before = statistics(fresh)
    for method, parameters in (
        ("das_push", {"rollouts": '[{"prompt_token_ids": [1]}]'}),
        ("das_push", {"rollouts": '[{"prompt_token_ids": [1], "response_token_ids": [26]}]'}),
        ("das_push", {}),
        ("das_push", {"rollouts": "{}"}),
        ("das_configure", {"policy": "best"}),
        ("das_configure", {"widths": "0,15"}),
        ("das_new_training_step", {"training_step": -1}),
    ):
        with pytest.raises(Exception, match=r"rollout|JSON array|best|widths|training_step"):
            call(fresh, method, **parameters)
    assert statistics(fresh)["settings"] == before["settings"]
    assert statistics(fresh)["history"] == before["history"]


# ---------------------------------------------------------------- interruptions


def test_requests_that_do_not_fit_are_retracted_and_end_as_they_would_have(fresh, undrafted):
    expected = tokens_of(undrafted["to the end of the context"])
    for _ in range(2):
        answers = generate(fresh, PROMPTS * 2, CASES["to the end of the context"] * 2)
        assert tokens_of(answers) == expected * 2
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0


def test_aborted_requests_leave_no_trace(fresh, undrafted):
    generate(fresh, PROMPTS[:2], GREEDY)
    before = statistics(fresh)["history"]["num_rollouts"]
    long = {"temperature": 0, "max_new_tokens": 140, "ignore_eos": True}
    rids = [f"abort-{number}" for number in range(4)]

    async def run():
        tasks = [
            asyncio.ensure_future(fresh.async_generate(input_ids=list(prompt), sampling_params=long, rid=rid))
            for prompt, rid in zip(PROMPTS, rids, strict=False)
        ]
        await asyncio.sleep(0.15)
        fresh.tokenizer_manager.abort_request(rid="abort-", abort_all=True)
        return await asyncio.gather(*tasks)

    answers = fresh.loop.run_until_complete(run())
    reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert "abort" in reasons
    added = statistics(fresh)["history"]["num_rollouts"] - before
    assert added == reasons.count("length")
    assert_same_answers(generate(fresh, PROMPTS, GREEDY, **LOGPROBS), undrafted["to the end token"])


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("kind", ["plan", "extend", "finish"])
def test_a_fault_costs_drafts_and_nothing_else(das_engine, undrafted, kind):
    call(das_engine, "das_forget")
    call(das_engine, "das_configure", policy="fixed:7", shape="chain", widths="0,7")
    generate(das_engine, PROMPTS, GREEDY)
    call(das_engine, "break_das", kind=kind)
    answers = generate(das_engine, PROMPTS, GREEDY, **LOGPROBS)
    assert_same_answers(answers, undrafted["to the end token"])
    assert statistics(das_engine)["state"].startswith("off: RuntimeError")
    passes = num_passes(generate(das_engine, PROMPTS, GREEDY))
    assert passes == [len(tokens) - 1 for tokens in tokens_of(answers)]
    call(das_engine, "das_forget")
    assert_same_answers(generate(das_engine, PROMPTS, GREEDY, **LOGPROBS), undrafted["to the end token"])
    assert statistics(das_engine)["state"] == "drafting"


def test_many_requests_leave_no_state_behind(fresh):
    """Hundreds of requests, under names that come back."""
    call(fresh, "das_configure", policy="throughput")
    for number in range(8):
        sampling = {"temperature": 1.0, "max_new_tokens": 6}
        rids = [f"many-{number % 2}-{row}" for row in range(48)]
        generate(fresh, PROMPTS * 8, sampling, rid=rids)
    counters = statistics(fresh)
    assert counters["num_live_requests"] == 0
    assert counters["history"]["num_prompts"] == len(PROMPTS)
