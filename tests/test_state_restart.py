"""A warm restart drafts from the first decode step on as well as the process before it would have."""

from pathlib import Path

import pytest

import das
from das import Drafter, load_state, plan_step, save_state
from das.analysis import read_log

EXAMPLE = Path(__file__).parent.parent / "examples" / "amc23_rollouts.jsonl.gz"


def decode(drafter, policy, rollouts, step):
    """Decode these responses side by side, greedily verified; return the drafts of each decode step."""
    running = {}
    for number, target in enumerate(rollouts):
        name = f"{step}-{number}"
        drafter.start(name, prompt_token_ids=target.prompt_token_ids, training_step=step)
        running[name] = target.response_token_ids.tolist()
    drafted = []
    while running:
        drafts = plan_step(drafter, list(running), policy=policy)
        drafted.append({name: draft.draft_token_ids for name, draft in drafts.items()})
        emitted = {}
        for name, rest in running.items():
            draft = drafts[name].draft_token_ids
            num_accepted = next((i for i, token in enumerate(draft) if rest[i : i + 1] != [token]), len(draft))
            emitted[name] = rest[: num_accepted + 1]
            running[name] = rest[num_accepted + 1 :]
        drafter.extend_batch(emitted)
        for name in [name for name, rest in running.items() if not rest]:
            drafter.finish(name)
            del running[name]
    plan_step(drafter, [], policy=policy)  # it hears how the last step fared
    return drafted


def lengths_priced():
    return das.LengthAwareBudget(latency=das.LatencyModel(c_base_ms=8.0, c_tok_ms=0.1))


@pytest.mark.parametrize("make", [lambda: das.PriceBudget(min_survival=0.3), lengths_priced], ids=["price", "lengths"])
@pytest.mark.parametrize("step", [0, 1], ids=["in the same epoch", "in the next epoch"])
def test_a_warm_restart_drafts_as_well_as_before_from_the_first_step_on(tmp_path, step, make):
    """In the next epoch it drafts the same, but for what LengthAwareBudget has noted of requests that ran.

    In the same epoch, responses that ended count as history instead of running text: 4 % fewer decode steps.
    """
    log = [record.rollout for record in read_log(EXAMPLE)]
    prompts = list(dict.fromkeys(stored.key for stored in log))[:2]
    steps = sorted({stored.training_step for stored in log})
    epochs = [[r for r in log if r.key in prompts and r.training_step == number] for number in steps]
    drafter, policy = Drafter(), make()
    decode(drafter, policy, epochs[0][::2], 0)
    save_state(tmp_path, drafter=drafter, policy=policy)
    restarted, restored = Drafter(), make()
    load_state(tmp_path, drafter=restarted, policy=restored)
    before = drafter.counters()
    targets = (epochs[0][1::2], epochs[1][::2])[step]
    expected, found = decode(drafter, policy, targets, step), decode(restarted, restored, targets, step)
    num_steps = drafter.counters().num_decode_steps - before.num_decode_steps
    assert restarted.counters().num_decode_steps <= 1.01 * num_steps
    assert restarted.counters().num_accepted_tokens > 0.3 * num_steps
    if step == 1 and isinstance(policy, das.PriceBudget):
        assert found == expected
    first, again = (sum(map(len, drafts[0].values())) for drafts in (expected, found))
    assert again >= 0.99 * first > 0
