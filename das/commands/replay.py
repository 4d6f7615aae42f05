"""`das replay`: what drafting would have brought on logged rollouts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.progress import MofNCompleteColumn, TextColumn

from das.analysis.generation_time import generation_time
from das.analysis.recording import Recording
from das.analysis.replay import BatchResult, Replay, ReplayResult
from das.analysis.report import replay_report
from das.commands.log_input import LogInput, log_options
from das.commands.parameter_types import Count
from das.commands.policy_option import policy_of, policy_options
from das.commands.report_option import decoder, html_option, write_report
from das.commands.terminal import print_table, progress_bar
from das.drafter import Drafter
from das.history import RolloutHistory
from das.latency import DEFAULT_LATENCY, LatencyModel
from das.metrics import summarise
from das.reliability import Reliability
from das.step import check_widths

_METRICS = ("tokens_per_decode_step", "drafted_per_decode_step", "draft_acceptance_rate", "mean_acceptance_length")
_MAX_BATCH_ROWS = 40  # a longer log gets one row a training step
_NOTHING_SAVED = 0.01  # a smaller share of the target forwards is called nothing


@click.command()
@log_options
@policy_options
@click.option(
    "--group-size",
    metavar="N",
    type=Count(least=1),
    default=8,
    show_default=True,
    help="Samples of a prompt that run at once.",
)
@click.option(
    "--order",
    type=click.Choice(["step", "lockstep"]),
    default="step",
    show_default=True,
    help="step: all running requests draft, then all extend, as engines work. lockstep: one request after the other.",
)
@click.option(
    "--shape",
    type=click.Choice(["chain", "tree"]),
    default="chain",
    show_default=True,
    help="tree: drafts with several tokens at one position, for engines that verify them; caps count all tokens.",
)
@click.option(
    "--widths",
    metavar="N,N",
    callback=lambda context, option, value: _widths(value),
    help="For engines that verify one width for the whole batch: the draft tokens a request that they can verify, "
    "ascending, as in 0,3,7,15. The policy picks one for each step.",
)
@click.option(
    "--window-epochs",
    metavar="N",
    type=int,
    default=4,
    show_default=True,
    help="Training steps of a prompt that the history keeps.",
)
@click.option(
    "--max-bytes", metavar="N", type=int, default=8 << 30, show_default=True, help="Limit of the history's memory."
)
@html_option
def replay(
    log: LogInput,
    *,
    as_json: bool,
    policy_name: str,
    max_draft_tokens: int | None,
    latency: LatencyModel | None,
    min_survival: float | None,
    threshold: int | None,
    group_size: int,
    order: Any,
    shape: Any,
    widths: tuple[int, ...] | None,
    window_epochs: int,
    max_bytes: int,
    html: Path | None,
) -> None:
    """Replay a log as an engine would run it, and count the draft tokens that the target model would have accepted.

    LOG is a .jsonl, .jsonl.gz, .parquet or (slime's) .pt file, or a directory of such files; several are read as one,
    - is standard input.
    Training steps follow one another; within one, all prompts run together, --group-size samples of each at a
    time: a generation batch, and a row of the table (one row a training step where there are more than 40 batches).
    The counts are an unbiased estimate if the log was sampled with the settings that the engine verifies with.
    Ctrl-C prints what was counted so far.

    \b
    Keys of --json:
      logs, formats (rows of each), partial (true after Ctrl-C), num_bad_rows, num_later_turns
      settings            {policy, group_size, order, shape, widths, window_epochs, max_bytes, num_rollouts}
      is_complete         the whole log was replayed
      total               figures of everything
      batches             figures of each batch, with training_step (null: not known), group (from 0), is_complete
      history             {num_prompts, num_rollouts, num_tokens, num_trees, rollout_bytes, tree_bytes, common_bytes,
                          num_added, num_restored, num_updated, num_late, num_expired, num_evicted_trees,
                          num_evicted_rollouts, num_builds_ahead, num_builds_on_start}, at the end
      plan_us, extend_us  the drafter's time for drafting, and for emitted tokens, per request and decode step
      generation_time     of the forwards of whole batches, by the latency model: {latency: {c_base_ms, c_tok_ms,
                          c_kv_ms, c_engine_ms}, with_drafts_s, without_drafts_s, speedup}
    Figures:
      num_requests (that ended), num_decode_steps, num_verification_steps (decode steps with a draft),
      num_drafted_tokens, num_accepted_tokens, num_emitted_tokens
      num_batch_steps           target forwards until the last request of a batch ended; total: their sum
      longest_response_tokens   the same without drafts
      num_padded_tokens         verified beside the drafted tokens, as a batch has one width (--widths)
      num_context_tokens        read by the passes, summed over decode steps and requests
      num_context_tokens_without_drafts   the same at one token a decode step, of the requests that ended
      draft_acceptance_rate     accepted / drafted tokens
      mean_acceptance_length    1 + accepted tokens / verification steps
      tokens_per_decode_step    emitted tokens / decode steps
      drafted_per_decode_step   drafted tokens / decode steps
      request_mean_draft_acceptance_rate, request_mean_mean_acceptance_length,
      request_mean_tokens_per_decode_step, request_mean_drafted_per_decode_step   mean over requests of the same
      reliability   of the predicted probabilities of all verified predictions: {num_predictions, bins: 15 of equal
                    counts, [{num_predictions, predicted (mean), observed (share that came true)}],
                    expected_calibration_error, brier_score (mean squared error), base_rate (share that came true),
                    base_rate_expected_calibration_error, base_rate_brier_score (of always predicting base_rate)}
    """
    if widths is not None and order != "step":
        raise click.UsageError("--widths goes with --order step, where requests share a pass.")
    policy = policy_of(
        policy_name,
        latency=latency,
        max_draft_tokens=max_draft_tokens,
        min_survival=min_survival,
        max_running=threshold,
    )
    try:
        history = RolloutHistory(window_epochs=window_epochs, max_bytes=max_bytes)
    except ValueError as error:
        raise click.UsageError(f"{error}.") from None
    log.refuse_as_output(html, "'--html'")
    decode = None if html is None else decoder(log.tokenizer)
    recording = run = None
    try:
        with log.records() as records:
            rollouts = [record.rollout for record in records]
            recording = None if html is None else Recording(rollouts)
            run = Replay(
                rollouts,
                policy=policy,
                group_size=group_size,
                order=order,
                shape=shape,
                widths=widths,
                drafter=Drafter(history),
                observer=recording,
            )
        log.warn(tokenizer_is_used=html is not None)
        with progress_bar("replaying", MofNCompleteColumn(), TextColumn("tokens")) as progress:
            run.run(progress=progress)
    except KeyboardInterrupt:
        if run is None:
            raise click.Abort from None
    result = run.result()
    partial = not result.is_complete
    note = log.note()
    if html is not None and recording is not None:
        if recording.ended:
            page = replay_report(
                result,
                recording,
                log_name=log.name,
                latency=latency,
                prompt_names=log.prompt_names,
                decode=decode,
                notes=[note],
            )
            note = f"{note} {write_report(html, page)}"
        else:
            warnings.warn(f"no request ended, so there is no report, and {html} was not written", stacklevel=1)
    if as_json:
        times = generation_time(result.batches, latency or DEFAULT_LATENCY)
        of_forwards = {"latency": asdict(latency or DEFAULT_LATENCY), **asdict(times), "speedup": times.speedup}
        found = {**result.as_dict(), "generation_time": of_forwards}
        log.print_json(found, partial=partial)
    else:
        _print(result, latency, note, partial=partial)
    if partial:
        raise click.Abort


def _widths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        widths = [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of ints, like 0,3,7,15.") from None
    try:
        return check_widths(widths)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None


def _print(result: ReplayResult, latency: LatencyModel | None, note: str, *, partial: bool) -> None:
    rows = _rows(result.batches)
    headings = (
        "step\n#group" if any("#" in name for name, _ in rows) else "step",
        "rollouts",
        "tokens",
        "tokens\nper\ndecode\nstep",
        "drafted\nper\ndecode\nstep",
        "draft\naccept.\nrate",
        "mean\naccept.\nlength",
        "decode\nsteps\nsaved",
        "batch\nsteps",
        "without\ndrafts",
    )
    _, rollouts, tokens, per_step, drafted, rate, length, saved, batch_steps, without_drafts = headings
    print_table(
        headings,
        [_cells(name, batches) for name, batches in rows],
        note,
        *_notes(result, latency),
        total=_cells("all", result.batches),
        drop_first=(length, rate, drafted, without_drafts, batch_steps, rollouts, tokens, per_step, saved),
        partial=partial,
    )


def _rows(batches: Sequence[BatchResult]) -> list[tuple[str, list[BatchResult]]]:
    """Return the rows of the table: name, and the batches that it sums up."""
    steps: dict[int | None, list[BatchResult]] = {}
    for batch in batches:
        steps.setdefault(batch.training_step, []).append(batch)
    names = {step: "-" if step is None else str(step) for step in steps}
    if len(batches) > _MAX_BATCH_ROWS or len(batches) == len(steps):
        return [(names[step], of_step) for step, of_step in steps.items()]
    return [(f"{names[batch.training_step]} #{batch.group}", [batch]) for batch in batches]


def _figures(batches: Sequence[BatchResult]) -> dict[str, float | int]:
    return summarise(counters for batch in batches for counters in batch.requests)


def _cells(name: str, batches: Sequence[BatchResult]) -> tuple[str, ...]:
    figures, ended = _figures(batches), [batch for batch in batches if batch.is_complete]
    return (
        name,
        f"{sum(len(batch.requests) for batch in batches):,}",
        f"{figures['num_emitted_tokens']:,}",
        *(_metric(figures, name) for name in _METRICS),
        f"{_saved(figures):.1%}" if figures["num_decode_steps"] else "-",
        f"{sum(batch.num_batch_steps for batch in ended):,}" if ended else "-",
        f"{sum(batch.longest_response_tokens for batch in ended):,}" if ended else "-",
    )


def _metric(figures: dict[str, float | int], name: str, *, prefix: str = "") -> str:
    """Return a metric as text; "-" where no step could tell."""
    needed = "num_verification_steps" if "acceptance" in name else "num_decode_steps"
    return f"{figures[prefix + name]:{'.1%' if name.endswith('rate') else '.2f'}}" if figures[needed] else "-"


def _saved(figures: dict[str, float | int]) -> float:
    """Share of the target forwards, one a token without drafts, that drafting spares."""
    return 1 - figures["num_decode_steps"] / figures["num_emitted_tokens"]


def _notes(result: ReplayResult, latency: LatencyModel | None) -> tuple[str, ...]:
    """Return what stands under the table."""
    figures, history = _figures(result.batches), result.history
    settings = ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
        for name, value in result.settings.items()
        if value is not None
    )
    means = ", ".join(f"{name.replace('_', ' ')} {_metric(figures, name, prefix='request_mean_')}" for name in _METRICS)
    return (
        "Batch steps: target forwards until a batch's last request ended; without drafts, as many as its longest "
        "response has tokens. The table's rates are token-weighted: sums over requests, then the ratio.",
        f"Means over requests: {means}.",
        *_reliability(result.reliability),
        f"Settings: {settings}.",
        *_padding(result, figures),
        f"Drafter: {result.plan_us:.1f} us to draft and {result.extend_us:.1f} us to take in the emitted tokens, per "
        "request and decode step, on this machine.",
        f"History at the end: {history.num_rollouts:,} rollouts of {history.num_prompts:,} prompts, "
        f"{history.num_tokens:,} tokens; {history.rollout_bytes / 1e6:,.1f} MB, and {history.tree_bytes / 1e6:,.1f} MB "
        "of trees.",
        _verdict(figures, partial=not result.is_complete),
        *_times(result, figures, latency),
    )


def _reliability(measured: Reliability) -> tuple[str, ...]:
    if not measured.num_predictions:
        return ()
    return (
        f"Predicted probabilities, {measured.num_predictions:,} verified: expected calibration error "
        f"{measured.expected_calibration_error:.3f} (15 bins of equal counts), Brier score {measured.brier_score:.3f}; "
        f"always predicting the base rate, {measured.base_rate:.3f}: "
        f"{measured.base_rate_expected_calibration_error:.3f} and {measured.base_rate_brier_score:.3f}.",
    )


def _padding(result: ReplayResult, figures: dict[str, float | int]) -> tuple[str, ...]:
    num_steps = figures["num_decode_steps"]
    if result.settings["widths"] is None or not num_steps:
        return ()
    padded = sum(batch.num_padded_tokens for batch in result.batches)
    drafted = figures["num_drafted_tokens"]
    return (
        f"Padding: {padded:,} tokens, verified beside the drafted ones as a batch has one width; with them "
        f"{(drafted + padded) / num_steps:.2f} extra tokens per decode step.",
    )


def _verdict(figures: dict[str, float | int], *, partial: bool) -> str:
    if not figures["num_decode_steps"]:
        return "No request ended, so nothing can be said."
    if not figures["num_drafted_tokens"]:
        return "Nothing was drafted, so nothing is saved: every token takes a target forward of its own."
    saved, subject = _saved(figures), "So far, drafting" if partial else "Drafting"
    verifies = f"verifies {figures['drafted_per_decode_step']:.1f} extra tokens per step"
    if saved < _NOTHING_SAVED:
        return f"{subject} saves nothing here (under 1% of the target forwards), and {verifies}."
    return f"{subject} saves {saved:.0%} of the target forwards and {verifies}."


def _times(result: ReplayResult, figures: dict[str, float | int], latency: LatencyModel | None) -> tuple[str, ...]:
    """What that means in time, by a latency model, and whether the model is the user's."""
    model = DEFAULT_LATENCY if latency is None else latency
    times = generation_time(result.batches, model)
    if not times.with_drafts_s or not figures["num_drafted_tokens"]:
        return ()
    context = f" and {model.c_kv_ms:.3g} ms a token of context" if model.c_kv_ms else ""
    origin = "assumed; --latency takes yours, which `das latency fit` finds" if latency is None else "as given"
    drafter_s = figures["num_decode_steps"] * (result.plan_us + result.extend_us) / 1e6
    return (
        f"At {model.c_base_ms:.4g} ms a forward, {model.c_tok_ms:.3g} ms a token{context} ({origin}), the forwards of "
        f"whole batches take {times.with_drafts_s:,.1f} s instead of {times.without_drafts_s:,.1f} s: "
        f"{times.speedup:.2f} times as fast{'' if times.speedup > 1.0 else ', so do not draft'}. The drafter took "
        f"{drafter_s:,.1f} s here.",
    )
