"""A griffe extension: show das' docstrings as they are written, sections as lists.

The usual parsers expect one name and one type a line; das names arguments that belong together in one, and says in
sentences what is raised.
"""

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Complexity|Source|Thread safety):[ \t]*(.*)$")
_ITEM = re.compile(r"^(\*{0,2}\w[\w, *]*): (.*)$")


def as_markdown(docstring: str) -> str:
    """Return a docstring with its sections as bold headings and bullet points. O(length)."""
    shown: list[str] = []
    in_section = False
    for line in docstring.splitlines():
        if heading := _SECTION.match(line):
            in_section = True
            shown += ["", f"**{heading[1]}:** {heading[2]}".rstrip(), ""]
        elif in_section and line.startswith("    "):
            shown.append(_in_section(line[4:]))
        else:
            in_section = in_section and not line
            shown.append(line)
    return "\n".join(shown)


def _in_section(line: str) -> str:
    item = _ITEM.match(line)
    if item:
        return f"- `{item[1]}`: {item[2]}"
    return f"    {line.strip()}" if line.startswith(" ") else line


class PlainDocstrings(griffe.Extension):
    """Rewrites every docstring of das."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each object that it has loaded."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
