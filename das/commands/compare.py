"""`das compare`: policies and drafter settings side by side on one log, by simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
from rich.progress import MofNCompleteColumn, TextColumn

from das.analysis.extra import analysis_package
from das.analysis.projection import Projection, Schedule
from das.analysis.recording import Recording
from das.analysis.report import Compared, compare_report
from das.analysis.simulate import simulate
from das.commands.engine_options import check_engine, check_log, engine_options
from das.commands.log_input import LogInput, log_options
from das.commands.parameter_types import Count, FilePath
from das.commands.policy_option import latency_option, policy_named
from das.commands.report_option import decoder, html_option, write_report
from das.commands.terminal import print_table, progress_bar
from das.file_errors import naming_file
from das.latency import DEFAULT_LATENCY, LatencyModel

_POLICIES = ("length-aware", "throughput", "price=0.15", "fixed=2", "fixed=4", "fixed=8", "unlimited")


@dataclass(frozen=True, slots=True)
class _Compared:
    """One row: what was chosen, and what it led to."""

    policy: str
    shape: str
    window_epochs: int
    projection: Projection
    recording: Recording | None  # for a report

    @property
    def makespan_s(self) -> float:
        return self.projection.makespan_s


@click.command()
@log_options
@click.option(
    "--policy",
    "policies",
    metavar="NAME[=N]",
    multiple=True,
    default=_POLICIES,
    help="A policy of `das replay`, with =N for its longest draft (length-aware, throughput, fixed, unlimited, aimd, "
    "goodput), its least survival (price, class) or its threshold (beg-mab, batch-threshold); may be repeated.  "
    f"[default: {' '.join(_POLICIES)}]",
)
@latency_option
@engine_options
@click.option(
    "--shape",
    "shapes",
    type=click.Choice(["chain", "tree"]),
    multiple=True,
    default=("chain",),
    help="Of the drafts; may be repeated.  [default: chain]",
)
@click.option(
    "--window-epochs",
    "windows",
    metavar="N",
    type=Count(least=1),
    multiple=True,
    default=(4,),
    help="Training steps of a prompt that the history keeps; may be repeated.  [default: 4]",
)
@html_option
@click.option(
    "--plot",
    metavar="FILE",
    type=FilePath(dir_okay=False),
    help="Draw the requests running over time, a curve for each row, as .svg, .png or .pdf.",
)
def compare(
    log: LogInput,
    *,
    as_json: bool,
    policies: Sequence[str],
    latency: LatencyModel | None,
    shapes: Sequence[Any],
    windows: Sequence[int],
    plot: Path | None,
    html: Path | None,
    **engine: Any,
) -> None:
    """Simulate the generation of a log under several policies and drafter settings, and print them side by side.

    LOG is a .jsonl, .jsonl.gz, .parquet or (slime's) .pt file, or a directory of such files; several are read as one,
    - is standard input.
    Every policy meets every --shape and every --window-epochs; what engines do is as in `das simulate`. Rows
    are in order of makespan, and "off" is speculation switched off. Ctrl-C prints the rows that are done.

    \b
    Examples:
      das compare rollouts.jsonl.gz --latency qwen2.5-7b-a100 --html report.html --plot running.svg
      das compare rollouts.jsonl.gz --policy length-aware --policy fixed=3 --policy fixed=5 --policy fixed=7
      das compare rollouts.jsonl.gz --policy length-aware --window-epochs 1 --window-epochs 16 --max-running 80

    \b
    Keys of --json:
      logs, formats (rows of each), partial (true after Ctrl-C), num_bad_rows, num_later_turns
      latency    {c_base_ms, c_tok_ms, c_kv_ms, c_engine_ms}
      compared   a list, in order of makespan: {policy, shape, window_epochs (as asked for), projection (what
                 `das simulate --json` says of it)}
    """
    check_engine(engine, shapes=tuple(shapes))
    log.refuse_as_output(html, "'--html'")
    log.refuse_as_output(plot, "'--plot'")
    if plot is not None:
        _check_plot(plot)  # before anything takes long
    decode = None if html is None else decoder(log.tokenizer)
    model = DEFAULT_LATENCY if latency is None else latency
    made = {text: policy_named(text, latency=model) for text in policies}
    compared: list[_Compared] = []
    rows = list(product(made, dict.fromkeys(shapes), dict.fromkeys(windows)))
    try:
        with log.records() as records:
            rollouts = [record.rollout for record in records]
        log.warn(tokenizer_is_used=html is not None)
        check_log(engine, rollouts)
        with progress_bar("simulating", MofNCompleteColumn(), TextColumn("tokens")) as progress:
            for number, (text, shape, window_epochs) in enumerate(rows):
                recording = None if html is None else Recording(rollouts)
                projection = simulate(
                    rollouts,
                    policy=made[text],
                    latency=model,
                    shape=shape,
                    window_epochs=window_epochs,
                    observer=recording,
                    progress=_part_of(progress, number, len(rows)),
                    **engine,
                )
                compared.append(_Compared(text, shape, window_epochs, projection, recording))
    except KeyboardInterrupt:
        if not compared:
            raise click.Abort from None
    partial = len(compared) < len(rows)
    compared.sort(key=lambda row: row.makespan_s)
    note = log.note()
    if html is not None and compared[0].recording is not None:
        page = compare_report(
            [Compared(_label(row, compared), row.projection) for row in compared],
            compared[0].recording,
            log_name=log.name,
            is_partial=partial,
            latency=latency,
            prompt_names=log.prompt_names,
            decode=decode,
            notes=[note],
        )
        note = f"{note} {write_report(html, page)}"
    if as_json:
        found = [
            {
                "policy": row.policy,
                "shape": row.shape,
                "window_epochs": row.window_epochs,
                "projection": row.projection.as_dict(),
            }
            for row in compared
        ]
        log.print_json({"latency": asdict(model), "compared": found}, partial=partial)
    else:
        _print(compared, model, note, is_assumed=latency is None, partial=partial)
    if plot is not None:
        _plot(compared, plot)
    if partial:
        raise click.Abort


def _part_of(progress: Callable[[int, int], None] | None, number: int, num_parts: int) -> Any:
    """The progress of one of several equal parts."""
    if progress is None:
        return None
    return lambda done, total: progress(number * total + done, num_parts * total)


def _print(compared: Sequence[_Compared], latency: LatencyModel, note: str, *, is_assumed: bool, partial: bool) -> None:
    headings = (
        "policy",
        "shape",
        "window",
        "makespan\ns",
        "times\nas fast",
        "step\ntimes\nas fast",
        "forwards",
        "tokens\nper\nstep",
        "drafted\nper\nstep",
        "accept.\nrate",
        "busy",
        "drafter\nus",
    )
    _, shape, window, _, _, step, forwards, tokens, drafted, rate, busy, drafter = headings
    off = compared[0].projection.without_drafts
    rows = [
        (
            row.policy,
            row.shape,
            str(row.window_epochs),
            *_times(row.projection.with_drafts, off),
            *_counts(row.projection.with_drafts),
            f"{row.projection.as_dict()['drafting_us']:.1f}",
        )
        for row in compared
    ]
    rows.append(("off", "-", "-", *_times(off, off), *_counts(off), "-"))
    settings = compared[0].projection.settings
    shown = ("group_size", "num_workers", "max_running", "assignment", "lag", "train_s", "execution", "draft_token_ms")
    best = compared[0].projection
    print_table(
        headings,
        rows,
        note,
        f"Settings: {', '.join(f'{name} {settings[name]}' for name in shown if settings[name] is not None)}; "
        f"{latency}{' (assumed; --latency takes yours)' if is_assumed else ''}.",
        "Makespan: time in which a rollout was running or waiting. Step: duration, training included. Busy: share of "
        "the workers' time within the makespan. The drafters' own time is measured on this machine, per request and "
        "decode step, and is in no other column.",
        f"Verdict on the first row, {compared[0].policy}: {best.verdict}.",
        drop_first=(busy, drafter, rate, window, shape, forwards, step, drafted, tokens),
        partial=partial,
    )


def _times(schedule: Schedule, off: Schedule) -> tuple[str, ...]:
    return (
        f"{schedule.makespan_s:,.1f}",
        f"{off.makespan_s / schedule.makespan_s:.3f}" if schedule.makespan_s else "-",
        f"{off.duration_s / schedule.duration_s:.3f}" if schedule.duration_s else "-",
    )


def _counts(schedule: Schedule) -> tuple[str, ...]:
    counters = schedule.counters
    return (
        f"{sum(worker.num_forwards for worker in schedule.workers):,}",
        f"{counters.tokens_per_decode_step:.2f}",
        f"{counters.drafted_per_decode_step:.2f}",
        f"{counters.draft_acceptance_rate:.1%}" if counters.num_drafted_tokens else "-",
        f"{schedule.utilisation:.0%}",
    )


def _pyplot() -> Any:
    analysis_package("matplotlib", needed_for="--plot")
    return analysis_package("matplotlib.pyplot", needed_for="--plot")


def _check_plot(path: Path) -> None:
    """Refuse a file that could not be written once all is compared."""
    kinds = sorted(_pyplot().figure().canvas.get_supported_filetypes())
    _pyplot().close()
    if path.suffix[1:] not in kinds:
        raise click.BadParameter(f"{path} must end in one of {', '.join(kinds)}.", param_hint="'--plot'")
    if not path.parent.is_dir():
        raise click.BadParameter(f"{path.parent} is no directory.", param_hint="'--plot'")


def _plot(compared: Sequence[_Compared], path: Path) -> None:
    """Draw the number of requests running over time; the slowest row is drawn first."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    styles = ("-", "--", "-.", ":")
    off = compared[0].projection.without_drafts
    runs = [("off", off), *((_label(row, compared), row.projection.with_drafts) for row in reversed(compared))]
    for number, (label, schedule) in enumerate(runs):
        width_s = schedule.duration_s / max(1, len(schedule.num_running))
        times = [width_s * i for i in range(len(schedule.num_running) + 1)]
        axes.stairs(
            schedule.num_running,
            times,
            baseline=None,
            linestyle=styles[number % len(styles)],
            label=f"{label}: {schedule.makespan_s:,.1f} s",
        )
    axes.set(xlabel="seconds", ylabel="requests running", xlim=0, ylim=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    with naming_file(path):
        figure.savefig(path)
    pyplot.close(figure)


def _label(row: _Compared, compared: Sequence[_Compared]) -> str:
    differing = [
        f"{name.partition('_')[0]} {getattr(row, name)}"
        for name in ("shape", "window_epochs")
        if len({getattr(other, name) for other in compared}) > 1
    ]
    return ", ".join([row.policy, *differing])
