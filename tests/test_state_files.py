"""The files of a saved state: damage anywhere is found, what no das can have written is refused, old formats load."""

import json
import shutil
import struct
import zlib
from array import array
from pathlib import Path

import numpy as np
import pytest
from rollout_samples import rollout
from state_samples import contents, samples_history

from das import RolloutHistory, StateError, load_state, save_state
from das.checked_file import CheckedFile, write_checked_file
from das.confidence import Confidence

FORMAT_1 = Path(__file__).parent / "state_format_1"
SEGMENT, HEAD = "rollouts-00000001.das", "state.das"


def loaded(path):
    history = RolloutHistory(window_epochs=100)
    load_state(path, history=history)
    return history


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    save_state(path, history=samples_history())
    return path


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))


# ---------------------------------------------------------------- damage


def positions(length):
    """Header, the first array, and the end with checksum and footer's place in full; a sample of what lies between."""
    return sorted({*range(min(80, length)), *range(0, length, 29), *range(max(0, length - 40), length)})


def flips_are_found(copy, name, at):
    path = copy / name
    data = path.read_bytes()
    for position in at(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(StateError, match=name) as caught:
            load_state(copy)
        assert caught.value.path == str(path), position


@pytest.mark.parametrize("name", [HEAD, SEGMENT])
def test_flipped_bytes_are_found_and_the_file_named(copy, name):
    flips_are_found(copy, name, positions)


@pytest.mark.slow
@pytest.mark.parametrize("name", [HEAD, SEGMENT])
def test_every_flipped_byte_is_found(copy, name):
    flips_are_found(copy, name, range)


@pytest.mark.parametrize("name", [HEAD, SEGMENT])
def test_truncation_is_found_and_so_are_bytes_behind_the_end(copy, name):
    path = copy / name
    data = path.read_bytes()
    for changed in [*(data[:length] for length in positions(len(data))), data + b"\0", data + data]:
        path.write_bytes(changed)
        with pytest.raises(StateError, match=name):
            load_state(copy)


def test_a_missing_segment_is_named(copy):
    (copy / SEGMENT).unlink()
    with pytest.raises(StateError, match=f"{SEGMENT}: it is missing, though {HEAD} names it"):
        load_state(copy)


def test_a_segment_of_another_state_is_found(copy, tmp_path):
    history = samples_history()
    history.add(rollout([1], 9))
    save_state(tmp_path / "other", history=history)
    shutil.copy(tmp_path / "other" / SEGMENT, copy)
    with pytest.raises(StateError, match=f"{SEGMENT}: it is not the file that {HEAD} names"):
        load_state(copy)


def test_files_of_another_kind_are_found(copy):
    shutil.copy(copy / SEGMENT, copy / HEAD)
    with pytest.raises(StateError, match=f"{HEAD}: it is of kind 'rollouts'; expected 'state'"):
        load_state(copy)
    (copy / HEAD).write_text("not of das" * 100)
    with pytest.raises(StateError, match=f"{HEAD}: it is no file of das"):
        load_state(copy)


def test_damage_changes_nothing_of_what_it_would_have_been_loaded_into(copy):
    history = samples_history()
    before = contents(history)
    path = copy / SEGMENT
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(StateError):
        load_state(copy, history=history)
    assert contents(history) == before


def test_remains_of_a_crash_are_ignored_and_removed_by_the_next_save(copy):
    before = contents(loaded(copy))
    for name in ("rollouts-00000002.das", "rollouts-00000003.das.tmp", "state.das.tmp"):
        (copy / name).write_bytes(b"half a fi")
    (copy / "notes.txt").write_text("somebody's")
    assert contents(loaded(copy)) == before
    save_state(copy, history=loaded(copy))
    assert sorted(entry.name for entry in copy.iterdir()) == ["lock", "notes.txt", SEGMENT, HEAD]


# ---------------------------------------------------------------- versions


def test_a_newer_format_says_so(copy):
    for name in (HEAD, SEGMENT):
        path = copy / name
        data = bytearray(path.read_bytes())
        struct.pack_into("<I", data, 8, 2)
        path.write_bytes(data)
        with pytest.raises(
            StateError, match=rf"{name}: it is of format 2; this das reads formats up to 1: a newer das"
        ):
            load_state(copy)
        struct.pack_into("<I", data, 8, 1)
        path.write_bytes(data)


def test_format_1_loads(tmp_path):
    """Written by `save_state(..., history=samples_history())` when the format was new. It has to load for ever."""
    assert contents(loaded(FORMAT_1)) == contents(samples_history())


def rewritten(path, change):
    """Write the segment anew with other arrays, and make the head name it."""
    with CheckedFile(path / SEGMENT, kind="rollouts") as file:
        arrays = {name: file.any_array(name).copy() for name in file._arrays}
    change(arrays)
    identity = write_checked_file(path / SEGMENT, kind="rollouts", values={}, arrays=arrays)
    with CheckedFile(path / HEAD, kind="state") as file:
        values = file.values
    values["segments"] = [[1, len(arrays.get("tokens", [])), identity.num_bytes, identity.checksum]]
    write_checked_file(path / HEAD, kind="state", values=values, arrays={})


def test_an_older_file_lacks_arrays_that_came_later_and_a_newer_one_has_more(copy):
    def change(arrays):
        for name in ("ordinal", "reward", "request_id_length", "request_id_text", "mask_length", "mask_bits"):
            del arrays[name]
        arrays["colour"] = np.arange(3)

    before = loaded(copy)
    rewritten(copy, change)
    after = loaded(copy)
    for key in before.prompt_keys():
        for one, other in zip(before.rollouts(key), after.rollouts(key), strict=True):
            assert one.response_token_ids.tolist() == other.response_token_ids.tolist()
            found = other.reward, other.request_id, other.response_mask, other.ordinal
            assert found == (None, None, None, 0)


# ---------------------------------------------------------------- what a right checksum does not say


def put(name, value, position=0):
    def change(arrays):
        arrays[name][position] = value

    return change


def cut(name):
    def change(arrays):
        arrays[name] = arrays[name][:-1]

    return change


def drop(name):
    return lambda arrays: arrays.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("tokens", -1), "negative token id"),
        (put("prompt_key", 0), "names a prompt twice"),
        (put("num_rollouts", 2**32 - 1), "num_rollouts does not add up"),
        (put("training_step", -1), "training_step is not 0 <= training_step < 2\\*\\*62"),
        (put("current_step", 2**62), "current_step is not"),
        (put("ordinal", 2**31), "ordinal is not"),
        (put("reward", np.inf), "reward is not finite"),
        (put("response_length", 0), "a response has no token"),
        (put("prompt_length", 0), "a prompt has no token"),
        (put("response_length", 2**32 - 1), "tokens that segment 1 does not hold"),
        (put("prompt_start", 2**64 - 1), "tokens that segment 1 does not hold"),
        (put("response_segment", 7), "tokens that segment 7 does not hold"),
        (put("mask_length", 2, 0), "a mask is not as long as its response"),
        (put("request_id_length", 2**31), "request_id_text has not"),
        (put("request_id_text", 0xFF), "a request_id is no UTF-8 text"),
        (put("request_id_length", [3, 10], slice(0, 2)), "a request_id is no UTF-8 text"),  # begins inside of "ä"
        (cut("training_step"), "has not 10 entries"),
        (cut("num_rollouts"), "num_rollouts has not 4 entries"),
        (cut("mask_bits"), "mask_bits has not"),
        (drop("tokens"), "it has no array 'tokens'"),
        (drop("response_hash"), "it has no array 'response_hash'"),
        (lambda arrays: arrays.update(tokens=arrays["tokens"].astype(np.int64)), "'tokens' is of <i8; expected <i4"),
    ],
)
def test_what_no_rollout_can_be_is_refused(copy, change, message):
    rewritten(copy, change)
    with pytest.raises(StateError, match=f"{SEGMENT}: .*{message}"):
        load_state(copy)


