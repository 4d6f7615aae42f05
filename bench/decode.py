"""Replays logged responses through a side: what it would have drafted, what an engine would have accepted."""

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

from bench.rollouts import Prompt, Tokens
from bench.sides import Draft, Side

C_BASE = 200  # cost of a batch forward, in units of the cost of one token


@dataclass(slots=True)
class Tally:
    """Sums over decode steps (one request, one forward) and batch passes (one forward of all)."""

    num_passes: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0

    @property
    def num_verified(self) -> int:
        """Tokens that passes were over."""
        return self.num_steps + self.num_drafted

    def summary(self) -> dict[str, float]:
        """Ratios and costs as `acceptance.md` defines them: J_B = (steps * (200 / B + 1) + drafted) / tokens."""
        per_step, per_token = 1 / max(1, self.num_steps), 1 / max(1, self.num_emitted)
        costs = {
            f"j{batch}": (self.num_steps * (C_BASE / batch + 1) + self.num_drafted) * per_token
            for batch in (128, 16, 1)
        }
        return {
            "num_passes": self.num_passes,
            "num_steps": self.num_steps,
            "drafted_per_step": self.num_drafted * per_step,
            "tokens_per_step": self.num_emitted * per_step,
            "acceptance_rate": self.num_accepted / max(1, self.num_drafted),
            **costs,
            "batch_cost": C_BASE * self.num_passes + self.num_verified,
        }


@dataclass(frozen=True, slots=True)
class PassTimes:
    """One pass over the batch: seconds spent in the side, and on how many requests."""

    draft_s: float
    extend_s: float
    num_requests: int


@dataclass(slots=True)
class _Request:
    name: str
    num_prompt_tokens: int
    logged: list[int]
    emitted: list[int]


class Decode:
    """A batch of at most `max_running` requests; where one ends, the next target starts.

    Args:
        side: with its history in.
        prompts: their targets are replayed, prompt after prompt.
        max_running: None: all at once.
        in_lockstep: each request drafts and extends before the next one drafts; else all draft, then all extend.

    Times leave out the loop itself, and the start and end of requests.
    """

    def __init__(
        self, side: Side, prompts: Iterable[Prompt], *, max_running: int | None = None, in_lockstep: bool = False
    ) -> None:
        self.tally = Tally()
        self._side = side
        self._waiting = [(prompt, target) for prompt in prompts for target in prompt.targets if len(target)][::-1]
        self._max_running = len(self._waiting) if max_running is None else max_running
        self._in_lockstep = in_lockstep
        self._num_started = 0
        self._running: list[_Request] = []
        self._refill()

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def num_context_tokens(self) -> int:
        """What the next pass attends to: prompts and what was emitted."""
        return sum(request.num_prompt_tokens + len(request.emitted) for request in self._running)

    def step(self) -> PassTimes:
        """Run one pass."""
        self.tally.num_passes += 1
        num_running = len(self._running)
        turns = [[request] for request in self._running] if self._in_lockstep else [self._running]
        draft_s = extend_s = 0.0
        for turn in turns:
            drafting, extending = self._turn(turn, num_running)
            draft_s += drafting
            extend_s += extending
        self._running = [request for request in self._running if not self._has_ended(request)]
        self._refill()
        return PassTimes(draft_s, extend_s, num_running)

    def _turn(self, requests: list[_Request], num_running: int) -> tuple[float, float]:
        names = [request.name for request in requests]
        start_s = perf_counter()
        drafts = self._side.draft(names, num_running)
        drafted_s = perf_counter()
        emitted = {request.name: self._verify(request, draft) for request, draft in zip(requests, drafts, strict=True)}
        verified_s = perf_counter()
        self._side.extend(emitted)
        extended_s = perf_counter()
        for request in requests:
            request.emitted += emitted[request.name]
        return drafted_s - start_s, extended_s - verified_s

    def _verify(self, request: _Request, draft: Draft) -> list[int]:
        """What an engine emits: the drafted path that agrees with the log, and the token after it."""
        position = len(request.emitted)
        ahead = request.logged[position : position + 65]
        accepted = _chain(draft, ahead) if isinstance(draft, list) else _path(*draft, ahead)
        bonus = ahead[len(accepted) : len(accepted) + 1]
        self.tally.num_steps += 1
        self.tally.num_drafted += len(draft) if isinstance(draft, list) else len(draft[0])
        self.tally.num_accepted += len(accepted)
        self.tally.num_emitted += len(accepted) + len(bonus)
        return accepted + bonus

    def _has_ended(self, request: _Request) -> bool:
        if len(request.emitted) < len(request.logged):
            return False
        if request.emitted != request.logged:
            raise RuntimeError(f"{request.name} emitted tokens that are not in the log")
        self._side.finish(request.name)
        return True

    def _refill(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            prompt, target = self._waiting.pop()
            self._running.append(self._start(prompt, target))

    def _start(self, prompt: Prompt, target: Tokens) -> _Request:
        name = f"request-{self._num_started}"
        self._num_started += 1
        self._side.start(name, prompt.key, prompt.token_ids)
        return _Request(name, len(prompt.token_ids), target.tolist(), [])


def _chain(draft: list[int], ahead: list[int]) -> list[int]:
    for length, (drafted, logged) in enumerate(zip(draft, ahead, strict=False)):
        if drafted != logged:
            return draft[:length]
    return draft[: len(ahead)]


def _path(token_ids: list[int], parents: list[int], ahead: list[int]) -> list[int]:
    children = {(parent, token): node for node, (token, parent) in enumerate(zip(token_ids, parents, strict=True))}
    path: list[int] = []
    node = -1
    for token in ahead:
        if (node, token) not in children:
            break
        node = children[node, token]
        path.append(token)
    return path
