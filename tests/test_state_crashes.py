"""Saved states and sudden ends: of the process at any moment, and of the power, where only what was synced remains."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from state_samples import advance, contents

from das import RolloutHistory, StateError, compact_state, load_state, save_state
from das import state_directory as directory_module

TESTS = Path(__file__).parent


@pytest.mark.parametrize("num_kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_killed_save_loses_nothing_that_was_acknowledged(tmp_path, num_kills):
    command = [sys.executable, str(TESTS / "state_kills.py"), str(tmp_path / "state"), str(num_kills)]
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=os.environ | {"PYTHONPATH": paths}, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    num_inside, num_saves = map(int, re.findall(r"(\d+) (?:of them|saves)", done.stdout))
    assert num_inside > 0, done.stdout
    assert num_saves > num_kills / 4, done.stdout


class Disk:
    """What a disk is sure to hold of a directory if the power fails: files as they were when they were synced, under
    the names that the directory had when it was synced."""

    def __init__(self, path, monkeypatch):
        self.path = path
        self.contents = {}  # inode -> bytes at the last sync
        self.names = {}  # name -> inode at the last sync of the directory
        self.moments = []  # before each change: what a power failure would leave
        self._fsync, self._replace = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "replace", self.replace)

    def fsync(self, descriptor):
        self.note()
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            if self.path.exists() and os.path.samestat(status, self.path.stat()):
                self.names = {entry.name: entry.inode() for entry in os.scandir(self.path)}
        else:
            with open(f"/proc/self/fd/{descriptor}", "rb") as file:
                self.contents[status.st_ino] = file.read()

    def replace(self, source, target):
        self.note()
        self._replace(source, target)

    def note(self):
        """Remember what would remain now: by the names that were synced, and by those that happen to be there."""
        now = {entry.name: entry.inode() for entry in os.scandir(self.path)} if self.path.exists() else {}
        for names in (self.names, now):
            self.moments.append({name: self.contents.get(inode, b"") for name, inode in names.items()})


def restored(folder, files):
    """The contents of the state in these files; None: there is none."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    history = RolloutHistory(window_epochs=3)
    try:
        load_state(folder, history=history)
    except FileNotFoundError:
        return None
    return contents(history)


def test_a_power_failure_leaves_the_state_before_or_the_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(directory_module, "_MAX_SEGMENTS", 3)
    path = tmp_path / "state"
    disk = Disk(path, monkeypatch)
    history, before, num_checked = RolloutHistory(window_epochs=3), None, 0
    for step in range(8):  # some of these saves write all anew, and remove what was before
        advance(history, step)
        save_state(path, history=history)
        if step == 6:
            compact_state(path)
        after = contents(history)
        outcomes = (before, after)
        for files in disk.moments:
            assert restored(tmp_path / f"{num_checked}", files) in outcomes, f"save {step}"
            num_checked += 1
        disk.moments.clear()
        disk.note()
        for files in disk.moments:  # the save has returned: nothing else than the new state will do
            assert restored(tmp_path / f"{num_checked}", files) == after, f"save {step}"
            num_checked += 1
        disk.moments.clear()
        before = after
    assert num_checked > 60


def test_a_segment_that_never_reached_the_disk_is_found(tmp_path):
    """What the order of syncs is there for: without it, a state could name a segment that is empty."""
    history = RolloutHistory()
    advance(history, 1)
    save_state(tmp_path, history=history)
    (tmp_path / "rollouts-00000001.das").write_bytes(b"")
    with pytest.raises(StateError, match=r"rollouts-00000001\.das: it is no file of das, or it is cut short"):
        load_state(tmp_path)