def with_footer(path, footer, *, body=b""):
    """A file of das whose footer is whatever is given, with the right checksum."""
    header = struct.pack("<8sI", b"das file", 1).ljust(64, b"\0")
    place = struct.pack("<QQ", 64 + len(body), len(footer))
    tail = place + struct.pack("<I8s", zlib.crc32(header + footer + place), b"das end\n")
    path.write_bytes(header + body + footer + tail)


def described(*arrays, **values):
    return json.dumps({"kind": "state", "values": values, "arrays": list(arrays)}).encode()


@pytest.mark.parametrize(
    "footer",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b"1" * 10_000,
        b'{"kind": "state", "values": {}, "arrays": 3}',
        described(["a", "|O8", [1], 0]),
        described(["a", "<i4", [-1], 0]),
        described(["a", "<i4", [2**47, 2**47], 0]),
        described(["a", "<i4", [1, 1, 1], 0]),
        described(["a", "<i4", [True], 0]),
        described(["a", "<i4", [1.5], 0]),
        described(["a", "<i4", [0], 0], ["a", "<i4", [0], 0]),
        described(["a", "<i4", [100], 0]),
        described([["a"], "<i4", [0], 0]),
        described("abcd"),
        described(),
        described(save_id=3),
        described(save_id="x", segments=[[1, 2, 3]]),
        described(save_id="x", segments=[[1, 2, 3, -1]]),
    ],
)
def test_a_footer_that_makes_no_sense_is_refused(copy, footer):
    with_footer(copy / HEAD, footer)
    with pytest.raises(StateError, match=f"{HEAD}: .* makes no sense"):
        load_state(copy)


