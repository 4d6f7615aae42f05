"""Saved states at scale: resident bytes a token, the byte limit, and how long saving, loading and going on take.

    python -m bench.bench_state [--prompts N] [--samples N] [--tokens N] [--folder DIR]

Without options 1/20 of the size that is promised, 5,000 prompts x 16 rollouts x 1,000 tokens; `--prompts 100000` is all
of it: 8 GB of memory and 6.5 GB in the folder, twice that where all is written anew. Tokens are random, and no tree is
built but those of one batch. "Resident" is what the process has beyond what it had before, /proc/self/status, after
`gc.collect()`; of mapped files, the pages that were read count. Seconds are those of the CPU, without waiting for
disks. Each history is in a process of its own, as memory freed by one may serve the next.
"""

import argparse
import ctypes
import gc
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import print_table
from das import Drafter, Rollout, RolloutHistory, ThroughputBudget, load_state, plan_step, save_state

NO_LIMIT_BYTES = 1 << 40
NUM_EPOCHS = 4
NUM_IN_FLIGHT = 64  # prompts whose trees are in memory
NUM_STEPS = 200
PROMPT_TOKENS = 200
HEADER = [
    "", "M tokens", "resident MB", "bytes a token, without trees", "counted MB", "resident / counted or limit",
    "CPU seconds", "us a decode step", "written MB",
]  # fmt: skip


def resident_bytes() -> int:
    """Return how many bytes of memory the process has now."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def rollouts(prompts: int, samples: int, tokens: int, *, from_prompt: int = 0) -> Iterator[Rollout]:
    """Return random rollouts, as an engine names them: prompts one after another, in epochs of equal size."""
    random = np.random.default_rng(from_prompt)
    for prompt in range(from_prompt, from_prompt + prompts):
        text = random.integers(0, 100_000, PROMPT_TOKENS).astype(np.int32)
        for sample in range(samples):
            yield Rollout(
                prompt_token_ids=text,
                response_token_ids=random.integers(0, 100_000, tokens).astype(np.int32),
                training_step=sample * NUM_EPOCHS // samples,
                reward=float(sample % 2),
                request_id=f"request-{prompt}-{sample}",
            )


def filled(size: tuple[int, int, int], *, max_bytes: int) -> RolloutHistory:
    """Return a history that holds them."""
    history = RolloutHistory(window_epochs=NUM_EPOCHS, max_bytes=max_bytes)
    history.add_many(rollouts(*size))
    return history


def start_batch(history: RolloutHistory) -> Drafter:
    """Start requests of the prompts used last: their trees are built."""
    drafter = Drafter(history)
    keys = history.prompt_keys()[-NUM_IN_FLIGHT:]
    prompts = [history.rollouts(key)[0].prompt_token_ids for key in keys]  # starting one may evict another
    for key, prompt in zip(keys, prompts, strict=True):
        drafter.start(str(key), prompt_token_ids=prompt, prompt_key=key, training_step=NUM_EPOCHS)
    return drafter


def step_us(drafter: Drafter, history: RolloutHistory) -> float:
    """Return the median CPU time of a decode step: each request drafts, and follows a rollout of its prompt."""
    policy, times_us = ThroughputBudget(), []
    texts = {str(key): history.rollouts(key)[0].response_token_ids for key in history.prompt_keys()[-NUM_IN_FLIGHT:]}
    for step in range(min(NUM_STEPS, min(map(len, texts.values())) // 3)):
        emitted = {name: text[3 * step : 3 * step + 3] for name, text in texts.items()}
        start_s = time.thread_time()
        plan_step(drafter, list(texts), policy=policy)
        drafter.extend_batch(emitted)
        times_us.append(1e6 * (time.thread_time() - start_s))
    return float(np.median(times_us))


def measured(what: str, history: RolloutHistory, before_bytes: int, **more: Any) -> dict[str, Any]:
    """Return a row: what is held by the process, and by the history's own count."""
    return {
        "what": what,
        "resident_bytes": resident_bytes() - before_bytes,
        "counted_bytes": history.memory_bytes(),
        "num_tokens": history.statistics().num_tokens,
        **more,
    }


