"""Logs that give drafting nothing to go by, or mislead it, under the default policy: it must notice, and cost nothing.

The cost of a pass over n requests that drafted d tokens is 200 + n + d, in units of the cost of one token: the latency
that ThroughputBudget starts from.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from rollout_samples import rollout

from bench.hostile_logs import answered, new_token_ids, random_log
from das import Drafter, NoDraft, RolloutHistory, ThroughputBudget, plan_step
from das.analysis import read_log
from das.analysis.replay import Replay, replay

EXAMPLE = Path(__file__).parent.parent / "examples" / "amc23_rollouts.jsonl.gz"
C_BASE = 200  # of a pass, in tokens
NUM_RUNNING = 32


@dataclass(frozen=True)
class Pass:
    """One forward pass over all running requests."""

    num_running: int
    num_drafted: int
    num_emitted: int


def passes(drafter, log, policy=None, *, max_running=NUM_RUNNING):
    """Run rollouts as an engine would: where one ends, the next one starts, while there are more."""
    policy = ThroughputBudget() if policy is None else policy
    waiting = [(f"{one.training_step}-{i}", one) for i, one in enumerate(log)][::-1]
    left, done = {}, []
    while left or waiting:
        while waiting and len(left) < max_running:
            request_id, one = waiting.pop()
            drafter.start(request_id, prompt_token_ids=one.prompt_token_ids, training_step=one.training_step)
            left[request_id] = one.response_token_ids.tolist()
        emitted, num_drafted = {}, 0
        for request_id, draft in plan_step(drafter, list(left), policy=policy).items():
            drafted, future = draft.draft_token_ids, left[request_id]
            agree = next((i for i, (a, b) in enumerate(zip(drafted, future, strict=False)) if a != b), len(drafted))
            emitted[request_id] = future[: agree + 1]
            num_drafted += len(drafted)
        drafter.extend_batch(emitted)
        done.append(Pass(len(left), num_drafted, sum(map(len, emitted.values()))))
        for request_id, tokens in emitted.items():
            del left[request_id][: len(tokens)]
            if not left[request_id]:
                del left[request_id]
                drafter.finish(request_id)
    return done


def cost_per_token(some):
    costs = [C_BASE + one.num_running + one.num_drafted for one in some]
    return sum(costs) / sum(one.num_emitted for one in some)


# ---------------------------------------------------------------- nothing to go by


@pytest.mark.parametrize("num_ids", [64, 1000])
def test_random_tokens_are_not_drafted(num_ids):
    log = [one for step in (0, 1) for one in random_log(num_ids=num_ids, num_tokens=400, step=step)]
    result = replay(log)
    for batch in result.batches:
        assert sum(one.num_drafted_tokens for one in batch.requests) < 0.1 * sum(
            one.num_decode_steps for one in batch.requests
        )
    assert result.counters.drafted_per_decode_step < 0.1


@pytest.mark.parametrize("num_ids", [64, 1000, 50_000])
def test_siblings_that_never_agree_cost_what_no_drafting_costs(num_ids):
    logs = [random_log(num_ids=num_ids, num_tokens=300, num_prompts=1, step=step) for step in (0, 1)]
    drafter, policy = Drafter(), ThroughputBudget()
    for log in logs:
        assert cost_per_token(passes(drafter, log, policy)) <= 1.02 * cost_per_token(passes(Drafter(), log, NoDraft()))


# ---------------------------------------------------------------- everything to go by


def test_one_token_repeated_is_drafted_to_the_cap():
    log = [rollout([7] * 1600, 0, prompt=[1 + i % 4]) for i in range(NUM_RUNNING)]
    result = replay(log, policy=ThroughputBudget(max_draft_tokens=16))
    assert result.counters.tokens_per_decode_step >= 15


# ---------------------------------------------------------------- a policy replaced between epochs


@pytest.fixture(scope="module")
def two_epochs():
    """Real rollouts of 16 prompts, 8 a prompt and checkpoint; the second in other token ids.

    The same prompts, and a policy that has nothing in common with the old one.
    """
    records = list(read_log(EXAMPLE))
    few = set(list(dict.fromkeys(record.prompt_id for record in records))[:16])
    old, new = (
        [r.rollout for r in records if r.prompt_id in few and r.rollout.training_step == step] for step in (400, 800)
    )
    return old, new_token_ids(new)


OLD_POLICIES = {
    "real": lambda old: old,
    "looping": lambda old: [answered(one, [7] * 400) for one in old],  # whatever was predicted came true
    "shuffled": lambda old: [
        answered(one, np.random.default_rng(5).permutation(one.response_token_ids)) for one in old
    ],
}


def cost_after_the_switch(old, new, **settings):
    """Cost per token of the second log's passes from the 201st on, while the batch is full."""
    drafter, policy = Drafter(RolloutHistory(**settings)), ThroughputBudget()
    if old:
        passes(drafter, old, policy)
    measured = [one for one in passes(drafter, new, policy)[200:] if one.num_running == NUM_RUNNING]
    assert len(measured) > 300
    return cost_per_token(measured)


