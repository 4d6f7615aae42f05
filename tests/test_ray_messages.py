"""Messages of the history service come from elsewhere: whole and right, or refused with a reason."""

import json
import struct
import zlib

import numpy as np
import pytest
from history_shards import numbered, pull_message
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_samples import rollout
from state_samples import SAMPLES, as_values

import das
from das.checked_file import checked_bytes
from das.rollout import with_changes
from das_ray import messages
from das_ray.delta import Delta
from das_ray.learned import Learned, merged
from das_ray.messages import (
    MessageError,
    Piece,
    pieces_message,
    read_note,
    read_pieces,
    read_rollouts,
    rollouts_message,
    shard_of,
)


def test_rollouts_come_as_they_went():
    worker, found = read_rollouts(rollouts_message(SAMPLES, worker="w"), "publish")
    assert worker == "w"
    assert sorted(map(as_values, found), key=repr) == sorted(map(as_values, SAMPLES), key=repr)
    for stored in found:
        assert not stored.response_token_ids.flags.writeable
        assert stored.response_token_ids.base is None  # nothing holds on to the message


def test_pieces_come_as_they_went_and_only_the_first_carries_the_prompt():
    whole = rollout([4, 5, 6, 7], 3, request_id="a/b")
    later = with_changes(whole, response_token_ids=whole.response_token_ids[2:])
    later = with_changes(
        later, response_hash=das.Rollout(prompt_token_ids=[1], response_token_ids=[6, 7]).response_hash
    )
    first, second = read_pieces(pieces_message([Piece("w", 0, whole), Piece("w", 2, later)], worker="w"), "pieces")
    assert (first.worker, first.start, first.end, first.rollout.request_id) == ("w", 0, 4, "a/b")
    assert first.rollout.prompt_token_ids.tolist() == [1, 2, 3]
    assert (second.start, second.end, second.rollout.prompt_token_ids.tolist()) == (2, 4, [3])
    assert first.name == second.name


def test_every_shard_gets_its_share_and_keys_stay_where_they_are():
    counts = np.bincount([shard_of(key, 8) for key in range(4000)], minlength=8)
    assert counts.min() > 400
    assert [shard_of(key, 1000) for key in (0, 1, 2**64 - 1)] == [585, 670, 417]  # on every machine, for ever


@given(st.data())
def test_a_damaged_message_is_refused(data):
    message = bytearray(rollouts_message([numbered(1), numbered(2)], worker="w"))
    position = data.draw(st.integers(0, len(message) - 1))
    if data.draw(st.booleans()):
        message[position] ^= data.draw(st.integers(1, 255))
    else:
        del message[position:]
    with pytest.raises(MessageError, match="publish"):
        read_rollouts(bytes(message), "publish")


@given(st.binary(max_size=300))
@settings(max_examples=50)
def test_bytes_that_are_no_message_are_refused(data):
    for read in (
        lambda: read_rollouts(data, "x"),
        lambda: read_pieces(data, "x"),
        lambda: read_note(data, "pull", "x"),
        lambda: Delta.from_bytes(data),
        lambda: Learned.from_bytes(data),
    ):
        with pytest.raises(MessageError):
            read()


@pytest.mark.parametrize("data", [None, "text", bytearray(b"x"), 3, ["x"]])
def test_other_things_than_bytes_are_refused(data):
    with pytest.raises(MessageError, match="must be bytes, not"):
        read_rollouts(data, "publish")


def with_footer(message, change):
    """The same message with another footer, and a checksum that is right: what a stranger could send."""
    offset, length, _, end = struct.unpack_from("<QQI8s", message, len(message) - 28)
    footer = json.loads(message[offset : offset + length])
    change(footer)
    text = json.dumps(footer).encode()
    place = struct.pack("<QQ", offset, len(text))
    checksum = zlib.crc32(message[:64] + text + place)
    return message[:offset] + text + place + struct.pack("<I8s", checksum, end)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda footer: footer.update(values=None), "worker is None"),
        (lambda footer: footer.update(values={"worker": "a/b"}), "worker is 'a/b'"),
        (lambda footer: footer.update(values={"worker": "x" * 201}), "it must be a text of 1 to 200"),
        (lambda footer: footer.update(kind="state"), "is of kind 'state'"),
        (lambda footer: footer["arrays"].pop(), "arrays of"),
        (lambda footer: footer["arrays"][0].__setitem__(2, [1 << 47]), "arrays of"),
        (lambda footer: footer["arrays"][0].__setitem__(1, "|O8"), "makes no sense"),
    ],
)
def test_a_stranger_s_message_is_refused(change, reason):
    with pytest.raises(MessageError, match=reason):
        read_rollouts(with_footer(rollouts_message([numbered(1)], worker="w"), change), "publish")


