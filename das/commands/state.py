"""`das state`: look at a saved state, write it anew, turn it into a Parquet log, and make one of logs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from das.analysis.rollout_tables import write_parquet
from das.commands.log_input import LogInput, log_options
from das.commands.parameter_types import Count, FilePath
from das.commands.terminal import print_json
from das.history import RolloutHistory
from das.state import SavedState, compact_state, load_state, save_state
from das.state_directory import HEAD_NAME, SaveSummary

_NO_LIMIT_BYTES = (1 << 62) - 1
_directory = click.argument("directory", metavar="DIR", type=FilePath())
_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


@click.group(invoke_without_command=True)
@click.pass_context
def state(context: click.Context) -> None:
    """Saved states (das.save_state): every command that reads logs takes their directory, too."""
    if context.invoked_subcommand is None:
        raise click.UsageError("A command is missing.")


@state.command()
@_directory
@_as_json
def show(directory: Path, as_json: bool) -> None:
    """Check a saved state, every byte of it, and say what it holds.

    \b
    Keys of --json:
      directory, num_prompts, num_rollouts, num_tokens (of responses)
      training_steps         {min, max} (null: there is no rollout)
      num_bytes, num_segments
      history                settings of the history that was saved
      num_predictions        that confidence goes by (null: none was saved)
      policy                 the class of the policy (null: none was saved)
    """
    figures = _figures(directory, load_state(directory))
    if as_json:
        print_json(figures)
        return
    steps = figures["training_steps"]
    click.echo(
        f"{directory}: whole and undamaged, {figures['num_bytes']:,} bytes in {figures['num_segments']} segments"
    )
    click.echo(
        f"{figures['num_rollouts']:,} rollouts of {figures['num_prompts']:,} prompts, {figures['num_tokens']:,} "
        f"response tokens" + (f", training steps {steps['min']} to {steps['max']}" if steps else "")
    )
    click.echo(", ".join(f"{name} {value:,}" for name, value in figures["history"].items()))
    if figures["num_predictions"] is not None:
        click.echo(f"confidence of {figures['num_predictions']:,.0f} predictions")
    if figures["policy"] is not None:
        click.echo(f"state of a {figures['policy']}")


@state.command()
@_directory
@_as_json
def compact(directory: Path, as_json: bool) -> None:
    """Write a saved state anew, without what is of no use any more. Saves do that by themselves when it pays.

    --json prints what `das.compact_state` returns.
    """
    _print_summary(directory, compact_state(directory), as_json=as_json)


@state.command()
@_directory
@click.argument("file", metavar="FILE.parquet", type=FilePath())
def export(directory: Path, file: Path) -> None:
    """Write the rollouts of a saved state to a Parquet file, which is a log as the other commands read it."""
    if file.suffix != ".parquet":
        raise click.BadParameter(
            f"{file} does not end in .parquet, by which logs are known.", param_hint="FILE.parquet"
        )
    num_rollouts = write_parquet(file, load_state(directory).rollouts())
    click.echo(f"{file}: {num_rollouts:,} rollouts")


@state.command("import")
@_directory
@log_options
@click.option("--window-epochs", metavar="N", type=Count(least=1), default=4, show_default=True)
def import_(log: LogInput, *, directory: Path, as_json: bool, window_epochs: int) -> None:
    """Make a saved state of logs: what a history would hold that has seen them. DIR must not hold a state yet.

    --json prints what `das.save_state` returns.
    """
    if (directory / HEAD_NAME).exists():
        raise FileExistsError(f"{directory}: it holds a saved state already")
    history = RolloutHistory(window_epochs=window_epochs, max_bytes=_NO_LIMIT_BYTES)
    with log.records() as records:
        history.add_many(record.rollout for record in records)
    log.warn()
    _print_summary(directory, save_state(directory, history=history), as_json=as_json)


def _figures(directory: Path, saved: SavedState) -> dict[str, Any]:
    steps = [rollout.training_step or 0 for rollout in saved.rollouts()]
    confidence = saved.confidence
    return {
        "directory": str(directory),
        "num_prompts": len(saved.windows),
        "num_rollouts": len(steps),
        "num_tokens": sum([len(rollout.response_token_ids) for rollout in saved.rollouts()]),
        "training_steps": {"min": min(steps), "max": max(steps)} if steps else None,
        "num_bytes": saved.num_bytes,
        "num_segments": saved.num_segments,
        "history": saved.history_settings,
        "num_predictions": None if confidence is None else float(np.sum(confidence["hits"] + confidence["misses"])),
        "policy": saved.policy_name,
    }


def _print_summary(directory: Path, summary: SaveSummary, *, as_json: bool) -> None:
    if as_json:
        print_json({"directory": str(directory), **asdict(summary)})
    else:
        click.echo(
            f"{directory}: {summary.num_rollouts:,} rollouts of {summary.num_prompts:,} prompts, "
            f"{summary.num_bytes:,} bytes in {summary.num_segments} segments"
        )
