"""What plan_step tells a policy: the running requests, and the rollouts that ended."""

import numpy as np
import pytest

from das import Drafter, FinishedRollouts, NoDraft, Rollout, RolloutHistory, UnlimitedBudget, plan_step


class Listener(UnlimitedBudget):
    """A policy that notes what it is told."""

    __slots__ = ("finished", "running")

    def __init__(self):
        super().__init__()
        self.running, self.finished = [], []

    def budgets(self, requests):
        self.running.append(requests)
        return super().budgets(requests)

    def observe_finished(self, finished):
        self.finished.append(finished)


def generated(drafter, policy, request_id, num_steps, **kwargs):
    """Run a request that emits 1, 2, 3, ... and what its drafts say, until it has had that many decode steps."""
    drafter.start(request_id, prompt_token_ids=[9], **kwargs)
    for _ in range(num_steps):
        draft = plan_step(drafter, [request_id], policy=policy)[request_id]
        drafter.extend(request_id, [*draft.draft_token_ids, 1])


def test_a_policy_sees_each_requests_own_counters():
    drafter, policy = Drafter(), Listener()
    generated(drafter, policy, "a", 5)
    drafter.start("b", prompt_token_ids=[1, 2], prompt_key=7)
    plan_step(drafter, ["b", "a"], policy=policy, num_running=9, num_waiting=3)
    seen, counters = policy.running[-1], drafter.counters("a")
    assert (seen.num_running, seen.num_waiting, len(seen)) == (9, 3, 2)
    assert seen.request_numbers.tolist() == [1, 0]
    assert seen.prompt_keys[0] == 7
    assert seen.num_prompt_tokens.tolist() == [2, 1]
    assert counters.num_accepted_tokens > 0
    for name in ("num_decode_steps", "num_drafted_tokens", "num_accepted_tokens", "num_emitted_tokens"):
        assert getattr(seen, name).tolist() == [0, getattr(counters, name)]
    assert seen.num_response_tokens.tolist() == [0, counters.num_emitted_tokens]


def test_request_numbers_are_never_used_again():
    drafter, policy = Drafter(), Listener()
    for name in "abc":
        generated(drafter, policy, name, 1)
        drafter.finish(name, keep=name != "b")
    assert [int(seen.request_numbers[0]) for seen in policy.running] == [0, 1, 2]


def test_a_policy_hears_once_of_each_rollout_that_entered_the_history():
    drafter, policy = Drafter(), Listener()
    pushed = Rollout(prompt_token_ids=[5], response_token_ids=[1, 2, 3], request_id="x", training_step=0)
    drafter.history.add(pushed)
    generated(drafter, policy, "a", 4)
    counters = drafter.finish("a")
    generated(drafter, policy, "aborted", 2)
    drafter.finish("aborted", keep=False)
    assert not drafter.history.add(pushed)  # known
    plan_step(drafter, [], policy=policy)
    plan_step(drafter, [], policy=policy)
    first, second = policy.finished
    assert isinstance(first, FinishedRollouts)
    assert (first.prompt_keys.tolist(), first.num_response_tokens.tolist()) == ([pushed.key], [3])
    assert first.num_decode_steps.tolist() == [0]
    assert second.num_response_tokens.tolist() == second.num_emitted_tokens.tolist() == [counters.num_emitted_tokens]
    assert second.num_decode_steps.tolist() == [4]
    assert second.num_drafted_tokens.tolist() == [counters.num_drafted_tokens]
    assert second.num_accepted_tokens.tolist() == [counters.num_accepted_tokens]
    assert second.prompt_keys.dtype == np.uint64


def test_a_key_of_64_bits_arrives_whole():
    drafter, policy = Drafter(), Listener()
    drafter.history.add(Rollout(prompt_token_ids=[5], response_token_ids=[1], prompt_key=2**64 - 1))
    plan_step(drafter, [], policy=policy)
    assert policy.finished[0].prompt_keys.tolist() == [2**64 - 1]


def test_each_drafter_of_a_history_hears_for_itself():
    history = RolloutHistory()
    drafters, policies = [Drafter(history), Drafter(history)], [Listener(), Listener()]
    history.add(Rollout(prompt_token_ids=[5], response_token_ids=[1]))
    for _ in range(2):
        for drafter, policy in zip(drafters, policies, strict=True):
            plan_step(drafter, [], policy=policy)
    assert [len(policy.finished) for policy in policies] == [1, 1]


def test_of_very_many_rollouts_a_policy_hears_of_the_last(monkeypatch):
    monkeypatch.setattr("das.history._NUM_FINISHED_KEPT", 100)
    drafter = Drafter(RolloutHistory(window_epochs=1))
    for step in range(100 + 10):
        rollout = Rollout(prompt_token_ids=[5], response_token_ids=[1] * (1 + step % 3), training_step=step)
        drafter.history.add(rollout)
    heard = drafter.take_finished()
    assert heard.num_response_tokens.tolist() == [1 + step % 3 for step in range(10, 100 + 10)]
    assert len(drafter.take_finished()) == 0


def test_a_policy_that_does_not_listen_costs_nothing_later():
    drafter = Drafter()
    generated(drafter, NoDraft(), "a", 1)
    drafter.finish("a")
    plan_step(drafter, [], policy=NoDraft())
    assert len(drafter.take_finished()) == 1


@pytest.mark.parametrize(("bad", "error"), [(-1, ValueError), (1.5, TypeError), (None, TypeError), (True, TypeError)])
def test_a_bad_number_of_waiting_requests_changes_nothing(bad, error):
    drafter, policy = Drafter(), Listener()
    drafter.start("a", prompt_token_ids=[1])
    with pytest.raises(error, match="num_waiting"):
        plan_step(drafter, ["a"], policy=policy, num_waiting=bad)
    assert not policy.running
