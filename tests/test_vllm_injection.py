"""das given to engines that were made without a speculative_config, and settings that stop such engines."""

import json
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from das_vllm import plugin

INJECTED = {"method": "custom_class", "model": "das_vllm.DasProposer", "num_speculative_tokens": 4}
OTHER = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture
def engine_arguments(monkeypatch: pytest.MonkeyPatch) -> type:
    """vLLM's EngineArgs as far as das wraps it, and modules with the other classes that the plugin connects to."""

    class EngineArgs:
        def __init__(self, speculative_config: dict[str, Any] | None = None, spec_method: str | None = None) -> None:
            self.speculative_config, self.spec_method = speculative_config, spec_method

        def create_speculative_config(self, target_model_config: Any, target_parallel_config: Any) -> Any:
            return self.speculative_config

    def module(name: str, **classes: type) -> None:
        made = ModuleType(name)
        vars(made).update(classes)
        monkeypatch.setitem(sys.modules, name, made)

    module("vllm.engine.arg_utils", EngineArgs=EngineArgs)
    module("vllm.v1.worker.gpu_model_runner", GPUModelRunner=type("GPUModelRunner", (), {"execute_model": print}))
    module("vllm.v1.worker.worker_base", WorkerBase=type("WorkerBase", (), {}))
    module("vllm.v1.worker.gpu_worker", Worker=type("Worker", (), {}))
    module("vllm.v1.core.sched.scheduler", Scheduler=type("Scheduler", (), {"schedule": print}))
    return EngineArgs


def made(engine_arguments: type, **given: Any) -> Any:
    return engine_arguments(**given).create_speculative_config(SimpleNamespace(), target_parallel_config=None)


def test_engines_are_given_das_only_if_told_to(engine_arguments: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAS_VLLM_CONFIG", '{"inject_num_speculative_tokens": null}')
    plugin.register()
    assert made(engine_arguments) is None
    monkeypatch.setenv("DAS_VLLM_CONFIG", '{"inject_num_speculative_tokens": 4}')
    assert made(engine_arguments) is None  # nothing was wrapped
    plugin.register()
    plugin.register()
    assert made(engine_arguments) == INJECTED
    assert made(engine_arguments, speculative_config=OTHER) == OTHER
    assert made(engine_arguments, spec_method="ngram") is None  # a flag beside the argument
    monkeypatch.delenv("DAS_VLLM_CONFIG")
    assert made(engine_arguments) is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"inject_num_speculative_tokens": 16, "latency": "a100"}', "DAS_VLLM_CONFIG: latency is 'a100'"),
        ('{"inject_num_speculative_tokens": 65}', "DAS_VLLM_CONFIG: inject_num_speculative_tokens is 65; it must be"),
        ('{"inject_num_speculative_tokens": "16"}', "inject_num_speculative_tokens must be an int, not str"),
        ('{"inject_num_speculative_tokens": 16, "polcy": 1}', "DAS_VLLM_CONFIG has 'polcy', which is no setting"),
        ('{"inject_num_speculative_tokens": 16', "DAS_VLLM_CONFIG is not valid JSON"),
        ("/no/such/file", "DAS_VLLM_CONFIG is neither JSON nor a file that can be read"),
        ("FILE", "DAS_VLLM_CONFIG must be a mapping of settings, not list"),
    ],
)
def test_bad_settings_stop_an_engine_that_was_to_be_given_das(
    text: str, error: str, engine_arguments: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started without das, it would go on for days before somebody notices."""
    file = tmp_path / "das.json"
    file.write_text("[16]")
    monkeypatch.setenv("DAS_VLLM_CONFIG", str(file) if text == "FILE" else text)
    plugin.register()
    with pytest.raises((TypeError, ValueError)) as raised:
        made(engine_arguments)
    assert error in str(raised.value)
    assert made(engine_arguments, speculative_config=OTHER) == OTHER  # it does not draft with das
    assert made(engine_arguments, spec_method="ngram") is None


def test_bad_settings_that_inject_nothing_are_said_and_engines_without_das_start(
    engine_arguments: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for values in ({"latency": "a100"}, {"latency": "a100", "inject_num_speculative_tokens": None}):
        monkeypatch.setenv("DAS_VLLM_CONFIG", json.dumps(values))
        with caplog.at_level(logging.WARNING, "vllm.das_vllm"):
            caplog.clear()
            plugin.register()
        (told,) = [record.getMessage() for record in caplog.records]
        assert told.startswith("das: DAS_VLLM_CONFIG: latency is 'a100', which is no preset; there are: ")
        assert told.endswith("An engine whose speculative_config names das will not start; others start without das")
        assert made(engine_arguments) is None
