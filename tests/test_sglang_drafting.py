"""The plugin's drafting, with requests as SGLang keeps them: what enters the history, and what a fault does."""

import gc
import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from sglang_requests import END, EngineRequest, decode

import das
from das.metrics import METRIC_NAMES
from das_sglang import control
from das_sglang.corpus import PushedText
from das_sglang.drafting import Drafting
from das_sglang.settings import Settings

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 4]]
RANDOM = np.random.default_rng(0)
RESPONSES = [[*RANDOM.integers(0, 8, length).tolist(), END] for length in (30, 12, 45)]


def settings(**changes):
    return Settings(**{"policy": "fixed:7", "widths": (0, 3, 7), **changes})


def requests_of(epoch, **options):
    return [EngineRequest(f"{epoch}-{n}", prompt, **options) for n, prompt in enumerate(PROMPTS)]


def responses_in(drafting):
    return sorted(
        rollout.response_token_ids.tolist()
        for key in drafting.history.prompt_keys()
        for rollout in drafting.history.rollouts(key)
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_rollouts_enter_the_history_to_their_last_token_and_are_drafted_from(overlap, shape):
    drafting = Drafting(settings(shape=shape))
    first = decode(drafting, requests_of("a"), RESPONSES, overlap=overlap)
    assert responses_in(drafting) == sorted(RESPONSES)
    drafting.training_step.note_update()
    second = decode(drafting, requests_of("b"), RESPONSES, overlap=overlap)
    assert responses_in(drafting) == sorted(RESPONSES * 2)
    assert second < first / 3
    statistics = drafting.statistics()
    assert statistics["num_live_requests"] == 0
    assert statistics["state"] == "drafting"
    # Emitted in decode steps: every token once; SGLang's prefill gives the first, which the drafter hears of as well.
    assert statistics["num_emitted_tokens"] == 2 * sum(map(len, RESPONSES))
    assert statistics["num_accepted_tokens"] > sum(map(len, RESPONSES)) / 2
    widths = {int(width): count for width, count in statistics["num_passes_by_width"].items()}
    assert sum(widths.values()) == statistics["num_verify_passes"] == first + second
    assert set(widths) <= {0, 3, 7}
    json.dumps(statistics)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_response_is_cut_where_the_user_sees_its_end(overlap):
    """A stop string ends a response inside of what was accepted; the drafter had seen more."""
    drafting = Drafting(settings())
    request = EngineRequest("a", [1, 2], ignore_eos=True)
    drafting.plan([request], [[3]], weight_version="default")
    drafting.plan([request], [[3, 4, 5, 6]], weight_version="default")
    request.output_ids.extend([3, 4, 5, 6])
    request.finish(2)
    drafting.finish("a")
    assert responses_in(drafting) == [[3, 4]]
    # The tree forgets what was cut: nothing is drafted behind 4.
    again = EngineRequest("b", [1, 2], ignore_eos=True)
    (draft,) = drafting.plan([again], [[3]], weight_version="default").drafts
    assert draft.draft_token_ids == [4]


def test_stop_tokens_and_limits_end_a_response_before_the_engine_says_so():
    drafting = Drafting(settings())
    ends = EngineRequest("a", [1], stop_token_ids=[7])
    limited = EngineRequest("b", [2], max_new_tokens=3)
    ignoring = EngineRequest("c", [3], stop_token_ids=[7], ignore_eos=True)
    plan = drafting.plan([ends, limited, ignoring], [[5, 7, 5], [5, 5, 5, 5], [5, 7, END]], weight_version="v")
    assert plan.drafts[0] is None
    assert plan.drafts[1] is None
    assert plan.drafts[2] is not None
    for request, tokens in ((ends, [5, 7, 5]), (limited, [5, 5, 5, 5]), (ignoring, [5, 7, END])):
        request.output_ids.extend(tokens)
    for request, length in ((ends, 2), (limited, 3), (ignoring, 3)):
        request.finish(length)
        drafting.finish(request.rid)
    assert responses_in(drafting) == [[5, 5, 5], [5, 7], [5, 7, END]]
    assert drafting.statistics()["history"]["num_evicted_trees"] == 0


def test_drafts_never_run_past_the_limit():
    drafting = Drafting(settings())
    decode(drafting, requests_of("a"), RESPONSES, overlap=False)
    request = EngineRequest("b", PROMPTS[2], max_new_tokens=4)
    for length in range(1, 4):
        plan = drafting.plan([request], [RESPONSES[2][:length]], weight_version="default")
        assert len(plan.drafts[0]) == 4 - length - 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"min_new_tokens": 8},
    ],
)
def test_requests_whose_distribution_hangs_on_the_draft_are_not_drafted_for(sampling):
    drafting = Drafting(settings())
    decode(drafting, requests_of("a"), RESPONSES, overlap=False)
    barred, other = EngineRequest("b", PROMPTS[2], **sampling), EngineRequest("c", PROMPTS[2])
    plan = drafting.plan([barred, other], [RESPONSES[2][:5]] * 2, weight_version="default")
    assert [len(draft) for draft in plan.drafts] == [0, 7]
    if "min_new_tokens" in sampling:
        plan = drafting.plan([barred, other], [RESPONSES[2][:8]] * 2, weight_version="default")
        assert [len(draft) for draft in plan.drafts] == [7, 7]


