"""A pytest plugin: a mutation needs a failing example, not the smallest one, and a test that never ends is one."""

import signal

from hypothesis import Phase, settings

MAX_TEST_S = 60  # a crowded machine takes several times as long as usual


def pytest_configure() -> None:  # after conftest.py has loaded its profile, before any test is imported
    settings.register_profile("no_shrinking", settings.default, phases=[Phase.explicit, Phase.generate])
    settings.load_profile("no_shrinking")


def pytest_runtest_logstart() -> None:
    signal.alarm(MAX_TEST_S)  # nobody catches it, so it ends the process also inside a native loop


def pytest_runtest_logfinish() -> None:
    signal.alarm(0)
