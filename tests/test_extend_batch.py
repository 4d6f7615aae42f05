"""`extend_batch` is `extend` for each request in order, in one call."""

import random

import pytest
from checks import failing_allocation

import das

PROMPT = [1, 2, 3]


def twins(num_requests, seed):
    """Two drafters with the same history and requests; half the requests answer one prompt."""
    order = random.Random(seed)
    drafters = []
    rollouts = [[order.randrange(4) for _ in range(60)] for _ in range(4)]
    for _ in range(2):
        drafter = das.Drafter()
        for number, response in enumerate(rollouts):
            drafter.history.add(das.Rollout(prompt_token_ids=PROMPT, response_token_ids=response, ordinal=number))
        for number in range(num_requests):
            drafter.start(f"r{number}", prompt_token_ids=PROMPT if number % 2 else [9, number], training_step=1)
        drafters.append(drafter)
    return drafters


def everything(drafter, policy):
    drafts = das.plan_step(drafter, drafter.request_ids(), policy=policy)
    cells = drafter.confidence.state()
    return (
        {name: (draft.draft_token_ids, draft.survival) for name, draft in drafts.items()},
        {name: drafter.counters(name) for name in drafter.request_ids()},
        cells["hits"].tolist(),
        cells["misses"].tolist(),
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_same_as_one_by_one(seed):
    order = random.Random(seed)
    one_by_one, batch = twins(7, seed)
    policy = das.PriceBudget(min_survival=0.05)
    for _ in range(12):
        drafts = everything(one_by_one, policy)[0]
        assert everything(batch, policy)[0] == drafts
        names = order.sample(sorted(drafts), order.randrange(1, 8))
        emitted = {}
        verified = {}
        for name in names:
            tokens = drafts[name][0]
            verified[name] = order.randrange(len(tokens) + 1)
            emitted[name] = [*tokens[: order.randrange(verified[name] + 1)], order.randrange(4)]
            if order.random() < 0.1:
                emitted[name] = []
        if order.random() < 0.3:
            verified = {}
        for name in names:
            one_by_one.extend(name, emitted[name], num_verified_draft_tokens=verified.get(name))
        batch.extend_batch(emitted, num_verified_draft_tokens=verified or None)
        for ours, theirs in zip(one_by_one.take_feedback(), batch.take_feedback(), strict=True):
            assert ours.tolist() == theirs.tolist()
        assert everything(one_by_one, policy) == everything(batch, policy)


def test_environment_tokens_come_before():
    one_by_one, batch = twins(4, 0)
    for drafter in (one_by_one, batch):
        drafter.extend("r1", [1, 2], generated=True)
        drafter.extend("r1", [7, 7, 7], generated=False)
        drafter.extend("r3", [7, 7, 7], generated=False)
    for name in ("r1", "r2", "r3"):
        one_by_one.extend(name, [0, 1])
    batch.extend_batch({"r1": [0, 1], "r2": [0, 1], "r3": [0, 1]})
    assert everything(one_by_one, das.UnlimitedBudget()) == everything(batch, das.UnlimitedBudget())
    for drafter in (one_by_one, batch):
        drafter.finish("r1")
    (rollout,) = [r for r in batch.history.rollouts(das.prompt_key(PROMPT)) if r.request_id == "r1"]
    assert rollout.response_mask.tolist() == [True, True, False, False, False, True, True]


@pytest.mark.parametrize(
    ("token_ids", "verified", "error", "message"),
    [
        ({"r0": [1], "nobody": [1]}, None, KeyError, "nobody"),
        ({"r0": [1], "r1": [1, -4]}, None, ValueError, r"token_ids\[1\] is -4"),
        ({"r0": [1], "r1": [1.5]}, None, TypeError, r"token_ids\[0\]"),
        ({"r0": [1], "r1": [1]}, {"r1": 99}, ValueError, "num_verified_draft_tokens is 99"),
        ({"r0": [1], "r1": [1]}, {"r1": -1}, ValueError, "num_verified_draft_tokens is -1"),
    ],
)
def test_a_refused_batch_changes_nothing(token_ids, verified, error, message):
    ours, untouched = twins(3, 1)
    policy = das.FixedBudget()
    assert everything(ours, policy) == everything(untouched, policy)
    with pytest.raises(error, match=message):
        ours.extend_batch(token_ids, num_verified_draft_tokens=verified)
    assert everything(ours, policy) == everything(untouched, policy)
    for drafter in (ours, untouched):
        drafter.extend_batch({name: [1, 2] for name in ("r0", "r1", "r2")})
    assert everything(ours, policy) == everything(untouched, policy)


@pytest.mark.parametrize("single", [True, False])
def test_no_memory_behind_environment_tokens_leaves_the_drafts_as_they_were(single):
    """The environment tokens may be in the tree by then; that is where the next draft would have put them."""
    policy, long = das.UnlimitedBudget(), list(range(1000, 21_000))  # longer than the room that the tree has
    num_failures = 0
    while True:
        ours, untouched = twins(3, 5)
        for drafter in (ours, untouched):
            drafter.extend_batch({name: [1, 2] for name in ("r0", "r1", "r2")})
            drafter.extend("r1", [0, 3], generated=False)
        try:
            with failing_allocation(num_failures):
                if single:
                    ours.extend("r1", long)
                else:
                    ours.extend_batch({"r1": long})
        except MemoryError:
            num_failures += 1
        else:
            break
        assert everything(ours, policy) == everything(untouched, policy)
        for drafter in (ours, untouched):
            drafter.extend_batch({name: [2, 3] for name in ("r2", "r1", "r0")})
        assert everything(ours, policy) == everything(untouched, policy)
        for r in (ours.finish("r1"), untouched.finish("r1")):
            assert r.num_emitted_tokens == 4
    assert num_failures >= 3
