"""`das latency`: fit the latency model to measured passes, list the presets."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from das.analysis.latency_sweep import fit_of, read_latency_sweep
from das.commands.parameter_types import FilePath
from das.commands.terminal import print_json, print_table
from das.latency import LatencyFit
from das.latency_presets import LATENCY_PRESETS


@click.group(invoke_without_command=True)
@click.pass_context
def latency(context: click.Context) -> None:
    """How long a forward pass takes: t = c_base + c_tok * tokens + c_kv * tokens of context, in milliseconds."""
    if context.invoked_subcommand is None:
        raise click.UsageError("A command is missing.")


@latency.command()
@click.argument("file", type=FilePath())
@click.option("--no-context", is_flag=True, help="Leave c_kv_ms at 0, also where FILE tells the context.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def fit(file: Path, no_context: bool, as_json: bool) -> None:
    """Fit the latency model to measured passes: least squares of relative errors, no coefficient below 0.

    FILE is a CSV file with a header. Either a row has num_tokens (computed in the pass: one a request, and its draft
    tokens), step_ms and, where known, num_context_tokens (summed over the batch); or it has batch, gamma (draft tokens
    of each request; absent: 0), seq (context of each; absent: not known) and median_ms or mean_ms, as in
    EfficientRollout's sweeps. Of these, rows of batch 0 are skipped, and where there is a mode those of other modes
    than target_decode and target_verify. The last line printed is what --latency of other commands takes.

    \b
    Keys of --json:
      file, num_skipped      rows that are no passes of the target model
      num_steps              passes that the model was fitted to
      latency                {c_base_ms, c_tok_ms, c_kv_ms, c_engine_ms}; c_engine_ms is not fitted: 0
      mean_relative_error, median_relative_error, p90_relative_error
                             |predicted - measured| / measured, over the same passes
    """
    sweep = read_latency_sweep(file)
    fitted = fit_of(sweep, file, with_context=not no_context)
    if as_json:
        print_json({"file": str(file), "num_skipped": sweep.num_skipped, **asdict(fitted)})
        return
    model = fitted.latency
    click.echo(f"{fitted.num_steps} passes ({sweep.num_skipped} rows skipped): t = {_formula(fitted)}")
    if model.c_tok_ms > 0:
        click.echo(f"A pass costs as much as {model.c_base_ms / model.c_tok_ms:.0f} tokens before it computes any.")
    click.echo(f"Relative error: {_errors(fitted)}.")
    click.echo(f"--latency {model.c_base_ms:.5g},{model.c_tok_ms:.5g},{model.c_kv_ms:.5g}")


@latency.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def list_presets(as_json: bool) -> None:
    """List the presets that --latency takes by name, with their errors and their source.

    \b
    Keys of --json: the presets by name, each with
      model, device, source
      fit                    {latency, num_steps, mean_relative_error, median_relative_error, p90_relative_error}
                             as `das latency fit` has them
    """
    if as_json:
        print_json({name: asdict(preset) for name, preset in LATENCY_PRESETS.items()})
        return
    sources = {preset.source: None for preset in LATENCY_PRESETS.values()}
    print_table(
        ("preset", "model", "device", "milliseconds", "relative error"),
        [
            (name, preset.model, preset.device, _formula(preset.fit), _errors(preset.fit))
            for name, preset in LATENCY_PRESETS.items()
        ],
        *(f"Source: {source}." for source in sources),
    )


def _formula(fitted: LatencyFit) -> str:
    model = fitted.latency
    context = f" + {model.c_kv_ms:.4g} context" if model.c_kv_ms > 0 else ""
    return f"{model.c_base_ms:.4g} + {model.c_tok_ms:.4g} tokens{context}"


def _errors(fitted: LatencyFit) -> str:
    return (
        f"median {fitted.median_relative_error:.1%}, p90 {fitted.p90_relative_error:.1%}, "
        f"mean {fitted.mean_relative_error:.1%}"
    )
