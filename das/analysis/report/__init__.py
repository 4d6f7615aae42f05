"""Reports: one HTML file that says what drafting would gain on a log, and shows why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from das.analysis.recording import Recording
from das.analysis.replay import ReplayResult
from das.analysis.report import acceptance, headline, policies, prompts, times
from das.analysis.report.page import page_of
from das.analysis.report.parts import Report, Section
from das.analysis.report.policies import Compared
from das.analysis.report.token_view import Decode, token_view
from das.latency import DEFAULT_LATENCY, LatencyModel

__all__ = ["Compared", "Decode", "compare_report", "replay_report"]


def replay_report(
    result: ReplayResult,
    recording: Recording,
    *,
    log_name: str,
    latency: LatencyModel | None = None,
    prompt_names: Mapping[int, str] | None = None,
    decode: Decode | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Return the report of a replay, as HTML.

    Args:
        result: what the replay counted.
        recording: that watched it.
        log_name: of the log, for the title.
        latency: what a forward costs; None: `DEFAULT_LATENCY`, said to be assumed.
        prompt_names: by prompt key, where the log has names.
        decode: returns the text of a token id; None: ids are shown.
        notes: on how the log was read.

    Returns:
        the same text for the same arguments; texts of the log are escaped.

    Raises:
        ValueError: no request ended, so there is nothing to report.

    Complexity: O(tokens).
    """
    names = dict(prompt_names or {})
    model = DEFAULT_LATENCY if latency is None else latency
    batches = times.batch_times(recording.ended, recording.batch_passes(), latency=model) if recording.ended else []
    settings = ", ".join(f"{name} {value}" for name, value in result.settings.items() if value is not None)
    return page_of(
        Report(
            title=f"das replay: {log_name}",
            subtitle=f"{len(recording.ended):,} rollouts, {result.counters.num_emitted_tokens:,} generated tokens.",
            is_partial=not result.is_complete,
            headline=headline.of_replay(result, latency=latency),
            sections=(
                *_acceptance(recording, batches_follow=True),
                Section(
                    name="time",
                    title="Lengths and time",
                    text="Why it matters when a token comes free: a few long rollouts decide when a batch ends.",
                    figures=(
                        *([times.running_of(batches)] if batches else []),
                        times.lengths_of(recording.ended),
                        times.tail_of(recording.ended),
                    ),
                ),
                *_rollouts(recording, names=names, decode=decode),
            ),
            notes=(
                *notes,
                f"Settings: {settings}.",
                "Policies side by side, and their Pareto curve: das compare LOG --html FILE.",
            ),
        )
    )


def compare_report(
    compared: Sequence[Compared],
    recording: Recording,
    *,
    log_name: str,
    is_partial: bool = False,
    latency: LatencyModel | None = None,
    prompt_names: Mapping[int, str] | None = None,
    decode: Decode | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Return the report of policies that were simulated on one log, as HTML.

    Args:
        compared: in order of makespan, at least one.
        recording: that watched the first of them.
        log_name, latency, prompt_names, decode, notes: as of `replay_report`.
        is_partial: some policies were not simulated.

    Returns, Raises, Complexity: as `replay_report`.
    """
    names = dict(prompt_names or {})
    off = compared[0].projection.without_drafts
    schedules = [("off", off), *((row.name, row.projection.with_drafts) for row in compared)]
    settings = ", ".join(f"{k} {v}" for k, v in compared[0].projection.settings.items() if v is not None)
    return page_of(
        Report(
            title=f"das compare: {log_name}",
            subtitle=f"{len(recording.ended):,} rollouts, {len(compared)} settings beside speculation switched off.",
            is_partial=is_partial,
            headline=headline.of_comparison(compared, latency=latency),
            sections=(
                Section(
                    name="policies",
                    title="Policies",
                    text="The same log under each policy; what is drafted has to be verified.",
                    figures=(policies.pareto_of(compared), times.running_under(schedules)),
                    tables=(("In order of makespan", policies.table_of(compared)),),
                ),
                *_acceptance(recording, batches_follow=False, policy=compared[0].name),
                Section(
                    name="time",
                    title="Lengths",
                    text="A few long rollouts decide when a batch ends.",
                    figures=(times.lengths_of(recording.ended), times.tail_of(recording.ended)),
                ),
                *_rollouts(recording, names=names, decode=decode),
            ),
            notes=(*notes, f"Settings of the first row: {settings}."),
        )
    )


def _acceptance(recording: Recording, *, batches_follow: bool, policy: str | None = None) -> tuple[Section, ...]:
    """What was drafted and accepted."""
    if not recording.ended:
        raise ValueError("no request ended; there is nothing to report")
    tokens = [token for request in recording.traced for step in request.steps for token in step.draft]
    share = recording.sampled_share
    measured = recording.reliability()
    drafted = (
        acceptance.by_position(recording),
        acceptance.by_order(tokens, sampled_share=share),
        acceptance.by_source(tokens, sampled_share=share),
    )
    return (
        Section(
            name="acceptance",
            title="What is drafted and accepted" if policy is None else f"What is drafted and accepted: {policy}",
            text="A draft token that the target model accepts is a token without a target forward of its own.",
            figures=(
                acceptance.by_epoch(recording.ended, batches_follow=batches_follow),
                *(drafted if tokens else ()),
                acceptance.by_class(recording.ended),
                *([acceptance.reliability(measured)] if measured.num_predictions else []),
            ),
        ),
    )


def _rollouts(recording: Recording, *, names: dict[int, str], decode: Decode | None) -> tuple[Section, ...]:
    """The prompts, and some rollouts token by token."""
    points, tables = prompts.prompts_of(recording.ended, names=names)
    html = token_view(recording.traced, decode=decode, names=names)
    ids = "" if decode is not None else " The numbers are token ids; --tokenizer FILE shows their text."
    prompt_section = Section(
        name="prompts",
        title="Prompts",
        text="Those whose rollouts resemble each other gain most.",
        figures=(points,),
        tables=tables,
    )
    token_section = Section(
        name="tokens",
        title="Token by token",
        text=f"Each box is one decode step: marked tokens came free, the one behind them was sampled.{ids}",
        html=html,
    )
    return (prompt_section, token_section) if html else (prompt_section,)
