"""Logs of each trainer: rows as the trainer writes them, what arrives in a record, and which rows are refused."""

import json
from pathlib import Path

import pytest
from log_samples import parquet, read_skipping, responses, row, verl, word_tokenizer, write

from das import Rollout, prompt_key
from das.analysis import LogError, read_log
from das.analysis.formats import FORMATS, format_of
from das.rollout import named_prompt_key
from das_sglang import control
from das_trainers import RolloutLog

DATA = Path(__file__).parent / "data"
pytestmark = pytest.mark.filterwarnings("ignore:.*tokenised again")


def open_instruct(**changes: object) -> dict[str, object]:
    record = {"step": 4, "sample_idx": 5, "prompt_idx": 1, "prompt_tokens": [1, 2], "response_tokens": [7, 8, 9]}
    record |= {"reward": 10.0, "advantage": 0.7, "finish_reason": "stop", "dataset": "math", "ground_truth": [3]}
    info = {"num_calls": 0, "timeouts": 0, "tool_errors": "", "tool_outputs": "", "tool_calleds": False}
    return (
        record | {"request_info": info | {"tool_call_stats": [], "rollout_state": {}}, "logprobs": [-1.0] * 3} | changes
    )


def slime(**changes: object) -> dict[str, object]:
    """A sample of tests/data/write_slime_dump.py as somebody may have turned it into JSON."""
    fields = {"group_index": 0, "index": 0, "prompt": "what is it", "tokens": [1, 2, 7, 8, 9], "response_length": 3}
    return fields | {"reward": 1.0, "loss_mask": [1, 0, 1], "status": "truncated", "training_step": 7} | changes


def nemo_rl(**changes: object) -> dict[str, object]:
    """Padded to the longest sequence of the batch, with tool output between two answers."""
    record = {"content": [["what is it", "it", "<tool>", "is"]], "rewards": 0.5, "input_lengths": 6}
    record |= {"token_ids": [1, 2, 7, 8, 9, 9, 0, 0], "token_loss_mask": [0, 0, 1, 0, 1, 1, 0, 0]}
    return record | {"sample_loss_mask": 1.0, "advantages": [0.1] * 8, "prev_logprobs": [-1.0] * 8} | changes


def prime_rl(**changes: object) -> dict[str, object]:
    record = {"schema_version": 1, "step": 9, "export_step": 3, "rank": 0, "micro_step": 0, "micro_sequence_idx": 0}
    record |= {"export_sequence_idx": 0, "run_id": None, "env_name": "math", "token_ids": [1, 2, 7, 8, 9]}
    record |= {"position_ids": [0, 1, 2, 3, 4], "loss_mask": [False, False, True, False, True]}
    return record | {"advantages": [0.5] * 5, "rewards": [1.0] * 5, "entropy": [None] * 5} | changes


def areal(**changes: object) -> dict[str, object]:
    record = {"task_id": 31, "sample_idx": 2, "seqlen": 6, "prompt_len": 3, "head_version": 5, "tail_version": 6}
    record |= {"version_rle": [[5, 2], [6, 1]], "reward": 1.0, "prompt": "what is it", "completion": "it is it"}
    return record | changes


SEGMENTS = [
    {"role": "prompt", "len": 3, "text": "what is it"},
    {"role": "gen", "len": 1, "text": "it"},
    {"role": "context", "len": 2, "text": "what what"},
    {"role": "gen", "len": 2, "text": "is it"},
]


def trl(**changes: object) -> dict[str, object]:
    record = {"step": 12, "prompt": "what is it", "completion": "it is it", "accuracy_reward": 1.0, "advantage": 0.3}
    return record | changes


def openrlhf(**changes: object) -> dict[str, object]:
    return {"input": "what is it", "output": "it is it", "reward": 0.25} | changes


