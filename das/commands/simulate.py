"""`das simulate`: how long engines would take to generate a log, with drafts and without."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich.progress import MofNCompleteColumn, TextColumn

from das.analysis.projection import LEAST_GAIN, BatchFigures, Projection
from das.analysis.simulate import simulate as project
from das.commands.engine_options import check_engine, check_log, engine_options
from das.commands.log_input import LogInput, log_options
from das.commands.parameter_types import Count
from das.commands.policy_option import policy_of, policy_options
from das.commands.terminal import print_table, progress_bar
from das.latency import DEFAULT_LATENCY, LatencyModel

_MAX_BATCH_ROWS = 40  # of a longer log, only the last ones are shown


@click.command()
@log_options
@policy_options
@engine_options
@click.option(
    "--shape",
    type=click.Choice(["chain", "tree"]),
    default="chain",
    show_default=True,
    help="tree: drafts with several tokens at one position, for engines that verify them.",
)
@click.option(
    "--window-epochs",
    metavar="N",
    type=Count(least=1),
    default=4,
    show_default=True,
    help="Training steps of a prompt that the history keeps.",
)
def simulate(
    log: LogInput,
    *,
    as_json: bool,
    policy_name: str,
    max_draft_tokens: int | None,
    latency: LatencyModel | None,
    min_survival: float | None,
    threshold: int | None,
    shape: Any,
    window_epochs: int,
    **engine: Any,
) -> None:
    """Simulate how long engines take to generate a log: batches that refill, workers, training beside generation.

    LOG is a .jsonl, .jsonl.gz, .parquet or (slime's) .pt file, or a directory of such files; several are read as one,
    - is standard input.
    The drafter is real and emits what was logged; only the clock is simulated, by --latency. A batch, a row of
    the table, is --group-size samples of each prompt of a training step; training on it follows. Beside it runs the
    same simulation with speculation switched off. Not simulated: prefill, limits of KV memory, time in environments.

    \b
    Examples:
      das simulate rollouts.jsonl.gz --latency qwen2.5-7b-a100
      das simulate rollouts.jsonl.gz --max-running 80
      das simulate rollouts.jsonl.gz --workers 8 --assignment round-robin
      das simulate rollouts.jsonl.gz --lag 1 --train-s 4

    \b
    Keys of --json:
      logs, formats (rows of each), partial (false), num_bad_rows, num_later_turns
      settings          what was simulated
      latency           {c_base_ms, c_tok_ms, c_kv_ms, c_engine_ms}
      speedup           makespan without drafts / with them
      step_speedup      the same of the duration, which includes training
      generation_share  of the duration of synchronous training without drafts
      amdahl_speedup    1 / (share / speedup + 1 - share): the step speedup of synchronous training
      verdict           "enable" where step_speedup tells of 1 % or more, else "leave off"
      plan_s, extend_s  the drafters' own time, measured here: drafting, and emitted tokens
      drafting_us       both, per request and decode step
      with_drafts, without_drafts   one schedule each
    Keys of a schedule:
      makespan_s             time in which a rollout was running or waiting for a place
      duration_s             until the last training step ended
      exposed_generation_s   how long training waited for rollouts
      utilisation            share of the workers' time within the makespan that they were in a forward
      num_forwards           of all workers
      num_verified_tokens    computed in them: one a request, drafted tokens, padding
      num_raced_tokens       emitted a second time, by --execution fastest-of-n
      num_padded_tokens      0, as drafts are verified at their own length
      num_decode_steps, num_verification_steps, num_drafted_tokens, num_accepted_tokens, num_emitted_tokens,
      draft_acceptance_rate, mean_acceptance_length, tokens_per_decode_step, drafted_per_decode_step
                             as `das replay` has them, of all requests; request_mean_... is the same here
      workers      [{busy_s, idle_s, num_forwards, num_requests, num_verified_tokens}]
      batches      [{training_step (null: not known), group, num_requests, num_emitted_tokens,
                   longest_response_tokens, released_s (when it could start), ended_s, makespan_s,
                   exposed_generation_s, trained_s (when training on it ended)}]
      num_running  mean number of requests running, in 100 equal slices of the duration
    """
    check_engine(engine, shapes=(shape,))
    model = DEFAULT_LATENCY if latency is None else latency
    policy = policy_of(
        policy_name,
        latency=model,
        max_draft_tokens=max_draft_tokens,
        min_survival=min_survival,
        max_running=threshold,
    )
    try:
        with log.records() as records:
            rollouts = [record.rollout for record in records]
        log.warn()
        check_log(engine, rollouts)
        with progress_bar("simulating", MofNCompleteColumn(), TextColumn("tokens")) as progress:
            projection = project(
                rollouts,
                policy=policy,
                latency=model,
                shape=shape,
                window_epochs=window_epochs,
                progress=progress,
                **engine,
            )
    except KeyboardInterrupt:
        raise click.Abort from None
    if as_json:
        found = projection.as_dict() | {"latency": asdict(model)}
        log.print_json(found, partial=False)
    else:
        _print(projection, log.note(), is_assumed=latency is None)


def _print(projection: Projection, note: str, *, is_assumed: bool) -> None:
    with_drafts, without = projection.with_drafts, projection.without_drafts
    pairs = list(zip(with_drafts.batches, without.batches, strict=True))
    headings = (
        "step\n#group",
        "rollouts",
        "tokens",
        "longest",
        "starts\ns",
        "ends\ns",
        "makespan\ns",
        "without\ndrafts\ns",
        "times\nas fast",
        "training\nwaits s",
    )
    _, rollouts, tokens, longest, starts, ends, *_ = headings
    print_table(
        headings,
        [_cells(*pair) for pair in pairs[-_MAX_BATCH_ROWS:]],
        note,
        *_notes(projection, is_assumed=is_assumed),
        total=(
            "all",
            f"{sum(batch.num_requests for batch in with_drafts.batches):,}",
            f"{sum(batch.num_emitted_tokens for batch in with_drafts.batches):,}",
            f"{max(batch.longest_response_tokens for batch in with_drafts.batches):,}",
            "",
            f"{with_drafts.duration_s:,.1f}",
            f"{with_drafts.makespan_s:,.1f}",
            f"{without.makespan_s:,.1f}",
            f"{projection.speedup:.2f}",
            f"{with_drafts.exposed_generation_s:,.1f}",
        ),
        drop_first=(rollouts, longest, tokens, starts, ends),
        caption=f"the last {_MAX_BATCH_ROWS} of {len(pairs)} batches" if len(pairs) > _MAX_BATCH_ROWS else None,
    )


def _cells(batch: BatchFigures, without: BatchFigures) -> tuple[str, ...]:
    step = "-" if batch.training_step is None else str(batch.training_step)
    return (
        f"{step} #{batch.group}",
        f"{batch.num_requests:,}",
        f"{batch.num_emitted_tokens:,}",
        f"{batch.longest_response_tokens:,}",
        f"{batch.released_s:,.1f}",
        f"{batch.ended_s:,.1f}",
        f"{batch.makespan_s:,.1f}",
        f"{without.makespan_s:,.1f}",
        f"{without.makespan_s / batch.makespan_s:.2f}" if batch.makespan_s else "-",
        f"{batch.exposed_generation_s:,.1f}",
    )


def _notes(projection: Projection, *, is_assumed: bool) -> tuple[str, ...]:
    """Return what stands under the table."""
    schedule, without, counters = projection.with_drafts, projection.without_drafts, projection.with_drafts.counters
    forwards = [sum(worker.num_forwards for worker in run.workers) for run in (schedule, without)]
    settings = ", ".join(f"{name} {value}" for name, value in projection.settings.items() if value is not None)
    raced = f" {schedule.num_raced_tokens:,} tokens were emitted twice, in races." if schedule.num_raced_tokens else ""
    return (
        f"Settings: {settings}.",
        *(("The latency is assumed; --latency takes yours, which `das latency fit` finds.",) if is_assumed else ()),
        f"Forwards: {forwards[0]:,} instead of {forwards[1]:,}; {counters.tokens_per_decode_step:.2f} tokens and "
        f"{counters.drafted_per_decode_step:.2f} drafted per decode step.{raced}",
        f"Utilisation of the workers: {schedule.utilisation:.0%}; without drafts {without.utilisation:.0%}.",
        f"Drafters: {projection.plan_s + projection.extend_s:,.1f} s on this machine, not part of the times above; "
        f"{_drafting_us(projection):.1f} us per request and decode step.",
        _training(projection),
        verdict_text(projection),
    )


def _drafting_us(projection: Projection) -> float:
    return 1e6 * (projection.plan_s + projection.extend_s) / max(1, projection.num_planned)


def _training(projection: Projection) -> str:
    """What the speedup means for training steps."""
    schedule, without = projection.with_drafts, projection.without_drafts
    if not projection.settings["train_s"]:
        return "Generation only; --train-s adds the rest of each training step."
    bound = (
        f"the relation 1 / (R / speedup + 1 - R) at R = {projection.generation_share:.2f} gives "
        f"{projection.amdahl_speedup:.2f} for synchronous training"
    )
    return (
        f"Training waits {schedule.exposed_generation_s:,.1f} s for rollouts instead of "
        f"{without.exposed_generation_s:,.1f} s, and ends after {schedule.duration_s:,.1f} s instead of "
        f"{without.duration_s:,.1f} s: {projection.step_speedup:.2f} times as fast; {bound}."
    )


def verdict_text(projection: Projection) -> str:
    """Say whether das should be enabled, and why."""
    if projection.verdict == "enable":
        return f"Verdict: enable drafting; the log is trained on {projection.step_speedup:.2f} times as fast."
    if projection.speedup >= 1.0 / (1.0 - LEAST_GAIN):
        return (
            f"Verdict: leave speculation off. Generation is {projection.speedup:.2f} times as fast, but training does "
            "not wait for it."
        )
    return (
        f"Verdict: leave speculation off. Under this policy the log takes {1 / projection.step_speedup:.2f} times as "
        f"long as without; less than {LEAST_GAIN:.0%} gained is within the error of a latency model."
    )
