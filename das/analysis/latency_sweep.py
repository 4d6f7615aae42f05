"""Reads measured latencies from CSV files and fits the latency model to them."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from das.analysis.logs import LogError
from das.latency import LatencyFit, fit_latency

_TIME_COLUMNS = ("step_ms", "median_ms", "mean_ms")  # the first that the file has
_TARGET_MODES = ("target_decode", "target_verify")  # of EfficientRollout's sweeps: passes of the target model


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySweep:
    """Measured passes, a list entry each.

    Args:
        num_tokens: computed in the pass.
        num_context_tokens: read in it, summed over the batch; None: the file does not say.
        step_ms: of the pass.
        num_skipped: rows of the file that are not passes of the target model.
    """

    num_tokens: list[float]
    num_context_tokens: list[float] | None
    step_ms: list[float]
    num_skipped: int


def read_latency_sweep(path: Path | str) -> LatencySweep:
    """Read a CSV file with a header line.

    Columns `num_tokens`, `step_ms` and, where known, `num_context_tokens` describe one pass a row. So do `batch`,
    `gamma` (draft tokens of each request; absent: 0) and `seq` (context of each request): such a pass computes
    batch (1 + gamma) tokens. Rows of batch 0, and where there is a `mode` those of other modes than target_decode and
    target_verify, are skipped. The time is `step_ms`, else `median_ms`, else `mean_ms`. Other columns are ignored.

    Raises:
        LogError: no such file, a column is missing, or a value is not a number greater than 0; it names the line.

    Complexity: O(rows).
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            return _sweep(csv.DictReader(file), str(path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise LogError(f"{path}: cannot be read: {reason}", path=str(path)) from None


def fit_latency_sweep(path: Path | str, *, with_context: bool = True) -> LatencyFit:
    """Fit the latency model to a CSV file; see `read_latency_sweep` and `das.fit_latency`.

    Args:
        with_context: fit c_kv_ms where the file tells the context; False: it stays 0.

    Raises:
        LogError: as `read_latency_sweep`, or passes to which no model can be fitted.
    """
    return fit_of(read_latency_sweep(path), path, with_context=with_context)


def fit_of(sweep: LatencySweep, path: Path | str, *, with_context: bool = True) -> LatencyFit:
    """Fit the latency model to what was read from `path`. Raises LogError where that cannot be done."""
    context = sweep.num_context_tokens if with_context else None
    try:
        return fit_latency(sweep.num_tokens, sweep.step_ms, num_context_tokens=context)
    except ValueError as error:
        raise LogError(f"{path}: {error}", path=str(path)) from None


def _sweep(rows: csv.DictReader[str], path: str) -> LatencySweep:
    columns = rows.fieldnames
    if not columns:
        raise LogError(f"{path}: the file is empty; it must begin with a header line", path=path)
    time_column = next((name for name in _TIME_COLUMNS if name in columns), None)
    by_batch = "num_tokens" not in columns
    lacking = []
    if time_column is None:
        lacking.append(f"{', '.join(_TIME_COLUMNS[:-1])} or {_TIME_COLUMNS[-1]}")
    if by_batch and "batch" not in columns:
        lacking.append("num_tokens or batch")
    if time_column is None or lacking:
        raise LogError(f"{path}: has no column {', and none of '.join(lacking)}", path=path)
    context_column = "seq" if by_batch else "num_context_tokens"
    tokens: list[float] = []
    context: list[float] = []
    times: list[float] = []
    num_skipped = 0
    for line, row in _target_passes(rows, path):
        if row is None or (by_batch and _number(row, "batch", path, line, least=0.0) == 0):
            num_skipped += 1
            continue
        batch = _number(row, "batch" if by_batch else "num_tokens", path, line)
        gamma = _number(row, "gamma", path, line, least=0.0) if by_batch and "gamma" in columns else 0.0
        tokens.append(batch * (1 + gamma))
        if context_column in columns:
            context.append(_number(row, context_column, path, line, least=0.0) * (batch if by_batch else 1))
        times.append(_number(row, time_column, path, line))
    if not times:
        raise LogError(f"{path}: holds no pass of the target model, {num_skipped} other rows", path=path)
    return LatencySweep(
        num_tokens=tokens,
        num_context_tokens=context if context_column in columns else None,
        step_ms=times,
        num_skipped=num_skipped,
    )


def _target_passes(rows: csv.DictReader[str], path: str) -> Iterator[tuple[int, Mapping[str, str | None] | None]]:
    """Return (line, row) of every row; None for the row of another mode."""
    for row in rows:
        if None in row:
            raise LogError(f"{path}:{rows.line_num}: has more fields than the header", path=path, line=rows.line_num)
        yield rows.line_num, row if row.get("mode", _TARGET_MODES[0]) in _TARGET_MODES else None


def _number(row: Mapping[str, str | None], column: str, path: str, line: int, *, least: float | None = None) -> float:
    """Return a finite number that is greater than 0, or at least `least`."""
    text = row[column]
    try:
        number = float(text or "")
    except ValueError:
        number = float("nan")
    if number < float("inf") and (number > 0 if least is None else number >= least):
        return number
    rule = "greater than 0" if least is None else f"at least {least:g}"
    raise LogError(
        f"{path}:{line}: {column} is {text!r}; it must be a number {rule}", path=path, line=line, field=column
    )
