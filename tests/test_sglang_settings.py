"""The plugin's settings, prompt keys, training steps and verification arrays: all that needs no engine."""

import dataclasses
import json
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_requests import EngineRequest

import das
from das.rollout import named_prompt_key
from das_sglang import engine_request
from das_sglang.settings import VARIABLE, Settings, wants_ngram
from das_sglang.training_step import TrainingStep
from das_sglang.verify_arrays import verify_arrays


def read(value):
    return Settings.from_environment({VARIABLE: value})


def test_settings_come_from_json_or_a_file(tmp_path):
    assert Settings.from_environment({}) == read("  ") == Settings()
    settings = read('{"policy": "price:0.3", "widths": [0, 5], "noise_seed": 7, "latency_ms": [8, 0.1]}')
    assert settings == Settings(policy="price:0.3", widths=(0, 5), noise_seed=7, latency_ms=(8, 0.1))
    (tmp_path / "das.json").write_text('{"shape": "tree"}')
    assert read(str(tmp_path / "das.json")) == Settings(shape="tree")
    assert repr(settings.make_policy(learns_latency=True)) == "PriceBudget(max_draft_tokens=5, min_survival=0.3)"
    assert settings.make_history().window_epochs == 4


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "Expecting property name"),
        ("[1]", "No such file"),
        ("nowhere.json", "No such file"),
        ('{"width": [1]}', "it names width; known are policy, shape, widths"),
        ('{"policy": "best"}', "policy is 'best'; it must be throughput, price:P, fixed:N or none"),
        ('{"policy": "none:3"}', "policy is 'none:3'"),
        ('{"policy": "none:"}', "policy is 'none:'"),
        ('{"policy": "price:"}', "policy is 'price:'"),
        ('{"policy": "price:2"}', "policy is 'price:2'; P must be a number, 0 <= P <= 1"),
        ('{"policy": "price:abc"}', "policy is 'price:abc'; P must be a number, 0 <= P <= 1"),
        ('{"policy": "price:nan"}', "policy is 'price:nan'; P must be"),
        (
            '{"policy": "fixed:16"}',
            "policy is 'fixed:16'; N must be an int, 0 <= N <= 15, which is the greatest of wid",
        ),
        ('{"policy": "fixed:4", "widths": [0, 3]}', "policy is 'fixed:4'; N must be an int, 0 <= N <= 3"),
        ('{"policy": "fixed:2.7"}', "policy is 'fixed:2.7'; N must be an int"),
        ('{"policy": "fixed:-1"}', "policy is 'fixed:-1'; N must be an int"),
        ('{"policy": "fixed:inf"}', "policy is 'fixed:inf'; N must be an int"),
        ('{"policy": 3}', "policy must be a string"),
        ('{"shape": "star"}', "shape is 'star'; it must be 'chain' or 'tree'"),
        ('{"widths": [3, 0]}', "widths must ascend"),
        ('{"widths": [0]}', "to draft nothing, set policy to 'none'"),
        ('{"widths": [65]}', "widths[0] is 65"),
        ('{"window_epochs": 0}', "window_epochs is 0"),
        ('{"latency_ms": [1]}', "latency_ms is [1]; it must hold two numbers"),
        ('{"latency_ms": 5}', "latency_ms is 5; it must hold two numbers, the ms of a pass and of a token in it"),
        ('{"latency_ms": ["a", "b"]}', "latency_ms is ['a', 'b']; it must hold two numbers"),
        ('{"latency_ms": [0, 0]}', "latency_ms is [0, 0]; it must hold two numbers"),
        (
            '{"latency_ms": [-1, 2]}',
            "latency_ms is [-1, 2]; it must hold two numbers, the ms of a pass and of a token "
            "in it: of these, c_base_ms is -1",
        ),
        ('{"noise_seed": -1}', "noise_seed is -1; it must be 0 <= noise_seed < 2**63"),
        ('{"noise_seed": "a"}', "noise_seed must be an int"),
        ('{"a": ' * 100_000, "maximum recursion depth exceeded"),
        ('{"replace_ngram": 1}', "replace_ngram must be true or false"),
    ],
)
def test_wrong_settings_name_the_variable_and_the_rule(value, message):
    with pytest.raises(ValueError, match=f"^{VARIABLE}: ") as raised:
        read(value)
    assert message.lower() in str(raised.value).lower()


