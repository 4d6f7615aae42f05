"""A part of the rule left out for a measurement: what is then drafted, and that the default is the whole rule."""

import math

import numpy as np
import pytest
from rollout_samples import draft, filled, rollout, scored

from das import Confidence, Drafter
from das._rule import Rule


def drafter_of(*responses, **changes):
    """A drafter whose request stands behind prompt 1 2, with these responses in its history."""
    drafter = Drafter(filled(*(rollout(response, 0, prompt=[1, 2]) for response in responses)))
    drafter._table.rule.change(**changes)
    drafter.start("a", prompt_token_ids=[1, 2], training_step=1)
    return drafter


def test_the_longest_match_alone():
    """1 2 was followed by 3 once, 2 by 4 five times more: the blend says 4, the longest match 3."""
    responses = [[3], [9, 2, 4, 2, 4, 2, 4, 2, 4, 2, 4]]
    changes = ({}, {"max_contexts": 1})
    blended, longest = (draft(drafter_of(*responses, **change), "a", 1).survival for change in changes)
    once_of_two = (1 + 2 * 1e-5) / (2 + 2)  # 3 and 9 followed 1 2
    assert longest == [pytest.approx(once_of_two, abs=1e-12)]
    assert blended != longest


def test_two_contexts_are_the_two_longest():
    (survival,) = draft(drafter_of([3], max_contexts=2), "a", 1).survival
    estimate = 1e-5
    for _ in range(2):
        estimate = (1 + 2 * estimate) / (1 + 2)
    assert survival == pytest.approx(estimate, abs=1e-12)
    assert draft(drafter_of([3], max_contexts=2), "a", 1) == draft(drafter_of([3]), "a", 1)


@pytest.mark.parametrize(("changes", "row"), [({}, 1), ({"is_keyed_by_source": False}, 0)])
def test_one_row_of_cells_for_all_sources(changes, row):
    drafter = drafter_of([3, 4, 5], **changes)
    draft(drafter, "a")
    drafter.extend("a", [3, 4, 9])
    assert drafter.confidence.hits[row].sum() == pytest.approx(2, rel=1e-3)
    assert drafter.confidence.misses[row].sum() == pytest.approx(1, rel=1e-3)
    assert scored(drafter.confidence) == (2, 1)
    assert drafter.confidence.explained == pytest.approx([2, 1], rel=1e-2), "histories are judged all the same"


@pytest.mark.parametrize(("memory", "left"), [(2000, 2000 - 1), (10, 1800), (math.inf, 2000)])
def test_how_much_a_cell_remembers(memory, left):
    drafter = drafter_of([3], cell_memory=memory)
    state = drafter.confidence.state()
    drafter.confidence.load_state({**state, "hits": np.full_like(state["hits"], 2000.0)})
    draft(drafter, "a", 0)
    drafter.extend("a", [9])
    assert drafter.confidence.hits.min() == pytest.approx(left, rel=1e-12)


def test_what_is_not_named_is_the_whole_rule_again():
    drafter = drafter_of([3, 4, 5], [3, 4, 6, 4, 5])
    whole = draft(drafter, "a").survival
    drafter._table.rule.change(max_contexts=1)
    assert draft(drafter, "a").survival != whole
    drafter._table.rule.change(is_keyed_by_source=True)
    assert draft(drafter, "a").survival == whole


@pytest.mark.parametrize(
    ("name", "shape"), [("hits", (3, 24)), ("misses", (4, 23)), ("histogram", (2, 3)), ("explained", (3,))]
)
def test_arrays_of_other_shapes_are_refused(name, shape):
    confidence = Confidence()
    arrays = {key: getattr(confidence, key) for key in ("hits", "misses", "histogram", "explained")}
    with pytest.raises(ValueError, match=r"must have"):
        Rule(**{**arrays, name: np.zeros(shape)})
    with pytest.raises(TypeError):
        Rule(**{**arrays, name: None})
