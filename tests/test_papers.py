"""The papers' figures, computed anew: on a small log the commands run, and what they claim holds."""

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest

import das
from bench.papers import das_paper, nemo_rl, spec_actor, tlt
from bench.papers.class_recorder import ClassRecorder, summary
from bench.papers.comparison import Claim, Comparison, Section, print_section, run
from bench.papers.logged_step import Log, read
from bench.rollouts import EXAMPLE

PAPERS = (das_paper, nemo_rl, spec_actor, tlt)
PROMPTS, SHARE = 4, 3  # of the example's 40 prompts, and the first third of each response
SMALLER = 40 // PROMPTS


@pytest.fixture(scope="module")
def log():
    whole = read(EXAMPLE, num_prompts=PROMPTS)
    rollouts = [
        replace(r, response_token_ids=r.response_token_ids[: len(r.response_token_ids) // SHARE])
        for r in whole.rollouts
    ]
    return Log(tuple(rollouts), seed=0)


@pytest.fixture
def scaled(monkeypatch):
    """A tenth of the requests, and passes that cost as much as a tenth of the tokens: the same regime."""
    latency = replace(nemo_rl.LATENCY, c_base_ms=nemo_rl.LATENCY.c_base_ms / SMALLER)
    for module in (nemo_rl, spec_actor):
        monkeypatch.setattr(module, "LATENCY", latency)
    monkeypatch.setattr(nemo_rl, "PLACES", (16 // SMALLER, 80 // SMALLER, None))
    monkeypatch.setattr(spec_actor, "SMALL", spec_actor.SMALL // SMALLER)
    monkeypatch.setattr(spec_actor, "LARGE", spec_actor.LARGE // SMALLER)
    monkeypatch.setattr(spec_actor, "DRAFT_TOKEN_MS", spec_actor.DRAFT_TOKEN_MS / SMALLER)
    monkeypatch.setattr(spec_actor, "WINDOWS", (1, 4, 16))


def check(section):
    """Every claim holds, every figure is a number or a word, and both say where they come from."""
    assert section.figures
    assert section.claims
    assert section.setting
    assert section.why
    for figure in section.figures:
        assert figure.what
        assert isinstance(figure.ours, str) or math.isfinite(figure.ours), figure
        assert figure.source or figure.paper is None, figure
    assert [claim.text for claim in section.claims if not claim.holds] == [], section.figures


def figure(section, what):
    return next(row.ours for row in section.figures if row.what == what)


# ---------------------------------------------------------------- claims


def test_das_claims_hold(log):
    sections = das_paper.sections(log)
    for section in sections:
        check(section)
    latency, _, optimum = sections[:3]
    assert figure(latency, "Qwen2.5-7B: c_base, ms") == pytest.approx(9.46, abs=0.01)
    assert figure(latency, "Llama-3.1-8B: c_tok, ms a token") == pytest.approx(0.0542, abs=1e-4)
    assert figure(optimum, "one request, printed Eq. 7, 2,835 draft tokens: N / l") == pytest.approx(0.892, abs=1e-3)


def test_nemo_rl_claims_hold(log):
    check(nemo_rl.cost_section())
    check(nemo_rl.amdahl_section())
    lag = nemo_rl.lag_section(log)
    check(lag)
    exposed = figure(lag, "exposed generation without drafts, of a step")
    assert exposed == pytest.approx(nemo_rl.EXPOSED_S / nemo_rl.STEP_S, rel=0.1)


@pytest.mark.usefixtures("scaled")
def test_longer_drafts_accept_more_and_end_later(log):
    check(nemo_rl.length_section(log.step()))


@pytest.mark.usefixtures("scaled")
@pytest.mark.parametrize("part", [spec_actor.window_section, spec_actor.large_batch_section])
def test_spec_actor_claims_hold(log, part):
    check(part(log.step()))


def test_races_bring_most_to_those_who_draft_least(log, monkeypatch):
    monkeypatch.setattr(spec_actor, "NUM_WORKERS", PROMPTS)
    check(spec_actor.racing_section(log.step()))


def test_tlt_claims_hold(log):
    (section,) = tlt.sections(log)
    check(section)


@pytest.mark.slow
@pytest.mark.parametrize("paper", PAPERS)
def test_claims_hold_on_the_shipped_log(paper):
    for section in paper.sections(read(EXAMPLE)):
        check(section)


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize("paper", PAPERS)
def test_commands_run(paper, log, tmp_path, monkeypatch, capsys):
    path = tmp_path / "log.jsonl"
    names = ("prompt_token_ids", "response_token_ids")
    rows = [
        {name: getattr(r, name).tolist()[:40] for name in names} | {"training_step": r.training_step}
        for r in log.rollouts
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sys, "argv", ["paper", "--log", str(path), "--prompts", "1", "--json"])
    run(paper.__doc__, paper.sections)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(section["figures"] and section["claims"] for section in found)


def test_a_section_shows_both_figures_and_claims_that_fail(capsys):
    figures = (
        Comparison("passes", 3.0, 4.0, "Table 1"),
        Comparison("drafts", 2.0),
        Comparison("class", "Long", "Short"),
    )
    print_section(Section("Title", "a log.", figures, (Claim("fewer", True), Claim("more", False)), "size."))
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert rows[2:] == [
        ["passes", "3.000", "4.000", "0.750", "Table 1"],
        ["drafts", "2.000", "-", "-", ""],
        ["class", "Long", "Short", "-", ""],
    ]
    assert lines[-2:] == ["- holds: fewer", "- DOES NOT HOLD: more"]


# ---------------------------------------------------------------- what the figures are computed with


def test_the_log_is_cut_into_batches(log):
    step = log.step(num_batches=4)
    assert [r.training_step for r in step.batches] == [t for t in (1, 2, 3, 4) for _ in range(2 * PROMPTS)]
    assert {r.key for r in step.batches} == {r.key for r in log.rollouts} == {r.key for r in step.history}
    assert step.group_size == 2


@pytest.mark.parametrize(("k", "alpha"), [(0.62, 1.43), (1.0, 0.4)])
def test_the_fit_finds_the_curve_that_points_lie_on(k, alpha):
    drafted = np.array([0.3, 1.0, 3.0, 9.0])
    points = list(zip(drafted, k * (1 - np.exp(-alpha * drafted)), strict=True))
    assert das_paper.fit_curve(points) == pytest.approx((k, alpha, 0.0), rel=2e-3, abs=1e-3)
    *_, error = das_paper.fit_curve(
        [(drafted, accepted + 0.05 * (-1) ** i) for i, (drafted, accepted) in enumerate(points)]
    )
    assert error > 0.02


@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("accepted", [0.0, 0.6, 1.0])
def test_tokens_a_round_are_those_of_tossed_coins(window, accepted):
    tosses = np.random.default_rng(0).random((20_000, window)) < accepted
    right = np.cumprod(tosses, axis=1).sum(axis=1)
    coupled = (right + 1).mean()
    decoupled = np.where(right == window, right, (right + 1) / 2).mean()
    assert spec_actor.tokens_a_round(window, accepted, "coupled") == pytest.approx(coupled, rel=0.02)
    assert spec_actor.tokens_a_round(window, accepted, "decoupled") == pytest.approx(decoupled, rel=0.02)


def test_the_share_of_generation_is_what_amdahls_law_needs():
    share = nemo_rl._share(2.0, 1.5)
    assert nemo_rl.amdahl_speedup(2.0, generation_share=share) == pytest.approx(1.5)


def test_what_drafting_pays_at_most_is_where_it_gains_nothing(log):
    counters = log.step().simulate(das.FixedBudget(8), latency=tlt.LATENCY).with_drafts.counters
    least = tlt._break_even(counters)
    assert tlt._speedup(counters, math.floor(least)) >= 1 >= tlt._speedup(counters, math.ceil(least))


def test_the_recorder_follows_each_request(log):
    recorder = ClassRecorder()
    step = log.step()
    projection = step.simulate(lambda: recorder, latency=das_paper.FIG_8)
    plain = step.simulate(das.LengthClassBudget, latency=das_paper.FIG_8)
    assert projection.with_drafts.counters == plain.with_drafts.counters
    assert len(recorder.requests) == len(step.batches)
    assert all(request.ended >= request.started for request in recorder.requests.values())
    noted = sum(int(request.drafted.sum()) for request in recorder.requests.values())
    most_unseen = 16 * len(step.batches)  # of each request's last step
    assert plain.with_drafts.counters.num_drafted_tokens - most_unseen <= noted
    assert noted <= plain.with_drafts.counters.num_drafted_tokens
    shares = summary([recorder])
    for part in (shares.started, shares.ended, shares.drafted):
        assert sum(part.values()) == pytest.approx(1.0)
