"""The simulated regimes: their files, the samples that a seed draws, every policy, and the oracle's prices."""

import json
from pathlib import Path

import numpy as np
import pytest
from rollout_samples import rollout

import das
from bench.bench_regimes import REGIMES, cut, measure, print_regime, regime_of
from bench.policies import DEFAULT, FAMILIES, OracleBudget
from das.analysis import read_log
from das.budget import RunningRequests

EXAMPLE = Path(__file__).parent.parent / "examples" / "amc23_rollouts.jsonl.gz"
LATENCY = das.LatencyModel(c_base_ms=5.0, c_tok_ms=0.025)
CUT = {"history_samples": 3, "group_size": 2, "num_batches": 2}


def running(number, *, num_waiting=0, num_running=None):
    """Requests of which nothing but their number matters."""
    zeros = np.zeros(number, np.int64)
    numbers = np.arange(number)
    return RunningRequests(
        numbers, numbers.astype(np.uint64), *[zeros] * 6, num_running=num_running or number, num_waiting=num_waiting
    )


def prices(budget, remaining, waiting=()):
    budget.foretell(remaining, waiting)
    return budget.budgets(running(len(remaining), num_waiting=len(waiting)))[1].tolist()


@pytest.fixture(scope="module")
def small_log(tmp_path_factory):
    """Three prompts of the example, cut to 60 tokens."""
    path = tmp_path_factory.mktemp("logs") / "small.jsonl"
    rollouts = [record.rollout for record in read_log(EXAMPLE)]
    keys = list(dict.fromkeys(r.key for r in rollouts))[:3]
    rows = [
        {
            "prompt_token_ids": r.prompt_token_ids.tolist(),
            "response_token_ids": r.response_token_ids[: 20 + 40 * (i % 2)].tolist(),
            "training_step": r.training_step,
        }
        for i, r in enumerate(rollouts)
        if r.key in keys
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_seed_draws_samples_and_the_order_of_prompts():
    log = [
        rollout([100 * step + sample], step, prompt=[prompt])
        for step in (400, 800)
        for prompt in (1, 2, 3, 4)
        for sample in range(5)
    ]
    history, targets = cut(log, seed=0, **CUT)
    assert (len(history), len(targets)) == (4 * 3, 4 * 2 * 2)
    assert {r.training_step for r in history} == {0}
    assert [r.training_step for r in targets] == [1] * 8 + [2] * 8
    assert all(r.response_token_ids[0] < 50_000 for r in history)
    assert all(r.response_token_ids[0] >= 80_000 for r in targets)
    by_prompt = {}
    for r in targets:
        by_prompt.setdefault(r.key, set()).add(int(r.response_token_ids[0]))
    assert {len(samples) for samples in by_prompt.values()} == {4}  # none twice
    as_lists = [[[r.key, r.response_token_ids.tolist()] for r in cut(log, seed=s, **CUT)[1]] for s in (0, 0, 1)]
    assert as_lists[0] == as_lists[1] != as_lists[2]
    with pytest.raises(ValueError, match="a prompt has 5 samples in the last step; 6 are needed"):
        cut(log, seed=0, history_samples=3, group_size=3, num_batches=2)
    with pytest.raises(ValueError, match="the log has one training step"):
        cut(log[:20], seed=0, **CUT)


def test_the_four_regimes_run_on_the_shipped_log():
    rollouts = [record.rollout for record in read_log(EXAMPLE)]
    assert set(REGIMES) == {"at_once", "refilled", "workers", "asynchronous"}
    for name in REGIMES:
        regime = regime_of(name)
        sizes = {key: regime[key] for key in ("history_samples", "group_size", "num_batches")}
        _, targets = cut(rollouts, seed=0, **sizes)
        assert len(targets) == 320, name
        assert das.LatencyModel(**regime["latency"]) == LATENCY


@pytest.mark.parametrize("regime", REGIMES)
def test_every_policy_ends_every_regime(small_log, regime, capsys):
    rows = []
    for policy, family in FAMILIES.items():
        for setting in family.settings[:2]:
            job = {"regime": regime, "policy": policy, "setting": setting, "seed": 0, "latency": None}
            job["log"] = str(small_log)
            rows.append({"job": job, **measure(job)})
    assert len({row["off_waited_s"] for row in rows}) == 1
    assert all(row["with_drafts"]["num_emitted_tokens"] == 3 * 4 * (20 + 60) for row in rows)
    print_regime(regime, rows)
    lines = capsys.readouterr().out.splitlines()
    assert regime_of(regime)["title"] in lines[1]
    ranked = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[5:]]
    assert {row[0].removesuffix(" *") for row in ranked} == set(FAMILIES)
    shares = [float(row[3]) for row in ranked]
    assert shares == sorted(shares)
    assert [float(row[7]) for row in ranked if row[0].endswith("*")] == [1.0]


def test_the_default_is_one_of_the_policies():
    assert not FAMILIES[DEFAULT].is_ceiling


def test_the_oracle_spends_on_those_that_end_last():
    budget = OracleBudget(latency=LATENCY)
    spread = prices(budget, [1000, 900, 100])
    assert spread[0] < spread[1] < spread[2] == 1.0
    assert len(set(prices(budget, [500, 500, 500]))) == 1
    one, many = prices(budget, [500])[0], prices(budget, [500] * 100)[0]
    assert one < many < 1.0
    assert prices(OracleBudget(latency=das.LatencyModel(c_base_ms=0.01, c_tok_ms=1.0)), [50, 40]) == [1.0, 1.0]


def test_the_oracle_solves_the_makespan_problem():
    """By brute force: N passes need p_i = -(l / alpha) ln(1 - (1 - N / l) / k) drafted tokens."""
    lengths, k, alpha = np.array([800.0, 700.0, 300.0]), 0.62, 1.43

    def cost_ms(num_passes):
        saved = np.maximum(0.0, 1 - num_passes / lengths)
        drafted = -(lengths / alpha) * np.log(1 - saved / k)
        return 5.0 * num_passes + 0.025 * (drafted.sum() + np.minimum(lengths, num_passes).sum())

    candidates = np.linspace(800 * (1 - k) + 0.01, 800, 20_000)
    best = candidates[np.argmin([cost_ms(candidate) for candidate in candidates])]
    expected = np.where(lengths > best, alpha * (k - 1 + best / lengths), 1.0)
    assert prices(OracleBudget(latency=LATENCY), lengths.tolist()) == pytest.approx(
        expected.tolist(), rel=0.01, abs=1e-3
    )


def test_places_share_what_waits():
    """500 and 100 tokens run, 1000 wait: both places have 800 to go. Of 150, the second place takes all: 250."""
    budget = OracleBudget(latency=LATENCY)
    assert prices(budget, [500, 100], [600, 400]) == prices(budget, [800, 800])
    assert prices(budget, [500, 100], [150]) == prices(budget, [500, 250])