def test_a_retracted_request_goes_on_where_it_was_and_its_lost_draft_is_not_scored():
    drafting = Drafting(settings())
    decode(drafting, requests_of("a"), RESPONSES, overlap=False)
    drafted_before = drafting.statistics()["num_drafted_tokens"]
    request = EngineRequest("b", PROMPTS[2])
    other = EngineRequest("c", [8, 8], presence_penalty=1.0)  # never drafted for
    assert len(drafting.plan([request, other], [RESPONSES[2][:1], [5]], weight_version="v").drafts[0]) == 7
    drafting.plan([other], [[5, 5]], weight_version="v")  # the request was retracted: its last step is lost
    (again, _) = drafting.plan([request, other], [RESPONSES[2][:2], [5, 5, 5]], weight_version="v").drafts
    assert again.draft_token_ids == RESPONSES[2][2:9]
    assert drafting.statistics()["num_drafted_tokens"] == drafted_before
    drafting.plan([request, other], [RESPONSES[2][:3], [5, 5, 5, 5]], weight_version="v")
    assert drafting.statistics()["num_drafted_tokens"] == drafted_before + 7


def test_tokens_that_were_taken_back_start_the_request_anew():
    drafting = Drafting(settings())
    request = EngineRequest("a", [1, 2])
    drafting.plan([request], [[3, 4, 5]], weight_version="v")
    drafting.plan([request], [[3]], weight_version="v")
    request.output_ids.extend([3, END])
    request.finish()
    drafting.finish("a")
    assert responses_in(drafting) == [[3, END]]


def test_aborted_and_vanished_requests_leave_nothing():
    drafting = Drafting(settings())
    aborted, vanished, other = (EngineRequest(rid, [1, 2]) for rid in "abc")
    drafting.plan([aborted, vanished, other], [[3], [4], [5]], weight_version="v")
    aborted.finished_reason = type("FINISH_ABORT", (), {})()
    drafting.finish("a")
    del vanished
    gc.collect()
    for length in range(2, 260):
        drafting.plan([other], [[5] * min(length, 60)], weight_version="v")
    assert drafting.statistics()["num_live_requests"] == 1
    assert responses_in(drafting) == []


def test_a_step_of_a_request_that_has_ended_does_not_start_it_again():
    drafting = Drafting(settings())
    ended, other = EngineRequest("a", [1, 2]), EngineRequest("b", [1, 2])
    drafting.plan([ended, other], [[3], [4]], weight_version="v")
    ended.output_ids.extend([3, END])
    ended.finish()
    drafting.finish("a")
    plan = drafting.plan([ended, other], [[5], [4, 4]], weight_version="v")
    assert plan.drafts[0] is None
    assert drafting.statistics()["num_live_requests"] == 1
    assert responses_in(drafting) == [[3, END]]


