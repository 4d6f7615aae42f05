"""The benchmarks' side of das runs to the end: no figure of the README comes from code that nothing else runs."""

from pathlib import Path

import pytest

from bench.bench_accept import FAMILIES, WITHOUT_A_PART, measure
from bench.bench_curve import POLICIES, counts_under, own_over_all
from bench.bench_lengths import batches, scores
from bench.bench_state import at_a_limit, cells, in_memory, loaded_into_memory, loaded_mapped
from bench.decode import Decode
from bench.rollouts import prompts_of_size
from bench.sides import MAX_DRAFT_TOKENS, create
from das import LengthModel
from das.analysis import read_log

EXAMPLE = Path(__file__).parent.parent / "examples" / "amc23_rollouts.jsonl.gz"


@pytest.mark.parametrize("order", ["step", "lockstep"])
@pytest.mark.parametrize("history", [0, 4])
def test_acceptance_is_measured_to_the_end(order, history):
    job = {"log": str(EXAMPLE), "end_token": True, "history": history, "group_size": 2, "prompts": 3, "order": order}
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
        *(f"{side}:price=0.15" for side in WITHOUT_A_PART),
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
    assert all(len(cells(row)) == 8 for row in rows)
    limited = at_a_limit((40, 4, 500), tmp_path)
    assert limited[0]["counted_bytes"] <= limited[0]["limit_bytes"]
