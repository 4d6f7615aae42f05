"""das in the place of SGLang's n-gram trie, which it beats after a weight update, and never instead by mistake."""

import json
import os
import subprocess
import sys

import pytest
from sglang_engines import OPTIONS, engine, generate, num_passes, tokens_of, trained_model, update_weights

from bench import tiny_llama

pytestmark = pytest.mark.sglang

PROMPTS = tiny_llama.prompts(6)
GREEDY = {"temperature": 0, "max_new_tokens": 48}


START = """
import json, sys
import sglang

if __name__ == "__main__":
    sglang.Engine(**json.loads(sys.argv[1]))
    print("it runs")
"""


def test_an_engine_that_was_to_be_das_does_not_run_sglangs_trie_instead(request, tmp_path):
    """Settings that are wrong: the scheduler's process ends with the reason, and so does the engine."""
    (tmp_path / "start.py").write_text(START)
    options = OPTIONS | {"model_path": str(trained_model(request.config.cache)), "speculative_algorithm": "NGRAM"}
    environment = os.environ | {"DAS_SGLANG": json.dumps({"replace_ngram": True, "policy": "best"})}
    command = [sys.executable, str(tmp_path / "start.py"), json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode != 0
    assert "it runs" not in done.stdout
    reason = "--speculative-algorithm NGRAM, with replace_ngram: DAS_SGLANG: policy is 'best'"
    assert reason in done.stdout + done.stderr, done.stderr[-4000:]


@pytest.mark.slow  # SGLang compiles its trie: half a minute, and a C++ compiler
def test_repeated_prompts_after_weight_updates(request, tmp_path):
    """das takes at most half the passes of SGLang's trie, which the flush has emptied."""
    model = trained_model(request.config.cache)
    updated = tiny_llama.update(model, tmp_path)
    answers, passes = {}, {}
    for algorithm in ("NGRAM", "DAS"):
        settings = {"latency_ms": [8.0, 0.04]}
        options = {"speculative_algorithm": algorithm, "speculative_num_draft_tokens": 8}
        with engine(model, settings=settings, **options) as running:
            generate(running, PROMPTS, GREEDY)
            answers[algorithm], passes[algorithm] = [], []
            for weights in (updated, model):
                update_weights(running, weights)
                found = generate(running, PROMPTS, GREEDY)
                answers[algorithm].append(tokens_of(found))
                passes[algorithm].append(sum(num_passes(found)))
    assert answers["DAS"] == answers["NGRAM"]
    for ours, theirs in zip(passes["DAS"], passes["NGRAM"], strict=True):
        assert ours <= theirs / 2, passes