def test_a_request_id_that_comes_back_is_another_request():
    drafting = Drafting(settings())
    for token in (3, 4):
        request = EngineRequest("a", [1, 2])
        drafting.plan([request], [[token, token]], weight_version="v")
    request.output_ids.extend([4, 4, END])
    request.finish()
    drafting.finish("a")
    drafting.finish("never seen")
    assert responses_in(drafting) == [[4, 4, END]]


def test_pushed_rollouts_are_drafted_from_and_raise_the_training_step():
    drafting = Drafting(settings())
    rollout = das.Rollout(prompt_token_ids=[1, 2], response_token_ids=[3, 4, 5, 6], training_step=17)
    assert drafting.add_rollouts([rollout, rollout]) == 1
    (draft,) = drafting.plan([EngineRequest("a", [1, 2])], [[3]], weight_version="default").drafts
    assert draft.draft_token_ids == [4, 5, 6]
    assert drafting.training_step.now("default") == 17


def test_pushed_tokens_that_the_model_does_not_have_are_refused():
    drafting = Drafting(settings(), vocabulary_size=10)
    rollouts = [das.Rollout(prompt_token_ids=[1], response_token_ids=[token], training_step=3) for token in (9, 10)]
    with pytest.raises(ValueError, match="rollout 1 holds token 10; the model's vocabulary has 10"):
        drafting.add_rollouts(rollouts)
    assert responses_in(drafting) == []
    assert drafting.training_step.now("default") == 0


def test_a_restarted_engine_goes_on_where_it_stopped(tmp_path):
    drafting = Drafting(settings(policy="throughput"))
    decode(drafting, requests_of("a"), RESPONSES, overlap=False, weight_version="4")
    drafting.save(str(tmp_path))
    restarted, other = Drafting(settings(policy="throughput")), Drafting(settings(policy="fixed:7"))
    for one in (restarted, other):
        one.restore(one.read_state(str(tmp_path)))
        assert responses_in(one) == sorted(RESPONSES)
        assert one.training_step.now(None) == 4
    assert restarted._policy.state().keys() == drafting._policy.state().keys()
    assert restarted._policy.tokens_per_decode_step == drafting._policy.tokens_per_decode_step
    steps = [
        decode(one, requests_of("b"), RESPONSES, overlap=False, weight_version="5") for one in (drafting, restarted)
    ]
    assert steps[0] == steps[1]


def test_a_saved_state_of_a_greater_vocabulary_is_refused(tmp_path):
    drafting = Drafting(settings())
    decode(drafting, requests_of("a"), RESPONSES, overlap=False)
    drafting.save(str(tmp_path))
    small = Drafting(settings(), vocabulary_size=END)
    with pytest.raises(ValueError, match="it holds token 9; the model's vocabulary has 9"):
        small.read_state(str(tmp_path))
    assert responses_in(small) == []


def rank_of_two(*, other_tells):
    """A scheduler as far as `das_sglang.control` reads it; what the other rank tells is made of what this one does."""
    group = SimpleNamespace(world_size=2, all_gather_object=lambda told: [told, other_tells(told)])
    return SimpleNamespace(tp_group=group, draft_worker=SimpleNamespace(drafting=Drafting(settings(), num_ranks=2)))


@pytest.mark.parametrize(
    ("other_tells", "message"),
    [
        (lambda told: told, None),
        (lambda told: ("no such file", None), "rank 1: no such file"),
        (lambda told: (None, "another"), "rank 1 reads something else there"),
    ],
)
def test_ranks_take_in_the_same_or_nothing(tmp_path, other_tells, message):
    """Ranks with different histories would draft differently, and wait for each other forever."""
    saved = Drafting(settings())
    decode(saved, requests_of("a"), RESPONSES, overlap=False)
    saved.save(str(tmp_path))
    pushed = json.dumps([{"prompt_token_ids": [1], "response_token_ids": [2, 3]}])
    for take_in in (
        lambda rank: control.das_load_state(rank, path=str(tmp_path)),
        lambda rank: control.das_push(rank, rollouts=pushed),
    ):
        rank = rank_of_two(other_tells=other_tells)
        drafting = rank.draft_worker.drafting
        if message is None:
            take_in(rank)
            assert responses_in(drafting) in (sorted(RESPONSES), [[2, 3]])
        else:
            with pytest.raises(ValueError, match=message):
                take_in(rank)
            assert responses_in(drafting) == []
    with pytest.raises(ValueError, match=r"rollout 0: .*colour"):
        control.das_push(rank_of_two(other_tells=other_tells), rollouts='[{"colour": 1}]')
    with pytest.raises(FileNotFoundError):
        control.das_load_state(rank_of_two(other_tells=other_tells), path=str(tmp_path / "absent"))


