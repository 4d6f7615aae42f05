"""Draw the suffix tree of docs/tree.md: python docs/pictures/draw_tree.py > docs/pictures/suffix_tree.svg

Every count in the picture is asked of a real `das.SuffixTree`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html import escape

from das import SuffixTree

WORDS = ["so", "2", "+", "3", "is", "5", "6"]
ROLLOUTS = ["so 2 + 3 is 5", "so 2 + 3 is 6"]  # of an earlier epoch
RUNNING = "so 2 +"
ORDER = 3  # longest context drawn; das keeps 16
BOX_WIDTH, BOX_HEIGHT, COLUMN, ROW = 92, 30, 170, 42
STYLE = """
  .box { fill: #eef3fb; stroke: #3b6ea8 }
  .seen { fill: #fdf0d5; stroke: #b7791f }
  text { font: 13px sans-serif; fill: #1a202c }
  .line { stroke: #7a8699; fill: none }
  .count { font-size: 11px; fill: #4a5568 }
  @media (prefers-color-scheme: dark) {
    .box { fill: #1f2d3d; stroke: #7fb0e6 }
    .seen { fill: #3d2f12; stroke: #e0b050 }
    text { fill: #e8edf3 }
    .count { fill: #b4bfcc }
  }
"""


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


@dataclass
class Box:
    """A context: the path from the root to it."""

    context: list[int]
    children: list[Box] = field(default_factory=list)
    row: float = 0.0


def grow(tree: SuffixTree, box: Box) -> Box:
    """Add a box for every continuation that was seen, down to the longest context."""
    if len(box.context) < ORDER:
        for token in range(len(WORDS)):
            if sum(tree.child_counts(box.context, token)):
                box.children.append(grow(tree, Box([*box.context, token])))
    return box


def place(box: Box, next_row: int) -> int:
    """Give each box a row: leaves one each, others the middle of their children. Returns the next free row."""
    if not box.children:
        box.row = next_row
        return next_row + 1
    for child in box.children:
        next_row = place(child, next_row)
    box.row = (box.children[0].row + box.children[-1].row) / 2
    return next_row


def drawn(tree: SuffixTree, box: Box) -> list[str]:
    """The box, its line to each child, and what is below."""
    x, y = 10 + COLUMN * len(box.context), 10 + ROW * box.row
    parts = []
    for child in box.children:
        start, end = (x + BOX_WIDTH, y + BOX_HEIGHT / 2), (x + COLUMN, 10 + ROW * child.row + BOX_HEIGHT / 2)
        bend = (start[0] + end[0]) / 2
        curve = f"M{start[0]},{start[1]} C{bend},{start[1]} {bend},{end[1]} {end[0]},{end[1]}"
        parts.append(f'<path class="line" d="{curve}"/>')
    is_context = bool(box.context) and ids(RUNNING)[-len(box.context) :] == box.context
    word = escape(WORDS[box.context[-1]]) if box.context else "(start)"
    kind, size = "seen" if is_context else "box", f'width="{BOX_WIDTH}" height="{BOX_HEIGHT}"'
    parts.append(f'<rect class="{kind}" x="{x}" y="{y}" {size} rx="6"/>')
    parts.append(f'<text x="{x + 10}" y="{y + 20}">{word}</text>')
    if box.context:
        times = sum(tree.child_counts(box.context[:-1], box.context[-1]))
        parts.append(f'<text class="count" x="{x + BOX_WIDTH - 10}" y="{y + 20}" text-anchor="end">{times} x</text>')
    for child in box.children:
        parts += drawn(tree, child)
    return parts


def main() -> None:
    """Print the picture."""
    tree = SuffixTree()
    for rollout in ROLLOUTS:
        tree.add(ids(rollout))
    tree.extend(tree.open(), ids(RUNNING))
    root = grow(tree, Box([]))
    height = 20 + ROW * place(root, 0)
    width = 20 + COLUMN * ORDER + BOX_WIDTH
    label = "Suffix tree of two rollouts and a running one, contexts of up to three words, with how often each was seen"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
    sys.stdout.write("\n".join([head, f"<style>{STYLE}</style>", *drawn(tree, root), "</svg>"]) + "\n")


if __name__ == "__main__":
    main()
