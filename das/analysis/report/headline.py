"""The answer that comes first: what drafting would gain, by which latency model, or that it would not."""

from __future__ import annotations

from collections.abc import Sequence

from das.analysis.generation_time import generation_time
from das.analysis.projection import LEAST_GAIN
from das.analysis.replay import ReplayResult
from das.analysis.report.parts import Headline, percent, ratio, seconds
from das.analysis.report.policies import Compared
from das.latency import DEFAULT_LATENCY, LatencyModel
from das.latency_presets import LATENCY_PRESETS
from das.metrics import AcceptanceCounters

SWITCH_ON = (
    ' In vLLM: speculative_config={"method": "custom_class", "model": "das_vllm.DasProposer", '
    '"num_speculative_tokens": 16}. In SGLang: --speculative-algorithm DAS. das doctor says whether yours fits.'
)
UNBIASED = (
    "The log was sampled with the settings (temperature, top-p) that the engine verifies with; only then is what is "
    "accepted here an unbiased estimate."
)


def of_replay(result: ReplayResult, *, latency: LatencyModel | None) -> Headline:
    """Return the answer of a replay.

    Args:
        latency: the user's; None: nobody gave one, and das' default is assumed.
    """
    model = DEFAULT_LATENCY if latency is None else latency
    counters, times = result.counters, generation_time(result.batches, model)
    drafter_s = counters.num_decode_steps * (result.plan_us + result.extend_us) / 1e6
    whole = [batch for batch in result.batches if batch.is_complete]
    forwards = sum(batch.num_batch_steps for batch in whole)
    forwards_without = sum(batch.longest_response_tokens for batch in whole)
    if not counters.num_drafted_tokens:
        verdict, is_gain = "Leave drafting off: nothing was drafted", False
    else:
        verdict, is_gain = _verdict(times.speedup)
    return Headline(
        verdict=verdict,
        is_gain=is_gain,
        text=f"The target forwards of {len(whole):,} generation batches take {seconds(times.with_drafts_s)} instead of "
        f"{seconds(times.without_drafts_s)} by the latency model, in {counters.num_decode_steps:,} decode steps "
        f"instead of {counters.num_emitted_tokens:,}.{SWITCH_ON if is_gain else ''}",
        figures=(
            ("times as fast", f"{times.speedup:.2f}", "makespan of all batches without drafts / with them"),
            *_counts(counters),
            (
                "forwards until the batches end",
                f"{forwards:,}",
                f"instead of {forwards_without:,}, as long as the longest response",
            ),
        ),
        assumptions=(
            _latency(latency),
            f"The drafter's own time is not in it. It took {drafter_s:,.1f} s on one core of the machine that made "
            f"this report, {result.plan_us + result.extend_us:.0f} us a request and decode step, for which an engine "
            "waits.",
            "Batches follow one another, and all requests of a batch start at once: no prefill, no waiting for places. "
            "das simulate has those.",
            UNBIASED,
        ),
    )


def of_comparison(compared: Sequence[Compared], *, latency: LatencyModel | None) -> Headline:
    """Return the answer of policies that were simulated, in order of makespan. Args: as of `of_replay`."""
    best = compared[0]
    projection = best.projection
    off, on = projection.without_drafts, projection.with_drafts
    verdict, is_gain = _verdict(projection.step_speedup, policy=best.name)
    is_gain = is_gain and projection.verdict == "enable"
    settings = projection.settings
    trains = f", {settings['train_s']:g} s of training after each batch" if settings["train_s"] else ""
    workers = "one worker" if settings["num_workers"] == 1 else f"{settings['num_workers']} workers"
    drafting_us = projection.as_dict()["drafting_us"]
    return Headline(
        verdict=verdict,
        is_gain=is_gain,
        text=f"Under {best.name}, the first of {len(compared)} settings, rollouts take {seconds(on.makespan_s)} "
        f"instead of {seconds(off.makespan_s)} with speculation off.{SWITCH_ON if is_gain else ''}",
        figures=(
            ("times as fast", f"{projection.speedup:.2f}", "makespan with speculation off / with the best setting"),
            *(
                [
                    (
                        "with training",
                        f"{projection.step_speedup:.2f}",
                        "times as fast, until the last training step ended",
                    )
                ]
                if trains
                else []
            ),
            *_counts(on.counters),
        ),
        assumptions=(
            _latency(latency),
            f"Simulated: {workers}, {settings['max_running'] or 'all'} requests at once on each, assignment "
            f"{settings['assignment']}, lag {settings['lag']}, execution {settings['execution']}{trains}.",
            f"The drafters' own time is not in it: {drafting_us:.0f} us a request and decode step on the machine that "
            "made this report; an engine waits for it.",
            "No prefill, no limits of KV memory, no preemption.",
            UNBIASED,
        ),
    )


def _verdict(speedup: float, *, policy: str = "drafting") -> tuple[str, bool]:
    """Where less than a percent of the time is saved, the answer is no."""
    if speedup * (1.0 - LEAST_GAIN) >= 1.0:
        return f"Switch {policy} on: generation ends {speedup:.2f} times as fast", True
    if speedup < 1.0:
        return f"Leave {policy} off: generation would end {percent(1 / speedup - 1)} later", False
    return f"Leave {policy} off: it would save under {LEAST_GAIN:.0%} of the time", False


def _counts(counters: AcceptanceCounters) -> tuple[tuple[str, str, str], ...]:
    saved = 1 - ratio(counters.num_decode_steps, counters.num_emitted_tokens)
    return (
        ("decode steps saved", percent(saved), "of one target forward a token and request"),
        ("tokens per decode step", f"{counters.tokens_per_decode_step:.2f}", "all decode steps counted"),
        ("drafted per decode step", f"{counters.drafted_per_decode_step:.2f}", "tokens to verify beside"),
        ("accepted", percent(counters.draft_acceptance_rate), "of the drafted tokens"),
    )


def _latency(latency: LatencyModel | None) -> str:
    """What a forward is taken to cost, and who says so."""
    model = DEFAULT_LATENCY if latency is None else latency
    terms = [f"{model.c_base_ms:.4g} ms", f"{model.c_tok_ms:.4g} ms for every token in it"]
    if model.c_kv_ms:
        terms.append(f"{model.c_kv_ms:.4g} ms for every token of context")
    if model.c_engine_ms:
        terms.append(f"{model.c_engine_ms:.4g} ms where speculation is on")
    return f"A forward takes {' + '.join(terms)}: {_origin(latency)}."


def _origin(latency: LatencyModel | None) -> str:
    if latency is None:
        return (
            "assumed, as nothing was measured on your engine. Public measurements of 7B to 14B models on an A100 have "
            "the same ratio of the two, 200; --latency takes yours, which das latency fit finds"
        )
    for preset in LATENCY_PRESETS.values():
        if preset.fit.latency == latency:
            return (
                f"measured of {preset.model} on {preset.device}, median error "
                f"{percent(preset.fit.median_relative_error)} ({preset.source.replace('`', '')})"
            )
    return "as given by --latency"
