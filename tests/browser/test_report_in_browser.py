"""The reports in headless Chromium: no errors, no requests, every figure drawn, wide and narrow, light and dark."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.browser

KINDS = ["replay", "compare"]
VIEWS = {"light": (1280, False), "dark": (1280, True), "narrow": (390, False), "narrow_dark": (390, True)}
# The number of shapes with a size that each plot holds: bars, lines, points.
SHAPES = """
return Object.fromEntries([...document.querySelectorAll("[data-plot]")].map((plot) => [
  plot.dataset.plot,
  [...plot.querySelectorAll(".plot path, .plot .point, .scatterlayer path, .barlayer path")].filter((shape) => {
    const box = shape.getBoundingClientRect();
    return box.width + box.height > 2;
  }).length,
]));
"""
CONTRAST = """
const channel = (value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
const luminance = (rgb) => {
  const [r, g, b] = rgb.match(/[\\d.]+/g).map(Number);
  return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
};
const probe = document.getElementById("probe");
const of = (name) => { probe.style.color = `var(--${name})`; return luminance(getComputedStyle(probe).color); };
const pairs = arguments[0];
return pairs.map(([front, back]) => {
  const [low, high] = [of(front), of(back)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
});
"""


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_figure_is_drawn_without_errors_or_requests(browser, reports: dict[str, Path], kind: str, view: str):
    width, dark = VIEWS[view]
    browser.open(reports[kind], width=width, dark=dark)
    shapes = browser.js(SHAPES)
    assert len(shapes) >= 10
    assert not [name for name, number in shapes.items() if number == 0]
    assert browser.requests() == [reports[kind].as_uri()]
    assert browser.messages() == []
    assert browser.js("return document.documentElement.scrollWidth") <= width  # nothing sticks out
    assert browser.screenshot(f"{kind}_{view}").stat().st_size > 50_000


@pytest.mark.parametrize("dark", [False, True])
def test_colours_can_be_told_from_the_page(browser, reports: dict[str, Path], dark: bool):
    browser.open(reports["replay"], dark=dark)
    texts = [(name, "paper") for name in ("text", "soft", "link", "good", "bad")]
    texts += [("soft", "page"), ("link", "page")]
    texts += [("text", name) for name in ("running", "history", "both", "common")]
    assert min(browser.js(CONTRAST, texts)) >= 4.5
    lines = [(name, "paper") for name in ("das", "orange", "green", "purple", "off")]
    assert min(browser.js(CONTRAST, lines)) >= 3.0


def test_text_is_there_before_figures_and_both_soon(browser, reports: dict[str, Path]):
    """Median of 5 openings, against twice the bar of 2 s, as other work may share the machine."""
    texts_ms, firsts_ms = [], []
    for _ in range(5):
        browser.open(reports["replay"])
        texts_ms.append(browser.js("return performance.getEntriesByName('first-contentful-paint')[0].startTime"))
        firsts_ms.append(min(browser.js("return drawnAtMs").values()))
    assert 0 < median(texts_ms) < median(firsts_ms) < 4000


@pytest.mark.parametrize(("anchor", "first"), [("", "epochs"), ("#time", "running"), ("#prompts", "prompts")])
def test_what_the_reader_sees_is_drawn_first(browser, reports: dict[str, Path], anchor: str, first: str):
    browser.open(reports["replay"], anchor=anchor)
    drawn_ms = browser.js("return drawnAtMs")
    assert min(drawn_ms, key=drawn_ms.get) == first
    assert len(drawn_ms) >= 10


def test_there_is_room_for_figures_before_they_are_drawn(browser, reports: dict[str, Path]):
    """On a phone, where long legends make some figures higher: what somebody reads must not move."""
    browser.open(reports["compare"], width=390)
    assert browser.js("return heightAtLoad") == browser.js("return document.documentElement.scrollHeight")


def test_paper_that_does_not_wait_has_every_figure(browser, reports: dict[str, Path]):
    early = {"source": "addEventListener('DOMContentLoaded', () => dispatchEvent(new Event('beforeprint')))"}
    added = browser.cdp("Page.addScriptToEvaluateOnNewDocument", **early)["identifier"]
    try:
        browser.open(reports["replay"])
    finally:
        browser.cdp("Page.removeScriptToEvaluateOnNewDocument", identifier=added)
    drawn_ms = browser.js(
        "return [...Object.values(drawnAtMs), performance.timing.loadEventStart - performance.timing.navigationStart]"
    )
    assert len(drawn_ms) > 10
    assert max(drawn_ms[:-1]) <= drawn_ms[-1]  # all of them before the page's own turn to draw came


def test_the_theme_follows_the_reader(browser, reports: dict[str, Path]):
    browser.open(reports["replay"])
    background = "return getComputedStyle(document.body).backgroundColor"
    line = "return getComputedStyle(document.querySelector('[data-plot=epochs] .scatterlayer path.js-line')).stroke"
    light = browser.js(background), browser.js(line)
    button = browser.driver.find_element("id", "theme")
    assert button.text == "Dark"
    button.send_keys(Keys.ENTER)
    browser.wait_for_figures()
    dark = browser.js(background), browser.js(line)
    assert button.text == "Light"
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    button.send_keys(Keys.SPACE)
    browser.wait_for_figures()
    assert (browser.js(background), browser.js(line)) == light


def test_keys_reach_everything(browser, reports: dict[str, Path]):
    browser.open(reports["replay"])
    reached = []
    while "tokens ids" not in reached and len(reached) < 250:
        browser.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(browser.js("const e = document.activeElement; return e.id || e.className || e.tagName"))
    assert reached[:2] == ["skip", "theme"]
    assert {"SUMMARY", "SELECT", "A", "INPUT", "tokens ids"} <= set(reached)


def test_what_is_picked_is_shown(browser, reports: dict[str, Path]):
    browser.open(reports["replay"])
    shown = "return [...document.querySelectorAll('.rollout')].filter((e) => !e.hidden).map((e) => e.dataset.rollout)"
    assert browser.js(shown) == ["0"]
    browser.driver.find_element("css selector", "select[data-picks=rollout]").send_keys(Keys.DOWN)
    assert browser.js(shown) == ["1"]
    rejected = "return getComputedStyle(document.querySelector('.tokens del')).display"
    assert browser.js(rejected) == "none"
    browser.driver.find_element("css selector", "input[data-shows=rejected]").send_keys(Keys.SPACE)
    assert browser.js(rejected) != "none"
    curve = "return document.querySelector('[data-plot=running] .scatterlayer path.js-line').getAttribute('d')"
    before = browser.js(curve)
    browser.driver.find_element("css selector", "select[data-figure=running]").send_keys(Keys.DOWN)
    assert browser.js(curve) != before


def test_it_prints(browser, reports: dict[str, Path]):
    browser.open(reports["replay"], dark=True)
    printed = browser.cdp("Page.printToPDF", printBackground=True)["data"]
    assert len(printed) > 100_000
    browser.wait_for("document.documentElement.dataset.theme === undefined")  # dark again
    browser.wait_for_figures()


def test_without_scripts_the_numbers_are_there(browser, reports: dict[str, Path]):
    browser.cdp("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.driver.get(reports["replay"].as_uri())
        text = browser.driver.find_element("css selector", "main").text
    finally:
        browser.cdp("Emulation.setScriptExecutionDisabled", value=False)
    assert "Switch drafting on: generation ends" in text
    assert "The numbers" in text
