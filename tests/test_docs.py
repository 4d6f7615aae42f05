"""The documentation: its code runs, its commands exist, its links lead somewhere, its pictures are what they say."""

import gzip
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from command_runs import REPOSITORY
from documentation import PAGES, TEXTS, Block, anchors, blocks, links

import das
import das_command

ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]
OWN_PAGES = [page for page in PAGES if page.parent.name == "docs"]
# What starts an engine, a trainer or an installation: run by engine and packaging tests, if at all.
NOT_RUN_HERE = (
    "pip install",
    "python -m sglang.launch_server",
    "vllm serve",
    "git clone",
    "bash .ci/run",
    "python train.py",
    "trl vllm-serve",
)


def name_of(block: Block) -> str:
    return f"{block.page.name}:{block.line}"


def languages(*wanted: str) -> list[Block]:
    return [block for block in ALL_BLOCKS if block.language in wanted]


@pytest.fixture
def a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the pages' commands are run in: a log under the name that they use, and what else they name."""
    with gzip.open(REPOSITORY / "examples" / "amc23_rollouts.jsonl.gz", "rt") as log:
        rows = "".join(islice(log, 16))
    with gzip.open(tmp_path / "my_rollouts.jsonl.gz", "wt") as log:
        log.write(rows)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    shutil.copy(REPOSITORY / "examples" / "latency_a100_qwen2.5-7b.csv", tmp_path / "measured.csv")
    das.save_state(tmp_path / "saved", drafter=das.Drafter())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", OWN_PAGES, ids=lambda page: page.name)
def test_python_runs(page: Path, a_log: Path) -> None:
    """A page's blocks go on from each other. Those that need an engine have to be Python, at least."""
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python":
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            if not block.runs_in:
                exec(code, names)


def commands(block: Block) -> list[str]:
    """The command lines of a block, comments cut off, lines that end in a backslash joined."""
    text = block.text.replace("\\\n", " ")
    lines = (re.sub(r"\s+#.*", "", line).strip() for line in text.splitlines())
    return [line.removeprefix("$ ") for line in lines if line and not line.startswith("#")]


SHELL = [
    (name_of(block), line)
    for block in languages("", "console", "bash")
    if not block.runs_in
    for line in commands(block)
]
DAS = {line: where for where, line in SHELL if line.startswith("das ")}  # each once, however many pages tell it


@pytest.mark.parametrize(("line", "where"), DAS.items(), ids=DAS)
def test_das_commands_run(line: str, where: str, a_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page tells to type works; where a tokenizer is to be given, there is none."""
    arguments = shlex.split(line)
    monkeypatch.setattr(sys, "argv", arguments)
    code = das_command.main()
    assert code == (1 if "tokenizer.json" in arguments else 0), f"{where}: {line}"


def is_known(line: str) -> bool:
    """Does a command that is not run here exist?"""
    if line.startswith("make "):
        (target,) = re.findall(r"^make ([\w-]+)", line)
        return re.search(rf"^{target}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE) is not None
    if module := re.match(r"python -m ((?:bench|das)[\w.]*)", line):
        return importlib.util.find_spec(module[1]) is not None
    if script := re.match(r"python ([\w/.]+\.py)", line):
        return (REPOSITORY / script[1]).exists() or line.startswith(NOT_RUN_HERE)
    return line.startswith(("das ", *NOT_RUN_HERE)) or re.match(r"[A-Z_]+=", line) is not None


@pytest.mark.parametrize(("where", "line"), SHELL, ids=[f"{where}:{line}" for where, line in SHELL])
def test_commands_exist(where: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY))
    assert is_known(line), f"{where}: {line}"


def test_other_commands_are_noticed() -> None:
    for line in ("make tea", "python -m bench.nothing", "dsa replay log", "python examples/none.py"):
        assert not is_known(line)


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    """Also out of the folder that a page really lies in: docs/design.md is the DESIGN.md above it."""
    for target in links(page):
        if not re.match(r"https?://|mailto:", target):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(file), f"{page.name}: {target}"
            is_on_the_site = page.parent == REPOSITORY / "docs" and not page.is_symlink()
            assert not is_on_the_site or not path.startswith("../"), f"{page.name}: {target} is not part of the site"


def test_the_picture_of_the_tree_is_drawn_from_a_tree() -> None:
    script = REPOSITORY / "docs" / "pictures" / "draw_tree.py"
    environment = {"PYTHONPATH": str(REPOSITORY)}
    drawn = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=environment)
    assert drawn.stdout == script.with_name("suffix_tree.svg").read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation() -> None:
    navigation = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1].split("\nplugins:")[0]
    listed = re.findall(r": (\w+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in OWN_PAGES)


def test_the_api_page_names_everything_public() -> None:
    text = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"^::: das\.(\w+)$", text, re.MULTILINE) if name != "analysis"}
    assert named == set(das.__all__)
