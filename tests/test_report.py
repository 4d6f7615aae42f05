"""The report of a replay and of a comparison: what it says, that the log's texts stay texts, and wrong use."""

import re
from dataclasses import replace
from hashlib import sha256
from importlib import resources
from pathlib import Path

import pytest
from log_samples import word_tokenizer, write
from plotly import graph_objects
from report_pages import Page, watched_replay
from rollout_samples import PROMPT, rollout

from das import FixedBudget, LatencyModel, NoDraft, latency_preset
from das.analysis.recording import Recording
from das.analysis.replay import Replay
from das.analysis.report import replay_report
from das.cli import main

EVIL = '<script>alert("1")</script>&amp;'
TWENTY = list(range(100, 120))
FIGURES = [
    "epochs",
    "positions",
    "orders",
    "sources",
    "classes",
    "reliability",
    "running",
    "lengths",
    "tail",
    "prompts",
]


def log_of(*, num_steps: int = 3, num_samples: int = 4) -> list:
    """Two prompts; responses of one that come back word for word, and of one that never repeats a token."""
    again = [rollout(TWENTY[: 10 + 2 * n], step, reward=1.0) for step in range(num_steps) for n in range(num_samples)]
    fresh = [
        rollout(list(range(1000 * step + 50 * n, 1000 * step + 50 * n + 8)), step, prompt=[9])
        for step in range(num_steps)
        for n in range(num_samples)
    ]
    return again + fresh


@pytest.fixture(scope="module")
def replayed():
    return watched_replay(log_of(), policy=FixedBudget(4))


@pytest.fixture(scope="module")
def page(replayed) -> Page:
    result, recording = replayed
    return Page(
        replay_report(
            result,
            recording,
            log_name=EVIL,
            prompt_names={recording.ended[0].rollout.key: f"first {EVIL}"},
            decode=lambda token_id: f"</script>{EVIL}\n" if token_id == TWENTY[3] else f" w{token_id}",
            notes=[EVIL],
        )
    )


# What it says.


def test_every_figure_is_there_and_one_that_plotly_knows(page: Page) -> None:
    assert list(page.plots) == FIGURES
    for name, plot in page.plots.items():
        assert plot["choices"], name
        for choice in plot["choices"]:
            figure = graph_objects.Figure(
                painted(choice["traces"]), painted(plot["layout"])
            )  # raises where it does not
            assert any(len(trace.x) for trace in figure.data), name


def painted(value):
    """A figure with a colour for each colour of the theme."""
    if isinstance(value, str):
        return "rgb(1, 2, 3)" if re.fullmatch("@[a-z]+", value) else value
    if isinstance(value, list):
        return [painted(part) for part in value]
    return {name: painted(part) for name, part in value.items()} if isinstance(value, dict) else value


def test_every_colour_is_one_of_the_theme(page: Page) -> None:
    used = set(re.findall('"@([a-z]+)"', page.scripts[0]))
    assert len(used) > 3
    assert used <= set(re.findall(r"--([a-z]+): light-dark\(", page.html))


def test_every_figure_has_its_numbers_and_a_text_alternative(page: Page) -> None:
    labels = {value for tag, name, value in page.attributes if tag == "div" and name == "aria-label"}
    for text in ("Acceptance by position in the draft", "The long tail", "Every prompt"):
        assert text in page.text
        assert text in labels  # of its table
    assert page.elements["figure"] == page.elements["details"] == len(FIGURES)
    assert sum((tag, name, value) == ("div", "role", "img") for tag, name, value in page.attributes) == len(FIGURES)


def test_the_numbers_are_the_replays(replayed, page: Page) -> None:
    result, _ = replayed
    total = result.counters
    assert f"tokens per decode step {total.tokens_per_decode_step:.2f} all decode steps counted" in page.text
    assert f"accepted {total.draft_acceptance_rate:.1%} of the drafted tokens" in page.text
    for batch, per_step in zip(result.batches, page.plots["epochs"]["choices"][0]["traces"][0]["y"], strict=True):
        assert per_step == pytest.approx(batch.summary()["tokens_per_decode_step"], rel=1e-4)
    drafted, accepted = (trace["y"] for trace in page.plots["positions"]["choices"][0]["traces"])
    assert sum(drafted) == pytest.approx(100, abs=0.1)
    assert sum(accepted) == pytest.approx(100 * total.draft_acceptance_rate, abs=0.1)


