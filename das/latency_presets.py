"""Latency models of known models and devices, each with the measurements it was fitted to."""

from __future__ import annotations

from dataclasses import dataclass

from das.latency import LatencyFit, LatencyModel

_SOURCE = "furiosa-ai/EfficientRollout (Apache-2.0), commit 0ff0bc5, sd_toggle/configs/; fitted by `das latency fit`"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPreset:
    """A fitted latency model and where it comes from.

    Args:
        model, device: that were measured.
        fit: the latency model and its errors.
        source: repository, licence and commit of the measurements, and the command that fitted them.
    """

    model: str
    device: str
    fit: LatencyFit
    source: str


# Median times of 223 and 224 passes over 1 to 1,024 tokens (batch 1 to 64, 0, 3, 7, 11 or 15 draft tokens), with 256 to
# 4,096 tokens of context a request. Fitted coefficients are rounded to four digits.
LATENCY_PRESETS: dict[str, LatencyPreset] = {
    "qwen2.5-7b-a100": LatencyPreset(
        model="Qwen2.5-7B",
        device="NVIDIA A100",
        fit=LatencyFit(
            latency=LatencyModel(c_base_ms=9.281, c_tok_ms=0.04558, c_kv_ms=1.77e-05),
            num_steps=223,
            mean_relative_error=0.0618,
            median_relative_error=0.0428,
            p90_relative_error=0.1411,
        ),
        source=_SOURCE,
    ),
    "llama3.1-8b-a100": LatencyPreset(
        model="Llama-3.1-8B-Instruct",
        device="NVIDIA A100",
        fit=LatencyFit(
            latency=LatencyModel(c_base_ms=10.45, c_tok_ms=0.05102, c_kv_ms=2.547e-05),
            num_steps=224,
            mean_relative_error=0.0588,
            median_relative_error=0.0507,
            p90_relative_error=0.1198,
        ),
        source=_SOURCE,
    ),
}
"""By name, model and device. Their measurements have no c_engine_ms: it is 0."""


def latency_preset(name: str) -> LatencyPreset:
    """Return a preset: its `fit.latency` is the model.

    Args:
        name: as `das latency list` prints it.

    Raises:
        ValueError: no preset has that name.
    """
    if name not in LATENCY_PRESETS:
        raise ValueError(f"name is {name!r}; it must be one of {', '.join(LATENCY_PRESETS)}")
    return LATENCY_PRESETS[name]
