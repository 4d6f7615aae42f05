"""The check of the installed SGLang, and what `das doctor` says of it, on sources written here."""

import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from das_sglang import compatibility, doctor
from das_sglang.compatibility import SEAMS
from das_sglang.settings import VARIABLE


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder "sglang" on the path that has all that das builds on; returns (write it, less one seam)."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.setattr(compatibility.metadata, "version", lambda name: "0.5.23")

    def write(without=None):
        modules = defaultdict(lambda: defaultdict(dict))
        for seam in SEAMS:
            owner, _, method = seam.name.rpartition(".")
            names = [name for name in seam.parameters if seam is not without]
            if seam is not without or seam.parameters:
                modules[seam.module][owner][method] = names
            else:
                modules[seam.module][owner].setdefault("", [])
        for module, owners in modules.items():
            lines = []
            for owner, functions in owners.items():
                indent = "    " if owner else ""
                lines += [f"class {owner}:", "    pass"] if owner else []
                lines += [f"{indent}def {name}({', '.join(args)}): pass" for name, args in functions.items() if name]
            file = tmp_path.joinpath("sglang", *module.split(".")).with_suffix(".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join(lines))
        (tmp_path / "sglang" / "__init__.py").write_text("")
        compatibility.problems.cache_clear()

    yield write
    compatibility.problems.cache_clear()


def test_an_sglang_that_has_everything_fits(sources):
    sources()
    assert compatibility.problems() == ()
    assert compatibility.reason_not_to_start() is None


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: f"{seam.module}.{seam.name}")
def test_whatever_is_missing_is_named(sources, seam):
    sources(without=seam)
    reason = compatibility.reason_not_to_start()
    assert reason is not None
    assert f"{seam.module}.{seam.name}" in reason
    assert "Use SGLang 0.5.23" in reason


def test_a_missing_module_is_named(sources, tmp_path):
    sources()
    (tmp_path / "sglang/srt/layers/sampler.py").unlink()
    compatibility.problems.cache_clear()
    assert "srt.layers.sampler.Sampler.forward (no such module)" in compatibility.problems()


def test_versions_within_the_extras_range():
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    oldest, below = (".".join(map(str, numbers)) for numbers in (compatibility.OLDEST, compatibility.BELOW))
    assert extras["sglang"] == [f"sglang>={oldest},<{below}"]
    inside = ["0.5.23", "0.5.23.post1", "0.5.23+cpu"]
    outside = ["0.5.22", "0.5.24", "0.5.24.dev3+gabc", "0.5.22.post3", "0.4.9", "0.6.0", "1.0"]
    assert [compatibility.is_in_range(version) for version in inside] == [True] * len(inside)
    assert [compatibility.is_in_range(version) for version in outside] == [False] * len(outside)


# ---------------------------------------------------------------- doctor


def rows():
    return {check.name: check for check in doctor.environment_checks()}


def test_doctor_without_sglang(monkeypatch):
    monkeypatch.setattr(compatibility.importlib.util, "find_spec", lambda name: None)
    ((what, state, text),) = doctor.checks()
    assert (what, state) == ("SGLang", "off")
    assert text.endswith("pip install sglang==0.5.23")


def test_doctor_of_a_good_installation(sources, monkeypatch):
    sources()
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    found = rows()
    assert all(found[name].ok for name in found if name != "SGLang: plugin")  # which only an installed das has
    assert "0.5.23" in found["SGLang"].detail
    assert "defaults" in found["SGLang: DAS_SGLANG"].detail
    assert {what: state for what, state, _ in doctor.checks()} == {
        name: "ok" if check.ok else "wrong" for name, check in found.items()
    }


def test_doctor_names_what_is_wrong_and_what_to_do(sources, monkeypatch):
    sources(without=SEAMS[0])
    monkeypatch.setenv(VARIABLE, '{"policy": "best"}')
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    monkeypatch.setattr(compatibility.metadata, "version", lambda name: "0.4.0")
    found = rows()
    wrong = {name: check for name, check in found.items() if not check.ok and name != "SGLang: plugin"}
    assert set(wrong) == {"SGLang", "SGLang: what das builds on", "SGLang: SGLANG_PLUGINS", "SGLang: DAS_SGLANG"}
    assert all(check.remedy for check in wrong.values())
    assert "load_plugins" in wrong["SGLang: what das builds on"].detail
    assert "policy is 'best'" in wrong["SGLang: DAS_SGLANG"].detail
