"""`das inspect`: what is in a log."""

from __future__ import annotations

from dataclasses import asdict

import click

from das.analysis.inspect import LogStatistics, LogSummary, StepSummary
from das.commands.log_input import LogInput, log_options
from das.commands.terminal import print_table


@click.command()
@log_options
def inspect(log: LogInput, *, as_json: bool) -> None:
    """Say what is in a log: rollouts, prompts, lengths, rewards, by training step.

    LOG is a .jsonl, .jsonl.gz, .parquet or (slime's) .pt file, or a directory of such files; several are read as one,
    - is standard input.
    Ctrl-C prints what was read so far.

    \b
    Keys of --json:
      logs, formats (rows of each), partial (true after Ctrl-C), num_bad_rows, num_later_turns
      epochs_per_prompt   {mean, min, max}
      total               one summary of everything
      training_steps      one summary for each training step
    Keys of a summary:
      training_step (null: not known, or total), num_rollouts, num_prompts
      samples_per_prompt  {mean, min, max}, within a training step
      response_tokens     {sum, mean, p50, p90, p99, max}
      token_share         of the log's response tokens, 0..1
      reward_mean, truncated_share (null: the log does not say)
    """
    statistics, partial = LogStatistics(), False
    try:
        with log.records() as records:
            for record in records:
                statistics.add(record)
    except KeyboardInterrupt:
        partial = True
    log.warn()
    summary = statistics.summary()
    if summary is not None and as_json:
        log.print_json(asdict(summary), partial=partial)
    elif summary is not None:
        _print(summary, log.note(), partial=partial)
    if partial:
        raise click.Abort


def _print(summary: LogSummary, note: str, *, partial: bool) -> None:
    epochs = summary.epochs_per_prompt
    print_table(
        ("step", "rollouts", "prompts", "samples", "mean", "p50", "p90", "p99", "max", "tokens", "reward", "cut"),
        [
            _cells(step, "-" if step.training_step is None else str(step.training_step))
            for step in summary.training_steps
        ],
        note,
        total=_cells(summary.total, "all"),
        drop_first=("p50", "p90", "samples", "p99", "cut", "prompts", "reward", "mean", "tokens", "rollouts", "max"),
        partial=partial,
        caption=f"{summary.total.response_tokens.sum:,} response tokens; a prompt comes in {epochs.mean:.4g} "
        f"epoch{'s' if epochs.max > 1 else ''} ({epochs.min} to {epochs.max})",
    )


def _cells(step: StepSummary, name: str) -> tuple[str, ...]:
    samples, tokens = step.samples_per_prompt, step.response_tokens
    return (
        name,
        f"{step.num_rollouts:,}",
        f"{step.num_prompts:,}",
        f"{samples.min}" if samples.min == samples.max else f"{samples.min}-{samples.max}",
        f"{tokens.mean:.0f}",
        *(str(length) for length in (tokens.p50, tokens.p90, tokens.p99, tokens.max)),
        f"{step.token_share:.1%}",
        _reward(step.reward_mean),
        "-" if step.truncated_share is None else f"{step.truncated_share:.1%}",
    )


def _reward(mean: float | None) -> str:
    if mean is None:
        return "-"
    return f"{mean:.3f}" if abs(mean) < 1e6 else f"{mean:.3g}"