def segment_with(**columns):
    """A message whose columns are others than the rollouts say."""
    message = rollouts_message([numbered(1)], worker="w")
    from das.checked_file import CheckedFile

    with CheckedFile("x", kind="rollouts", data=message) as file:
        names = [name for name in file._arrays]
        arrays = {name: file.any_array(name) for name in names} | columns
        return checked_bytes(kind="rollouts", values=file.values, arrays=arrays)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"response_hash": np.array([1], np.uint64)}, "the hash of a response"),
        ({"response_start": np.array([10**6], np.uint64)}, "it refers to tokens"),
        ({"response_segment": np.array([2], np.uint32)}, "it refers to tokens that segment 2"),
        ({"response_length": np.array([0], np.uint32)}, "a response has no token"),
        ({"training_step": np.array([-1], np.int64)}, "training_step is not"),
        ({"reward": np.array([np.inf])}, "reward is not finite"),
        ({"tokens": np.full(23, -5, np.int32)}, "a negative token id"),
    ],
)
def test_what_no_rollout_can_be_is_refused_though_checksums_are_right(columns, reason):
    with pytest.raises(MessageError, match=reason):
        read_rollouts(segment_with(**columns), "publish")


def test_sizes_are_bounded(monkeypatch):
    message = rollouts_message([numbered(n) for n in range(5)], worker="w")
    monkeypatch.setattr(messages, "MAX_MESSAGE_ROLLOUTS", 4)
    with pytest.raises(MessageError, match="it holds 5 rollouts; 4 is the most"):
        read_rollouts(message, "publish")
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", len(message) - 1)
    with pytest.raises(MessageError, match=f"has {len(message)} bytes"):
        read_rollouts(message, "publish")


def test_many_rollouts_that_share_one_long_text_do_not_fill_the_memory(monkeypatch):
    """A text is stored once in a message, but for each of its rollouts in a history."""
    same = [rollout([7] * 1000, 0, request_id=str(n)) for n in range(40)]
    message = rollouts_message(same, worker="w")
    assert len(message) < 40_000
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 100_000)
    with pytest.raises(MessageError, match="its responses have more than 100000 bytes"):
        read_rollouts(message, "publish")


def test_a_piece_needs_a_name():
    for request_id in (None, "no-slash", "/x"):
        message = rollouts_message([rollout([1], 0, request_id=request_id)], worker="w")
        with pytest.raises(MessageError, match=r"a piece is named|worker is ''"):
            read_pieces(message, "pieces")


def test_a_note_of_another_kind_or_without_its_arrays_is_refused():
    with pytest.raises(MessageError, match="is of kind 'pull'"):
        read_note(pull_message([1]), "delta", "delta")
    with pytest.raises(MessageError, match="makes no sense"):
        read_note(checked_bytes(kind="pull", values=[], arrays={}), "pull", "pull")


# ---------------------------------------------------------------- what was learned


def learned_by(worker, seed, *, num_steps):
    random = np.random.default_rng(seed)
    confidence = das.Confidence()
    confidence.hits[:] = random.integers(0, 3000, confidence.hits.shape)
    policy = das.LengthAwareBudget()
    policy.tokens_per_decode_step = 1.0 + seed
    return Learned(
        worker=worker,
        num_decode_steps=num_steps,
        confidence=confidence.state(),
        policy_name="LengthAwareBudget",
        policy=policy.state(),
    )


def test_learned_states_go_through_bytes_and_merge_the_same_in_any_order():
    states = [learned_by(f"w{n}", n, num_steps=n % 3) for n in range(5)]
    read = [Learned.from_bytes(state.to_bytes()) for state in states]
    one, other = merged(read), merged(read[::-1])
    assert one.to_bytes() == other.to_bytes()
    assert (one.num_decode_steps, one.policy["tokens_per_decode_step"]) == (4, 3.0)  # w2 has most steps, as w5 would
    drafter, policy = das.Drafter(), das.LengthAwareBudget()
    assert one.apply_to(drafter, policy)
    assert policy.tokens_per_decode_step == 3.0
    expected = das.Confidence()
    expected.merge([state.confidence for state in states])
    assert np.array_equal(drafter.confidence.hits, expected.hits)
    assert not one.apply_to(drafter, das.PriceBudget(min_survival=0.1))
    assert merged([]) is None


def test_learned_nonsense_is_refused():
    good = learned_by("w", 0, num_steps=3)
    for changes in (
        {"confidence": {"hits": np.zeros(3)}},
        {"policy": [1]},
        {"policy_name": 3},
        {"num_decode_steps": -1},
        {"worker": ""},
    ):
        fields = {name: getattr(good, name) for name in good.__dataclass_fields__} | changes
        with pytest.raises(MessageError):
            Learned.from_bytes(Learned(**fields).to_bytes())
