"""The tests here need trainers, in an environment of their own: `make test-trainers`."""

import json
import sys
from pathlib import Path

import pytest

from das_trainers.settings import VARIABLE, process_feed

REASONER = Path(__file__).parents[2] / "examples" / "tiny_reasoner"
sys.path.insert(0, str(REASONER))  # for task.py


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.trainers)
            item.add_marker(pytest.mark.filterwarnings("default"))  # trainers' and torch's own


@pytest.fixture(scope="session")
def model_folder():
    """A Llama of 0.3 M parameters before RL, as `save_pretrained` writes one."""
    return REASONER / "epoch0"


@pytest.fixture(scope="session")
def tokenizer(model_folder):
    transformers = pytest.importorskip("transformers", reason="the trainers' environment is not there")
    return transformers.AutoTokenizer.from_pretrained(model_folder, pad_token="<unused1>")


@pytest.fixture
def fed_log(tmp_path, monkeypatch):
    """The directory that the hooks of this process write to, from the start of a test to its end."""
    folder = tmp_path / "fed"
    monkeypatch.setenv(VARIABLE, json.dumps({"log": str(folder)}))
    process_feed.cache_clear()
    yield folder
    process_feed().close()
    process_feed.cache_clear()
