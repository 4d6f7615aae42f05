"""Plots what `bench_accept` has measured: accepted against drafted tokens per decode step, one line a rule.

    python -m bench.plot_accept [--out out]

Reads `bench_accept.jsonl` there and writes an SVG file for each order and history in it; the newest row of a setting
counts.
"""

import argparse
import json
from pathlib import Path

from bench.bench_accept import FAMILIES
from bench.harness import ROOT, Row

Group = tuple[str, int]  # order, samples of history
Curve = list[tuple[float, float]]  # (drafted, accepted) per decode step


def curves_of(rows: list[Row]) -> dict[Group, dict[str, Curve]]:
    """Group the rows that carry a measurement: (order, history) -> rule -> its settings, in order of drafted tokens."""
    points: dict[Group, dict[str, dict[float, tuple[float, float]]]] = {}
    for row in rows:
        if "error" in row or row["job"]["family"] not in FAMILIES:
            continue
        rules = points.setdefault((row["job"]["order"], row["history_samples"]), {})
        point = row["drafted_per_step"], row["drafted_per_step"] * row["acceptance_rate"]
        rules.setdefault(row["job"]["family"], {})[row["job"]["value"]] = point
    return {
        group: {rule: sorted(by_value.values()) for rule, by_value in rules.items()} for group, rules in points.items()
    }


def plot(curves: dict[str, Curve], title: str, path: Path) -> None:
    """Draw one figure: a marker a setting, so that colours are not needed to tell the rules apart."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5))
    markers = "osD^v<>PX*hd"
    for number, (rule, points) in enumerate(curves.items()):
        axes.plot(
            *zip(*points, strict=True), marker=markers[number % len(markers)], markersize=5, linewidth=1.2, label=rule
        )
    axes.set(title=title, xlabel="drafted tokens per decode step", ylabel="accepted tokens per decode step", xlim=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Plot all there is."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, default=ROOT / "out", help="folder of the JSON lines (%(default)s)")
    folder = options.parse_args().out
    lines = (folder / "bench_accept.jsonl").read_text().splitlines()
    for (order, history), curves in curves_of([json.loads(line) for line in lines]).items():
        path = folder / f"accept_{order}_history{history}.svg"
        plot(curves, f"order {order}, {history or 'no'} earlier samples of each prompt", path)
        print(path)


if __name__ == "__main__":
    main()