#           format, file, row; prompt, response, mask, training step, reward; sample, truncated
ARRIVALS = [
    ("das", "a.jsonl", row(), [1, 2], [7, 8, 9], None, 3, 0.5, 0, None),
    ("open-instruct", "run_rollouts_000000.jsonl", open_instruct(), [1, 2], [7, 8, 9], None, 4, 10.0, 0, False),
    ("open-instruct", "a.jsonl", open_instruct(finish_reason="length"), [1, 2], [7, 8, 9], None, 4, 10.0, 0, True),
    ("slime", "7.jsonl", slime(), [1, 2], [7, 8, 9], [1, 0, 1], 7, 1.0, 0, True),
    ("slime", "7.jsonl", slime(reward={"a": 1}, loss_mask=None), [1, 2], [7, 8, 9], None, 7, None, 0, True),
    ("nemo-rl", "train_data_step17.jsonl", nemo_rl(), [1, 2], [7, 8, 9, 9], [1, 0, 1, 1], 17, 0.5, 0, None),
    ("prime-rl", "rank_0.jsonl", prime_rl(), [1, 2], [7, 8, 9], [1, 0, 1], 3, 1.0, 0, None),
    ("prime-rl", "rank_0.jsonl", prime_rl(export_step=None), [1, 2], [7, 8, 9], [1, 0, 1], 9, 1.0, 0, None),
    ("verl", "3.jsonl", verl(3), [1, 2, 3], [3, 2, 3], None, 3, 1.0, 0, None),
    ("openrlhf", "out.jsonl", openrlhf(), [1, 2, 3], [3, 2, 3], None, None, 0.25, 0, None),
    ("areal", "31.jsonl", areal(), [1, 2, 3], [3, 2, 3], None, 5, 1.0, 2, None),
    ("areal", "31.jsonl", areal(segments=SEGMENTS), [1, 2, 3], [3, 1, 1, 2, 3], [1, 0, 0, 1, 1], 5, 1.0, 2, None),
    ("trl", "completions_00012.parquet", trl(), [1, 2, 3], [3, 2, 3], None, 12, None, 0, None),
    ("trl", "completions.jsonl", trl(), [1, 2, 3], [3, 2, 3], None, 12, None, 0, None),
]


@pytest.mark.parametrize("arrival", ARRIVALS, ids=lambda arrival: f"{arrival[0]}-{arrival[1]}")
@pytest.mark.parametrize("is_forced", [False, True])
def test_a_row_of_each_format_arrives(tmp_path: Path, arrival: tuple, is_forced: bool) -> None:
    name, file, fields, prompt, response, mask, step, reward, sample, truncated = arrival
    path = (parquet if file.endswith("parquet") else write)(tmp_path / file, fields)
    forced = {"format": name} if is_forced else {}
    [record] = read_log(path, tokenizer=word_tokenizer(tmp_path), **forced)
    rollout = record.rollout
    assert record.format == name
    assert (rollout.prompt_token_ids.tolist(), rollout.response_token_ids.tolist()) == (prompt, response)
    found = None if rollout.response_mask is None else rollout.response_mask.tolist()
    assert found == (None if mask is None else [bool(generated) for generated in mask])
    assert (rollout.training_step, rollout.reward) == (step, reward)
    assert (record.sample, record.truncated, record.prompt_id) == (sample, truncated, "q1" if name == "das" else None)


def test_every_format_has_a_sample() -> None:
    assert {arrival[0] for arrival in ARRIVALS} == set(FORMATS)
    assert all(FORMATS[name].trainer and FORMATS[name].name == name for name in FORMATS)


STEP_FIELDS = {"training_step", "export_step", "step", "head_version"}


@pytest.mark.parametrize("step", [2**62, 2**63 - 1, 2**63, 10**40])
@pytest.mark.parametrize("arrival", [arrival for arrival in ARRIVALS if arrival[6] is not None], ids=lambda a: a[0])
def test_a_training_step_that_no_rollout_takes_is_a_bad_row(tmp_path: Path, arrival: tuple, step: int) -> None:
    """Wherever a format has its training step: in a field, or in the name of its file."""
    _, _, fields, *_ = arrival
    path = write(tmp_path / f"step{step}.jsonl", fields | dict.fromkeys(STEP_FIELDS & fields.keys(), step))
    with pytest.raises(
        LogError, match=rf"jsonl:1: .*(step|version|name) must be an integer, .*2\*\*62, not {step}"
    ) as caught:
        list(read_log(path, tokenizer=word_tokenizer(tmp_path)))
    assert caught.value.line == 1


