"""Memory for the trees' arrays: what is given back is found again, and the regions' bookkeeping holds."""

import random

import numpy as np
import pytest

from das import SuffixTree
from das._huge_pages import check_invariants, mapped_bytes

REGION_BYTES = 32 << 20


def tree_of(num_tokens, seed):
    tree = SuffixTree()
    tree.add(np.random.default_rng(seed).integers(0, 500, num_tokens, dtype=np.int32))
    return tree


@pytest.mark.parametrize("seed", range(3))
def test_trees_come_and_go_in_any_order(seed):
    order = random.Random(seed)
    trees = {}
    for number in range(120):
        if trees and order.random() < 0.45:
            del trees[order.choice(list(trees))]
        trees[number] = tree_of(order.choice([3, 50, 400, 3000, 30_000]), number)
        check_invariants()
    for number, tree in trees.items():
        same = tree_of(tree.num_tokens, number)
        assert [tree.counts([token]) for token in range(20)] == [same.counts([token]) for token in range(20)]
    trees.clear()
    check_invariants()


def test_an_empty_region_is_returned():
    before = mapped_bytes()
    trees = [tree_of(400_000, seed) for seed in range(4)]  # more than what earlier tests left free
    assert mapped_bytes() >= before + REGION_BYTES
    trees.clear()
    assert mapped_bytes() <= before + REGION_BYTES  # one may be shared with what was there before


def test_an_array_larger_than_a_region():
    tree = tree_of(1_500_000, 1)
    assert tree.memory_bytes() > 2 * REGION_BYTES  # its edges alone fill more than one region
    assert mapped_bytes() >= tree.memory_bytes() - (1 << 20)
    check_invariants()
    tree.extend(tree.open(), [1, 2, 3])
    assert tree.num_tokens == 1_500_003
