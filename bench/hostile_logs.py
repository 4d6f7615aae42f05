"""Logs on which drafting may cost more than it brings: made to mislead, or drawn at random from many kinds of text."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

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
    """Each rollout its own random text, the same at every call."""
    draw = np.random.default_rng((0, step))
    return [
        _rollout(draw.integers(num_ids, size=num_tokens), step=step, prompt=num_ids + 1 + i % num_prompts)
        for i in range(num_requests)
    ]


def new_token_ids(rollouts: Sequence[das.Rollout]) -> list[das.Rollout]:
    """The same texts in a language of its own: each token id is replaced by another one."""
    num_ids = 1 + max(int(one.response_token_ids.max()) for one in rollouts)
    dictionary = np.random.default_rng(3).permutation(num_ids).astype(np.int32)
    return [answered(one, dictionary[one.response_token_ids]) for one in rollouts]


def answered(one: das.Rollout, response: Sequence[int] | Tokens) -> das.Rollout:
    """Another response to the same prompt at the same step."""
    return replace(one, response_token_ids=np.asarray(response, np.int32))


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

    A policy is a source of text, an automaton: in each state it has a favourite next token, which comes with a
    probability of that state's own, else one of a few others; state and token lead to the next state. Alphabet, states,
    how sure it is, how much prompts have in common, what training changes, lengths and group size differ from log to
    log. Loops come by themselves.
    """
    draw = random.Random(seed)
    num_states, num_ids = int(2 ** draw.uniform(2, 12)), int(2 ** draw.uniform(1, 16))
    sureness, alike = draw.uniform(0.05, 0.98), 2 ** draw.uniform(-1, 5)  # the mean, and how alike states are
    num_others = draw.choice([1, 2, 4, 16, num_ids])
    source = _Source(draw, num_ids, num_others=num_others, sureness=sureness, alike=alike, shared=draw.random())
    changed = draw.random()  # share of states, from a training step to the next
    group_size, mean_tokens, spread = draw.choice([1, 2, 4, 8, 16]), draw.choice([80, 160, 320]), draw.random()
    log = []
    for step in range(draw.randint(1, 3)):
        source.forget(changed)
        for prompt in range(-(-LEAST_REQUESTS // group_size)):
            usual = mean_tokens * draw.lognormvariate(0.0, spread)
            for _ in range(group_size):
                length = min(max(4, round(usual * draw.lognormvariate(0.0, 0.5 * spread))), 4 * mean_tokens)
                text = source.text(prompt, length, num_states=num_states)
                log.append(_rollout(text, step=step, prompt=num_ids + prompt))
    return log


class _Source:
    """What comes in each state: of one prompt, or of all alike."""

    def __init__(
        self, draw: random.Random, num_ids: int, *, num_others: int, sureness: float, alike: float, shared: float
    ) -> None:
        self._draw, self._num_ids, self._num_others, self._shared = draw, num_ids, num_others, shared
        self._beta = alike * sureness, alike * (1.0 - sureness)
        self._favourites: dict[Hashable, tuple[int, float]] = {}  # token and its probability, by prompt and state

    def text(self, prompt: int, length: int, *, num_states: int) -> list[int]:
        written, state = [], 0
        for _ in range(length):
            token, chance = self._favourite(prompt, state)
            if self._draw.random() >= chance:
                token = (token + self._draw.randint(1, self._num_others)) % self._num_ids
            written.append(token)
            state = hash((state, token)) % num_states
        return written

    def forget(self, share: float) -> None:
        kept = {key: value for key, value in self._favourites.items() if self._draw.random() >= share}
        self._favourites = kept

    def _favourite(self, prompt: int, state: int) -> tuple[int, float]:
        if (found := self._favourites.get((prompt, state))) is None:
            found = self._draw.randrange(self._num_ids), self._draw.betavariate(*self._beta)
            if self._draw.random() < self._shared:
                found = self._favourites.setdefault(state, found)
            self._favourites[prompt, state] = found
        return found


def _rollout(response: Sequence[int] | NDArray[Any], *, step: int, prompt: int) -> das.Rollout:
    return das.Rollout(
        prompt_token_ids=[prompt],
        response_token_ids=np.asarray(response, np.int32),
        training_step=step,
        prompt_key=prompt,
    )
