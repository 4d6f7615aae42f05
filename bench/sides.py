"""das and its peers behind one face, as an engine drives them: one call a decode step, for all running requests."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from importlib.metadata import version
from platform import python_version
from typing import Any, Protocol

import das
from bench import peers
from bench.rollouts import Tokens
from das.budget import BudgetPolicy, FloatArray, IntArray
from das.drafter import Shape

Draft = list[int] | tuple[list[int], list[int]]
"""A chain; or a tree: its tokens, and the index of each token's parent, -1 for the end of the context."""

MAX_DRAFT_TOKENS = 16
LONGEST_DRAFT_TOKENS = 64
WIDTHS = (0, 3, 7, 15)
PADDING = -1  # a draft token that no log agrees with


class Side(Protocol):
    """One competitor. History is added first, then `ready` is called once, then requests come and go."""

    def settings(self) -> dict[str, object]:
        """What is in force, and the versions."""

    def add(self, key: int, prompt: Tokens, response: Tokens) -> None:
        """Take in an earlier rollout of a prompt."""

    def ready(self) -> None:
        """Index what was added, where that has not happened yet."""

    def start(self, name: str, key: int, prompt: Tokens) -> None:
        """Begin a request."""

    def draft(self, names: Sequence[str], num_running: int) -> Sequence[Draft]:
        """Draft for requests: one draft each."""

    def extend(self, tokens: Mapping[str, list[int]]) -> None:
        """Take in what requests emitted."""

    def finish(self, name: str) -> None:
        """End a request."""


class Das:
    """das: a history, a drafter, `plan_step` and `extend_batch`; drafts are chains, or trees.

    Args:
        is_calibrated: False: what is learned about acceptance is forgotten before every call, so the blend is believed.
        max_common_tokens: 0: a prompt without history sees no other prompt's text. None: as usual.
        changes: to other parts of the rule, as `Rule.change` takes them.
        hedge: settings of a Hedge; None: one blend.
        widths: that an engine can verify, one for all requests of a step; drafts are padded to it. None: as they are.
    """

    def __init__(
        self,
        policy: BudgetPolicy,
        shape: Shape = "chain",
        *,
        is_calibrated: bool = True,
        max_common_tokens: int | None = None,
        changes: Mapping[str, Any] | None = None,
        hedge: Mapping[str, Any] | None = None,
        widths: Sequence[int] | None = None,
    ) -> None:
        self._policy = policy
        self._shape = shape
        self._is_calibrated = is_calibrated
        limits = {} if max_common_tokens is None else {"max_common_tokens": max_common_tokens}
        self._history = das.RolloutHistory(max_bytes=1 << 40, **limits)
        self._widths = widths
        self._hedge = None if hedge is None else dict(hedge)
        self._drafter = das.Drafter(self._history, hedge=None if hedge is None else das.Hedge(**hedge))
        self._changes = dict(changes or {})
        self._drafter._table.rule.change(**self._changes)

    def settings(self) -> dict[str, object]:
        """The policy, and versions."""
        return {
            "policy": repr(self._policy),
            "shape": self._shape,
            "is_calibrated": self._is_calibrated,
            "changes": {name: str(value) for name, value in self._changes.items()},
            "hedge": self._hedge,
            "widths": self._widths,
            "max_common_tokens": self._history.max_common_tokens,
            "window_epochs": self._history.window_epochs,
            "das": das.__version__,
            "numpy": version("numpy"),
            "python": python_version(),
        }

    def add(self, key: int, prompt: Tokens, response: Tokens) -> None:
        """Store the rollout, as of an earlier step."""
        self._history.add(
            das.Rollout(prompt_token_ids=prompt, response_token_ids=response, training_step=0, prompt_key=key)
        )

    def ready(self) -> None:
        """Build all prompts' trees, to the end; the first `start` of each prompt installs its own."""
        self._history.prepare(self._history.prompt_keys())
        wait(build for _, build, _ in self._history._builds.values())  # else they would run beside what is timed

    def start(self, name: str, key: int, prompt: Tokens) -> None:
        """Begin a request of the next step."""
        self._drafter.start(name, prompt_token_ids=prompt, prompt_key=key, training_step=1)

    def draft(self, names: Sequence[str], num_running: int) -> Sequence[Draft]:
        """Plan the step and read the drafts."""
        if not self._is_calibrated:
            self._drafter.confidence.reset()
        drafts = das.plan_step(
            self._drafter,
            names,
            policy=self._policy,
            num_running=num_running,
            shape=self._shape,
            widths=self._widths,
        )
        if drafts.width is not None:
            chains = (drafts[name].draft_token_ids for name in names)
            return [chain + [PADDING] * (drafts.width - len(chain)) for chain in chains]
        if self._shape == "tree":
            return [(drafts[name].draft_token_ids, drafts[name].parents) for name in names]
        return [drafts[name].draft_token_ids for name in names]

    def extend(self, tokens: Mapping[str, list[int]]) -> None:
        """One call for all."""
        self._drafter.extend_batch(tokens)

    def finish(self, name: str) -> None:
        """The rollout enters the history."""
        self._drafter.finish(name)