def test_the_largest_training_step_arrives(tmp_path: Path) -> None:
    [record] = read_log(write(tmp_path / "1.jsonl", row(training_step=2**62 - 1, prompt_key=2**64 - 1)))
    assert (record.rollout.training_step, record.rollout.key) == (2**62 - 1, 2**64 - 1)


def test_a_prompt_named_by_text_has_the_key_that_engines_give_it(tmp_path: Path) -> None:
    rows = [row(prompt_key="problem 17"), row(prompt_key="problem 17", prompt_token_ids=[5])]
    nameless = [row(prompt_key=key) for key in (None, "", True, 1.5, [1])]
    records = list(read_log(write(tmp_path / "1.jsonl", *rows, *nameless)))
    assert [record.rollout.key for record in records[:2]] == [named_prompt_key("problem 17")] * 2
    assert [record.rollout.key for record in records[2:]] == [prompt_key([1, 2])] * 5


def test_a_log_that_numbers_samples_keeps_their_numbers(tmp_path: Path) -> None:
    """As `das_trainers.RolloutLog` writes them, so that a rollout read again is the same one."""
    log = RolloutLog(tmp_path)
    numbers = [7, 0, 3, 0, 1, 0]  # two of the groups have no step, so that their numbers come again
    log.add_many([Rollout(prompt_token_ids=[1], response_token_ids=[2], ordinal=number) for number in numbers])
    log.close()
    assert [record.rollout.ordinal for record in read_log(tmp_path)] == numbers
    rows = [row(ordinal=5), row(), row(ordinal=None)]
    assert [record.rollout.ordinal for record in read_log(write(tmp_path / "mixed.jsonl", *rows))] == [5, 0, 1]
    path = write(tmp_path / "bad.jsonl", row(ordinal=2**31))
    with pytest.raises(LogError, match=r"ordinal must be an integer, .*2\*\*31, not 2147483648"):
        list(read_log(path))


def test_engines_take_the_rows_of_a_log(tmp_path: Path) -> None:
    rows = [row(prompt_key="a", truncated=True, request_id="r"), row(response_mask=[True, False, True])]
    rows += [row(response_token_ids=[4], epoch=3, ordinal=None), row(response_token_ids=[4], ordinal=2)]
    path = write(tmp_path / "1.jsonl", *rows)
    pushed = list(control._parsed("", str(path)))
    for one, record in zip(pushed, read_log(path), strict=True):
        assert (one.key, one.response_hash, one.training_step) == (
            record.rollout.key,
            record.rollout.response_hash,
            record.rollout.training_step,
        )


def test_nemo_rl_values_may_come_as_lists_of_one(tmp_path: Path) -> None:
    plain = nemo_rl()
    wrapped = {name: [value] for name, value in plain.items()}
    path = write(tmp_path / "train_data_step2.jsonl", plain, wrapped, nemo_rl(token_loss_mask=[0.0] * 2 + [1.0] * 6))
    first, second, third = read_log(path)
    assert responses([first]) == responses([second]) == responses([third]) == [[7, 8, 9, 9]]
    assert (first.rollout.reward, second.rollout.reward, third.rollout.response_mask) == (0.5, 0.5, None)


