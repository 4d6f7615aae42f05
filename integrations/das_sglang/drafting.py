"""What the worker asks once a decode step: drafts and a width. A fault in here switches drafting off, nothing else."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import das
from das.metrics import RequestMeans
from das.rollout import check_vocabulary
from das_ray.shared_history import Broadcast, SharedHistory
from das_sglang.live_requests import LiveRequests
from das_sglang.settings import Settings
from das_sglang.training_step import TrainingStep

logger = logging.getLogger("das")

_CHANGEABLE = ("policy", "shape", "widths", "noise_seed")  # of a running engine
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a decode step verifies.

    Args:
        drafts: one a request of the batch, in its order; None: none.
        width: draft tokens a request, padding included.
    """

    drafts: list[das.Draft | None]
    width: int


class Drafting:
    """das' side of a worker: history, drafter, policy, and the requests that run.

    Args:
        settings: of the start; an engine that starts with chains was not set up for trees.
        num_ranks: of the tensor-parallel group, which must all draft the same.
        vocabulary_size: of the model, which fails on other tokens.
        is_first_rank: of that group.
        broadcast: in that group; see das_ray.shared_history. None: there is one rank, or none shares its history.

    Attributes:
        history: of all rollouts seen.
        shared: its share in the history of several engines; None: it has none.
        training_step: which step the engine is at.
        fault: why nothing is drafted any more; None: it is.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        num_ranks: int = 1,
        vocabulary_size: int = 1 << 31,
        is_first_rank: bool = True,
        broadcast: Broadcast | None = None,
    ) -> None:
        self.settings = settings
        self.vocabulary_size = vocabulary_size
        self.training_step = TrainingStep()
        self._num_ranks = num_ranks
        self._is_first_rank = is_first_rank
        self._broadcast = broadcast
        self._last_step = 0  # whose rollouts are being generated
        self._widest = settings.widths[-1]
        self._keeps_width = False
        self._may_draft_trees = settings.shape == "tree"
        self._num_steps_by_width: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()
        self.history: das.RolloutHistory
        self.shared: SharedHistory | None = None
        self.fault: str | None
        self._step_started_s: float | None
        self.forget()

    def plan(self, requests: Sequence[Any], unprocessed: Sequence[Sequence[int]], *, weight_version: str) -> Plan:
        """Return the drafts of the decode step that comes now.

        Args:
            requests: SGLang's, of the batch.
            unprocessed: of each, the tokens it has emitted that are not in its `output_ids` yet.
            weight_version: the engine's.

        Never raises. Complexity: O(emitted and drafted tokens), whatever the history holds.
        """
        nothing = Plan([None] * len(requests), 0)
        if self.shared is not None:
            self.shared.between_steps()
        plan = self._guarded(lambda: self._plan(requests, unprocessed, weight_version), nothing, "drafting")
        self._num_steps_by_width[plan.width] += 1
        self._counts["num_verified_tokens"] += len(requests) * (1 + plan.width)
        self._counts["num_padded_tokens"] += len(requests) * plan.width - sum(len(draft or ()) for draft in plan.drafts)
        return plan

    def prefill(self, requests: Iterable[Any]) -> None:
        """A pass prefills these requests: build their prompts' trees beside it. Never raises."""
        self._step_started_s = None
        self._guarded(lambda: self.prepare(self._live.keys_of(requests)), None, "preparing trees")

    def prepare(self, prompt_keys: Iterable[int]) -> None:
        """Requests of these prompts start soon: get what other engines know of them, and build their trees."""
        prompt_keys = sorted(set(prompt_keys))
        self.history.prepare(prompt_keys)
        if self.shared is not None:
            self.shared.announce(prompt_keys)

    def finish(self, rid: str) -> None:
        """SGLang has ended a request. Never raises."""
        counters = self._guarded(lambda: self._live.finish(rid), None, "ending a request")
        if counters is not None:
            self._request_means.add(counters)

    def add_rollouts(self, rollouts: Sequence[das.Rollout]) -> int:
        """Take in rollouts that a trainer pushes; return how many were new.

        A later training step than the engine's raises that: what is generated from now on is at least as new.

        Raises:
            ValueError: as `check_rollouts`. Nothing changes then.
        """
        self.check_rollouts(rollouts)
        for rollout in rollouts:
            if rollout.training_step is not None:
                self.training_step.raise_to(rollout.training_step)
        return self.history.add_many(rollouts)

    def check_rollouts(self, rollouts: Iterable[das.Rollout]) -> None:
        """Raise ValueError for a rollout with a token that is not in the model's vocabulary."""
        check_vocabulary(rollouts, vocabulary_size=self.vocabulary_size)

    def save(self, path: str) -> None:
        """Save history, confidence and policy to a directory. Raises as `das.save_state`."""
        das.save_state(path, drafter=self._drafter, policy=self._policy)

    def read_state(self, path: str) -> das.SavedState:
        """Return a saved state that this engine can take in.

        Raises:
            as `das.load_state`. ValueError: it holds a token that the model does not have.
        """
        saved = das.load_state(path, mapped=False)  # a mapped file that is cut short ends the process
        saved.check_vocabulary(self.vocabulary_size)
        return saved

    def restore(self, saved: das.SavedState) -> None:
        """Take in a saved state; that of the policy where it is of the same class. Raises as `das.load_state`."""
        is_same_policy = saved.policy_name == type(self._policy).__name__
        saved.restore(drafter=self._drafter, policy=self._policy if is_same_policy else None)
        self.training_step.raise_to(saved.newest_step() or 0)

    def forget(self) -> None:
        """Begin anew, with drafting on: nothing in the history, nothing learned, nothing counted.

        Running requests are known again at their next step. Settings and the training step stay.
        """
        self.history = self.settings.make_history()
        self.fault = None
        self._policy = self.settings.make_policy(learns_latency=self._num_ranks == 1)
        self._drafter = das.Drafter(self.history)
        self._live = LiveRequests(self._drafter)
        if self.shared is not None:
            self.shared.close(wait_s=0.0)
        self.shared = self._make_shared()
        self._step_started_s = None
        self._plan_s = 0.0
        self._num_steps_by_width.clear()
        self._counts.clear()
        self._request_means = RequestMeans()

    def _make_shared(self) -> SharedHistory | None:
        if self.settings.shared_history is None:
            return None
        if self._num_ranks > 1 and self._broadcast is None:
            logger.error("das: ranks that each run a batch of their own cannot share a history; each keeps its own")
            return None
        return SharedHistory(
            self.settings.shared_history,
            drafter=self._drafter,
            policy=lambda: self._policy,
            broadcast=self._broadcast if self._num_ranks > 1 else None,
            vocabulary_size=self.vocabulary_size,
            is_first_rank=self._is_first_rank,
        )

    def keep_width(self) -> None:
        """The attention backend has one verify width: all passes take the greatest from now on, for good."""
        self.settings = replace(self.settings, widths=(self._widest,))
        self._keeps_width = True

    def configure(self, **changes: Any) -> None:
        """Change policy, shape, widths or noise_seed of the running engine; what was learned of acceptance stays.

        Raises:
            TypeError, ValueError: another field, a value that is refused, or what the engine was not started for: a
            greater width, another one where the attention backend has one only, trees where it started with chains.
            Nothing changes then.
        """
        others = sorted(changes.keys() - set(_CHANGEABLE))
        if others:
            raise ValueError(
                f"{', '.join(others)} cannot be changed while the engine runs; {', '.join(_CHANGEABLE)} can"
            )
        settings = replace(self.settings, **changes)
        if settings.widths[-1] > self._widest:
            raise ValueError(f"widths is {settings.widths}; the engine was started for at most {self._widest}")
        if self._keeps_width and settings.widths != (self._widest,):
            raise ValueError(
                f"widths is {settings.widths}; the engine's attention backend has one verify width, so it must be "
                f"({self._widest},)"
            )
        if settings.shape == "tree" and not self._may_draft_trees:
            raise ValueError("shape is 'tree'; the engine was started for chains: set shape to 'tree' before it starts")
        policy = settings.make_policy(learns_latency=self._num_ranks == 1)
        self.settings, self._policy = settings, policy

    def statistics(self) -> dict[str, Any]:
        """Return counters and what is held, as plain values by name. Never raises. O(running requests)."""
        counters = self._drafter.counters()
        num_steps = max(1, sum(self._num_steps_by_width.values()))
        return {
            "state": "drafting" if self.fault is None else f"off: {self.fault}",
            "settings": self.settings.as_dict(),
            "policy": repr(self._policy),
            **asdict(counters),
            "draft_acceptance_rate": counters.draft_acceptance_rate,
            "mean_acceptance_length": counters.mean_acceptance_length,
            "tokens_per_decode_step": counters.tokens_per_decode_step,
            "drafted_per_decode_step": counters.drafted_per_decode_step,
            **self._request_means.means(),
            "num_verify_passes": sum(self._num_steps_by_width.values()),
            "num_passes_by_width": {str(width): num for width, num in sorted(self._num_steps_by_width.items())},
            "num_verified_tokens": self._counts["num_verified_tokens"],
            "num_padded_tokens": self._counts["num_padded_tokens"],
            "plan_us_per_pass": 1e6 * self._plan_s / num_steps,
            "num_live_requests": len(self._live),
            "history": asdict(self.history.statistics()),
            "shared_history": None if self.shared is None else self.shared.statistics(),
        }

    def _plan(self, requests: Sequence[Any], unprocessed: Sequence[Sequence[int]], weight_version: str) -> Plan:
        start_s = time.perf_counter()
        step_ms = None
        if self._num_ranks == 1 and self._step_started_s is not None:  # clocks differ between ranks
            step_ms = 1e3 * (start_s - self._step_started_s)
        self._step_started_s = start_s
        training_step = self.training_step.now(weight_version)
        if self.shared is not None and training_step != self._last_step:
            self.shared.share_learned()
        self._last_step = training_step
        limits = self._live.advance(requests, unprocessed, training_step=training_step)
        drafts = das.plan_step(
            self._drafter,
            list(limits),
            policy=self._policy,
            num_running=len(requests),
            max_draft_tokens=limits,
            step_ms=step_ms,
            shape=self.settings.shape,  # type: ignore[arg-type]  # Settings has checked it
            widths=self.settings.widths,
        )
        plan = Plan([drafts.get(request.rid) for request in requests], drafts.width or 0)
        self._plan_s += time.perf_counter() - start_s
        return plan

    def _guarded(self, work: Callable[[], _T], otherwise: _T, name: str) -> _T:
        """Do it; after the first exception never again: the engine goes on without drafts."""
        if self.fault is not None:
            return otherwise
        try:
            return work()
        except Exception as error:
            self.fault = f"{type(error).__name__} while {name}: {error}"
            logger.exception(
                "das is switched off in this process, the engine goes on without drafts: an error while %s", name
            )
            return otherwise
