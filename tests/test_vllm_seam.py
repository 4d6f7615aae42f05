"""The seam check: what it finds in sources, what it says of what is missing, and what `das doctor` makes of it."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_runs import REPOSITORY
from vllm_runner import vllm_config

from das import cli
from das_vllm import DasProposer, doctor, plugin, seam
from das_vllm.seam import HOOKS, check


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Sources that hold all that das relies on, and nothing else."""
    for hook in HOOKS:
        file = tmp_path / "vllm" / hook.file
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as source:
            source.writelines(line_with(need) for need in hook.needs)
    return tmp_path / "vllm"


def line_with(need: str) -> str:
    return f"self.drafter.{need}\n" if "(" in need else f"{need}\n"


def test_sources_that_hold_everything_fit(package: Path) -> None:
    assert [found.name for found in check(package)] == [hook.name for hook in HOOKS]
    assert all(found.fits for found in check(package))


@pytest.mark.parametrize(("hook", "need"), [(hook, need) for hook in HOOKS for need in hook.needs])
def test_what_is_missing_is_named_with_its_remedy(package: Path, hook, need) -> None:
    file = package / hook.file
    lines = [
        line for line in file.read_text().splitlines(True) if not re.search(rf"(?<!\w){re.escape(need)}(?!\w)", line)
    ]
    file.write_text("".join(lines))
    (found,) = [found for found in check(package) if found.name == hook.name]
    assert not found.fits
    assert need in found.missing
    assert found.remedy == hook.remedy


def test_other_arguments_of_propose_do_not_fit(package: Path) -> None:
    file = package / "v1/worker/gpu_model_runner.py"
    file.write_text(file.read_text().replace("num_tokens_no_spec", "num_tokens"))
    (found,) = [found for found in check(package) if not found.fits]
    assert found.is_essential
    assert "self.input_batch.num_tokens_no_spec" in found.missing[0]


def test_files_that_are_absent_or_no_python_lack_everything(package: Path) -> None:
    (package / "config/speculative.py").write_text("def (")
    (package / "v1/worker/worker_base.py").unlink()
    missing = {found.name: found.missing for found in check(package) if not found.fits}
    assert missing == {"speculative method custom_class": ("custom_class",), "WorkerBase": ("WorkerBase",)}


def test_register_never_raises_and_says_what_does_not_fit(
    package: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A vLLM without any of the modules that the plugin connects to."""
    (package / "__init__.py").touch()
    (package / "v1/worker/worker_base.py").write_text("")
    for folder in ("v1", "v1/worker"):
        (package / folder / "__init__.py").touch()
    (package / "v1/worker/gpu_model_runner.py").write_text("class Renamed: pass")
    (package / "v1/worker/gpu_worker.py").write_text("")
    monkeypatch.syspath_prepend(str(package.parent))
    before = set(sys.modules)
    try:
        plugin.register()
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "bind_runners does not fit vllm of unknown version (AttributeError" in said
    assert "WorkerBase lacks WorkerBase. Off: RPC methods" in said


def test_a_vllm_that_calls_its_drafter_otherwise_is_named_at_start_and_the_engine_goes_on(
    package: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (package / "__init__.py").touch()
    file = package / "v1/worker/gpu_model_runner.py"
    file.write_text(file.read_text().replace("num_tokens_no_spec", "num_tokens"))
    (package / "v1/worker/worker_base.py").unlink()
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(seam, "version", {"vllm": "0.99.0"}.__getitem__)
    with caplog.at_level(logging.INFO, "vllm.das_vllm"):
        proposer = DasProposer(vllm_config())
    settings, error, warning = [record.getMessage() for record in caplog.records]
    assert "drafts up to 4 tokens a request and step" in settings
    assert "vllm 0.99.0 does not fit: WorkerBase lacks WorkerBase" in warning
    assert "das is off from here on; the engine goes on without drafts" in error
    assert "vllm 0.99.0 does not fit: GPUModelRunner's call of propose() lacks propose(" in error
    assert "install a vLLM of 0.22 to 0.33" in error
    assert not proposer.is_drafting
    assert proposer.propose(3, object(), sampled_token_ids=[[1], [2]]) == [[], []]


def test_doctor_prints_a_line_a_check_and_fails_if_something_is_wrong(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "installed_package", lambda: package)
    monkeypatch.setattr(doctor, "entry_points", lambda group: [])
    assert cli.main(["doctor", "--json"]) == 0
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)["checks"]}
    assert (rows["vLLM"]["state"], rows["vLLM seam"]["state"], rows["vLLM plugin"]["state"]) == ("ok", "ok", "off")
    assert rows["vLLM settings"]["text"].startswith('defaults: {"policy"')

    (package / "v1/spec_decode/custom_class_proposer.py").unlink()
    monkeypatch.setenv("DAS_VLLM_CONFIG", '{"policy": "best"}')
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(
        re.match(r"vLLM seam +wrong +create_custom_proposer lacks create_custom_proposer, .*das cannot", x)
        for x in lines
    )
    assert any(re.match(r"vLLM settings +wrong +DAS_VLLM_CONFIG: policy is 'best'", x) for x in lines)


def test_doctor_says_what_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "installed_package", lambda: None)
    assert cli.main(["doctor"]) == 0
    assert "pip install 'vllm>=0.22,<0.34'" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "checks", lambda: 1 / 0)
    assert cli.main(["doctor"]) == 1
    assert re.search(r"das_vllm +wrong +its checks failed: ZeroDivisionError", capsys.readouterr().out)


def test_the_adapter_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, das_vllm, das_vllm.plugin, das_vllm.doctor; print(sorted({'vllm', 'torch'} & set(sys.modules)))"
    path = f"{REPOSITORY}:{REPOSITORY / 'integrations'}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path}, timeout=60
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
