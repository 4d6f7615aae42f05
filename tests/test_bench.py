"""The benchmarks' side of das runs to the end: no figure of the README comes from code that nothing else runs."""

from pathlib import Path

import pytest

from bench.bench_accept import FAMILIES, WITHOUT_A_PART, measure
from bench.decode import Decode
from bench.rollouts import prompts_of_size
from bench.sides import MAX_DRAFT_TOKENS, create

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
