"""Logs that hold text: verl's and AReaL's rollout dumps, TRL's completion tables, OpenRLHF's generated data sets.

verl: `_dump_generations` in verl-project/verl, verl/trainer/ppo/ray_trainer.py: {rollout_data_dir}/{step}.jsonl.
AReaL: `_dump_trajectory` in inclusionAI/AReaL, areal/infra/workflow_executor.py: rollout/{version}/{task}.jsonl.
TRL: `GRPOTrainer.log` in huggingface/trl, trl/trainer/grpo_trainer.py: completions/completions_{step}.parquet.
OpenRLHF: openrlhf/cli/batch_inference.py in OpenRLHF/OpenRLHF (0551ff62); its trainers write no rollouts down.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from das.analysis.fields import BadRow, Row, encoded, number, required, shown, whole_number
from das.analysis.formats.log_format import LogFormat, ParsedRow, having_all
from das.rollout import Rollout


def _pair(
    row: Row, prompt: str, response: str, tokenizer: Any, *, step: str | None = None, reward: str | None = None
) -> ParsedRow:
    """A row with prompt and response in a field each, and perhaps step and reward."""
    return ParsedRow(
        rollout=Rollout(
            prompt_token_ids=encoded(required(row, prompt), prompt, tokenizer),
            response_token_ids=encoded(required(row, response), response, tokenizer),
            training_step=None if step is None else whole_number(row, step),
            reward=None if reward is None else number(row.get(reward), reward),
        )
    )


def _verl_row(row: Row, _file: Path, tokenizer: Any) -> ParsedRow:
    return _pair(row, "input", "output", tokenizer, step="step", reward="score")


def _openrlhf_row(row: Row, _file: Path, tokenizer: Any) -> ParsedRow:
    return _pair(row, "input", "output", tokenizer, reward="reward")


def _trl_row(row: Row, _file: Path, tokenizer: Any) -> ParsedRow:
    """Rewards stand in a column for each reward function, named after it; nothing says which columns these are."""
    return _pair(row, "prompt", "completion", tokenizer, step="step")


def _areal_row(row: Row, _file: Path, tokenizer: Any) -> ParsedRow:
    """head_version: of the first generated token. Several turns: segments say what was generated, else all was."""
    segments = row.get("segments")
    if segments is None:
        parsed = _pair(row, "prompt", "completion", tokenizer, step="head_version", reward="reward")
        return ParsedRow(rollout=parsed.rollout, sample=whole_number(row, "sample_idx"))
    texts = _texts_by_role(segments)
    stretches = [encoded(text, f"segments[{i + 1}].text", tokenizer) for i, (_, text) in enumerate(texts[1:])]
    generated = [np.full(len(ids), role == "gen") for ids, (role, _) in zip(stretches, texts[1:], strict=True)]
    return ParsedRow(
        rollout=Rollout(
            prompt_token_ids=encoded(texts[0][1], "segments[0].text", tokenizer),
            response_token_ids=np.concatenate(stretches),
            response_mask=np.concatenate(generated),
            training_step=whole_number(row, "head_version"),
            reward=number(row.get("reward"), "reward"),
        ),
        sample=whole_number(row, "sample_idx"),
    )


def _texts_by_role(segments: Any) -> list[tuple[str, Any]]:
    """Role and text of each segment: a prompt, then what was generated ("gen") and what came from outside."""
    if not isinstance(segments, list) or len(segments) < 2 or not all(isinstance(part, dict) for part in segments):
        raise BadRow(f"segments must be a list of two or more objects, not {shown(segments)}", "segments")
    for i, part in enumerate(segments):
        allowed = ("prompt",) if i == 0 else ("gen",) if i == 1 else ("gen", "context")
        if part.get("role") not in allowed:
            raise BadRow(
                f"segments[{i}].role is {shown(part.get('role'))}; it must be {' or '.join(allowed)}", "segments"
            )
    return [(part["role"], part.get("text")) for part in segments]


def _is_openrlhf(row: Row) -> bool:
    return row.keys() >= {"input", "output"} and row.keys().isdisjoint(("step", "score"))


def _is_verl(row: Row) -> bool:
    return row.keys() >= {"input", "output"} and not row.keys().isdisjoint(("step", "score"))


VERL = LogFormat(
    name="verl",
    trainer="verl",
    fields=("input", "output", "step", "score"),
    fits=_is_verl,
    parse=_verl_row,
    is_text=True,
)
OPENRLHF = LogFormat(
    name="openrlhf",
    trainer="OpenRLHF",
    fields=("input", "output", "reward"),
    fits=_is_openrlhf,
    parse=_openrlhf_row,
    is_text=True,
)
AREAL = LogFormat(
    name="areal",
    trainer="AReaL",
    fields=("prompt", "completion", "head_version", "reward", "sample_idx", "segments"),
    fits=having_all("prompt", "completion", "head_version"),
    parse=_areal_row,
    is_text=True,
)
TRL = LogFormat(
    name="trl",
    trainer="TRL",
    fields=("prompt", "completion", "step"),
    fits=having_all("prompt", "completion"),
    parse=_trl_row,
    is_text=True,
)
