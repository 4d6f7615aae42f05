"""The setting `shared_history` in both engines' adapters: what it may be, and that engines draft from each other."""

import logging
import re
import sys
import time

import pytest
from history_shards import ShardsHere
from sglang_requests import END, EngineRequest
from vllm_runner import Runner

import das
from das_ray import SharedHistorySettings, read_shared_history, shared_history
from das_ray.__main__ import main as das_ray_main
from das_ray.exchange import ServiceError
from das_sglang.drafting import Drafting
from das_sglang.settings import Settings as SglangSettings
from das_vllm.settings import read_settings

PROMPT = [1, 2, 3]
TEXT = [5, 2, 7, 8, 6, 5, 4, 2, 8, 7, 3, 5, 5, 6, 2, 3, 4, 8, 7, 6, 4, 3, 3, 2, 6]
TABLE = {"service": "ray:test", "pull_interval_ms": 10, "piece_tokens": 1}


@pytest.fixture
def shards(tmp_path, monkeypatch):
    shards = ShardsHere(tmp_path)
    monkeypatch.setattr(shared_history, "_connect_to_ray", lambda settings: shards)
    yield shards
    shards.close()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("NAME", r"shared_history: service is 'NAME'; it must be \"ray:NAME\""),
        ("ray:", "the NAME of service is ''; it must be 1 to 100 letters, digits, _, . or -"),
        ("ray:a b", "the NAME of service is 'a b'; it must be 1 to 100 letters"),
        ("http:x", "service is 'http:x'"),
        ({}, "shared_history has no service"),
        ({"service": "ray:a", "port": 1}, "has 'port', which is no setting; there are: service, namespace"),
        ({"service": 3}, "service must be a str, not int"),
        ({"service": "ray:a", "namespace": ""}, "namespace is ''"),
        ({"service": "ray:a", "address": 3}, "address must be a str or null"),
        ({"service": "ray:a", "in_step": 1}, "in_step must be true or false"),
        ({"service": "ray:a", "pull_interval_ms": 9}, "pull_interval_ms is 9; it must be at least 10"),
        ({"service": "ray:a", "pull_interval_ms": 9.5}, "pull_interval_ms must be an int"),
        ({"service": "ray:a", "piece_tokens": 0}, "piece_tokens is 0"),
        ({"service": "ray:a", "max_queue_bytes": True}, "max_queue_bytes must be an int"),
        (3, "or a table with it; not int"),
    ],
)
def test_wrong_settings_are_named_before_an_engine_starts(value, reason):
    with pytest.raises((TypeError, ValueError), match=reason):
        read_shared_history(value)
    with pytest.raises((TypeError, ValueError), match=reason):
        read_settings({"das": {"shared_history": value}}, {})
    with pytest.raises((TypeError, ValueError), match=reason):
        SglangSettings(shared_history=value)


def test_right_settings_and_none():
    assert read_shared_history(None) is None
    assert read_shared_history("ray:my-run.3") == SharedHistorySettings(service="ray:my-run.3")
    assert read_settings({"das": {"shared_history": TABLE}}, {}).shared_history.pull_interval_ms == 10
    assert '"shared_history": null' in str(read_settings(None, {}))
    assert SglangSettings.from_environment({"DAS_SGLANG": '{"shared_history": "ray:x"}'}).shared_history.name == "x"
    assert SglangSettings(shared_history="ray:x").as_dict()["shared_history"]["service"] == "ray:x"
    with pytest.raises(ValueError, match="deterministic is true; with shared_history, clocks decide"):
        read_settings({"das": {"shared_history": "ray:x", "deterministic": True}}, {})


@pytest.mark.parametrize("arguments", [["start", "run", "--directory", "."], ["stop", "run"], ["status", "run"]])
def test_the_command_says_what_to_install_where_ray_is_missing(arguments, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "das_ray.service", raising=False)
    assert das_ray_main(arguments) == 1
    assert re.fullmatch(r"das_ray: .*\bray\b.*: pip install 'ray>=2.40,<3'\n", capsys.readouterr().err)


def test_an_engine_without_ray_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "das_ray.service", raising=False)
    drafter, settings = das.Drafter(), SharedHistorySettings(service="ray:x")
    sharing = shared_history.SharedHistory(settings, drafter=drafter, policy=das.NoDraft)
    wait_for(lambda: "pip install 'ray" in sharing.statistics()["state"], sharing.between_steps)
    sharing.close()


def vllm_engine(**settings):
    options = {"policy": "price", "policy_options": {"min_survival": 0.0}, "shared_history": TABLE}
    return Runner(das={**options, **settings}, num_speculative_tokens=8)


def wait_for(condition, step, timeout_s=60.0):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        step()
        time.sleep(0.02)


def run_to_the_end(engine, request_id, text):
    """Return how many engine steps that took."""
    num_steps = 0
    while engine.requests[request_id].num_emitted < len(text):
        engine.step()
        num_steps += 1
    engine.remove(request_id)
    engine.step()
    return num_steps


