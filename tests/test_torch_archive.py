"""slime's dumps: what torch.save wrote is read without unpickling; damage and malice end in an error of the log."""

import io
import os
import pickle
import random
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
from log_samples import read_skipping, responses

from das.analysis import LogError, read_log

REAL = Path(__file__).parent / "data" / "slime_rollout_7.pt"


def sample(tokens, num_response=1, **changes):
    fields = {"index": 0, "prompt": "what", "tokens": tokens, "response_length": num_response, "reward": 1.0}
    return fields | {"loss_mask": None, "status": "completed", "metadata": {}} | changes


def dump(samples, rollout_id=3):
    return pickle.dumps({"rollout_id": rollout_id, "samples": samples}, protocol=2)


def archive(path, pickled, *, compression=zipfile.ZIP_STORED, names=("dump/data.pkl",)):
    """A file in the layout of torch.save."""
    with zipfile.ZipFile(path, "w", compression) as written:
        for name in names:
            written.writestr(name, pickled)
        written.writestr("dump/version", "3\n")
    return path


def test_a_dump_that_torch_wrote():
    records = list(read_log(REAL))
    assert responses(records)[:4] == [[3, 300, 70_000], [3, 1, 9, 9, 4], [7], [8, 8]]
    assert responses(records)[4] == list(range(2500))
    assert [record.rollout.prompt_token_ids.tolist() for record in records] == [[1, 2, 3]] * 2 + [[5, 6]] * 2 + [[5]]
    assert {record.rollout.training_step for record in records} == {7}
    assert [record.rollout.reward for record in records] == [1.0, None, None, 1.0, 1.0]  # a numpy scalar is not read
    assert [record.truncated for record in records] == [False, True, False, False, False]
    assert records[1].rollout.response_mask.tolist() == [True, True, False, False, True]
    assert [record.location for record in records] == [f"{REAL}:{number}" for number in range(1, 6)]
    assert "torch" not in sys.modules


@pytest.mark.parametrize("num_samples", [1, 2, 999, 1000, 1001, 2001])
def test_samples_come_however_the_pickler_cuts_their_list(tmp_path, num_samples):
    path = archive(tmp_path / "3.pt", dump([sample([1, 2, i]) for i in range(num_samples)]))
    assert responses(list(read_log(path))) == [[i] for i in range(num_samples)]


def test_values_of_every_kind_are_plain_data(tmp_path):
    numbers = [*range(-300, 300), 2**31 - 1, -(2**31), 2**40, -(2**40), 2**200, 0.5]
    big = [*numbers, True, None, "\ud800", (), (1,), (1,) * 9]
    path = archive(
        tmp_path / "3.pt", dump([sample([1, 2], metadata={"any": big, 5: {}}), sample([1, 3], metadata=None)])
    )
    assert responses(list(read_log(path))) == [[2], [3]]


def test_what_samples_share_is_refused_unless_it_is_a_name(tmp_path):
    tokens = [1, 2, 3]
    samples = [sample(tokens), sample(tokens), sample([4, 5], session_id="short", other="short")]
    records, [error] = read_skipping(archive(tmp_path / "3.pt", dump(samples)))
    assert responses(records) == [[3], [5]]
    assert (error.line, error.field) == (2, "tokens")
    assert "tokens must be a list of token ids, not <a value shared with another sample, not plain data>" in str(error)


