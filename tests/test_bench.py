"""The benchmarks' side of das runs to the end: no figure of docs/numbers.md comes from code that nothing else runs."""

from pathlib import Path

import numpy as np
import pytest

from bench.bench_accept import FAMILIES, OTHER_RULES, measure
from bench.bench_curve import POLICIES, counts_under, own_over_all
from bench.bench_lengths import batches, scores
from bench.bench_state import HEADER, at_a_limit, cells, in_memory, loaded_into_memory, loaded_mapped
from bench.decode import Decode
from bench.rollouts import prompts_of_size, questions_of
from bench.sides import MAX_DRAFT_TOKENS, create
from das import LengthModel
from das.analysis import read_log

EXAMPLE = Path(__file__).parent.parent / "examples" / "amc23_rollouts.jsonl.gz"


@pytest.mark.parametrize("order", ["step", "lockstep"])
@pytest.mark.parametrize("history", [0, 4])
def test_acceptance_is_measured_to_the_end(order, history):
    job = {
        "log": str(EXAMPLE),
        "end_token": True,
        "history": history,
        "group_size": 2,
        "prompts": 3,
        "order": order,
        "change": "drift",
    }
    family = FAMILIES["das:price"]
    row = measure({**job, **family.job(0.15)})
    assert row["num_targets"] == 6
    assert row["num_target_tokens"] >= row["num_steps"] > 0
    assert row["tokens_per_step"] > (1.5 if history else 1.1)


@pytest.mark.parametrize(
    "side",
    [
        "das:price=0.15",
        "das:fixed=8",
        "das:throughput=0",
        "das-tree:price=0.15",
        "das-widths:throughput=0",
        "das:width=3",
        *(f"{side}:price=0.15" for side in OTHER_RULES),
    ],
)
def test_every_policy_decodes_a_batch_that_refills(side):
    prompts = prompts_of_size(str(EXAMPLE), num_tokens=3000)
    side = create(side, cap=MAX_DRAFT_TOKENS)
    for prompt in prompts:
        for response in prompt.history:
            side.add(prompt.key, prompt.token_ids, response)
    side.ready()
    decode = Decode(side, prompts, max_running=2)
    while decode.num_running:
        decode.step()
    assert decode.tally.num_emitted == sum(len(target) for prompt in prompts for target in prompt.targets)
    assert decode.tally.num_accepted > 0
    assert side.settings()["policy"]


def test_the_three_changes_of_policy():
    """Later samples of the same step, those of another step, and these in token ids that the history does not know."""
    none, drift, abrupt = (
        questions_of(str(EXAMPLE), None, history_samples=4, group_size=2, change=change)
        for change in ("none", "drift", "abrupt")
    )
    for one, other, renamed in zip(none, drift, abrupt, strict=True):
        assert [list(map(len, prompt.history)) for prompt in (one, other)] == [list(map(len, renamed.history))] * 2
        assert [len(target) for target in other.targets] == [len(target) for target in renamed.targets]
        assert one.targets[0].tolist() not in [other.targets[0].tolist(), one.history[0].tolist()]
    ids, renamed_ids = (np.concatenate([prompt.targets[0] for prompt in prompts]) for prompts in (drift, abrupt))
    assert len(set(zip(ids.tolist(), renamed_ids.tolist(), strict=True))) == len(set(ids.tolist()))
    assert (ids == renamed_ids).mean() < 0.1


def test_padding_is_paid_for_and_never_accepted():
    job = {"log": str(EXAMPLE), "end_token": True, "history": 4, "group_size": 2, "prompts": 3, "order": "step"}
    always, chosen, free = (
        measure({**job, "change": "drift", **FAMILIES[name].job(value)})
        for name, value in (("das:width", 7), ("das-widths:throughput", 0), ("das:throughput", 0))
    )
    assert always["drafted_per_step"] == 7
    assert always["tokens_per_step"] > 1.5
    assert 0 < chosen["drafted_per_step"] <= 15
    assert free["batch_cost"] <= chosen["batch_cost"], "one width for all is a restriction"


def test_forecasts_of_lengths_are_scored_to_the_end():
    log = batches(str(EXAMPLE), 8)
    assert [len(lengths) for _, lengths in log] == [320, 320]
    found = scores(log, LengthModel())
    assert all(likelihood > -3 for likelihood, *_ in found)
    assert found[0][0] > scores(log, LengthModel(shrinkage_rollouts=1e6))[0][0]


def test_curves_are_measured_to_the_end():
    log = [record.rollout for record in read_log(EXAMPLE)]
    prompts = sorted({rollout.key for rollout in log})[:3]
    counts = counts_under([rollout for rollout in log if rollout.key in prompts], POLICIES["cap 4"]())
    keys, emitted, drafted, accepted = counts
    assert len(keys) == sum(rollout.key in prompts for rollout in log)
    assert set(keys.tolist()) == set(prompts)
    assert (accepted <= drafted).all()
    assert (accepted < emitted).all()
    assert 0.5 < own_over_all(counts) < 1.5


def test_saved_states_are_measured_to_the_end(tmp_path):
    size = 3, 4, 50
    rows = [row for measure in (in_memory, loaded_mapped, loaded_into_memory) for row in measure(size, tmp_path)]
    assert [row["num_tokens"] for row in rows[:2]] == [600, 600]
    assert {row["num_tokens"] for row in rows[2:]} == {600}  # of three prompts, each lost an epoch and gained one
    assert rows[2]["written_bytes"] < rows[1]["written_bytes"]
    assert all(len(cells(row)) == len(HEADER) for row in rows)
    limited = at_a_limit((40, 4, 500), tmp_path)
    assert limited[0]["counted_bytes"] <= limited[0]["limit_bytes"]