def test_widths_fit_into_what_the_engine_verifies():
    settings = Settings()
    assert settings.widths_within(None) == (0, 3, 7, 15)
    assert settings.widths_within(12) == (0, 3, 7, 11)
    assert settings.widths_within(2) == (0, 1)
    assert settings.widths_within(8) == (0, 3, 7)
    assert Settings(widths=(0, 3)).widths_within(16) == (0, 3, 15)  # not a limit: the greatest width
    for number in (0, 1, 66, 100):
        message = f"^with --speculative-num-draft-tokens {number}, N is {number}; it must be 2 to 65$"
        with pytest.raises(ValueError, match=message):
            settings.within(number)
    assert settings.within(12) == Settings(widths=(0, 3, 7, 11))
    fixed = Settings(policy="fixed:15")
    assert fixed.within(None) == fixed.within(16) == fixed
    with pytest.raises(ValueError, match=r"^with --speculative-num-draft-tokens 12, policy is 'fixed:15'; N .* <= 11"):
        fixed.within(12)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Settings)])
@pytest.mark.parametrize("value", [None, 1e400, -1e400, 10**400, -1, 2.7, "", "a", "fixed:1e400", [], [None], {}, True])
def test_no_value_raises_anything_but_the_variables_error(field, value):
    told = f"{VARIABLE}: "
    try:
        read(json.dumps({field: value}))
    except ValueError as error:
        told = str(error)
    assert told.startswith(f"{VARIABLE}: ")


def test_whether_ngram_is_meant_is_read_from_any_text(tmp_path):
    (tmp_path / "das.json").write_text('{"replace_ngram": true}')
    meant = ('{"replace_ngram": true, "polcy": 1}', '{"replace_ngrm": true}', '{"replace_ngram": 1}')
    meant += ("{", "nowhere.json", str(tmp_path / "das.json"))
    not_meant = ("", '{"replace_ngram": false}', '{"replace_ngram": null}', '{"policy": "best", "widths": [0]}')
    assert all(wants_ngram({VARIABLE: text}) for text in meant)
    assert not any(wants_ngram({VARIABLE: text}) for text in not_meant)
    assert not wants_ngram({})


def test_the_prompt_key_is_the_first_that_is_there():
    request = EngineRequest("das:p7/3", [1, 2, 3])
    request.extra_key, request.lora_id = "problem-12adapter", "adapter"
    request.sampling_params.custom_params = {"das_prompt_key": 12}
    assert engine_request.prompt_key(request) == 12
    request.sampling_params.custom_params = {"das_prompt_key": "p7", "other": 1}
    by_name = engine_request.prompt_key(request)
    request.sampling_params.custom_params = None
    assert engine_request.prompt_key(request) == named_prompt_key("problem-12") != by_name
    request.extra_key = "adapter"  # what SGLang makes of no extra key and a LoRA adapter
    assert engine_request.prompt_key(request) == by_name
    request.rid = "p7/3"
    assert engine_request.prompt_key(request) is None


def test_names_of_prompts_have_stable_keys():
    assert named_prompt_key("p7") == named_prompt_key("p7") < 1 << 64
    assert named_prompt_key(5) == 5
    others = [-1, 1 << 64, True, "5", "", "\ud800"]
    assert len({named_prompt_key(name) for name in others}) == len(others)


def test_what_a_request_emitted_is_neither_lost_nor_taken_twice():
    """Its last pass emitted 7, 8: before and after SGLang has processed that, and right after a prefill."""
    request = EngineRequest("a", [1, 2, 3])
    for processed, cached, emitted, expected in (
        ([], 3, [5], [5]),
        ([5], 3, [5], []),  # a prefill of others ran in between
        ([5, 6], 6, [7, 8], [7, 8]),
        ([5, 6, 7, 8], 6, [7, 8], []),
        ([5, 6, 7, 8], 6, [], []),
    ):
        request.output_ids = array("q", processed)
        found = engine_request.unprocessed_tokens(request, num_cached_tokens=cached, last_emitted=emitted)
        assert found == expected