def test_learned_state_that_no_confidence_can_have_is_refused(copy):
    with CheckedFile(copy / HEAD, kind="state") as file:
        values = file.values
    wrong = {name: counts - 1.0 for name, counts in Confidence().state().items()}
    values["learned"]["confidence"] = {name: {"$array": name} for name in wrong}
    values["array_names"] = list(wrong)
    write_checked_file(copy / HEAD, kind="state", values=values, arrays=wrong)
    with pytest.raises(StateError, match="what was learned makes no sense: hits holds a count"):
        load_state(copy)
    values["array_names"] = []
    write_checked_file(copy / HEAD, kind="state", values=values, arrays={})
    with pytest.raises(StateError, match="what was learned makes no sense"):
        load_state(copy)


# ---------------------------------------------------------------- the container by itself


def test_arrays_come_back_as_they_were(tmp_path):
    arrays = {
        "matrix": np.arange(6, dtype=np.float64).reshape(2, 3),
        "scalar": np.array(3, np.uint8),
        "empty": np.zeros((0, 4), np.int64),
        "big-endian": np.arange(3, dtype=">i4"),
        "strided": np.arange(20, dtype=np.uint16)[::3],
        "pieces": [np.array([1, 2], np.int32), np.zeros(0, np.int32), np.array([3], np.int32)],
        "nothing": [],
    }
    identity = write_checked_file(tmp_path / "file", kind="test", values={"a": [1, None]}, arrays=arrays)
    with CheckedFile(tmp_path / "file", kind="test") as file:
        assert (file.values, file.identity) == ({"a": [1, None]}, identity)
        assert identity.num_bytes == (tmp_path / "file").stat().st_size
        for name, array_before in arrays.items():
            found = file.any_array(name)
            expected = (
                np.concatenate([np.zeros(0, np.int32), *array_before])
                if isinstance(array_before, list)
                else array_before
            )
            assert found.shape == expected.shape
            assert found.tolist() == expected.tolist()
            assert found.dtype == expected.dtype.newbyteorder("<")
        pieces = array("i")
        mapped = file.map("pieces", "<i4", lambda part: pieces.extend(part.tolist()))
        assert mapped.tolist() == pieces.tolist() == [1, 2, 3]
        assert not mapped.flags.writeable
        assert file.map("nothing", "<i4", pieces.extend).tolist() == []
    with pytest.raises(StateError, match="of kind 'test'; expected 'other'"):
        CheckedFile(tmp_path / "file", kind="other")
