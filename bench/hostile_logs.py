"""Logs on which drafting may cost more than it brings: made to mislead, or drawn at random from many kinds of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

import das
from bench.rollouts import EXAMPLE
from das.analysis import read_log

LEAST_REQUESTS = 32  # of a synthetic log, and of each adversarial one
Tokens = NDArray[np.int32]


def random_log(
    *, num_ids: int, num_tokens: int, num_requests: int = LEAST_REQUESTS, num_prompts: int = 4, step: int = 0
) -> list[das.Rollout]:
    """Each rollout its own random text."""
    random = np.random.default_rng((0, step))
    return [
        _rollout(random.integers(num_ids, size=num_tokens), step=step, prompt=num_ids + 1 + i % num_prompts)
        for i in range(num_requests)
    ]


def new_token_ids(rollouts: Sequence[das.Rollout]) -> list[das.Rollout]:
    """The same texts in a language of its own: each token id is replaced by another one."""
    num_ids = 1 + max(int(one.response_token_ids.max()) for one in rollouts)
    dictionary = np.random.default_rng(3).permutation(num_ids).astype(np.int32)
    return [answered(one, dictionary[one.response_token_ids]) for one in rollouts]


def answered(one: das.Rollout, response: Iterable[int]) -> das.Rollout:
    """Another response to the same prompt at the same step."""
    return das.Rollout(
        prompt_token_ids=one.prompt_token_ids, response_token_ids=list(response), training_step=one.training_step
    )


def replaced_policy_log() -> list[das.Rollout]:
    """Real rollouts of 16 prompts, then those of a policy that has nothing in common with the one before."""
    rollouts = [record.rollout for record in read_log(EXAMPLE)]
    few = set(list(dict.fromkeys(one.key for one in rollouts))[:16])
    first, last = ([one for one in rollouts if one.key in few and one.training_step == step] for step in (400, 800))
    return [*first, *new_token_ids(last)]


ADVERSARIAL: dict[str, Callable[[], list[das.Rollout]]] = {
    "random tokens": lambda: [one for step in (0, 1) for one in random_log(num_ids=64, num_tokens=400, step=step)],
    "one token": lambda: [
        _rollout(np.full(1600, 7), step=step, prompt=1 + i % 4) for step in (0, 1) for i in range(LEAST_REQUESTS)
    ],
    "siblings that never agree": lambda: [
        one for step in (0, 1) for one in random_log(num_ids=50_000, num_tokens=300, num_prompts=1, step=step)
    ],
    "policy replaced": replaced_policy_log,
}


def synthetic_log(seed: int) -> list[das.Rollout]:
    """One to three training steps of a policy of some kind; the seed decides everything.

    A prompt has a few texts, and a rollout copies one of them. At any token it may leave it: for a token of its own,
    for another place of it, or for a loop over what it has just written; then it writes on from there. How often, over
    which alphabet, how long, and how much of the texts outlives a training step, differs from log to log.
    """
    random = np.random.default_rng((1, seed))
    num_ids = int(2 ** random.uniform(1, 16))
    group_size = int(random.choice([1, 2, 4, 8, 16]))
    num_prompts = -(-LEAST_REQUESTS // group_size)
    num_texts = int(random.integers(1, 9))
    kept = float(random.uniform())  # of each text, from one training step to the next
    leaving = random.dirichlet([0.5] * 3) * 2.0 ** random.uniform(
        -8, 0
    )  # own token, elsewhere, loop: each token's share
    mean_tokens, spread = float(random.choice([80, 160, 320])), float(random.uniform(0.0, 1.0))
    texts = random.integers(num_ids, size=(num_prompts, num_texts, 512))
    log = []
    for step in range(int(random.integers(1, 4))):
        texts = np.where(random.random(texts.shape) < kept, texts, random.integers(num_ids, size=texts.shape))
        for prompt in range(num_prompts):
            usual = mean_tokens * np.exp(spread * random.standard_normal())
            for _ in range(group_size):
                length = int(np.clip(usual * np.exp(0.5 * spread * random.standard_normal()), 4, 4 * mean_tokens))
                text = texts[prompt, random.integers(num_texts)]
                written = _written(text, length, num_ids=num_ids, leaving=leaving, random=random)
                log.append(_rollout(written, step=step, prompt=num_ids + 1 + prompt))
    return log


def _written(
    text: NDArray[np.int64], length: int, *, num_ids: int, leaving: NDArray[np.float64], random: np.random.Generator
) -> list[int]:
    """A copy of the text, left and taken up again as `synthetic_log` says."""
    written: list[int] = []
    source: Sequence[int] = text.tolist()
    at = 0
    for chance in random.random(length).tolist():
        if chance < leaving[0]:
            written.append(int(random.integers(num_ids)))
            at += 1
            continue
        if chance < leaving[:2].sum():
            source, at = text.tolist(), int(random.integers(len(text)))
        elif chance < leaving.sum() and written:
            source, at = written[-int(random.integers(1, 17)) :], 0
        written.append(source[at % len(source)])
        at += 1
    return written


def _rollout(response: Sequence[int] | NDArray[np.int64], *, step: int, prompt: int) -> das.Rollout:
    return das.Rollout(
        prompt_token_ids=[prompt],
        response_token_ids=np.asarray(response, np.int32),
        training_step=step,
        prompt_key=prompt,
    )
