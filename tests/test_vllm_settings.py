"""Settings of das in vLLM: where they come from, and what is said of wrong ones."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import das
from das_vllm.settings import DEFAULT_POLICY, POLICIES, Settings, read_settings


def test_without_any_setting_the_defaults_hold() -> None:
    settings = read_settings({}, {})
    assert settings == Settings() == read_settings(None, {})
    assert isinstance(settings.make_policy(8), POLICIES[DEFAULT_POLICY])  # type: ignore[arg-type]
    assert settings.make_history().window_epochs == 4


def test_additional_config_goes_before_the_environment_name_by_name(tmp_path: Path) -> None:
    file = tmp_path / "das.json"
    file.write_text(json.dumps({"window_epochs": 2, "policy": "fixed"}))
    given = {"das": {"policy": "price", "policy_options": {"min_survival": 0.3}}, "somebody else's": 1}
    for text in (str(file), file.read_text()):
        settings = read_settings(given, {"DAS_VLLM_CONFIG": text})
        assert (settings.policy, settings.window_epochs) == ("price", 2)
        assert repr(settings.make_policy(8)) == "PriceBudget(max_draft_tokens=8, min_survival=0.3)"


def test_latency_is_a_preset_or_coefficients_or_learned() -> None:
    preset = Settings(latency="qwen2.5-7b-a100").make_policy(8)
    assert isinstance(preset, das.ThroughputBudget)
    assert preset.latency == das.latency_preset("qwen2.5-7b-a100").fit.latency
    given = read_settings({"das": {"latency": [8, 0.04]}}, {}).make_policy(8)
    assert isinstance(given, das.ThroughputBudget)
    assert given.latency == das.LatencyModel(c_base_ms=8, c_tok_ms=0.04)
    learned = Settings().make_policy(8, can_learn_latency=True)
    fixed = Settings().make_policy(8, can_learn_latency=False)
    assert "latency" in learned.state()
    assert "latency" not in fixed.state()  # nothing that a clock could change


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"polcy": "price"}, "'polcy', which is no setting; there are: policy, "),
        ({"policy": "best"}, "policy is 'best'; it must be one of length-aware, "),
        ({"policy": ["x"]}, "policy must be a string, not list"),
        (
            {"policy_options": {"min_survival": 0.1}},
            "policy_options has 'min_survival'; the options of 'length-aware' are: max_draft_tokens, length_weight",
        ),
        ({"policy_options": {"lengths": None}}, "policy_options has 'lengths'; the options of 'length-aware' are: max"),
        (
            {"policy": "class", "policy_options": {"classes": None}},
            "policy_options has 'classes'; the options of 'class' are: long, medium, short, min_survival",
        ),
        ({"policy": "none", "policy_options": {"x": 1}}, "the options of 'none' are: none"),
        ({"policy_options": [1]}, "policy_options must be a mapping, not list"),
        ({"policy": "fixed", "policy_options": {"max_draft_tokens": 65}}, "max_draft_tokens is 65; it must be"),
        ({"latency": "a100"}, "latency is 'a100', which is no preset; there are: "),
        ({"latency": [1.0]}, "latency is (1.0,); it must be a preset or 2 to 4 of c_base_ms, "),
        ({"latency": [-1.0, 1.0]}, "c_base_ms is -1.0"),
        ({"latency": 3}, "latency is 3; it must be"),
        ({"policy": "fixed", "latency": "a100"}, "latency is 'a100', which is no preset; there are: "),
        ({"window_epochs": 0}, "window_epochs is 0"),
        ({"window_epochs": "4"}, "window_epochs must be an int, not str"),
        ({"max_history_bytes": 0}, ": max_history_bytes is 0; it must be at least 1"),
        ({"max_history_bytes": -1}, ": max_history_bytes is -1; it must be 0 <= max_history_bytes < 2**62"),
        ({"max_history_bytes": 1.5}, ": max_history_bytes must be an int, not float"),
        ({"deterministic": 1}, "deterministic must be true or false, not 1"),
        ({"learn_from_engine": None}, "learn_from_engine must be true or false, not None"),
        ([1], "must be a mapping of settings, not list"),
    ],
)
def test_errors_name_source_setting_and_rule(values: Any, error: str) -> None:
    for source, additional_config, environment in (
        ('additional_config["das"]', {"das": values}, {}),
        ("DAS_VLLM_CONFIG", None, {"DAS_VLLM_CONFIG": json.dumps(values)}),
    ):
        if source == "DAS_VLLM_CONFIG" and not isinstance(values, dict):
            continue  # is read as a path
        with pytest.raises((TypeError, ValueError)) as raised:
            read_settings(additional_config, environment)
        assert source in str(raised.value)
        assert error in str(raised.value)


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (0, "inject_num_speculative_tokens is 0; it must be 1 <= inject_num_speculative_tokens <= 64"),
        (65, "inject_num_speculative_tokens is 65; it must be 1 <= inject_num_speculative_tokens <= 64"),
        (True, "inject_num_speculative_tokens must be an int, not bool"),
    ],
)
def test_what_is_injected_must_be_what_das_can_draft(number: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^DAS_VLLM_CONFIG: {error}$"):
        read_settings(None, {"DAS_VLLM_CONFIG": json.dumps({"inject_num_speculative_tokens": number})})


def test_injection_is_for_the_environment_only() -> None:
    """An engine that is given additional_config can be given speculative_config."""
    text = '{"inject_num_speculative_tokens": 4}'
    with pytest.raises(ValueError, match=r"has inject_num_\w+, which is read from DAS_VLLM_CONFIG only; pass spec"):
        read_settings({"das": json.loads(text)}, {})
    given = {"das": {"window_epochs": 2}}
    assert read_settings(given, {"DAS_VLLM_CONFIG": text}).inject_num_speculative_tokens == 4
    assert read_settings({"das": {"inject_num_speculative_tokens": None}}, {}) == Settings()


@pytest.mark.parametrize("policy", POLICIES)
def test_options_of_policies_are_those_that_json_can_say(policy: str) -> None:
    with pytest.raises(ValueError, match="policy_options has 'none of them'") as raised:
        Settings(policy=policy, policy_options={"none of them": 1})
    listed = str(raised.value).partition(" are: ")[2].split(", ")
    defaults = {name: one.default for name, one in inspect.signature(POLICIES[policy]).parameters.items()}
    expressible = [name for name, default in defaults.items() if isinstance(default, (int, float))]
    assert listed == (expressible or ["none"])
    Settings(policy=policy, policy_options={name: defaults[name] for name in expressible})


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in ("class", "none")])
def test_policies_go_up_to_what_the_engine_verifies_unless_told_otherwise(policy: str) -> None:
    for number in (1, 16, 64):
        assert Settings(policy=policy).make_policy(number).max_draft_tokens == number
    told = Settings(policy=policy, policy_options={"max_draft_tokens": 5})
    assert told.make_policy(64).max_draft_tokens == 5


def test_an_environment_variable_that_is_neither_json_nor_a_file_is_named() -> None:
    with pytest.raises(ValueError, match="DAS_VLLM_CONFIG is not valid JSON"):
        read_settings(None, {"DAS_VLLM_CONFIG": "{"})
    with pytest.raises(ValueError, match="DAS_VLLM_CONFIG is neither JSON nor a file that can be read"):
        read_settings(None, {"DAS_VLLM_CONFIG": "/no/such/file"})


@pytest.mark.parametrize("data", [b"\xff", b'{"window_epochs": %s}' % (b"1" * 5000), b"[" * 100_000])
def test_a_file_that_python_cannot_read_as_json_is_named_too(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "das.json"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"^DAS_VLLM_CONFIG is "):
        read_settings(None, {"DAS_VLLM_CONFIG": str(file)})


def test_settings_are_shown_as_json() -> None:
    shown = json.loads(str(Settings(latency=(8.0, 0.04), policy_options={"max_draft_tokens": 4})))
    assert shown["latency"] == [8.0, 0.04]
    assert Settings(**{**shown, "latency": tuple(shown["latency"])}) == Settings(
        latency=(8.0, 0.04), policy_options={"max_draft_tokens": 4}
    )