@pytest.fixture(scope="module")
def cold():
    """The same after no old policy at all, measured once for each kind of settings."""
    costs = {}

    def cost(new, **settings):
        if str(settings) not in costs:
            costs[str(settings)] = cost_after_the_switch([], new, **settings)
        return costs[str(settings)]

    return cost


@pytest.mark.parametrize("settings", [{}, {"max_common_tokens": 0}], ids=["default", "no common text"])
@pytest.mark.parametrize("old_policy", sorted(OLD_POLICIES))
def test_a_policy_replaced_between_epochs_costs_what_a_cold_start_costs(two_epochs, cold, old_policy, settings):
    """What the cells, the trees and the price learned of the old policy is in nobody's way.

    With default settings, where a cold start draws on other prompts' text; and without that text on either side.
    """
    old, new = two_epochs
    assert cost_after_the_switch(OLD_POLICIES[old_policy](old), new, **settings) <= 1.02 * cold(new, **settings)


# ---------------------------------------------------------------- memory


def adversarial_logs(step):
    """Random text, one token, a loop behind random text, and tokens that never come again."""
    rng, prompts = random.Random(step), [[1 + i % 4] for i in range(NUM_RUNNING)]
    yield random_log(num_ids=50_000, num_tokens=100, step=step)
    yield [rollout([7] * 100, step, prompt=prompt) for prompt in prompts]
    yield [rollout([rng.randrange(1 << 30) for _ in range(50)] + [7] * 50, step, prompt=prompt) for prompt in prompts]
    firsts = range(step * 5000, step * 5000 + 100 * NUM_RUNNING, 100)
    yield [rollout(range(first, first + 100), step, prompt=[9]) for first in firsts]


@pytest.mark.parametrize("which", range(4))
def test_memory_is_bounded_by_the_window_and_by_the_limit(which):
    """Seven epochs: what is held grows until the window is full, and never again."""
    limit = 20_000  # bytes: less than an epoch's trees
    common = (
        3000  # tokens, and what requests that have joined by then still add; a tree of few tokens takes more a token
    )
    held, whole, limited = (
        [],
        *(Drafter(RolloutHistory(window_epochs=2, max_bytes=n, max_common_tokens=common)) for n in (1 << 30, limit)),
    )
    for step in range(7):
        log = list(adversarial_logs(step))[which]
        for drafter in (whole, limited):
            Replay(log, drafter=drafter).run()
        statistics = whole.history.statistics()
        held.append(statistics.rollout_bytes + statistics.tree_bytes)
        assert statistics.common_bytes <= 160 * (common + 100 * NUM_RUNNING)
        assert limited.history.memory_bytes() <= limit
        assert statistics.num_rollouts <= 2 * NUM_RUNNING
    assert held[0] > limit
    assert max(held[3:]) <= 1.1 * max(held[:3])