def test_training_steps_follow_numbers_and_count_what_has_none():
    step = TrainingStep()
    assert [step.now("default"), step.now("default")] == [0, 0]
    step.note_update()
    step.note_update()  # the buckets of one update
    assert [step.now("default"), step.now("default")] == [1, 1]
    assert [step.now("other"), step.now("other")] == [2, 2]
    assert [step.now("7"), step.now("7")] == [7, 7]
    step.note_update()
    assert step.now("8") == 8  # an update with its number is one step, not two
    assert [step.now("3"), step.now("8")] == [8, 8]  # never back
    step.raise_to(20)
    assert step.now("21x") == 21
    assert TrainingStep().now(None) == 0
    assert TrainingStep().now("5") == 5


@given(versions=st.lists(st.sampled_from(["default", "a", "3", "10", None, "update"]), max_size=12))
def test_training_steps_never_fall(versions):
    step, seen = TrainingStep(), [0]
    version = "default"
    for event in versions:
        if event == "update":
            step.note_update()
        else:
            version = event
        seen.append(step.now(version))
    assert seen == sorted(seen)


# ---------------------------------------------------------------- verification arrays


def drafts_of(*, shape, lengths):
    """Real drafts, of at most so many tokens each, from a history that branches."""
    history = das.RolloutHistory()
    random = np.random.default_rng(4)
    for _ in range(6):
        response = [1, 2, *random.integers(0, 3, 20).tolist()]
        history.add(das.Rollout(prompt_token_ids=[7], response_token_ids=response, training_step=0))
    drafter = das.Drafter(history)
    for number in range(len(lengths)):
        drafter.start(f"{number}", prompt_token_ids=[7])
        drafter.extend(f"{number}", [1])
    limits = {f"{number}": length for number, length in enumerate(lengths)}
    return list(
        das.plan_step(drafter, list(limits), policy=das.FixedBudget(16), max_draft_tokens=limits, shape=shape).values()
    )


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("width", [7, 9])
def test_every_node_sees_its_ancestors_and_padding_is_nobodys_child(shape, width):
    drafts = [*drafts_of(shape=shape, lengths=[0, 1, 5, 7]), None]
    assert [len(draft or ()) for draft in drafts] == [0, 1, 5, 7, 0]
    if shape == "tree":
        assert drafts[3].parents != list(range(-1, 6))
    roots = [11, 12, 13, 14, 15]
    tokens, mask = verify_arrays(drafts, roots, width=width)
    assert tokens.dtype == np.int64
    assert mask.dtype == np.bool_
    num_nodes = width + 1
    tokens, mask = tokens.reshape(-1, num_nodes), mask.reshape(-1, num_nodes, num_nodes)
    for row, draft in enumerate(drafts):
        length = len(draft or ())
        assert tokens[row].tolist() == [
            roots[row], *(draft.draft_token_ids if draft else []), *[roots[row]] * (width - length),
        ]  # fmt: skip
        for node in range(num_nodes):
            expected, at = {node}, node
            while 0 < at <= length:
                at = draft.parents[at - 1] + 1
                expected.add(at)
            assert set(np.flatnonzero(mask[row, node]).tolist()) == expected


def test_no_requests_and_width_0():
    tokens, mask = verify_arrays([], [], width=3)
    assert len(tokens) == len(mask) == 0
    tokens, mask = verify_arrays([None, None], [5, 6], width=0)
    assert tokens.tolist() == [5, 6]
    assert mask.tolist() == [True, True]


def test_a_draft_longer_than_the_width_is_refused():
    with pytest.raises(ValueError, match=r"drafts\[0\] has 7 tokens; it must have at most 3"):
        verify_arrays(drafts_of(shape="chain", lengths=[7]), [1], width=3)


def test_settings_can_be_shown():
    json.dumps(Settings().as_dict())
