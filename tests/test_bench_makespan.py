"""The makespan of a replayed batch: passes timed by a latency model, every policy, each held against no drafting."""

from pathlib import Path

import pytest

from bench.bench_makespan import NO_DRAFTS, POLICIES, measure, print_makespans
from bench.decode import C_BASE
from bench.policies import DEFAULT, FAMILIES
from bench.rollouts import EndToken, questions_of
from das.latency_presets import LATENCY_PRESETS

EXAMPLE = Path(__file__).parent.parent / "examples" / "amc23_rollouts.jsonl.gz"


def row(policy, setting=None, *, order="step", latency=None, max_running=None):
    job = {"order": order, "policy": policy, "setting": setting, "latency": latency, "max_running": max_running}
    job |= {"prompts": 1, "log": str(EXAMPLE)}
    return {"job": job, **measure(job)}


def lengths():
    prompt = questions_of(str(EXAMPLE), EndToken(), history_samples=16, group_size=8)[0]
    return len(prompt.token_ids), [len(target) for target in prompt.targets]


def test_without_drafts_a_batch_takes_as_many_passes_as_its_longest_request():
    _, of_responses = lengths()
    found = row(NO_DRAFTS)
    assert found["num_passes"] == max(of_responses)
    assert found["makespan_ms"] == C_BASE * max(of_responses) + sum(of_responses)


def test_one_after_the_other_each_request_has_its_own_passes():
    _, of_responses = lengths()
    found = row(NO_DRAFTS, max_running=1)
    assert found["makespan_ms"] == (C_BASE + 1) * sum(of_responses)
    assert row(DEFAULT, max_running=1)["makespan_ms"] < 0.5 * found["makespan_ms"]


def test_a_preset_charges_for_the_context_too():
    num_prompt_tokens, of_responses = lengths()
    latency = LATENCY_PRESETS["qwen2.5-7b-a100"].fit.latency
    context = sum(num_prompt_tokens * length + length * (length - 1) // 2 for length in of_responses)
    expected = latency.c_base_ms * max(of_responses) + latency.c_tok_ms * sum(of_responses) + latency.c_kv_ms * context
    assert row(NO_DRAFTS, latency="qwen2.5-7b-a100")["makespan_ms"] == pytest.approx(expected)


@pytest.mark.parametrize(("order", "policies"), [("lockstep", [NO_DRAFTS, DEFAULT, "threshold"]), ("step", POLICIES)])
def test_policies_are_ranked_at_their_best_setting(order, policies, capsys):
    rows = [
        row(policy, setting, order=order)
        for policy in policies
        for setting in (FAMILIES[policy].settings[-1:] if policy in FAMILIES else (None,))
    ]
    print_makespans(rows)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[5:]]
    table = {name: (float(seconds), float(ratio)) for name, _, seconds, ratio, *_ in lines}
    assert set(table) == set(policies)
    assert list(table.values()) == sorted(table.values())
    assert table[NO_DRAFTS][1] == 1.0
    assert table[DEFAULT][1] < 0.7
