"""Several workers in one process, without a clock: what it costs that others' text comes some steps late."""

from collections import deque
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import das
from bench.decode import Decode
from bench.rollouts import EndToken, Prompt, load
from bench.sharing_worker import SharingSide
from das_ray.delta import Delta
from das_ray.installer import Installer
from das_ray.messages import Piece


@dataclass(frozen=True, slots=True)
class Sums:
    """Of all workers in an epoch."""

    num_emitted: int
    num_steps: int

    @property
    def tokens_per_step(self) -> float:
        """Tokens per decode step."""
        return self.num_emitted / self.num_steps


def lagged(epochs: list[list[Prompt]], *, num_workers: int, lag_steps: int | None) -> list[Sums]:
    """Decode in workers of this process that take steps in turn, and return each epoch's sums.

    Args:
        lag_steps: after which what a worker has generated reaches the others; None: never.
    """
    sides = [SharingSide(number, is_shared=False, settings={}) for number in range(num_workers)]
    installers = [Installer(side.history) for side in sides]
    finished: list[list[das.Rollout]] = [[] for _ in sides]
    for side, installer, own in zip(sides, installers, finished, strict=True):
        side.history.subscribe(
            lambda stored, installer=installer, own=own: None if installer.is_installing else own.append(stored)
        )
    found = []
    for step, prompts in enumerate(epochs):
        for side in sides:
            side.training_step = step
        decodes = [Decode(side, share_of(prompts, number, num_workers, step)) for number, side in enumerate(sides)]
        told: list[dict[str, int]] = [{} for _ in sides]
        on_their_way: deque[tuple[int, int, Delta]] = deque()
        for number_of_pass in count():
            is_over = not any(decode.num_running for decode in decodes)
            while on_their_way and (is_over or on_their_way[0][0] <= number_of_pass):
                _, sender, delta = on_their_way.popleft()
                for number, installer in enumerate(installers):
                    if number != sender:
                        installer.add(delta)
                        installer.run(max_tokens=1 << 40)
            if is_over:
                break
            for number, decode in enumerate(decodes):
                if decode.num_running:
                    decode.step()
                if lag_steps is not None:
                    pieces = pieces_since(str(number), sides[number].drafter, told[number])
                    delta = Delta("", 1, 1, list(finished[number]), pieces, [])
                    on_their_way.append((number_of_pass + 1 + lag_steps, number, delta))
                finished[number].clear()
        tallies = [decode.tally for decode in decodes]
        found.append(Sums(sum(one.num_emitted for one in tallies), sum(one.num_steps for one in tallies)))
    return found


def pieces_since(worker: str, drafter: das.Drafter, told: dict[str, int]) -> list[Piece]:
    """Return what running requests have generated beyond what was told, which is noted."""
    pieces = []
    for request_id in drafter.request_ids():
        start = told.get(request_id, 0)
        rollout = drafter.running_rollout(request_id, start=start)
        if rollout is not None:
            told[request_id] = start + len(rollout.response_token_ids)
            pieces.append(Piece(worker, start, rollout))
    return pieces


def epochs_of(log: Path) -> list[list[Prompt]]:
    """Return the prompts of each of the log's training steps, with its samples as targets."""
    questions, by_step = load(log, EndToken())
    return [
        [Prompt(key, question, targets=by_step[step][key]) for key, question in enumerate(questions)]
        for step in sorted(by_step)
    ]


def share_of(prompts: list[Prompt], worker: int, num_workers: int, epoch: int) -> list[Prompt]:
    """Return what a worker generates: of each prompt some samples, other ones in each epoch."""
    return [
        Prompt(
            prompt.key,
            prompt.token_ids,
            targets=[
                target
                for number, target in enumerate(prompt.targets)
                if (prompt.key + number + epoch) % num_workers == worker
            ],
        )
        for prompt in prompts
    ]
