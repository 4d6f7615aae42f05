"""Reports of small logs for the tests, and a reader of their HTML."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

from das.analysis.recording import Recording
from das.analysis.replay import Replay, ReplayResult


@dataclass
class Page(HTMLParser):
    """What a browser would make of a page: its elements, their attributes, the text that is shown, and the scripts."""

    html: str
    elements: Counter[str] = field(default_factory=Counter)
    attributes: list[tuple[str, str, str | None]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._inside = ""
        self.feed(self.html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        """All that is shown, words apart by one blank."""
        return " ".join(" ".join(self.texts).split())

    @property
    def plots(self) -> dict[str, Any]:
        """The plots, by name."""
        return json.loads(self.scripts[0])


def watched_replay(log: list[Any], **settings: Any) -> tuple[ReplayResult, Recording]:
    """Replay a log to its end, watched for a report."""
    recording = Recording(log)
    run = Replay(log, observer=recording, **settings)
    run.run()
    return run.result(), recording
