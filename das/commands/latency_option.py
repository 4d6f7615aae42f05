"""The `--latency` option of every command that needs a latency model: a preset, or coefficients."""

from __future__ import annotations

import click

from das.latency import LatencyModel
from das.latency_presets import LATENCY_PRESETS


def latency_of(context: click.Context, parameter: click.Parameter, text: str | None) -> LatencyModel | None:
    """Return the model that an option names, by preset or as c_base_ms,c_tok_ms[,c_kv_ms[,c_engine_ms]]: its callback.

    Raises click.BadParameter, a usage error, for a text that names none; None stays None.
    """
    if text is None:
        return None
    if text in LATENCY_PRESETS:
        return LATENCY_PRESETS[text].fit.latency
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not 2 <= len(numbers) <= 4:
        presets = ", ".join(LATENCY_PRESETS)
        raise click.BadParameter(
            f"{text!r} is neither a preset ({presets}) nor c_base_ms,c_tok_ms[,c_kv_ms[,c_engine_ms]]."
        )
    names = ("c_base_ms", "c_tok_ms", "c_kv_ms", "c_engine_ms")
    try:
        return LatencyModel(**dict(zip(names, numbers, strict=False)))
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None
