"""The token data of the benchmarks: a rollout log, and prompts with history and targets cut from it.

A log has few prompts, a benchmark needs many tokens. So prompts are made: each question of the log, with
`HISTORY_SAMPLES` samples of its first training step as history and a group of samples of its last one to replay, is one
prompt. Further samples of the same questions make further prompts, and once the log is used up it is used again. Every
set of prompts after the first has its token ids rotated within the vocabulary: the text of a set is related to itself
as the log's is, and shares nothing with the other sets but the vocabulary.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from das.analysis import read_log

Tokens = NDArray[np.int32]
Change = Literal["none", "drift", "abrupt"]
Log = dict[int, list[list[Tokens]]]
"""Training step -> question, in file order -> samples' responses."""

EXAMPLE = Path(__file__).parent.parent / "examples" / "amc23_rollouts.jsonl.gz"
HISTORY_SAMPLES = 16
GROUP_SIZE = 8
ROTATION = 9973  # token ids of set s: (id + s * ROTATION) modulo the vocabulary


@dataclass(slots=True)
class Prompt:
    """A prompt, its finished rollouts, and the rollouts to replay."""

    key: int
    token_ids: Tokens
    history: list[Tokens] = field(default_factory=list)
    targets: list[Tokens] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EndToken:
    """The token that ends a response, for logs without one: appended where the response is short enough to have one."""

    token_id: int = 128009
    below_tokens: int = 2040

    def append_to(self, response: Tokens) -> Tokens:
        """Return the response, with its end."""
        return np.append(response, np.int32(self.token_id)) if len(response) < self.below_tokens else response


def load(path: str | Path, end: EndToken | None = None) -> tuple[list[Tokens], Log]:
    """Read a log: the questions' token ids, and for each training step each question's responses."""
    questions: dict[int, Tokens] = {}
    by_step: dict[int, dict[int, list[Tokens]]] = {}
    for record in read_log(path):
        rollout = record.rollout
        questions.setdefault(rollout.key, rollout.prompt_token_ids)
        response = rollout.response_token_ids if end is None else end.append_to(rollout.response_token_ids)
        by_step.setdefault(rollout.training_step or 0, {}).setdefault(rollout.key, []).append(response)
    log = {step: [by_step[step].get(key, []) for key in questions] for step in sorted(by_step)}
    return list(questions.values()), log


def questions_of(
    path: str | Path, end: EndToken | None, *, history_samples: int, group_size: int, change: Change = "drift"
) -> list[Prompt]:
    """Each question once: the first samples of the first step as history, and targets.

    Args:
        change: of the policy, from history to targets. "drift": the targets are the first samples of the last step;
            without history those of the first, a cold start. "none": the next samples of the first step. "abrupt": as
            "drift", in permuted token ids, as if of a policy that has nothing in common with the old one.
    """
    token_ids, log = load(path, end)
    first, last = min(log), max(log)
    start = history_samples if change == "none" else 0
    step = first if change == "none" or not history_samples else last
    rename = _renaming(log) if change == "abrupt" else lambda tokens: tokens
    return [
        Prompt(
            key,
            token_ids[key],
            log[first][key][:history_samples],
            [rename(target) for target in log[step][key][start : start + group_size]],
        )
        for key in range(len(token_ids))
    ]


def _renaming(log: Log) -> Callable[[Tokens], Tokens]:
    """Give every token id another one, always the same."""
    vocabulary = 1 + max(int(tokens.max()) for step in log.values() for tokens in _flat(step))
    names = np.random.default_rng(0).permutation(vocabulary).astype(np.int32)
    return lambda tokens: names[tokens]


def prompts_of_size(path: str | Path, *, num_tokens: int, min_prompts: int = 1) -> list[Prompt]:
    """At least `min_prompts` prompts whose histories hold `num_tokens` tokens together (the last rollout is whole).

    Where `min_prompts` full histories would hold more than that, all of them are shorter, by the same number of
    rollouts give or take one.
    """
    token_ids, log = load(path)
    history, targets = log[min(log)], log[max(log)]
    vocabulary = 1 + max(int(tokens.max()) for tokens in [*token_ids, *_flat(history), *_flat(targets)])
    num_blocks = max(1, min(len(history[0]) // HISTORY_SAMPLES, len(targets[0]) // GROUP_SIZE))
    full: list[Prompt] = []
    available = 0
    for number in count():
        if available >= num_tokens and number >= min_prompts:
            break
        set_number, question = divmod(number, len(token_ids))
        block = set_number % num_blocks
        past = islice(history[question], block * HISTORY_SAMPLES, (block + 1) * HISTORY_SAMPLES)
        future = islice(targets[question], block * GROUP_SIZE, (block + 1) * GROUP_SIZE)
        rotate = _Rotation(set_number * ROTATION, vocabulary)
        prompt = Prompt(number, rotate(token_ids[question]), [*map(rotate, past)], [*map(rotate, future)])
        available += sum(map(len, prompt.history))
        full.append(prompt)
    return _cut(full, num_tokens)


def shuffled_targets(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """The prompts in random order, to replay their targets one prompt after the other."""
    return random.Random(seed).sample(list(prompts), len(prompts))


@dataclass(frozen=True, slots=True)
class _Rotation:
    offset: int
    vocabulary: int

    def __call__(self, token_ids: Tokens) -> Tokens:
        if not self.offset:
            return token_ids
        rotated: Tokens = ((token_ids.astype(np.int64) + self.offset) % self.vocabulary).astype(np.int32)
        return rotated


def _flat(samples: list[list[Tokens]]) -> list[Tokens]:
    return [response for responses in samples for response in responses if len(response)]


def _cut(full: list[Prompt], num_tokens: int) -> list[Prompt]:
    """Keep the first rollouts of every prompt until there are enough tokens."""
    prompts = [Prompt(prompt.key, prompt.token_ids, targets=prompt.targets) for prompt in full]
    total = 0
    for sample in range(HISTORY_SAMPLES):
        for prompt, source in zip(prompts, full, strict=True):
            if total < num_tokens and sample < len(source.history):
                prompt.history.append(source.history[sample])
                total += len(source.history[sample])
    return prompts
