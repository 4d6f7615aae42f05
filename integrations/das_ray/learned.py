"""What a worker's drafter and policy have learned, as a message; and one state from those of several workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import das
from das.packed_values import packed, unpacked
from das_ray.messages import MessageError, check_worker, count_in, note_message, read_note

KIND = "learned"
MAX_LEARNED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What was learned.

    Args:
        worker: whose it is.
        num_decode_steps: it was learned in; with more of them it weighs more.
        confidence: `das.Confidence.state()`.
        policy_name: the policy's class.
        policy: its `state()`: lengths, latency, running means.
    """

    worker: str
    num_decode_steps: int
    confidence: Mapping[str, Any]
    policy_name: str
    policy: Mapping[str, Any]

    @classmethod
    def of(cls, worker: str, drafter: das.Drafter, policy: das.BudgetPolicy) -> Learned:
        """Return what these have learned so far; between two decode steps."""
        return cls(
            worker=worker,
            num_decode_steps=drafter.counters().num_decode_steps,
            confidence=drafter.confidence.state(),
            policy_name=type(policy).__name__,
            policy=policy.state(),
        )

    def to_bytes(self) -> bytes:
        """Return it as a message. Raises TypeError: the policy's state holds what no message can."""
        arrays: dict[str, Any] = {}
        values = {
            "worker": self.worker,
            "num_decode_steps": self.num_decode_steps,
            "confidence": packed(self.confidence, "confidence", arrays),
            "policy_name": self.policy_name,
            "policy": packed(self.policy, "policy", arrays),
        }
        return note_message(KIND, values, arrays)

    @classmethod
    def from_bytes(cls, data: Any) -> Learned:
        """Read and check a message. Raises MessageError."""
        if isinstance(data, bytes) and len(data) > MAX_LEARNED_BYTES:
            raise MessageError(f"learned has {len(data)} bytes; {MAX_LEARNED_BYTES} is the most")
        note = read_note(data, KIND, "learned")
        try:
            confidence, policy = (unpacked(note.values[name], note.arrays) for name in ("confidence", "policy"))
            das.Confidence().load_state(confidence)
            if not isinstance(policy, dict) or not isinstance(note.values["policy_name"], str):
                raise TypeError("policy or policy_name is of the wrong kind")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise MessageError(f"learned: it makes no sense: {error}") from None
        return cls(
            worker=check_worker(note.values.get("worker")),
            num_decode_steps=count_in(note, "num_decode_steps", "learned"),
            confidence=confidence,
            policy_name=note.values["policy_name"],
            policy=policy,
        )

    def apply_to(self, drafter: das.Drafter, policy: das.BudgetPolicy) -> bool:
        """Let these begin with it; return whether the policy did, which it does where it is of that class."""
        drafter.confidence.load_state(self.confidence)
        if self.policy_name != type(policy).__name__:
            return False
        try:
            policy.load_state(dict(self.policy))
        except (KeyError, TypeError, ValueError):  # of another version; it left the policy as it was
            return False
        return True


def merged(states: Iterable[Learned]) -> Learned | None:
    """Return one state of several workers', the same whatever their order; None: there are none.

    Confidence is merged by `das.Confidence.merge`. The policy's state (lengths, latency, means) is that of the worker
    with the most decode steps, the first by name among equals: lengths hear of all rollouts that a worker has got from
    others, too, so those of several workers overlap, and times of different machines do not add up.
    """
    ordered = sorted(states, key=lambda state: (-state.num_decode_steps, state.worker))
    if not ordered:
        return None
    confidence = das.Confidence()
    confidence.merge([state.confidence for state in ordered])
    most = ordered[0]
    return Learned(
        worker="merged",
        num_decode_steps=sum([state.num_decode_steps for state in ordered]),
        confidence=confidence.state(),
        policy_name=most.policy_name,
        policy=most.policy,
    )
