"""One SuffixTree shared by threads: it answers as after the same calls made one after another, and nothing hangs."""

import faulthandler
import os
import random
import subprocess
import sys
import textwrap
import threading
from array import array

import pytest
from checks import CheckedTree
from thread_runs import TIMEOUT_S, run_threads

from das._suffix_tree import SuffixTree

NUM_WRITERS = 8
NUM_READERS = 2
PROMPT = [1, 2, 3, 1, 2]


@pytest.fixture(autouse=True)
def no_deadlock(capfd):
    """A lock taken in the wrong order also stops the main thread: the watchdog needs no GIL."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with capfd.disabled():
        stderr = os.dup(2)
    faulthandler.dump_traceback_later(2 * TIMEOUT_S, exit=True, file=stderr)
    yield
    faulthandler.cancel_dump_traceback_later()
    os.close(stderr)
    sys.setswitchinterval(interval)


def script(name):
    """What one writer does: pieces for its open sequence, and sequences it adds whole, all over few tokens."""
    rng = random.Random(name)
    pieces = [[rng.randrange(4) for _ in range(rng.randint(1, 8))] for _ in range(120)]
    whole = [[rng.randrange(4) for _ in range(rng.choice([5, 400]))] for _ in range(12)]
    return pieces, whole


def write(tree, prompt, name, *, draft):
    pieces, whole = script(name)
    sequence = tree.open(prompt=prompt)
    for i, piece in enumerate(pieces):
        tree.extend(sequence, piece)
        if draft:
            tree.continuations(sequence, piece)
        if i % 10 == 0:
            tree.add(whole[i // 10], prompt=prompt)
            tree.add_prompt(piece)
    tree.close(sequence)


def test_threads_give_the_sequential_answers():
    checked = CheckedTree(max_order=4)
    prompt = checked.add_prompt(PROMPT)
    done = threading.Event()
    writers = range(NUM_WRITERS)

    def read():
        while not done.is_set():
            for context in ([], [1], [2, 1], [3, 0, 1], PROMPT[:4]):
                assert min(checked.tree.counts(context)) >= 0
                assert checked.tree.top_child(context) in {None, 0, 1, 2, 3}
                assert checked.tree.memory_bytes() > 0

    def write_all():
        handle = checked.prompts[prompt]
        try:
            run_threads(*(lambda name=name: write(checked.tree, handle, name, draft=True) for name in writers))
        finally:
            done.set()

    run_threads(write_all, *[read] * NUM_READERS)
    for name in writers:
        write(checked.oracle, prompt, name, draft=False)
    checked.check()


def test_one_sequence_extended_by_many_threads():
    """Nobody promises an order, but no token is lost and none is torn."""
    tree = SuffixTree(max_order=2)
    sequence = tree.open()
    run_threads(*(lambda name=name: [tree.extend(sequence, [name] * 3) for _ in range(500)] for name in range(8)))
    tree.close(sequence)
    tree.check_invariants()
    assert tree.num_tokens == 8 * 1500
    assert [tree.child_counts([], name) for name in range(8)] == [(1500, 0)] * 8
    assert all(tree.child_counts([name, name], name)[0] >= 500 for name in range(8))


def test_handles_are_never_given_twice():
    tree = SuffixTree()
    handles, sequences = [], []

    def take():
        for _ in range(300):
            handles.append(tree.add_prompt([1]))
            sequences.append(tree.open())

    run_threads(*[take] * 8)
    assert len(set(handles)) == len(set(sequences)) == 2400
    assert tree.num_open_sequences == 2400
    tree.check_invariants()


def test_token_ids_that_ask_the_tree():
    """Reading the caller's token ids may run the caller's code, which may use the same tree."""
    code = """
        from das._suffix_tree import SuffixTree

        class Asking(list):
            def __iter__(self):
                return iter([tree.top_child([1]), 1])
            def __len__(self):
                return 2
            def __getitem__(self, i):
                return list(self)[i]

        tree = SuffixTree()
        tree.add([1, 2])
        tree.add(Asking())
        print(tree.counts([2]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip() == "(0, 1)"


SIZES = {
    "num_tokens": lambda tree: tree.num_tokens,
    "num_nodes": lambda tree: tree.num_nodes,
    "num_edges": lambda tree: tree.num_edges,
    "num_open_sequences": lambda tree: tree.num_open_sequences,
    "memory_bytes": lambda tree: tree.memory_bytes(),
    "max_order": lambda tree: tree.max_order,
}


@pytest.mark.parametrize("size", SIZES)
def test_a_size_is_that_before_or_after_a_call_and_never_one_in_between(size):
    tree, token_ids = SuffixTree(), array("i", [random.randrange(50) for _ in range(100_000)])
    boundaries, seen, done = [SIZES[size](tree)], set(), threading.Event()

    def grow():
        for _ in range(3):
            tree.add(token_ids)  # without the GIL
            boundaries.append(SIZES[size](tree))
        done.set()

    def read():
        while not done.is_set():
            seen.add(SIZES[size](tree))

    run_threads(grow, read)
    assert seen <= set(boundaries)
