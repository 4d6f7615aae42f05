"""A pytest plugin: a mutation needs a failing example, not the smallest one."""

from hypothesis import Phase, settings


def pytest_configure() -> None:  # after conftest.py has loaded its profile, before any test is imported
    settings.register_profile("no_shrinking", settings.default, phases=[Phase.explicit, Phase.generate])
    settings.load_profile("no_shrinking")