class Dangerous:
    """Pickled as a call of os.mkdir."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_that_a_pickle_says_is_called_or_imported(tmp_path):
    trap = tmp_path / "called"
    samples = [
        sample([1, 2], metadata=Dangerous(trap)),
        sample(Dangerous(trap)),
        sample([1, 4], reward=Dangerous(trap)),
    ]
    samples[0]["metadata"] = OrderedDict(a=Dangerous(trap), b=io.BytesIO())
    path = archive(tmp_path / "3.pt", dump(samples))
    pickle.loads(dump([Dangerous(trap)]))
    trap.rmdir()  # it was called there, so it would be called here
    records, [error] = read_skipping(path)
    assert responses(records) == [[2], [4]]
    assert error.field == "tokens"
    assert "not plain data" in str(error)
    assert not trap.exists()


def opened(pickled, tmp_path):
    """Samples read and the error at their end."""
    records, bad = [], []
    path = archive(tmp_path / "3.pt", pickled)
    try:
        records = list(read_log(path, skip_bad=True, on_bad=bad.append))
    except LogError as error:
        bad = bad or [error]
    return records, bad


def test_a_pickle_that_ends_anywhere_gives_the_samples_before(tmp_path):
    pickled = dump([sample([1, 2, i]) for i in range(3)])
    for end in range(len(pickled)):
        records, [error] = opened(pickled[:end], tmp_path)
        assert responses(records) == [[i] for i in range(len(records))]
        assert f"3.pt:{len(records) + 1}: the pickle in the archive is damaged" in str(error)
    assert len(records) == 3


def test_damaged_bytes_never_end_in_anything_but_an_error_of_the_log(tmp_path):
    pickled, rng = dump([sample([1, 2, i], metadata={"a": [i, 0.5, (i,)]}) for i in range(3)]), random.Random(0)
    outcomes = set()
    for _ in range(300):
        damaged = bytearray(pickled)
        for _ in range(rng.choice([1, 1, 3])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        records, bad = opened(bytes(damaged), tmp_path)
        outcomes.add((len(records) == 3, bool(bad)))
        assert all(isinstance(error, LogError) and "3.pt" in str(error) for error in bad)
    assert len(outcomes) >= 3


def test_a_damaged_byte_anywhere_around_the_pickle_is_an_error_of_the_log(tmp_path):
    """Offsets that lead nowhere, entries marked as encrypted, compressed or of a later version, names that are none."""
    whole = archive(tmp_path / "3.pt", dump([sample([1, 2])])).read_bytes()
    messages = set()
    for position in (*range(whole.index(b"\x80\x02")), *range(whole.index(b"PK\x01\x02"), len(whole))):
        for value in (1, 0xFF):
            (tmp_path / "3.pt").write_bytes(whole[:position] + bytes([value]) + whole[position + 1 :])
            try:
                list(read_log(tmp_path / "3.pt"))
            except LogError as error:
                messages.add(str(error))
    assert all("3.pt:" in message for message in messages)
    for what in ("encrypted", "zip file version", "Invalid argument", "not compressed"):
        assert any(what in message for message in messages), what


@pytest.mark.parametrize("field", ["tokens", "response_length", "reward", "loss_mask", "status"])
def test_values_nested_without_end_are_bad_rows(tmp_path, field):
    deep = b"](" * 5000 + b"K\x01" + b"e" * 5000
    marker = pickle.dumps("marker", protocol=2)[2:-3]  # without protocol, memo and stop
    pickled = dump([sample([1, 2]), sample([1, 2]) | {field: "marker"}, sample([1, 3])])
    assert pickled.count(marker) == 1
    records, bad = opened(pickled.replace(marker, deep), tmp_path)
    assert responses(records) == [[2], [3]]
    assert [(error.line, error.field) for error in bad] == [(2, field)]
    assert "a list nested too deep to show" in str(bad[0])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("text", None, "not an archive that torch.save wrote, or a damaged one"),
        ("compressed", {"compression": zipfile.ZIP_DEFLATED}, "must hold one data.pkl, not compressed"),
        ("none", {"names": ("dump/other.pkl",)}, "must hold one data.pkl"),
        ("two", {"names": ("a/data.pkl", "b/data.pkl")}, "must hold one data.pkl"),
    ],
)
def test_archives_of_others(tmp_path, name, options, message):
    path = tmp_path / f"{name}.pt"
    if options is None:
        path.write_bytes(REAL.read_bytes()[:-100])
    else:
        archive(path, dump([sample([1, 2])]), **options)
    with pytest.raises(LogError, match=rf"{name}\.pt:1: .*{message}"):
        list(read_log(path))


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (pickle.dumps({"model": [1, 2]}, protocol=2), "the archive holds no samples"),
        (dump([]), "the archive holds no samples"),
        (dump({"a": sample([1, 2])}), "the archive holds no samples"),
        (
            pickle.dumps({"rollout_id": 1, "samples": [sample([1, 2])]}, protocol=4),
            "has protocol 4; torch.save writes 2",
        ),
        (b"\x80\x02V1\n.", "holds operation b'V', which protocol 2"),
    ],
)
def test_pickles_of_others(tmp_path, pickled, message):
    with pytest.raises(LogError, match=message):
        list(read_log(archive(tmp_path / "3.pt", pickled)))


def test_what_belongs_to_one_sample_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("das.analysis.containers.torch_archive._MAX_SAMPLE_VALUES", 2000)
    fits = [sample([1, *range(900)], 900) for _ in range(4)]  # more than the bound together
    for too_much in (list(range(3000)), "x" * 20_000, 1 << 150_000):
        records, bad = opened(dump([*fits, sample([1, 2], metadata=too_much)]), tmp_path)
        assert len(records) == 4
        assert [error.line for error in bad] == [5]
    assert "more than 2000 values belong to one sample" in str(bad[0]) or "holds operation" in str(bad[0])


def test_dumps_without_a_number_have_no_training_step(tmp_path):
    pickled = pickle.dumps({"kind": "eval", "samples": [sample([1, 2])]}, protocol=2)
    [record] = read_log(archive(tmp_path / "3.pt", pickled))
    assert record.rollout.training_step is None
