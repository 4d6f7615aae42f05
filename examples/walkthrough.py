"""Draft for one prompt's rollouts from those of an earlier training step, by hand: python examples/walkthrough.py"""

from collections import defaultdict
from itertools import takewhile
from pathlib import Path

import das
from das.analysis import read_log

# A log of two training steps: 40 prompts, 8 samples each.
steps: dict[int, list[das.Rollout]] = defaultdict(list)
for record in read_log(Path(__file__).parent / "amc23_rollouts.jsonl.gz"):
    steps[record.rollout.training_step or 0].append(record.rollout)
first, second = sorted(steps)

# What the policy wrote at the first step is what drafts are made from.
history = das.RolloutHistory(window_epochs=4)
history.add_many(steps[first])

# At the second step the first prompt comes back. The engine starts its 8 samples together.
prompt_key = steps[second][0].key
logged = {f"sample-{i}": r for i, r in enumerate(steps[second]) if r.key == prompt_key}
drafter = das.Drafter(history)
for request_id, rollout in logged.items():
    drafter.start(request_id, prompt_token_ids=rollout.prompt_token_ids, training_step=second)

# Decode steps: everything still running drafts in one call; the target model verifies, which here the log does.
policy = das.PriceBudget(min_survival=0.15)  # draft while a token survives with at least this probability
position = dict.fromkeys(logged, 0)
finished = []
while position:
    for request_id, draft in das.plan_step(drafter, list(position), policy=policy).items():
        truth = logged[request_id].response_token_ids[position[request_id] :].tolist()
        pairs = zip(draft.draft_token_ids, truth, strict=False)
        num_accepted = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        emitted = truth[: num_accepted + 1]  # the accepted tokens, and the one that the target model adds
        drafter.extend(request_id, emitted)  # siblings can draft from it at once
        position[request_id] += len(emitted)
        if len(emitted) == len(truth):
            finished.append(drafter.finish(request_id, reward=logged[request_id].reward))  # enters the history
            del position[request_id]

for name, value in das.summarise(finished).items():
    print(f"{name:40} {value:.3f}" if isinstance(value, float) else f"{name:40} {value}")