def test_drafts_of_repeated_text_come_from_earlier_epochs(page: Page) -> None:
    """Siblings write the same tokens at the same time, so running text knows none of them before."""
    names, shares = (page.plots["sources"]["choices"][0]["traces"][1][axis] for axis in "xy")
    assert shares[names.index("earlier epochs")] > 40
    assert page.html.count('<mark class="history"') > page.html.count('<mark class="common"')


@pytest.mark.parametrize(
    ("latency", "said"),
    [
        (
            None,
            "A forward takes 5 ms + 0.025 ms for every token in it: assumed, as nothing was measured on your engine.",
        ),
        (
            LatencyModel(c_base_ms=3, c_tok_ms=1, c_engine_ms=2),
            "+ 2 ms where speculation is on: as given by --latency.",
        ),
        (latency_preset("qwen2.5-7b-a100").fit.latency, "measured of Qwen2.5-7B on NVIDIA A100, median error 4.3%"),
    ],
)
def test_the_latency_model_is_named_with_its_source(replayed, latency, said: str) -> None:
    assert said in Page(replay_report(*replayed, log_name="log", latency=latency)).text


@pytest.mark.parametrize(
    ("policy", "latency", "verdict"),
    [
        (FixedBudget(4), None, r"Switch drafting on: generation ends 1\.\d\d times as fast"),
        (
            FixedBudget(4),
            LatencyModel(c_base_ms=0.01, c_tok_ms=10),
            r"Leave drafting off: generation would end \d.*% later",
        ),
        (NoDraft(), None, "Leave drafting off: nothing was drafted"),
    ],
)
def test_the_headline_is_a_yes_or_a_no(policy, latency, verdict: str) -> None:
    page = Page(replay_report(*watched_replay(log_of(), policy=policy), log_name="log", latency=latency))
    assert re.search(verdict, page.text)
    assert ("das_vllm.DasProposer" in page.text) == verdict.startswith("Switch")  # how, if it is worth it
    assert ("gain" if verdict.startswith("Switch") else "no-gain") in re.search('class="answer ([a-z-]+)"', page.html)[
        1
    ]


def test_a_gain_below_a_percent_is_a_no(replayed) -> None:
    result, recording = replayed
    speedup = sum(b.longest_response_tokens for b in result.batches) / sum(b.num_batch_steps for b in result.batches)
    almost = LatencyModel(c_base_ms=1.0, c_tok_ms=1e-9, c_engine_ms=speedup / 1.005 - 1)
    page = Page(replay_report(result, recording, log_name="log", latency=almost))
    assert "Leave drafting off: it would save under 1% of the time" in page.text


def test_the_same_input_gives_the_same_page_and_only_measured_time_differs(replayed) -> None:
    result, recording = replayed
    first, again = (replay_report(result, recording, log_name="log") for _ in range(2))
    assert first == again
    other, other_recording = watched_replay(log_of(), policy=FixedBudget(4))
    other = replace(other, plan_us=result.plan_us, extend_us=result.extend_us)
    assert replay_report(other, other_recording, log_name="log") == first


def test_a_replay_that_was_stopped_says_so() -> None:
    log = log_of()
    recording = Recording(log)
    run = Replay(log, observer=recording, policy=FixedBudget(4))

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(progress=stop)
    page = Page(replay_report(run.result(), recording, log_name="log"))
    assert "PARTIAL: stopped before the end of the log." in page.text
    assert "PARTIAL" not in Page(replay_report(*watched_replay(log, policy=FixedBudget(4)), log_name="log")).text


def test_nothing_ended_is_an_error() -> None:
    log = log_of()
    recording = Recording(log)
    with pytest.raises(ValueError, match="no request ended; there is nothing to report"):
        replay_report(Replay(log, observer=recording).result(), recording, log_name="log")


# Texts of the log stay texts, and nothing comes from outside.