def test_a_corpus_is_the_history_of_the_prompt_it_is_named_after():
    drafting = Drafting(settings(), vocabulary_size=10)
    corpus = PushedText(drafting)
    assert corpus.load_external_corpus_named("sums", [[1, 2, 3], [4], [1, 5, 6, 7]]) == 8
    assert responses_in(drafting) == []  # nothing sees it before the scheduler says so
    corpus.commit_external_corpus_load("sums", 8)
    assert responses_in(drafting) == [[2, 3], [5, 6, 7]]
    request = EngineRequest("a", [8, 8], custom_params={"das_prompt_key": "sums"})
    assert drafting.plan([request], [[5]], weight_version="v").drafts[0].draft_token_ids == [6, 7]
    assert corpus.list_external_corpora() == {"sums": 8}
    for call in (
        lambda: corpus.load_external_corpus_named("sums", [[4], []]),
        lambda: corpus.load_external_corpus_named("sums", [[4, 10]]),
        lambda: PushedText(drafting, num_ranks=2).load_external_corpus_named("sums", [[1, 2]]),
        lambda: corpus.remove_external_corpus("sums"),
    ):
        with pytest.raises(ValueError, match=r"two tokens|holds token 10|one rank|nothing to remove"):
            call()


def test_a_fault_is_told_once_and_ends_drafting_only(caplog, monkeypatch):
    drafting = Drafting(settings())
    decode(drafting, requests_of("a"), RESPONSES, overlap=False)

    def broken(*args, **options):
        raise RuntimeError("broken on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(das, "plan_step", broken)
        with caplog.at_level(logging.ERROR, "das"):
            steps = decode(drafting, requests_of("b"), RESPONSES, overlap=True)
    assert steps == max(map(len, RESPONSES))  # one token a step, and overlap's step in vain
    assert len(caplog.records) == 1
    assert "switched off" in caplog.text
    assert "broken on purpose" in caplog.text
    assert drafting.statistics()["state"] == "off: RuntimeError while drafting: broken on purpose"
    assert responses_in(drafting) == sorted(RESPONSES)
    drafting.forget()
    decode(drafting, requests_of("c"), RESPONSES, overlap=True)
    assert responses_in(drafting) == sorted(RESPONSES)
    assert drafting.statistics()["state"] == "drafting"


def test_a_history_at_its_limit_drops_old_prompts_and_goes_on():
    limit = 26_000
    drafting = Drafting(settings(max_bytes=limit))
    for number in range(12):
        requests = [EngineRequest(f"{number}-{row}", [number, row]) for row in range(3)]
        decode(drafting, requests, RESPONSES, overlap=True)
        assert drafting.history.memory_bytes() <= limit
    statistics = drafting.statistics()
    assert statistics["state"] == "drafting"
    assert statistics["history"]["num_evicted_rollouts"] > 0
    again = [EngineRequest(f"again-{row}", [11, row]) for row in range(3)]
    assert decode(drafting, again, RESPONSES, overlap=True) < 12


def test_two_ranks_draft_the_same_whatever_their_clocks_say(monkeypatch):
    ranks = [Drafting(Settings(), num_ranks=2) for _ in range(2)]
    plans = [[], []]
    for rank, drafting in enumerate(ranks):
        ticks = iter(np.cumsum(np.random.default_rng(rank).random(100_000)))
        monkeypatch.setattr("das_sglang.drafting.time.perf_counter", lambda ticks=ticks: float(next(ticks)))
        for epoch in range(3):
            requests = requests_of(f"{epoch}")
            plan = drafting.plan

            def noted(*args, plan=plan, rank=rank, **options):
                result = plan(*args, **options)
                plans[rank].append((result.width, [draft and draft.draft_token_ids for draft in result.drafts]))
                return result

            drafting.plan = noted
            decode(drafting, requests, RESPONSES, overlap=True)
            drafting.plan = plan
    assert plans[0] == plans[1]
    assert any(width for width, _ in plans[0])


def test_one_rank_learns_what_passes_cost():
    drafting = Drafting(Settings())
    decode(drafting, requests_of("a"), RESPONSES, overlap=False)
    assert drafting._policy.state()["latency"]["num_observed"] > 20
    fixed = Drafting(Settings(latency_ms=(8.0, 0.1)))
    decode(fixed, requests_of("a"), RESPONSES, overlap=False)
    assert "latency" not in fixed._policy.state()


def test_configure_changes_the_running_engine_or_nothing():
    drafting = Drafting(settings(shape="tree"))
    decode(drafting, requests_of("a"), RESPONSES, overlap=False)
    drafting.configure(policy="none", shape="chain", widths=(0, 1))
    assert decode(drafting, requests_of("b"), RESPONSES, overlap=False) == max(map(len, RESPONSES)) - 1
    drafting.configure(policy="fixed:7", shape="tree", widths=(7,))
    assert isinstance(drafting.plan([EngineRequest("c", PROMPTS[2])], [[0]], weight_version="v").drafts[0], das.Draft)
    for changes, message in (
        ({"widths": (0, 15)}, "the engine was started for at most 7"),
        ({"max_bytes": 1}, "max_bytes cannot be changed while the engine runs"),
        ({"policy": "best"}, "policy is 'best'"),
        ({"policy": "fixed:8"}, "policy is 'fixed:8'"),
        ({"shape": "star"}, "shape is 'star'"),
    ):
        with pytest.raises(ValueError, match=r"widths|max_bytes|policy|shape") as raised:
            drafting.configure(**changes)
        assert message in str(raised.value)
    assert drafting.settings.widths == (7,)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (
            {"widths": (0, 3, 7)},
            r"widths is \(0, 3, 7\); the engine's attention backend has one verify width, so .* \(7,\)",
        ),
        ({"widths": (3,), "policy": "none"}, r"widths is \(3,\); the engine's attention backend has one verify width"),
        ({"shape": "tree"}, "shape is 'tree'; the engine was started for chains"),
    ],
)
def test_configure_cannot_undo_what_the_engine_was_started_for(changes, rule):
    drafting = Drafting(settings())
    drafting.keep_width()
    assert drafting.settings == settings(widths=(7,))
    with pytest.raises(ValueError, match=rule):
        drafting.configure(**changes)
    assert drafting.settings == settings(widths=(7,))
    assert repr(drafting._policy) == repr(drafting.settings.make_policy(learns_latency=True))
    drafting.forget()
    with pytest.raises(ValueError, match=rule):
        drafting.configure(**changes)
    drafting.configure(policy="price:0.5", widths=(7,), shape="chain")


def test_request_means_are_those_of_the_requests_that_ended(monkeypatch):
    drafting = Drafting(settings())
    ended = []
    finish = drafting._live.finish

    def noted(rid):
        ended.append(finish(rid))
        return ended[-1]

    monkeypatch.setattr(drafting._live, "finish", noted)
    for epoch in "ab":
        decode(drafting, requests_of(epoch), RESPONSES, overlap=True)
    drafting.finish("never seen")
    expected = das.summarise(counters for counters in ended if counters is not None)
    told = drafting.statistics()
    for name in METRIC_NAMES:
        assert told[f"request_mean_{name}"] == pytest.approx(expected[f"request_mean_{name}"])
        assert told[name] == pytest.approx(expected[name])
    assert told["request_mean_draft_acceptance_rate"] != pytest.approx(told["draft_acceptance_rate"])
    assert told["drafted_per_decode_step"] > 0
    drafting.forget()
    assert drafting.statistics()["request_mean_tokens_per_decode_step"] == 0
