"""Draw the runs of real_run.py.

    PYTHONPATH=. python examples/real_run/picture.py [--runs out/real_run] [--out out/real_run.svg]

Needs matplotlib (pip install 'das-drafter[analysis]').
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from findings import Prediction, compare, predictions, reward_curves
from run_file import Run, read_runs

ROOT = Path(__file__).parents[2]
WITHOUT, WITH_DAS, REPLAYED = "#9a5b13", "#1f5fa8", "#111111"  # told apart without colours too: by line, dot, cross


def main() -> None:
    """Draw what is in the folder."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=Path, default=ROOT / "out" / "real_run", help="folder (%(default)s)")
    options.add_argument("--out", type=Path, default=ROOT / "out" / "real_run.svg", help="(%(default)s)")
    given = options.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    draw(given.runs, given.out)
    print(given.out)


def draw(folder: Path, out: Path) -> None:
    """Draw a row for each engine that has runs: rewards, decode steps, makespans."""
    from matplotlib import pyplot

    engines = [engine for engine in ("sglang", "vllm") if read_runs(folder, engine=engine, drafts=True)]
    if not engines:
        raise FileNotFoundError(f"{folder} holds no runs; real_run.py writes them")
    settings: Any = {
        "svg.hashsalt": "das",
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.grid": True,
        "grid.alpha": 0.3,
    }
    with pyplot.rc_context(settings):
        figure, rows = pyplot.subplots(len(engines), 3, figsize=(11, 2.9 * len(engines)), squeeze=False)
        for engine, axes in zip(engines, rows, strict=True):
            undrafted, drafted = (read_runs(folder, engine=engine, drafts=drafts) for drafts in (False, True))
            replayed = [predictions(run) for run in drafted]
            draw_rewards(axes[0], undrafted, drafted)
            draw_counts(axes[1], "num_decode_steps", undrafted, drafted, replayed)
            draw_counts(axes[2], "makespan_passes", undrafted, drafted, replayed)
            name = {"sglang": "SGLang, keyed noise", "vllm": f"vLLM, {len(drafted)} seeds"}[engine]
            for panel, title in zip(axes, ("mean reward", "decode steps", "makespan in passes"), strict=True):
                panel.set(title=f"{name}: {title}", xlabel="training step", ylim=0)
                panel.xaxis.get_major_locator().set_params(integer=True)
        rows[0][1].legend(fontsize=8)
        figure.tight_layout()
        figure.savefig(out, metadata={"Date": None})
        pyplot.close(figure)


def draw_rewards(axes: Any, undrafted: Sequence[Run], drafted: Sequence[Run]) -> None:
    """Draw mean curves; where there are several seeds, each one thinly, and the band around the mean without das."""
    without, with_das = reward_curves(undrafted), reward_curves(drafted)
    for curves, colour, style in ((without, WITHOUT, "-"), (with_das, WITH_DAS, "o")):
        axes.plot(curves.mean(0), style, color=colour, markersize=4)
        if len(curves) > 1:
            axes.plot(curves.T, color=colour, alpha=0.3, linewidth=0.7)
    if len(without) > 1:
        middle, band = without.mean(0), compare(without, with_das).band
        axes.fill_between(np.arange(len(middle)), middle - band, middle + band, color=WITHOUT, alpha=0.15, linewidth=0)


def draw_counts(
    axes: Any, name: str, undrafted: Sequence[Run], drafted: Sequence[Run], replayed: Sequence[Sequence[Prediction]]
) -> None:
    """Draw a count by training step, mean over seeds: without, with das, and what the replay of these rollouts says."""
    shown: tuple[tuple[Sequence[Sequence[Any]], str, str, str], ...] = (
        (undrafted, WITHOUT, "-", "without"),
        (drafted, WITH_DAS, "o", "with das"),
        (replayed, REPLAYED, "x", "replayed"),
    )
    for runs, colour, style, label in shown:
        values = np.array([[getattr(step, name) for step in run] for run in runs])
        axes.plot(values.mean(0), style, color=colour, markersize=5 if style == "x" else 4, label=label)


if __name__ == "__main__":
    main()
