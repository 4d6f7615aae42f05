"""What the tests of saved states share: rollouts of every kind, and the contents of a history as plain values."""

import shutil

import numpy as np
from rollout_samples import rollout

from das import RolloutHistory

SAMPLES = (
    rollout([1, 2, 3], 4, reward=0.5, request_id="a"),
    rollout([1, 2, 3], 4, request_id="ä ☃ \udc80"),  # half a surrogate pair: text of somebody's file name
    rollout([1, 2, 3], 4, request_id="", reward=-1e300),
    rollout([9], 5, response_mask=[False]),
    rollout(range(9), 5, response_mask=[True] * 8 + [False], request_id="tools"),
    rollout([7] * 70, 5, prompt=[2**31 - 1], prompt_key=2**64 - 1),
    rollout([7] * 70, 6, prompt=[2**31 - 1], prompt_key=2**64 - 1),
    rollout([0, 2**31 - 1], 6, prompt=[5, 6], prompt_key=2**64 - 1),  # another prompt under that key
    rollout([8, 8], 6, prompt=[4], reward=0.0),
    rollout([8, 8], 6, prompt=[4], ordinal=1),
    rollout([3], 0, prompt=[3], prompt_key=0),
)


def as_values(stored):
    mask = None if stored.response_mask is None else stored.response_mask.tolist()
    return (
        stored.key,
        stored.prompt_token_ids.tolist(),
        stored.response_token_ids.tolist(),
        stored.response_hash,
        stored.training_step,
        stored.reward,
        stored.request_id,
        mask,
        stored.ordinal,
    )


def contents(history):
    """All that a state has to keep of a history: of each prompt its window, in order, and which epoch is next."""
    found = {}
    for key in history.prompt_keys():
        record = history.record_for(key)
        if len(record):
            window = [as_values(stored) for stored in history.rollouts(key)]
            found[key] = (record.current_step, record.has_finished, window)
    return found


def unreadable_copies(path):
    """Return folders that are no state, made from one, each with the name that an error has to tell."""
    damaged, cut = path.with_name("damaged"), path.with_name("cut")
    for folder in (damaged, cut):
        shutil.copytree(path, folder)
    rollouts, head = next(damaged.glob("rollouts-*")), cut / "state.das"
    content = bytearray(rollouts.read_bytes())
    content[len(content) // 2] ^= 1
    rollouts.write_bytes(content)
    head.write_bytes(head.read_bytes()[:-9])
    return [(damaged, rollouts.name), (cut, head.name), (path.with_name("absent"), "absent")]


def samples_history(**settings):
    history = RolloutHistory(**settings)
    assert history.add_many(SAMPLES) == len(SAMPLES)
    return history


def advance(history, number):
    """Change a history in the way of step `number`: rollouts, epochs that expire, rewards that come later."""
    random = np.random.default_rng(number)
    for sample in range(3):
        response = random.integers(0, 50, random.integers(1, 400))
        prompt = [int(random.integers(0, 5))]
        history.add(rollout(response, number // 4, prompt=prompt, request_id=f"{number}-{sample}"))
        if sample == 0:
            history.add(rollout(response, number // 4, prompt=prompt, request_id=f"{number}-0", reward=float(number)))
    if number % 5 == 0:
        history.add(rollout([number], number // 4, prompt=[100 + number], reward=1.0))
