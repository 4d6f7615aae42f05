"""Logs with the token ids of prompt and response apart: das's own, and open-instruct's rollout traces.

open-instruct: `RolloutRecord` in allenai/open-instruct, open_instruct/rl_utils.py (read at 00feb3a5).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from das.analysis.fields import BadRow, Row, mask, number, required, text, token_ids, whole_number
from das.analysis.formats.log_format import LogFormat, ParsedRow, having_any
from das.rollout import Rollout, named_prompt_key

_DAS_IDS = ("prompt_token_ids", "response_token_ids")
_OPEN_INSTRUCT_IDS = ("prompt_tokens", "response_tokens")


def _das_row(row: Row, _file: Path, _tokenizer: Any) -> ParsedRow:
    prompt, response = (token_ids(required(row, field), field) for field in _DAS_IDS)
    prompt_id, truncated = row.get("prompt_id"), row.get("truncated")
    key = row.get("prompt_key")
    if type(key) is int:  # of another kind, it is a trainer's own field of that name
        key = whole_number(row, "prompt_key", bits=64)
    names_key = type(key) is int or (isinstance(key, str) and key != "")
    ordinal = whole_number(row, "ordinal", bits=31)
    return ParsedRow(
        rollout=Rollout(
            prompt_token_ids=prompt,
            response_token_ids=response,
            training_step=whole_number(row, "training_step"),
            reward=number(row.get("reward"), "reward"),
            request_id=text(row, "request_id"),
            prompt_key=named_prompt_key(key) if names_key else None,
            response_mask=mask(
                row.get("response_mask"), "response_mask", num_tokens=len(response), of="response token"
            ),
            ordinal=ordinal or 0,
        ),
        names_key=names_key,
        has_ordinal=ordinal is not None,
        sample=whole_number(row, "sample"),
        prompt_id=str(prompt_id) if type(prompt_id) is int else text(row, "prompt_id"),
        truncated=truncated if isinstance(truncated, bool) else None,
    )


def _open_instruct_row(row: Row, _file: Path, _tokenizer: Any) -> ParsedRow:
    """sample_idx and prompt_idx count within a training step, so they name no prompt."""
    prompt, response = (token_ids(required(row, field), field) for field in _OPEN_INSTRUCT_IDS)
    info, finish_reason = row.get("request_info"), text(row, "finish_reason")
    if isinstance(info, dict) and info.get("tool_calleds"):
        reason = "the response holds tool output, and the log does not say where; what the model wrote is not known"
        raise BadRow(f"request_info.tool_calleds is true: {reason}", "request_info")
    return ParsedRow(
        rollout=Rollout(
            prompt_token_ids=prompt,
            response_token_ids=response,
            training_step=whole_number(row, "step"),
            reward=number(row.get("reward"), "reward"),
        ),
        truncated=None if finish_reason is None else finish_reason == "length",
    )


DAS = LogFormat(
    name="das",
    trainer="das",
    fields=(
        *_DAS_IDS,
        "training_step",
        "reward",
        "prompt_id",
        "prompt_key",
        "sample",
        "request_id",
        "response_mask",
        "truncated",
        "ordinal",
    ),
    fits=having_any(*_DAS_IDS),
    parse=_das_row,
)
OPEN_INSTRUCT = LogFormat(
    name="open-instruct",
    trainer="open-instruct",
    fields=(*_OPEN_INSTRUCT_IDS, "step", "reward", "finish_reason", "request_info"),
    fits=having_any(*_OPEN_INSTRUCT_IDS),
    parse=_open_instruct_row,
)
