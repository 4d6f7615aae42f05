"""Hypothesis profiles: dev by default, ci and full by the environment variable DAS_TEST_PROFILE."""

import os
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("checks")

# `make test-browser` installs selenium; where it is not, these files cannot even be read.
collect_ignore = [] if find_spec("selenium") else ["browser"]

COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("dev", max_examples=25, stateful_step_count=30, derandomize=True, **COMMON)
settings.register_profile("ci", max_examples=200, stateful_step_count=60, derandomize=True, **COMMON)
settings.register_profile("full", max_examples=5000, stateful_step_count=100, print_blob=True, **COMMON)
settings.load_profile(os.environ.get("DAS_TEST_PROFILE", "dev"))
