"""Rollouts token by token, as HTML: which tokens came free, and from whose text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from das.analysis.recording import TracedRequest, TracedStep, TracedToken
from das.analysis.report.acceptance import SOURCES, source_of
from das.analysis.report.parts import percent, ratio

Decode = Callable[[int], str]
"""Returns the text of a token id."""

_MOST_TOKENS = 1000  # of a rollout that are shown


def token_view(traced: Sequence[TracedRequest], *, decode: Decode | None, names: dict[int, str]) -> str:
    """Return a few sampled rollouts, of which the reader picks one.

    Args:
        traced: that were sampled; only those that drafted are of use.
        decode: None: the token ids are shown.
        names: of prompts, by key, where the log has them.

    Returns:
        HTML, all texts of the log escaped; empty where there is no such rollout.

    Complexity: O(tokens shown).
    """
    picked = _picked([request for request in traced if any(step.draft for step in request.steps)])
    if not picked:
        return ""
    options = "".join(f'<option value="{n}">{escape(label)}</option>' for n, (label, _) in enumerate(picked))
    rollouts = "".join(
        f'<div class="rollout" data-rollout="{n}"{" hidden" if n else ""}>{_rollout(request, decode, names)}</div>'
        for n, (_, request) in enumerate(picked)
    )
    legend = "".join(
        f'<li><mark class="{source}">token</mark> {escape(name)}: {escape(meaning)}</li>'
        for source, (name, meaning) in SOURCES.items()
    )
    return (
        f'<p class="pick"><label>Rollout <select data-picks="rollout">{options}</select></label></p>'
        f'<ul class="legend">{legend}<li><span class="step"><b>token</b></span> sampled by the target model</li></ul>'
        '<p class="pick"><label><input type="checkbox" data-shows="rejected"> also show rejected draft tokens'
        f" <del>token</del></label></p>{rollouts}"
    )


def _picked(traced: Sequence[TracedRequest]) -> list[tuple[str, TracedRequest]]:
    """A typical rollout, the best, the worst and the longest, each once, of the last epoch: there is a history then."""
    if not traced:
        return []
    last = max(-1 if (step := request.finished.rollout.training_step) is None else step for request in traced)
    traced = [request for request in traced if request.finished.rollout.training_step in (last, None)]
    by_gain = sorted(traced, key=lambda request: request.finished.counters.tokens_per_decode_step)
    longest = max(traced, key=lambda request: request.finished.num_tokens)
    chosen = {
        "typical": by_gain[len(by_gain) // 2],
        "longest": longest,
        "gains most": by_gain[-1],
        "gains least": by_gain[0],
    }
    picked: dict[int, tuple[str, TracedRequest]] = {}
    for label, request in chosen.items():
        picked.setdefault(id(request), (f"{label} of {len(traced)} looked up in the last epoch", request))
    return list(picked.values())


def _rollout(request: TracedRequest, decode: Decode | None, names: dict[int, str]) -> str:
    rollout, counters = request.finished.rollout, request.finished.counters
    step = "" if rollout.training_step is None else f", training step {rollout.training_step}"
    reward = "" if rollout.reward is None else f", reward {rollout.reward:g}"
    about = (
        f"Prompt {names.get(rollout.key, f'{rollout.key:016x}')}{step}{reward}: {counters.num_emitted_tokens:,} tokens "
        f"in {counters.num_decode_steps:,} decode steps, {counters.num_accepted_tokens:,} of them free "
        f"({percent(ratio(counters.num_accepted_tokens, counters.num_emitted_tokens))})."
    )
    token_ids = rollout.response_token_ids.tolist()
    shown = [step for step in request.steps if step.position < _MOST_TOKENS]
    text = "".join(_step(step, token_ids, decode) for step in shown)
    more = "" if len(shown) == len(request.steps) else f"<p>The first {_MOST_TOKENS:,} tokens are shown.</p>"
    kind = "text" if decode is not None else "ids"
    return f'<p>{escape(about)}</p><div class="tokens {kind}" tabindex="0">{text}</div>{more}'


def _step(step: TracedStep, token_ids: Sequence[int], decode: Decode | None) -> str:
    """The tokens of a decode step: accepted ones, the bonus token, and what was rejected."""
    accepted = [token for token in step.draft if token.is_accepted]
    rejected = [token for token in step.draft if not token.is_accepted]
    emitted = token_ids[step.position : step.position + step.num_emitted_tokens]
    parts = [_mark(token, decode) for token in accepted]
    parts += [f"<b>{_text(token, decode)}</b>" for token in emitted[len(accepted) :]]
    between = " " if decode is None else ""
    if rejected:
        parts.append(f"<del>{between.join(_text(token.token_id, decode) for token in rejected)}</del>")
    return f'<span class="step">{between.join(parts)}</span>{between}'


def _mark(token: TracedToken, decode: Decode | None) -> str:
    source, origin = source_of(token.origin), token.origin
    behind = "" if origin is None else f" behind {origin.order} known tokens"
    seen = 0 if origin is None else origin.num_running + origin.num_history
    title = f"{SOURCES[source][0]},{behind}, seen {seen} times"
    return f'<mark class="{source}" title="{title}">{_text(token.token_id, decode)}</mark>'


def _text(token_id: int, decode: Decode | None) -> str:
    if decode is None:
        return str(token_id)
    return escape(decode(token_id)).replace("\n", "\u21b5\n") or "\u2400"
