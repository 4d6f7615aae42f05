"""After a weight update das takes at most half the passes of SGLang's n-gram trie, which the flush has emptied."""

import pytest
from sglang_engines import engine, generate, num_passes, tokens_of, trained_model, update_weights

from bench import tiny_llama

pytestmark = [pytest.mark.sglang, pytest.mark.slow]  # SGLang compiles its trie: half a minute, and a C++ compiler

PROMPTS = tiny_llama.prompts(6)
GREEDY = {"temperature": 0, "max_new_tokens": 48}


def test_repeated_prompts_after_weight_updates(request, tmp_path):
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
