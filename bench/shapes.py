"""Unusual text: loops, one very long rollout, very many rollouts of one prompt. And the usual, to compare with."""

import gc
from itertools import cycle, islice

import numpy as np

from bench.decode import Decode
from bench.harness import Job, Row
from bench.indexing import DAS, index
from bench.rollouts import Prompt, prompts_of_size
from bench.sides import create

USUAL = "usual"
LOOPS = [f"loop {period}" for period in range(1, 8)]
LONG = "long"
MANY = "many"
SHAPES = [USUAL, *LOOPS, LONG, MANY]
LIVE_SIDE = "das:price=0.15"
TOKENS = {USUAL: 32_000, LONG: 128_000, MANY: 256_000} | dict.fromkeys(LOOPS, 32_000)
NUM_ROLLOUTS = 512
LOOP_BEGINS = 200  # tokens of ordinary text before a rollout loops


def measure_shape(job: Job) -> Row:
    """Add the text in bulk, then decode it, or more text of its prompt, live with one running request.

    A shape without history adds in bulk what it then decodes. Both parts are per token: a step in a loop drafts and
    emits many. The text is added three times, each to an empty index: the best time, and the memory of the first.
    """
    prompts = _prompts_of(job["log"], job["shape"], job["tokens"])
    bulk = [Prompt(prompt.key, prompt.token_ids, prompt.history or prompt.targets) for prompt in prompts]
    indexed = [index(job["side"], bulk) for _ in range(3)]
    best_ns = min(results["ns_per_token"] for results in indexed)
    live = _live(LIVE_SIDE if job["side"] == DAS else job["side"], prompts)
    return {"bulk": {**indexed[0], "ns_per_token": best_ns}, "live": live}


def _prompts_of(log: str, shape: str, num_tokens: int) -> list[Prompt]:
    usual = prompts_of_size(log, num_tokens=num_tokens)
    if shape == USUAL:
        return usual
    first = usual[0]
    rollouts = [response for prompt in usual for response in prompt.history]
    if shape == MANY:
        share = max(1, num_tokens // NUM_ROLLOUTS)
        texts = np.concatenate(rollouts)[:num_tokens]
        history = [texts[at : at + share] for at in range(0, len(texts), share)]
        return [Prompt(0, first.token_ids, history, first.targets)]
    if shape == LONG:
        return [Prompt(0, first.token_ids, targets=[np.concatenate(rollouts)[:num_tokens]])]
    period = int(shape.split()[1])
    text = rollouts[0][:LOOP_BEGINS]
    loop = np.fromiter(islice(cycle(text[-period:].tolist()), num_tokens - len(text)), np.int32)
    return [Prompt(0, first.token_ids, targets=[np.concatenate([text, loop])])]


def _live(side_name: str, prompts: list[Prompt]) -> Row:
    side = create(side_name)
    for prompt in prompts:
        for response in prompt.history:
            side.add(prompt.key, prompt.token_ids, response)
    side.ready()
    decode = Decode(side, prompts, max_running=1)
    times, emitted = [], []
    gc.collect()
    gc.disable()
    while decode.num_running:
        before = decode.tally.num_emitted
        step = decode.step()
        times.append(1e6 * (step.draft_s + step.extend_s))
        emitted.append(decode.tally.num_emitted - before)
    gc.enable()
    num_emitted, num_drafted, half = sum(emitted), decode.tally.num_drafted, len(times) // 2
    return {
        "side": side_name,
        "us_per_step": sum(times) / len(times),
        "us_per_emitted_token": sum(times) / num_emitted,
        "us_per_drafted_or_emitted_token": sum(times) / (num_emitted + num_drafted),
        "second_half_over_first": sum(times[half:]) / sum(emitted[half:]) / (sum(times[:half]) / sum(emitted[:half])),
        **decode.tally.summary(),
        "settings": side.settings(),
    }
