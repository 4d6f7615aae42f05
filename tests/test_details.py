"""What deliberate mutations showed to be unwatched; one reason each."""

import numpy as np
from das._tree_arrays import EDGE_BYTES, NODE_BYTES
from rollout_samples import KEY, PROMPT, draft, filled, rollout, run

from das import Drafter, prompt_key
from das._suffix_tree import SuffixTree


def test_memory_bytes_holds_every_array():
    n = 20_000
    tree = SuffixTree()
    tree.add(np.random.default_rng(0).integers(0, 50, n, dtype=np.int32))  # each array is asked for once, exactly
    assert tree.memory_bytes() >= (NODE_BYTES + 2 * EDGE_BYTES * 4 / 3 + 4 + 4) * n


def test_ties_go_to_the_shorter_context():
    # order 1: [9] -> 4 five times, -> 5 once; order 2: [8, 9] -> 5 once; both candidates have the same P
    history = filled(
        *[rollout([k, 9, 4], 0, prompt=[k], prompt_key=KEY) for k in (20, 21, 22, 23, 24)],
        rollout([8, 9, 5], 0, prompt=[25], prompt_key=KEY),
    )
    drafter = Drafter(history)
    drafter.start("a", prompt_token_ids=[30, 8, 9], prompt_key=KEY, training_step=1)
    assert draft(drafter, "a", 1).draft_token_ids == [4]


def test_environment_tokens_drop_the_pending_draft():
    drafter = Drafter(filled(rollout([4, 5, 6, 7], 0)))
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    assert len(draft(drafter, "a")) > 0
    drafter.extend("a", [40, 41], generated=False)
    drafter.extend("a", [4])
    assert drafter.counters("a").num_drafted_tokens == 0
    assert drafter.confidence.hits.sum() + drafter.confidence.misses.sum() == 0


def test_unheard_feedback_keeps_the_newer_half():
    drafter = Drafter(filled(rollout([4, 5, 6, 7], 0)))
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    for _ in range(1 << 16):
        drafter.extend("a", [1])
    assert len(draft(drafter, "a", 1)) == 1
    drafter.extend("a", [2])
    drafted, _ = drafter.take_feedback()
    assert len(drafted) == (1 << 15) + 1
    assert drafted[-1] == 1


def test_unheard_feedback_keeps_newer_values():
    drafter = Drafter(filled(rollout([4, 5, 6, 7], 0)))
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    for i in range((1 << 16) + 1):
        if i >= (1 << 16) - 100:
            draft(drafter, "a", 1)
        drafter.extend("a", [4])
    drafted, _ = drafter.take_feedback()
    assert drafted[-50:].sum() == 50


def test_siblings_share_one_build():
    history = filled(rollout([4, 5, 6], 0))
    drafter = Drafter(history)
    for name in "abc":
        drafter.start(name, prompt_token_ids=PROMPT, training_step=1)
    assert history.statistics().num_builds_on_start == 1


def test_expiry_gives_back_bytes():
    history = filled(rollout([4] * 100, 0), rollout([5, 6], 1), window_epochs=1)
    assert history.statistics().rollout_bytes == filled(rollout([5, 6], 1)).statistics().rollout_bytes


def test_eviction_gives_back_tokens():
    history = filled(rollout([4] * 100, 0), rollout([5, 6], 0, prompt=[9]), max_bytes=3000)
    statistics = history.statistics()
    assert statistics.num_evicted_rollouts == 1
    assert statistics.num_tokens == sum(
        len(r.response_token_ids) for k in history.prompt_keys() for r in history.rollouts(k)
    )


def test_the_tree_used_least_recently_goes_first():
    prompts = [[k] for k in (1, 2, 3)]
    history = filled(*[rollout(list(range(50)), 0, prompt=p) for p in prompts])
    drafter = Drafter(history)
    for i, p in enumerate([*prompts, prompts[0]]):
        run(drafter, f"r{i}", [7], prompt=p, step=1)
    history.max_bytes = history.memory_bytes()
    history.add(rollout([1], 0, prompt=[8]))  # one rollout too many
    trees = [history._prompts[prompt_key(p)].tree is not None for p in prompts]
    assert trees == [True, False, True]