BAD = {
    "open-instruct": [
        ({"prompt_tokens": [1], "step": 1}, "response_tokens", "response_tokens is missing"),
        (open_instruct(response_tokens=[]), "response_tokens", "response_tokens is empty"),
        (open_instruct(step=-1), "step", "step must be an integer"),
        (open_instruct(finish_reason=3), "finish_reason", "finish_reason must be text"),
        (
            open_instruct(request_info={"tool_calleds": True}),
            "request_info",
            "tool_calleds is true: the response holds",
        ),
    ],
    "slime": [
        (slime(tokens="1"), "tokens", "tokens must be a list of token ids"),
        (slime(response_length=0), "response_length", "response_length is 0; it must be 1 to 4"),
        (slime(response_length=5), "response_length", "response_length is 5; it must be 1 to 4"),
        (slime(response_length=None), "response_length", "response_length is None; it must be"),
        (slime(loss_mask=[1, 1]), "loss_mask", "loss_mask has 2 entries; it must have 3, one a response token"),
        (slime(reward="1"), "reward", "reward must be a number"),
        (slime(status=1), "status", "status must be text"),
    ],
    "nemo-rl": [
        (nemo_rl(input_lengths=9), "input_lengths", "input_lengths is 9; it must be 1 to 8"),
        (nemo_rl(input_lengths=0), "input_lengths", "input_lengths is 0; it must be 1 to 8"),
        (nemo_rl(token_loss_mask=[0] * 8), "token_loss_mask", "token_loss_mask marks no token as generated"),
        (nemo_rl(token_loss_mask=[1] * 8), "token_loss_mask", "marks the first token as generated"),
        (nemo_rl(token_loss_mask=[1] * 7), "token_loss_mask", "token_loss_mask has 7 entries; it must have 8"),
        (nemo_rl(token_loss_mask=[0.5] * 8), "token_loss_mask", r"token_loss_mask\[0\] is 0.5; it must be true"),
        (nemo_rl(token_loss_mask=None), "token_loss_mask", "token_loss_mask is null"),
        (nemo_rl(token_loss_mask=[0] * 7 + [1]), "token_loss_mask", "marks no token as generated"),  # only padding
        ({"content": "it", "rewards": 1.0, "input_lengths": 3}, "token_ids", "token_ids is missing"),
    ],
    "prime-rl": [
        (prime_rl(loss_mask=None), "loss_mask", "loss_mask is null"),
        (prime_rl(token_ids=[1, 2, 3, 4, -1]), "token_ids", r"token_ids\[4\] is -1"),
        (prime_rl(rewards=["a"] * 5), "rewards", "rewards must be a number"),
    ],
    "openrlhf": [
        (openrlhf(output=""), "output", "output is empty"),
        (openrlhf(reward=[1]), "reward", "reward must be a number"),
    ],
    "areal": [
        (areal(completion=None), "completion", "completion must be text, not None"),
        (areal(head_version="5"), "head_version", "head_version must be an integer"),
        (areal(sample_idx=0.5), "sample_idx", "sample_idx must be an integer"),
        (areal(segments=SEGMENTS[1:]), "segments", r"segments\[0\].role is 'gen'; it must be prompt"),
        (areal(segments=[*SEGMENTS, {"role": "tool"}]), "segments", r"segments\[4\].role is 'tool'; it must be gen or"),
        (areal(segments=SEGMENTS[:1]), "segments", "segments must be a list of two or more objects"),
        (
            areal(segments=[*SEGMENTS, {"role": "gen"}]),
            "segments[4].text",
            r"segments\[4\].text must be text, not None",
        ),
    ],
    "trl": [
        (trl(prompt=[{"role": "user", "content": "what"}]), "prompt", "prompt must be text, not "),
        (trl(step=0.5), "step", "step must be an integer"),
    ],
}
GOOD = {"open-instruct": open_instruct, "slime": slime, "nemo-rl": nemo_rl, "prime-rl": prime_rl}
GOOD |= {"openrlhf": openrlhf, "areal": areal, "trl": trl}


@pytest.mark.parametrize(
    ("name", "bad", "field", "message"), [(name, *case) for name, cases in BAD.items() for case in cases]
)
def test_bad_rows_of_each_format_name_line_and_field(
    tmp_path: Path, name: str, bad: dict[str, object], field: str, message: str
) -> None:
    path = write(tmp_path / "log.jsonl", GOOD[name](), bad, GOOD[name]())
    tokenizer = word_tokenizer(tmp_path)
    with pytest.raises(LogError, match=rf"log\.jsonl:2: .*{message}") as caught:
        list(read_log(path, tokenizer=tokenizer))
    assert (caught.value.path, caught.value.line, caught.value.field) == (str(path), 2, field)
    records, [error] = read_skipping(path, tokenizer=tokenizer)
    assert (len(records), str(error)) == (2, str(caught.value))


# Which format a file has.


def test_detection_depends_on_the_fields_only() -> None:
    rows = {arrival[0]: arrival[2] for arrival in ARRIVALS}
    for name, fields in rows.items():
        assert format_of(dict(reversed(fields.items()))) is FORMATS[name]
    assert format_of({"question": 1}) is None


