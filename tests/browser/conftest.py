"""Headless Chromium of the system, driven by selenium; without it these tests fail, they skip nothing."""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver

from das.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "amc23_rollouts.jsonl.gz"
SCREENSHOTS = Path(__file__).parents[2] / "out" / "report_screenshots"  # for people to look at
DRAWN_WITHIN_S = 60  # all figures, on a crowded machine
# Notes when each figure was drawn first, in ms since the page was asked for, and how high the page was before.
WATCH = """
window.drawnAtMs = {};
new MutationObserver(() => {
  for (const { dataset } of document.querySelectorAll("[data-plot]:has(.main-svg)")) {
    drawnAtMs[dataset.plot] ??= performance.now();
  }
}).observe(document, { childList: true, subtree: true });
addEventListener("load", () => { window.heightAtLoad = document.documentElement.scrollHeight; });
"""


class Browser:
    """A headless Chromium."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, page: Path, *, width: int = 1280, dark: bool = False, anchor: str = "") -> None:
        """Open a page at a width, as a phone's where that is small, and wait until all is drawn."""
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])
        self.requests(), self.messages()  # of pages before
        self.driver.get("about:blank")  # else an anchor would move within the page before
        self.driver.get(page.as_uri() + anchor)
        self.wait_for_figures()

    def wait_for_figures(self) -> None:
        """Wait until all figures are drawn."""
        self.wait_for("document.documentElement.dataset.drawn === 'all'")

    def js(self, script: str, *args: Any) -> Any:
        """Return what a script returns."""
        return self.driver.execute_script(script, *args)

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true."""
        until_s = time.monotonic() + DRAWN_WITHIN_S
        while not self.js(f"return {condition}"):
            assert time.monotonic() < until_s, f"never true: {condition}; {self.messages()}"
            time.sleep(0.05)

    def cdp(self, command: str, **arguments: Any) -> Any:
        """Call Chromium's own protocol."""
        return self.driver.execute_cdp_cmd(command, arguments)

    def messages(self) -> list[Any]:
        """Return what was written on the console since the last call."""
        return self.driver.get_log("browser")

    def requests(self) -> list[str]:
        """Return what was asked for since the last call, data: and blob: aside."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("data:", "blob:"))]

    def screenshot(self, name: str) -> Path:
        """Keep a picture of the whole page."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        size = self.js("return [document.documentElement.clientWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        picture = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        path = SCREENSHOTS / f"{name}.png"
        path.write_bytes(base64.b64decode(picture["data"]))
        return path


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium, "no chromium on PATH: apt-get install chromium chromium-driver"
    assert driver, "no chromedriver on PATH: apt-get install chromium chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    running = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    running.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
    yield Browser(running)
    running.quit()


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The reports that the two commands write of the shipped log."""
    folder = tmp_path_factory.mktemp("reports")
    files = {name: folder / f"{name}.html" for name in ("replay", "compare")}
    assert main(["replay", str(EXAMPLE), "--html", str(files["replay"])]) == 0
    policies = [part for name in ("length-aware", "fixed=4") for part in ("--policy", name)]
    assert main(["compare", str(EXAMPLE), *policies, "--html", str(files["compare"])]) == 0
    return files