def test_texts_of_the_log_are_shown_as_they_are(page: Page) -> None:
    assert page.elements["script"] == 3  # the plots, plotly.js, the page's own: not one of the log's
    assert "<" not in page.scripts[0]
    assert "alert(" not in page.scripts[2]
    assert page.text.count(EVIL) > 4  # title, notes, prompt, tokens
    assert f"first {EVIL}" in page.text
    assert f"</script>{EVIL}\u21b5" in page.text
    (name,) = {text for text in page.plots["prompts"]["choices"][0]["traces"][0]["text"] if text.startswith("first")}
    assert "<" not in name  # plotly.js takes some tags for markup


def test_nothing_is_loaded_from_outside(page: Page) -> None:
    links = [value for _, name, value in page.attributes if name in ("src", "href", "data", "action")]
    assert links
    assert all(link.startswith(("#", "data:,")) for link in links)
    assert ("meta", "content", "default-src 'none'") in [
        (tag, name, (value or "").partition(";")[0]) for tag, name, value in page.attributes
    ]
    assert "url(" not in re.search("<style>.*?</style>", page.html, re.DOTALL)[0]


def test_it_is_smaller_than_2_mb(page: Page) -> None:
    assert 1_000_000 < len(page.html.encode()) < 2_000_000


# plotly.js.


def test_plotting_is_what_was_published() -> None:
    """As the file in https://registry.npmjs.org/plotly.js-basic-dist-min/-/plotly.js-basic-dist-min-4.1.1.tgz."""
    published = resources.files("das.analysis.report").joinpath("plotly-basic.min.js").read_bytes()
    assert sha256(published).hexdigest() == "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"


def test_plotting_may_stand_in_a_script_element(page: Page) -> None:
    text = page.scripts[1]
    assert text.endswith("return Plotly;\n}));")  # the parser's own end of it is the end of it
    assert "<!--" not in text


def test_figures_are_of_kinds_that_the_basic_bundle_has(page: Page) -> None:
    kinds = {trace["type"] for plot in page.plots.values() for choice in plot["choices"] for trace in choice["traces"]}
    assert kinds == {"bar", "scatter"}


# The commands.


@pytest.fixture
def log(tmp_path: Path) -> Path:
    rows = [
        {"prompt_id": EVIL, "prompt_token_ids": PROMPT, "response_token_ids": [1, 2, 3, 1, 2, 3], "training_step": step}
        for step in (0, 1, 1)
    ]
    return write(tmp_path / "log.jsonl", *rows)


def test_replay_writes_a_report_and_says_where(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = log.parent / "report.html"
    tokenizer = word_tokenizer(log.parent)
    assert main(["replay", str(log), "--policy", "fixed", "--html", str(file), "--tokenizer", str(tokenizer)]) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    assert f"Report: {file} (" in " ".join(output.split())
    page = Page(file.read_text())
    assert page.text.startswith("das replay: log.jsonl")
    assert EVIL in page.text
    assert re.search(r"what\W*is\W*it", page.text)  # tokens 1 2 3, by the tokenizer


def test_compare_writes_a_report_of_its_best_row(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = log.parent / "report.html"
    args = ["--policy", "fixed=4", "--policy", "none", "--json", "--html", str(file)]
    assert main(["compare", str(log), *args]) == 0
    capsys.readouterr()
    page = Page(file.read_text())
    assert list(page.plots)[:2] == ["pareto", "running"]
    assert set(FIGURES) - {"running"} <= set(page.plots)
    assert "Switch fixed=4 on: generation ends" in page.text
    best, *others = (trace["name"] for trace in page.plots["pareto"]["choices"][0]["traces"])
    assert (best, others) == ("not beaten", ["off", "fixed=4", "none"])
    frontier = page.plots["pareto"]["choices"][0]["traces"][0]
    assert frontier["x"] == sorted(frontier["x"])
    assert frontier["y"] == sorted(frontier["y"], reverse=True)


@pytest.mark.parametrize("command", ["replay", "compare"])
def test_a_folder_that_is_not_there_is_told_first(command: str, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(log), "--html", str(log.parent / "no" / "report.html")]) == 2
    assert "no is no directory" in capsys.readouterr().err


def test_a_tokenizer_that_is_none_is_told_first(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = write(log.parent / "bad.json", "{}")
    assert main(["replay", str(log), "--html", str(log.parent / "report.html"), "--tokenizer", str(bad)]) == 1
    assert "not a tokenizer.json that tokenizers can read" in capsys.readouterr().err
