"""A rollout batch starts with trees that were built before: 1,024 requests of 256 prompts."""

import numpy as np

import das


def filled_history(num_prompts, *, num_rollouts=4, num_tokens=60):
    history = das.RolloutHistory(num_threads=2)
    random = np.random.default_rng(0)
    for prompt in range(num_prompts):
        for number in range(num_rollouts):
            history.add(
                das.Rollout(
                    prompt_token_ids=[prompt, 1],
                    response_token_ids=random.integers(0, 99, num_tokens).astype(np.int32),
                    training_step=0,
                    request_id=f"{prompt}-{number}",
                )
            )
    return history


def test_1024_requests_of_256_prompts_start_with_prefetched_trees():
    history = filled_history(256)
    keys = history.prompt_keys()
    history.prepare(keys)
    drafter = das.Drafter(history)
    for request in range(1024):
        prompt = request // 4
        drafter.start(f"r{request}", prompt_token_ids=[prompt, 1], training_step=1)
    statistics = history.statistics()
    assert (statistics.num_builds_ahead, statistics.num_builds_on_start, statistics.num_trees) == (256, 0, 256)
    # What is prepared while requests run is for requests of a later step, and for no other.
    drafter.start("next", prompt_token_ids=[0, 1], training_step=1)
    assert history.statistics().num_builds_ahead == 256


def test_prefetched_trees_hold_what_trees_built_at_the_start_hold():
    ahead, on_start = filled_history(8), filled_history(8)
    ahead.prepare(ahead.prompt_keys())
    drafts = []
    for history in (ahead, on_start):
        drafter = das.Drafter(history)
        texts = {key: history.rollouts(key)[0].response_token_ids[:3].tolist() for key in history.prompt_keys()}
        for prompt in range(8):
            drafter.start(str(prompt), prompt_token_ids=[prompt, 1], training_step=1)
            drafter.extend(str(prompt), texts[das.prompt_key([prompt, 1])])
        found = drafter.draft([str(n) for n in range(8)], max_draft_tokens=[8] * 8, min_survival=[0.0] * 8)
        drafts.append([draft.draft_token_ids for draft in found.values()])
    assert drafts[0] == drafts[1]
    assert all(drafts[0])
