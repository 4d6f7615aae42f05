"""The pages of the documentation, cut into what tests look at: fenced blocks, links, headings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from command_runs import REPOSITORY

_FOLDERS = ("bench", "examples", "integrations", "tests")
PAGES = sorted([REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").glob("*.md")])
TEXTS = sorted({*PAGES, *REPOSITORY.glob("*.md"), *(p for d in _FOLDERS for p in (REPOSITORY / d).rglob("*.md"))})
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_RUNS_IN = re.compile(r"<!-- runs in: (\w+) -->\s*$")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Args:
        page: the file it is in.
        line: of its first line of text, from 1.
        language: as written behind the fence; "" where nothing is.
        text: what is in it.
        runs_in: the engine that it needs, by a comment `<!-- runs in: vllm -->` before it; "" where it needs none.
    """

    page: Path
    line: int
    language: str
    text: str
    runs_in: str


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()]
        engine = _RUNS_IN.search(before.rstrip() + "\n")
        line = before.count("\n") + 2
        found.append(Block(page, line, match[1], match[2], engine[1] if engine else ""))
    return found


def links(page: Path) -> list[str]:
    """Return the targets of a page's links and pictures, code left out."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return _LINK.findall(re.sub(r"`[^`]*`", "", text))


def anchors(page: Path) -> set[str]:
    """Return the names under which a page's headings can be linked to."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