def test_vllm_engines_draft_from_each_other(shards):
    first, second = vllm_engine(), vllm_engine()
    first.add("a", PROMPT, TEXT, max_tokens=len(TEXT))
    alone = run_to_the_end(first, "a", TEXT)
    wait_for(lambda: first.drafter.statistics()["das_shared_num_published_rollouts"] == 1, lambda: None)
    # The step that prefills the request says so before; what others know is there when it starts.
    second.add("b", PROMPT, TEXT, max_tokens=len(TEXT))
    second.drafter.scheduled([_new_request(second, "b")])
    wait_for(lambda: second.drafter.history.statistics().num_rollouts, second.drafter.shared.between_steps)
    second.drafter.prepare([das.prompt_key(PROMPT)])
    assert run_to_the_end(second, "b", TEXT) < alone / 2
    statistics = second.drafter.statistics()
    assert statistics["das_shared_state"] == "sharing"
    assert statistics["das_shared_num_received_rollouts"] == 1
    assert statistics["das_history_num_builds_ahead"] == 1
    assert statistics["das_history_num_builds_on_start"] == 0
    second.drafter.new_training_step(1)  # what was learned goes to those that start later
    wait_for(lambda: shards.shards[0]._learned, lambda: None)
    for engine in (first, second):
        engine.drafter.shared.close()


def _new_request(runner, request_id):
    """What vLLM's scheduler says of a request: NewRequestData has these two."""
    return runner.requests[request_id]


def test_vllm_pushes_reach_other_engines_once(shards):
    first, second = vllm_engine(), vllm_engine()
    pushed = das.Rollout(prompt_token_ids=PROMPT, response_token_ids=TEXT, training_step=0)
    assert first.drafter.history.add(pushed)
    assert second.drafter.history.add(pushed)  # the trainer pushes to both
    key = das.prompt_key(PROMPT)
    for engine in (first, second):
        engine.drafter.prepare([key])
        engine.drafter.shared.flush()
        engine.drafter.shared.between_steps()
        assert len(engine.drafter.history.rollouts(key)) == 1
        engine.drafter.shared.close()
    assert sum(shard._store.num_rollouts for shard in shards.shards) == 1


def test_vllm_goes_on_without_the_service_and_after_faults(monkeypatch, caplog):
    def connect(settings):
        raise ServiceError(f"there is no service {settings.name!r}")

    monkeypatch.setattr(shared_history, "_connect_to_ray", connect)
    engine = vllm_engine()
    with caplog.at_level(logging.ERROR):
        engine.add("a", PROMPT, TEXT, max_tokens=len(TEXT))
        run_to_the_end(engine, "a", TEXT)
        wait_for(lambda: engine.drafter.shared.statistics()["state"].startswith("alone"), lambda: None)
    assert engine.drafter.is_drafting
    assert len(engine.drafter.history.rollouts(das.prompt_key(PROMPT))) == 1
    assert [r.message for r in caplog.records if "there is no service 'test'" in r.message]
    engine.drafter.scheduled([object()])  # another vLLM: an attribute is missing
    assert engine.drafter.fault is not None
    assert engine.drafter.shared is None
    engine.add("b", PROMPT, TEXT, max_tokens=len(TEXT))
    assert run_to_the_end(engine, "b", TEXT) == len(TEXT)


def test_vllm_shares_nothing_unless_told_and_from_ranks_that_draft_only():
    assert Runner().drafter.shared is None
    assert Runner(das={"shared_history": TABLE}, tp=2, rank=1).drafter.shared is None


def sglang_run(drafting, rid):
    """Decode TEXT and return how many steps that took."""
    request = EngineRequest(rid, PROMPT, max_new_tokens=len(TEXT) + 1)
    drafting.prefill([request])
    text, num_steps = [*TEXT, END], 0
    request.output_ids.append(text[0])
    while len(request.output_ids) < len(text):
        (draft,) = drafting.plan([request], [[]], weight_version="0").drafts
        num_steps += 1
        for token in [*(draft.draft_token_ids if draft else ()), None]:
            request.output_ids.append(text[len(request.output_ids)])
            if token != request.output_ids[-1] or len(request.output_ids) == len(text):
                break
    request.finish()
    drafting.finish(rid)
    return num_steps


def test_sglang_engines_draft_from_each_other(shards):
    settings = SglangSettings(policy="price:0", widths=(0, 7), shared_history=TABLE)
    first, second = Drafting(settings), Drafting(settings)
    alone = sglang_run(first, "a")
    wait_for(lambda: first.statistics()["shared_history"]["num_published_rollouts"] == 1, lambda: None)
    second.prepare([das.prompt_key(PROMPT)])
    wait_for(lambda: second.history.statistics().num_rollouts, second.shared.between_steps)
    assert sglang_run(second, "b") < alone / 2
    assert second.statistics()["shared_history"]["num_received_rollouts"] == 1
    old = second.shared
    second.forget()
    assert second.shared is not old
    assert old.fault == "it was closed"
    second.plan([], [], weight_version="1")  # another training step
    wait_for(lambda: shards.shards[0]._learned, lambda: None)
    for drafting in (first, second):
        drafting.shared.close()


def test_sglang_ranks_with_batches_of_their_own_share_nothing(caplog):
    drafting = Drafting(SglangSettings(shared_history=TABLE), num_ranks=2, broadcast=None)
    assert drafting.shared is None
    assert "ranks that each run a batch of their own cannot share" in caplog.text