class PinnedBatch(das.ThroughputBudget):
    """The self-tuned price of a batch that stays at one size, however many requests run.

    Args:
        num_running: requests that the policy is told of; 0: as many as run.
    """

    def __init__(self, num_running: int) -> None:
        super().__init__(max_draft_tokens=MAX_DRAFT_TOKENS)
        self._num_running = num_running

    def budgets(self, requests: das.RunningRequests) -> tuple[IntArray, FloatArray]:
        """As the policy's own, at the pinned size."""
        return super().budgets(replace(requests, num_running=self._num_running or requests.num_running))

    def __repr__(self) -> str:
        return f"{super().__repr__()} at {self._num_running or 'as many as'} running"


class OfPeer:
    """A peer, called once per request, which is all they offer.

    Args:
        peer: name of the peer. A name with `:tree` drafts trees.
        cap: most tokens of a draft.
        settings: replace those of the name.
    """

    def __init__(self, peer: str, cap: int, settings: Mapping[str, object]) -> None:
        name, _, mode = peer.partition(":")
        self._peer: Any = peers.create(name, **settings)  # a tree peer where mode says so
        self._cap = cap
        self._propose = getattr(self._peer, "draft_tree" if mode == "tree" else "draft")

    def settings(self) -> dict[str, object]:
        """The peer's own account, and the cap."""
        return {**self._peer.applied_settings(), "max_draft_tokens": self._cap}

    def add(self, key: int, prompt: Tokens, response: Tokens) -> None:
        """Index it, as plain ints: what every peer takes."""
        self._peer.add(key, prompt.tolist(), response.tolist())

    def ready(self) -> None:
        """Peers index at once."""

    def start(self, name: str, key: int, prompt: Tokens) -> None:
        """Begin a request."""
        self._peer.start(name, key, prompt.tolist())

    def draft(self, names: Sequence[str], num_running: int) -> Sequence[Draft]:
        """Propose for one after the other."""
        propose, cap = self._propose, self._cap
        return [propose(name, cap) for name in names]

    def extend(self, tokens: Mapping[str, list[int]]) -> None:
        """Append for one after the other."""
        extend = self._peer.extend
        for name, token_ids in tokens.items():
            extend(name, token_ids)

    def finish(self, name: str) -> None:
        """End a request."""
        self._peer.finish(name)


_VARIANTS: dict[str, dict[str, Any]] = {
    "das": {},
    "das-tree": {"shape": "tree"},
    "das-uncalibrated": {"is_calibrated": False},
    "das-no-common": {"max_common_tokens": 0},
    "das-longest-match": {"changes": {"max_contexts": 1}},
    "das-one-source": {"changes": {"is_keyed_by_source": False}},
    "das-widths": {"widths": WIDTHS},
    "das-hedged": {"hedge": {}},
    "das-hedged-by-request": {"hedge": {"learning_rate": 1.0, "share": 0.03, "per_request": True}},
    "das-unforgetting": {"changes": {"cell_memory": math.inf}},
}
_POLICIES: dict[str, Callable[[float], BudgetPolicy]] = {
    "price": lambda value: das.PriceBudget(min_survival=value, max_draft_tokens=MAX_DRAFT_TOKENS),
    "long-price": lambda value: das.PriceBudget(min_survival=value, max_draft_tokens=LONGEST_DRAFT_TOKENS),
    "fixed": lambda value: das.FixedBudget(int(value)),
    "width": lambda value: das.FixedBudget(int(value)),
    "throughput": lambda value: PinnedBatch(int(value)),
    "length-aware": lambda value: das.LengthAwareBudget(length_weight=value, max_draft_tokens=MAX_DRAFT_TOKENS),
}


def create(side: str, *, cap: int = MAX_DRAFT_TOKENS, **settings: object) -> Side:
    """Make a side: a peer's name with its settings, or das with a policy: `das:price=0.15`, `das:fixed=8`,
    `das:throughput=128` (self-tuned for that many running requests; 0: those that run), `das:length-aware=0.5` (its
    length weight). `das-tree:` drafts trees; the other names that begin with das do without one part of the rule."""
    name, _, policy = side.partition(":")
    if name not in _VARIANTS:
        return OfPeer(side, cap, settings)
    kind, _, value = policy.partition("=")
    variant = {"widths": (int(value),)} if kind == "width" else _VARIANTS[name]
    return Das(_POLICIES[kind](float(value)), **variant)
