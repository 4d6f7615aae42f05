"""Logs with prompt and response in one sequence of token ids: slime's dumps, NeMo-RL's train data, prime-rl's exports.

slime: `Sample.to_dict` in THUDM/slime, slime/utils/types.py (0d234f3e), which `save_debug_rollout_data` writes.
NeMo-RL: `log_batched_dict_as_jsonl` of train_data_step{N}.jsonl in NVIDIA-NeMo/RL, nemo_rl/algorithms/grpo.py (0.6).
prime-rl: `TokenExporter` in PrimeIntellect-ai/prime-rl, src/prime_rl/trainer/rl/token_export.py (004274ec).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from das.analysis.containers.torch_archive import Unread
from das.analysis.fields import BadRow, Row, mask, number, required, shown, text, token_ids, whole_number
from das.analysis.formats.log_format import LogFormat, ParsedRow, having_all, having_any, split_sequence
from das.rollout import Rollout


def _slime_row(row: Row, _file: Path, _tokenizer: Any) -> ParsedRow:
    """group_index counts on from epoch to epoch, so it names no prompt. A reward that is a dictionary is none."""
    ids = token_ids(required(row, "tokens"), "tokens")
    required(row, "response_length")
    num_response = whole_number(row, "response_length")
    if not num_response or num_response >= len(ids):
        rule = f"it must be 1 to {len(ids) - 1}, as tokens has {len(ids)} entries and begins with the prompt"
        raise BadRow(f"response_length is {shown(num_response)}; {rule}", "response_length")
    reward, status = row.get("reward"), text(row, "status")
    return ParsedRow(
        rollout=Rollout(
            prompt_token_ids=ids[:-num_response],
            response_token_ids=ids[-num_response:],
            training_step=whole_number(row, "training_step"),
            reward=None if isinstance(reward, dict | Unread) else number(reward, "reward"),
            response_mask=mask(row.get("loss_mask"), "loss_mask", num_tokens=num_response, of="response token"),
        ),
        truncated=None if status is None else status == "truncated",
    )


def _nemo_rl_row(row: Row, file: Path, _tokenizer: Any) -> ParsedRow:
    """Sequences are padded to the longest of their batch; the training step is in the file's name only."""
    plain = {name: _unwrapped(row[name]) for name in _NEMO_RL_FIELDS if name in row}
    required(plain, "input_lengths")
    ids = token_ids(required(plain, "token_ids"), "token_ids")
    length = whole_number(plain, "input_lengths")
    if not length or length > len(ids):
        rule = f"it must be 1 to {len(ids)}, the length of token_ids"
        raise BadRow(f"input_lengths is {shown(length)}; {rule}", "input_lengths")
    generated = _generated(plain, "token_loss_mask", num_tokens=len(ids))
    prompt, response, response_mask = split_sequence(ids[:length], generated[:length], "token_loss_mask")
    return ParsedRow(
        rollout=Rollout(
            prompt_token_ids=prompt,
            response_token_ids=response,
            training_step=_step_named_by(file),
            reward=number(plain.get("rewards"), "rewards"),
            response_mask=response_mask,
        )
    )


def _step_named_by(file: Path) -> int | None:
    named, field = re.search(r"step(\d+)", file.name), "the step in the file's name"
    return None if named is None else whole_number({field: int(named[1])}, field)


def _unwrapped(value: Any) -> Any:
    """Rows are cut out of batches of one, so that values may come as lists of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _generated(row: Row, field: str, *, num_tokens: int) -> npt.NDArray[np.bool_]:
    """A mask over the whole sequence; 1.0 and 0.0 count as well."""
    values = required(row, field)
    if isinstance(values, list):
        values = [int(value) if type(value) is float and value in (0.0, 1.0) else value for value in values]
    generated = mask(values, field, num_tokens=num_tokens, of="token")
    if generated is None:
        raise BadRow(f"{field} is null; it must say which tokens were generated", field)
    return generated


def _prime_rl_row(row: Row, _file: Path, _tokenizer: Any) -> ParsedRow:
    """step counts the trainer's steps, export_step those of the run where one trainer serves several."""
    ids = token_ids(required(row, "token_ids"), "token_ids")
    generated = _generated(row, "loss_mask", num_tokens=len(ids))
    prompt, response, response_mask = split_sequence(ids, generated, "loss_mask")
    rewards = row.get("rewards")
    reward = rewards[len(prompt)] if isinstance(rewards, list) and len(rewards) == len(ids) else None
    return ParsedRow(
        rollout=Rollout(
            prompt_token_ids=prompt,
            response_token_ids=response,
            training_step=whole_number(row, "step" if row.get("export_step") is None else "export_step"),
            reward=number(reward, "rewards"),
            response_mask=response_mask,
        )
    )


_NEMO_RL_FIELDS = ("token_ids", "input_lengths", "token_loss_mask", "rewards")

SLIME = LogFormat(
    name="slime",
    trainer="slime",
    fields=("tokens", "response_length", "training_step", "reward", "loss_mask", "status"),
    fits=having_all("tokens", "response_length"),
    parse=_slime_row,
)
NEMO_RL = LogFormat(
    name="nemo-rl",
    trainer="NeMo-RL",
    fields=_NEMO_RL_FIELDS,
    fits=having_any("token_loss_mask", "input_lengths"),
    parse=_nemo_rl_row,
)
PRIME_RL = LogFormat(
    name="prime-rl",
    trainer="prime-rl",
    fields=("token_ids", "loss_mask", "step", "export_step", "rewards"),
    fits=having_all("token_ids", "loss_mask"),
    parse=_prime_rl_row,
)
