"""Bulk indexing of prompts' rollouts, by das or a peer, and the check that the index is right."""

import gc
import random
from time import perf_counter
from typing import Any

import numpy as np

from bench import peers
from bench.harness import Row, resident_bytes
from bench.rollouts import Prompt, Tokens
from das import SuffixTree, __version__

DAS = "das"
NUM_CHECKED = 25  # contexts a tree


def index(side: str, prompts: list[Prompt]) -> Row:
    """Index every prompt's history in this process; time and resident memory per token of the history.

    das indexes the prompts too: that costs time and memory, and does not count as tokens.
    """
    num_tokens = sum(len(response) for prompt in prompts for response in prompt.history)
    gc.collect()
    gc.freeze()
    gc.disable()
    seconds, grown_bytes, more = _index_das(prompts) if side == DAS else _index_peer(side, prompts)
    gc.enable()
    return {
        "num_prompts": len(prompts),
        "num_tokens": num_tokens,
        "ns_per_token": 1e9 * seconds / num_tokens,
        "bytes_per_token": grown_bytes / num_tokens,
        **more,
    }


def _index_das(prompts: list[Prompt]) -> tuple[float, int, Row]:
    """One tree a prompt."""
    before = resident_bytes()
    start_s = perf_counter()
    trees = []
    for prompt in prompts:
        tree = SuffixTree(num_expected_tokens=sum(map(len, prompt.history)))
        handle = tree.add_prompt(prompt.token_ids)
        for response in prompt.history:
            tree.add(response, prompt=handle)
        trees.append(tree)
    seconds = perf_counter() - start_s
    grown = resident_bytes() - before
    for tree, prompt in zip(trees, prompts, strict=True):
        expected = len(prompt.token_ids) + sum(map(len, prompt.history))
        if tree.num_tokens != expected:
            raise RuntimeError(f"prompt {prompt.key}: the tree holds {tree.num_tokens} tokens, not {expected}")
    checked = {0, len(trees) - 1}
    for number in checked:
        _check_counts(trees[number], prompts[number])
    return seconds, grown, {
        "own_estimate_bytes": sum(tree.memory_bytes() for tree in trees),
        "num_checked_contexts": NUM_CHECKED * len(checked),
        "settings": {"scope": "one tree per prompt", "max_order": trees[0].max_order, "das": __version__},
    }  # fmt: skip


def _index_peer(side: str, prompts: list[Prompt]) -> tuple[float, int, Row]:
    """Only `add` is timed, not making the lists of ints it takes; what the peer allocates at once is memory too."""
    before = resident_bytes()
    peer = peers.create(side)
    seconds = 0.0
    for prompt in prompts:
        prompt_ids = prompt.token_ids.tolist()
        for response in prompt.history:
            # Arctic takes an array that can be written to; the others take ints.
            token_ids: Any = response.copy() if side.startswith("arctic") else response.tolist()
            start_s = perf_counter()
            peer.add(prompt.key, prompt_ids, token_ids)
            seconds += perf_counter() - start_s
    grown = resident_bytes() - before
    last, known = prompts[-1], prompts[-1].history[-1]
    peer.start("check", last.key, last.token_ids.tolist())
    peer.extend("check", known[: min(32, len(known) // 2)].tolist())
    if not peer.draft("check", 8):
        raise RuntimeError(f"{side} finds nothing after the first tokens of a rollout it has indexed")
    return seconds, grown, {"own_estimate_bytes": peer.memory_bytes(), "settings": peer.applied_settings()}


def _check_counts(tree: SuffixTree, prompt: Prompt) -> None:
    """Compare counts of contexts taken from the text with counting in the text."""
    rng = random.Random(prompt.key)
    for _ in range(NUM_CHECKED):
        text = np.concatenate([prompt.token_ids, rng.choice(prompt.history)])
        order = rng.randint(1, tree.max_order)
        start = rng.randrange(max(1, len(text) - order))
        context, token = text[start : start + order], int(text[min(start + order, len(text) - 1)])
        expected_any, expected_token = _count(prompt, context, token)
        found = tree.counts(context), tree.child_counts(context, token)
        if found != (expected_any, expected_token):
            raise RuntimeError(
                f"prompt {prompt.key}: after {context.tolist()} the tree counts {found}, not "
                f"{(expected_any, expected_token)}"
            )


def _count(prompt: Prompt, context: Tokens, token: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """How often something, and `token`, follows the context: in the prompt, and in the responses behind it."""
    in_prompt = _follows(prompt.token_ids, context, first=0)
    in_responses = np.concatenate(
        [
            _follows(np.concatenate([prompt.token_ids, response]), context, first=len(prompt.token_ids))
            for response in prompt.history
        ]
    )
    return (len(in_prompt), len(in_responses)), (int((in_prompt == token).sum()), int((in_responses == token).sum()))


def _follows(text: Tokens, context: Tokens, *, first: int) -> Tokens:
    """The tokens that follow the context in a text, those at `first` and later."""
    if len(text) <= len(context):
        return text[:0]
    windows = np.lib.stride_tricks.sliding_window_view(text, len(context))[:-1]
    positions = np.flatnonzero((windows == context).all(axis=1)) + len(context)
    return text[positions[positions >= first]]
