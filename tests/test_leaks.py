"""Memory is given back: the resident memory of a process that builds and drops trees, or drops rollouts, stays flat."""

import platform
import subprocess
import sys
import textwrap

import pytest

PROLOGUE = """
    import contextlib, gc, resource
    from das._suffix_tree import SuffixTree
    from das._tree_arrays import _fail_allocation_after

    def resident_bytes():
        gc.collect()
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
"""

BUILD_AND_DROP = """
    def work():
        tree = SuffixTree()
        tree.__init__()
        prompt = tree.add_prompt(range(100))
        sequences = [tree.open(prompt=prompt) for _ in range(20)]
        for sequence in sequences:
            tree.extend(sequence, list(range(400)))
            tree.continuations(sequence, [1, 2, 3])
        tree.add(list(range(4000)), prompt=prompt)
        for sequence in sequences[:10]:
            tree.close(sequence)
        tree.check_invariants()
"""

FAIL = """
    tree = SuffixTree()
    sequence = tree.open()
    tree.extend(sequence, [1, 2, 1, 2])
    long = list(range(50_000))

    def work():
        for n in range(3):
            # the first allocation, so that the tree never grows; a new tree needs three
            for after, call in ((0, lambda: tree.add(long)), (0, lambda: tree.extend(sequence, long)), (n, SuffixTree)):
                _fail_allocation_after(after)
                with contextlib.suppress(MemoryError):
                    call()
        _fail_allocation_after(-1)
        for _ in range(200):
            for bad in ([1, -1], ["a"], None):
                with contextlib.suppress(TypeError, ValueError):
                    tree.add(bad)
                with contextlib.suppress(TypeError, ValueError):
                    tree.counts(bad)
            with contextlib.suppress(KeyError):
                tree.close(12345)
            with contextlib.suppress(ValueError):
                SuffixTree(max_order=99)
            tree.counts([1, 2]), tree.child_counts([1], 2), tree.top_child([1]), tree.continuations(sequence, [1, 2])
"""

TREES_TAKE_THE_PLACE_OF_ROLLOUTS = """
    import numpy as np
    from das import Drafter, Rollout, RolloutHistory

    LIMIT = 48 << 20
    random = np.random.default_rng(0)
    history = RolloutHistory(max_bytes=LIMIT)
    for prompt in range(800):  # more than fit
        text = random.integers(0, 100_000, 50).astype(np.int32)
        for number in range(16):
            response = random.integers(0, 100_000, 1000).astype(np.int32)
            history.add(Rollout(prompt_token_ids=text, response_token_ids=response, request_id=f"{prompt}-{number}"))
    assert history.statistics().num_evicted_rollouts > 0
    keys = history.prompt_keys()
    prompts = {key: history.rollouts(key)[0].prompt_token_ids for key in keys[-36:]}
    drafter = Drafter(history)

    def work():
        key, prompt = prompts.popitem()
        drafter.start(str(key), prompt_token_ids=prompt)
"""

MEASURE = """
    for _ in range({warm_up}):
        work()
    before = resident_bytes()
    for _ in range({rounds}):
        work()
    print(resident_bytes() - before)
"""


def growth(work, *, warm_up, rounds):
    code = textwrap.dedent(PROLOGUE) + textwrap.dedent(work)
    code += textwrap.dedent(MEASURE.format(warm_up=warm_up, rounds=rounds))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


def test_dropped_trees_leave_nothing():
    assert growth(BUILD_AND_DROP, warm_up=10, rounds=100) < 1 << 20  # one tree has about as much


def test_raising_calls_leave_nothing():
    assert growth(FAIL, warm_up=5, rounds=60) < 1 << 19


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are not asked for their pages")
def test_the_memory_limit_holds_for_the_process_where_trees_take_the_place_of_rollouts():
    limit_bytes = 48 << 20
    # 30 MB of trees come; what pages stay hold other objects, too
    assert growth(TREES_TAKE_THE_PLACE_OF_ROLLOUTS, warm_up=1, rounds=35) < limit_bytes // 4