@pytest.mark.parametrize(("own", "other"), [(verl(1), openrlhf()), (openrlhf(), verl(1)), (row(), prime_rl())])
def test_a_row_of_another_format_in_a_file_is_called_that(tmp_path: Path, own: dict, other: dict) -> None:
    path = write(tmp_path / "log.jsonl", "", own, other, own)
    names = [format_of(fields).name for fields in (other, own)]  # type: ignore[union-attr]
    message = rf"log\.jsonl:3: the row has the format {names[0]}, but the file began with {names[1]} in line 2; a file"
    tokenizer = word_tokenizer(tmp_path)
    with pytest.raises(LogError, match=message):
        list(read_log(path, tokenizer=tokenizer))
    records, bad = read_skipping(path, tokenizer=tokenizer)
    assert ([record.format for record in records], len(bad)) == ([names[1]] * 2, 1)


def test_the_format_can_be_forced(tmp_path: Path) -> None:
    both = openrlhf() | row()
    path = write(tmp_path / "log.jsonl", both, openrlhf())
    tokenizer = word_tokenizer(tmp_path)
    assert responses(read_skipping(path)[0]) == [[7, 8, 9]]
    assert responses(list(read_log(path, format="openrlhf", tokenizer=tokenizer))) == [[3, 2, 3]] * 2
    with pytest.raises(LogError, match=r"log\.jsonl:1: tokens is missing; fields found: input, "):
        list(read_log(path, format="slime"))
    with pytest.raises(ValueError, match=r"format is 'vrel'; it must be one of das, open-instruct, "):
        read_log(path, format="vrel")


def test_a_forced_format_reads_its_parquet_columns_only(tmp_path: Path) -> None:
    path = parquet(tmp_path / "log.parquet", trl() | {"reward": "not a number"})
    assert len(list(read_log(path, format="trl", tokenizer=word_tokenizer(tmp_path)))) == 1
    with pytest.raises(LogError, match=r"log\.parquet:1: prompt_token_ids is missing; fields found: reward$"):
        list(read_log(path, format="das"))


@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if one.is_text])
def test_text_formats_ask_for_a_tokenizer_and_warn(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "log.jsonl", next(arrival[2] for arrival in ARRIVALS if arrival[0] == name))
    trainer = FORMATS[name].trainer
    with pytest.raises(LogError, match=rf"log\.jsonl:1: a text log \({trainer}\) needs the policy's tokenizer\.json"):
        list(read_log(path))
    with pytest.warns(UserWarning, match="token ids can differ"):
        list(read_log(path, tokenizer=word_tokenizer(tmp_path)))


# Folders as trainers leave them.


def test_folders_are_read_through_without_what_is_no_rollout(tmp_path: Path) -> None:
    steps = {
        "exp_001/train_data_step10.jsonl": 5,
        "exp_001/train_data_step9.jsonl": 4,
        ".tmp/train_data_step1.jsonl": 1,
    }
    for name, token in steps.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, nemo_rl(token_ids=[1, 2, token, 8, 9, 9, 0, 0]))
    write(tmp_path / "exp_001" / "val_data_step9.jsonl", {"content": ["it"], "rewards": 1.0, "idx": 0})
    write(tmp_path / "exp_001" / "run_metadata.jsonl", {"run_name": "run"})
    (tmp_path / "loop").symlink_to(tmp_path)
    records = list(read_log(tmp_path))
    assert [record.rollout.training_step for record in records] == [9, 10]
    assert [int(record.rollout.response_token_ids[0]) for record in records] == [4, 5]


def test_files_of_a_folder_may_differ_in_format(tmp_path: Path) -> None:
    write(tmp_path / "1.jsonl", row())
    write(tmp_path / "2.jsonl.gz", open_instruct())
    (tmp_path / "3.pt").write_bytes((DATA / "slime_rollout_7.pt").read_bytes())
    assert [record.format for record in read_log(tmp_path)] == ["das", "open-instruct", *["slime"] * 5]


def test_rows_need_not_know_each_other(tmp_path: Path) -> None:
    """A cut-off row in the middle of a file costs that row only, in every format."""
    for name, good in GOOD.items():
        cut = json.dumps(good())[:-30]
        records, [error] = read_skipping(
            write(tmp_path / "log.jsonl", good(), cut, good()), tokenizer=word_tokenizer(tmp_path)
        )
        assert ([record.format for record in records], error.line) == ([name] * 2, 2)
