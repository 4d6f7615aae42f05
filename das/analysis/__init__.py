"""The offline wing: read logged rollouts and say what is in them. Nothing in `das` outside it imports it."""

from das.analysis.logs import LogError, LogRecord, read_log, read_logs
from das.analysis.rollout_tables import rollout_table, rollouts_of_table, write_parquet

__all__ = ["LogError", "LogRecord", "read_log", "read_logs", "rollout_table", "rollouts_of_table", "write_parquet"]
