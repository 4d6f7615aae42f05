"""Trees give back what they took: the resident memory of a process that keeps building and dropping them stays flat."""

import subprocess
import sys
import textwrap

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
