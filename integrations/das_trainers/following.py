"""Feeds what a trainer writes to disk, file by file as it comes: for trainers without a door for a hook."""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

from das.analysis.logs import LogError, log_files, read_log
from das_trainers.feed import Feed

logger = logging.getLogger("das.trainers")


class LogFollower:
    """Reads each file of a directory of logs once, when it is complete, and feeds its rollouts.

    Args:
        directory: that the trainer writes to; it need not be there yet. Files as `das.analysis.read_log` reads them,
            with token ids.
        feed: where they go.
        is_complete: whether a file will not grow any more. None: it has not changed since the last look.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        feed: Feed,
        *,
        is_complete: Callable[[Path], bool] | None = None,
    ) -> None:
        self._directory = Path(directory)
        self._feed = feed
        self._is_complete = is_complete
        self._seen: dict[Path, tuple[int, int]] = {}  # size and time of change at the last look
        self._done: set[Path] = set()

    def poll(self, *, is_last: bool = False) -> int:
        """Feed what has been completed since the last call; return how many rollouts. Never raises.

        A row that is no rollout is left out, and told of in the log.

        Args:
            is_last: training has ended, so that a file need not be seen unchanged to count as complete.
        """
        num_fed = 0
        with self._feed.guard("following a log"):
            for file in self._new_files(is_last):
                self._done.add(file)
                try:
                    num_fed += self._feed_file(file)
                except LogError as error:
                    logger.warning("das: left out: %s", error)
        return num_fed

    def run(self, stop: threading.Event, *, every_s: float = 10.0) -> None:
        """Poll until `stop` is set, when training has ended, and take what is left then.

        For a thread, or a process beside the trainer.
        """
        while not stop.wait(every_s):
            self.poll()
        self.poll(is_last=True)

    def _new_files(self, is_last: bool) -> list[Path]:
        try:
            files = log_files(self._directory)
        except (FileNotFoundError, LogError):  # nothing there yet
            return []
        whole = self._is_complete or (lambda file: is_last or self._is_unchanged(file))
        return [file for file in files if file not in self._done and whole(file)]

    def _feed_file(self, file: Path) -> int:
        num_fed = 0
        for record in read_log(file, skip_bad=True, on_bad=lambda bad: logger.warning("das: left out: %s", bad)):
            rollout = record.rollout
            self._feed.add(
                prompt_token_ids=rollout.prompt_token_ids,
                response_token_ids=rollout.response_token_ids,
                training_step=rollout.training_step,
                reward=rollout.reward,
                response_mask=rollout.response_mask,
                prompt_key=rollout.key,
                sample=zlib.crc32(record.location.encode()) >> 1,  # of file and line: read again, it is the same one
            )
            num_fed += 1
        return num_fed

    def _is_unchanged(self, file: Path) -> bool:
        status = file.stat()
        before, self._seen[file] = self._seen.get(file), (status.st_size, status.st_mtime_ns)
        return before == self._seen[file]
