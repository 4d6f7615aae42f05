"""The tests here need vLLM, CPU build, in an environment of its own: `make test-vllm`."""

from pathlib import Path
from typing import Any

import pytest
from engine_runs import Case, engine, generate, random_model, set_environment, workload

from bench.bench_vllm import repair_sampling_on_cpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM's and torch's own


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    set_environment()
    repair_sampling_on_cpu()
    return random_model(tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("other"), seed=4)


@pytest.fixture(scope="session")
def cases() -> list[Case]:
    return workload()


@pytest.fixture(scope="session")
def undrafted(tiny_model: Path, cases: list[Case]) -> dict[str, list[Any]]:
    """What the engine returns without drafting. One engine at a time: shutting one down takes others with it."""
    with engine(tiny_model, num_speculative_tokens=None) as llm:
        return generate(llm, cases)


@pytest.fixture(scope="session")
def undrafted_by_other_model(other_model: Path, cases: list[Case]) -> dict[str, list[Any]]:
    with engine(other_model, num_speculative_tokens=None) as llm:
        return generate(llm, cases)