def in_memory(size: tuple[int, int, int], folder: Path) -> list[dict[str, Any]]:
    """Fill a history, save it, change a hundredth of its prompts, and save it again."""
    before = resident_bytes()
    history = filled(size, max_bytes=NO_LIMIT_BYTES)
    rows = [measured("added", history, before)]
    start_s = time.process_time()
    summary = save_state(folder, history=history)
    seconds = time.process_time() - start_s
    rows.append(measured("saved", history, before, seconds=seconds, written_bytes=summary.num_written_bytes))
    for key in history.prompt_keys()[:: 100 if size[0] >= 100 else 1]:
        (first, *_) = history.rollouts(key)
        changed = {"response_token_ids": np.arange(size[2]), "training_step": NUM_EPOCHS, "prompt_key": key}
        history.add(Rollout(prompt_token_ids=first.prompt_token_ids, **changed))
    start_s = time.process_time()
    summary = save_state(folder, history=history)
    seconds = time.process_time() - start_s
    rows.append(
        measured("1 % changed, saved", history, before, seconds=seconds, written_bytes=summary.num_written_bytes)
    )
    return rows


def loaded(size: tuple[int, int, int], folder: Path, *, mapped: bool) -> list[dict[str, Any]]:
    """Load the saved state, then build the trees of a batch."""
    before = resident_bytes()
    history = RolloutHistory(window_epochs=NUM_EPOCHS, max_bytes=NO_LIMIT_BYTES)
    start_s = time.process_time()
    load_state(folder, history=history, mapped=mapped)
    seconds = time.process_time() - start_s
    name = "loaded, mapped" if mapped else "loaded into memory"
    rows = [measured(name, history, before, seconds=seconds)]
    drafter = start_batch(history)
    rows.append(
        measured(
            f"{NUM_IN_FLIGHT} trees in flight",
            history,
            before,
            step_us=step_us(drafter, history),
            tree_bytes=history.statistics().tree_bytes,
        )
    )
    drafter.close()
    if mapped:  # all of the text, as if every prompt had been in a batch since
        for key in history.prompt_keys():
            for rollout in history.rollouts(key):
                rollout.response_token_ids.sum()
        rows.append(measured("every token read", history, before, tree_bytes=history.statistics().tree_bytes))
    return rows


def loaded_into_memory(size: tuple[int, int, int], folder: Path) -> list[dict[str, Any]]:
    """As `loaded`, not mapped."""
    return loaded(size, folder, mapped=False)


def loaded_mapped(size: tuple[int, int, int], folder: Path) -> list[dict[str, Any]]:
    """As `loaded`, mapped."""
    return loaded(size, folder, mapped=True)


def at_a_limit(size: tuple[int, int, int], folder: Path) -> list[dict[str, Any]]:
    """Add the same rollouts where half of them fit, and start a batch, whose trees count, too."""
    prompts, samples, tokens = size
    limit = prompts * samples * tokens * 5 // 2
    before = resident_bytes()
    history = filled(size, max_bytes=limit)
    rows = [measured("added at a limit", history, before, limit_bytes=limit)]
    drafter = start_batch(history)
    rows.append(measured("and a batch started", history, before, limit_bytes=limit))
    ctypes.CDLL(None).malloc_trim(0)
    rows.append(measured("and malloc_trim called", history, before, limit_bytes=limit))
    drafter.close()
    return rows


def run(measure: Callable[..., list[dict[str, Any]]], size: tuple[int, int, int], folder: Path) -> list[dict[str, Any]]:
    """Measure in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (size, folder))


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    tokens = row["num_tokens"]
    trees = row.get("tree_bytes", 0)
    held = (
        row["resident_bytes"] / row["limit_bytes"]
        if "limit_bytes" in row
        else row["resident_bytes"] / row["counted_bytes"]
    )
    return [
        row["what"],
        f"{tokens / 1e6:.1f}",
        f"{row['resident_bytes'] / 1e6:.0f}",
        f"{(row['resident_bytes'] - trees) / tokens:.2f}",
        f"{row['counted_bytes'] / 1e6:.0f}",
        f"{held:.3f}",
        f"{row['seconds']:.1f}" if "seconds" in row else "",
        f"{row['step_us']:.0f}" if "step_us" in row else "",
        f"{row['written_bytes'] / 1e6:.1f}" if "written_bytes" in row else "",
    ]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--prompts", type=int, default=5_000, metavar="N")
    options.add_argument("--samples", type=int, default=16, metavar="N")
    options.add_argument("--tokens", type=int, default=1_000, metavar="N")
    options.add_argument("--folder", type=Path, help="where the state is written; a temporary folder")
    given = options.parse_args()
    size = given.prompts, given.samples, given.tokens
    with tempfile.TemporaryDirectory(prefix="das_bench_state_", dir=given.folder) as name:
        rows = [
            row
            for measure in (in_memory, loaded_mapped, loaded_into_memory, at_a_limit)
            for row in run(measure, size, Path(name))
        ]
    print_table(f"{size[0]} prompts x {size[1]} rollouts x {size[2]} tokens", HEADER, [cells(row) for row in rows])


if __name__ == "__main__":
    main()
