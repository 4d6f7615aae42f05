"""Tree drafts: the kernel against best-first search written down naively, and what holds for every tree."""

import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from oracle import HISTORY
from rollout_samples import PROMPT, filled, rollout, tree_of
from test_drafting_rule import NaiveRule, assert_learned_alike, caps, prices

from das import Draft, Drafter, DraftTree, FixedBudget, PriceBudget, plan_step, prompt_key

MAX_CHILDREN = 4
LONG = list(range(100, 200))


class NaiveTreeRule(NaiveRule):
    """Best-first search; asked[request] is (token, cell, rate) of each position's candidates."""

    def candidates(self, tree, context, common, max_children):
        """(token, probability if none before it comes, cell), the chain's choice first."""
        contexts = self.contexts(tree, context, common)
        tops = list(dict.fromkeys(asked.top_child(known) for asked, known, _ in contexts))
        firsts = dict.fromkeys(asked.first_child(known) for asked, known, _ in contexts)
        probability = {token: self.blend(contexts, token) for token in [*tops, *firsts] if token is not None}
        best = sorted(tops, key=probability.get, reverse=True)[:1]
        others = sorted((token for token in probability if token not in best), key=probability.get, reverse=True)
        left, answer = 1.0, []
        for token in [*best, *others][:max_children]:
            conditional = min(1.0, probability[token] / max(left, 1e-9))
            left -= probability[token]
            answer.append((token, conditional, self.cell(tree, context, token, conditional)))
        return answer

    def draft(self, request, tree, context, max_draft_tokens, min_survival, common=None, max_children=MAX_CHILDREN):
        """(tokens, parents, survival) in the order in which nodes are made."""
        paths, token_ids, parents, survival, offers = [[]], [], [], [], []
        asked = self.asked[request] = []
        self.has_history[request] = tree.counts(())[HISTORY] > 0
        while True:
            position, left = len(token_ids), 1.0
            path = survival[-1] if survival else 1.0
            candidates = self.candidates(tree, [*context, *paths[-1]], common, max_children)
            asked.append([])
            for token, probability, cell in candidates:
                asked[-1].append((token, cell, np.float32(self.hit_rate(cell, probability))))
                rate = left * self.hit_rate(cell, probability)
                left -= rate
                if rate > 0 and path * rate >= min_survival:
                    offers.append((path * rate, position, token))
            if not offers or len(token_ids) == max_draft_tokens:
                break
            offers.sort(key=lambda offer: -offer[0])  # stable: of equals the earlier offer
            best, position, token = offers.pop(0)
            paths.append([*paths[position], token])
            token_ids.append(token)
            parents.append(position - 1)
            survival.append(best)
        self.num_drafted[request] = len(token_ids)
        self.paths = {tuple(path): number for number, path in enumerate(paths)}
        return token_ids, parents, survival

    def extend(self, request, token_ids, num_verified=None):
        asked = self.asked.pop(request, [])
        verified = len(asked) if num_verified is None else num_verified + 1
        for position, token in enumerate(token_ids):
            number = self.paths.get(tuple(token_ids[:position]))
            if number is None or number >= verified:
                break
            for place, prediction in enumerate(asked[number]):
                was_hit = self.learn(*prediction, token)
                if place == 0:
                    self.judge_history(request, prediction, was_hit)
                if was_hit:
                    break


def draft_tree(drafter, request, cap, price, **options):
    return drafter.draft([request], max_draft_tokens=[cap], min_survival=[price], shape="tree", **options)[request]


def paths_of(tree):
    """The tokens from the root to each node."""
    paths = []
    for token, parent in zip(tree.draft_token_ids, tree.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


def assert_is_a_tree(tree, cap, price):
    assert isinstance(tree, DraftTree)
    assert len(tree) == len(tree.draft_token_ids) == len(tree.parents) == len(tree.survival) <= cap
    assert all(-1 <= parent < node for node, parent in enumerate(tree.parents))
    assert len(set(zip(tree.parents, tree.draft_token_ids, strict=True))) == len(tree)
    assert all(tree.parents.count(parent) <= MAX_CHILDREN for parent in tree.parents)
    assert tree.survival == sorted(tree.survival, reverse=True)
    assert all(max(price, 1e-300) <= one <= 1.0 for one in tree.survival)
    for node, own in [(-1, 1.0), *enumerate(tree.survival)]:  # siblings exclude one another
        assert (
            sum(one for one, parent in zip(tree.survival, tree.parents, strict=True) if parent == node) <= own + 1e-12
        )


@st.composite
def scenes(draw):
    """A drafter with a few requests of a prompt that has a history, and each one's text so far."""
    alphabet = draw(strategies.alphabets)
    prompt = draw(strategies.words(alphabet))
    texts = [prompt]
    for _ in range(draw(st.integers(0, 4))):
        texts.append(draw(strategies.words_after(alphabet, texts)))
    history = [rollout(text, 0, prompt=prompt, request_id=f"h{i}") for i, text in enumerate(texts[1:])]
    drafter, contexts = Drafter(filled(*history)), {}
    for request in "abc"[: draw(st.integers(1, 3))]:
        drafter.start(request, prompt_token_ids=prompt, training_step=1)
        contexts[request] = list(prompt)
    return drafter, contexts, alphabet


@st.composite
def emissions(draw, tree, alphabet):
    """Some path of the tree and then other tokens; and how much of the tree was verified."""
    path = draw(st.sampled_from([[], *paths_of(tree)]))
    num_verified = draw(st.one_of(st.none(), st.integers(0, len(tree))))
    return path + draw(strategies.words(alphabet, max_size=4)), num_verified


@given(st.data())
def test_the_kernel_is_best_first_search_over_the_rule(data):
    drafter, contexts, alphabet = data.draw(scenes())
    key = prompt_key(contexts["a"])
    tree, rule = tree_of(drafter.history, key), NaiveTreeRule()
    common = None if drafter.history.rollouts(key) else drafter.history._common.tree_for_start().tree
    for _ in range(data.draw(st.integers(1, 6))):
        request = data.draw(st.sampled_from(sorted(contexts)))
        cap, price, most = data.draw(caps), data.draw(prices), data.draw(st.integers(1, MAX_CHILDREN))
        answer = draft_tree(drafter, request, cap, price, max_children=most)
        expected = rule.draft(request, tree, contexts[request][-16:], cap, price, common, most)
        assert (answer.draft_token_ids, answer.parents) == expected[:2]
        assert answer.survival == pytest.approx(expected[2], abs=1e-9)
        assert_is_a_tree(answer, cap, price)
        emitted, num_verified = data.draw(emissions(answer, alphabet))
        before = drafter.counters(request)
        drafter.extend(request, emitted, num_verified_draft_tokens=num_verified)
        rule.extend(request, emitted, num_verified)
        assert_learned_alike(drafter, rule)
        contexts[request] += emitted
        assert_counted(drafter.counters(request), before, answer, emitted, num_verified)


def assert_counted(after, before, tree, emitted, num_verified):
    if not emitted:
        assert after == before
        return
    drafted = len(tree) if num_verified is None else num_verified
    verified = paths_of(tree)[:drafted]
    accepted = max((n for n in range(1, len(emitted) + 1) if emitted[:n] in verified), default=0)
    assert after.num_drafted_tokens - before.num_drafted_tokens == drafted
    assert after.num_accepted_tokens - before.num_accepted_tokens == accepted
    assert after.num_emitted_tokens - before.num_emitted_tokens == len(emitted)


@given(st.data())
def test_with_one_child_a_tree_is_the_chain(data):
    drafter, contexts, alphabet = data.draw(scenes())
    for request in sorted(contexts):
        cap, price = data.draw(caps), data.draw(prices)
        tree = draft_tree(drafter, request, cap, price, max_children=1)
        chain = drafter.draft([request], max_draft_tokens=[cap], min_survival=[price])[request]
        assert tree == chain
        assert tree.survival == chain.survival
        drafter.extend(request, chain.draft_token_ids + data.draw(strategies.words(alphabet, max_size=3)))


@given(st.data())
def test_a_limit_of_the_batch_leaves_the_best_trees(data):
    drafter, contexts, _ = data.draw(scenes())
    names, limit = sorted(contexts), data.draw(st.integers(0, 20))
    policy = FixedBudget(8)
    whole = plan_step(drafter, names, policy=policy, shape="tree")
    cut = plan_step(drafter, names, policy=policy, shape="tree", max_batch_draft_tokens=limit)
    assert sum(map(len, cut.values())) == min(limit, sum(map(len, whole.values())))
    for name in names:
        n = len(cut[name])
        assert cut[name].draft_token_ids == whole[name].draft_token_ids[:n]
        assert cut[name].parents == whole[name].parents[:n]
    kept = [one for name in names for one in cut[name].survival]
    dropped = [one for name in names for one in whole[name].survival[len(cut[name]) :]]
    assert not kept or not dropped or min(kept) >= max(dropped)
    for name in names:  # what was cut is not counted
        drafter.extend(name, [1])
        assert drafter.counters(name).num_drafted_tokens == len(cut[name])


def test_a_tree_on_paper():
    """Prompt 1 2, history 3 4 and 3 5: after 3 both came once; a chain takes the later, a tree both."""
    drafter = Drafter(filled(*(rollout([3, token], 0, prompt=[1, 2]) for token in (4, 5))))
    drafter.start("a", prompt_token_ids=[1, 2], training_step=1)
    answer = draft_tree(drafter, "a", 8, 0.0)
    assert (answer.draft_token_ids, answer.parents) == ([3, 5, 4], [-1, 0, 0])
    three, five, four = answer.survival
    later = five / three
    assert four / three == pytest.approx((1 - later) * min(1.0, later / (1 - later)), abs=1e-12)  # equal counts
    assert repr(answer).startswith("DraftTree(draft_token_ids=[3, 5, 4], parents=[-1, 0, 0], survival=[0.7")
    drafter.extend("a", [3, 4, 9])
    counters = drafter.counters("a")
    assert (counters.num_drafted_tokens, counters.num_accepted_tokens, counters.num_emitted_tokens) == (3, 2, 3)
    learned = drafter.confidence.hits.sum(), drafter.confidence.misses.sum()
    assert learned == pytest.approx((2, 1), rel=1e-3)  # 3 and 4 came, 5 did not; the first hit has faded a little


def test_the_chains_choice_stays_first():
    """After 9 7 both 4 and 5 came once, 5 later; after 7 alone 6 came most often, then 4. So 4 is likelier than both,
    and a chain does not see it. A tree takes it beside 5, and with one child it is the chain."""
    texts = [[9, 7, 4], [9, 7, 5], [8, 7, 4], [8, 7, 6], [8, 7, 6], [8, 7, 6]]
    drafter = Drafter(filled(*(rollout(text, 0, prompt=[1], ordinal=n) for n, text in enumerate(texts))))
    drafter.start("a", prompt_token_ids=[1], training_step=1)
    drafter.extend("a", [9, 7])
    chain = drafter.draft(["a"], max_draft_tokens=[1], min_survival=[0.0])["a"]
    assert chain.draft_token_ids == [5]
    assert draft_tree(drafter, "a", 1, 0.0, max_children=1) == chain
    tree = draft_tree(drafter, "a", 3, 0.0)
    assert tree.draft_token_ids[tree.parents.index(-1)] == 4
    assert {5, 4} <= {token for token, parent in zip(tree.draft_token_ids, tree.parents, strict=True) if parent == -1}


def test_drafts_compare_by_tokens_and_parents():
    drafter = Drafter(filled(*(rollout([3, token], 0, prompt=[1, 2]) for token in (4, 5))))
    for name in "ab":
        drafter.start(name, prompt_token_ids=[1, 2], training_step=1)
    tree, same = (draft_tree(drafter, name, 8, 0.0) for name in "ab")
    chain = drafter.draft(["a"], max_draft_tokens=[8], min_survival=[0.0])["a"]
    assert (tree, hash(tree)) == (same, hash(same))
    assert tree != chain
    assert tree != [3, 5, 4]
    assert isinstance(chain, Draft)
    assert not isinstance(chain, DraftTree)
    assert (chain.draft_token_ids, chain.parents) == ([3, 5], [-1, 0])
    with pytest.raises(TypeError, match="a DraftTree is made by plan_step"):
        DraftTree()


def test_a_chain_replaces_a_tree_and_a_tree_a_chain():
    drafter = Drafter(filled(rollout(LONG, 0)))
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    for position, shape in enumerate(["tree", "chain", "tree"]):
        for drafted in ("chain", "tree", shape):
            plan_step(drafter, ["a"], policy=FixedBudget(4), shape=drafted)
        drafter.extend("a", LONG[5 * position : 5 * position + 5])
    counters = drafter.finish("a")
    assert (counters.num_drafted_tokens, counters.num_accepted_tokens) == (12, 12)


@given(max_total_tokens=st.integers(0, 12))
def test_no_tree_runs_past_max_total_tokens(max_total_tokens):
    drafter = Drafter(filled(rollout(LONG, 0)))
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1, max_total_tokens=max_total_tokens)
    paths = paths_of(plan_step(drafter, ["a"], policy=FixedBudget(8), shape="tree")["a"])
    assert max(map(len, paths), default=0) <= max(0, max_total_tokens - len(PROMPT) - 1)


def test_trees_of_a_large_batch_are_those_of_single_requests():
    """More requests than are drafted side by side, each at another place."""
    drafter = Drafter(filled(*(rollout([*range(n % 3), *LONG[n::3], 7], 0, ordinal=n) for n in range(6))))
    names = [f"r{n}" for n in range(40)]
    for n, name in enumerate(names):
        drafter.start(name, prompt_token_ids=PROMPT, training_step=1)
        drafter.extend(name, LONG[n : n + n % 4])
    budgets = {"max_draft_tokens": np.full(1, 9), "min_survival": np.full(1, 0.001)}
    together = drafter.draft(
        names, **{name: np.repeat(value, 40) for name, value in budgets.items()}, shape="tree"
    )  # fmt: skip
    for name in names:
        alone = drafter.draft([name], **budgets, shape="tree")[name]
        assert (alone, alone.survival) == (together[name], together[name].survival)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"shape": "bush"}, ValueError, "shape is 'bush'; it must be 'chain' or 'tree'"),
        ({"shape": "tree", "max_children": 0}, ValueError, "max_children is 0; it must be 1 <= max_children <= 4"),
        ({"shape": "tree", "max_children": 5}, ValueError, "max_children is 5; it must be 1 <= max_children <= 4"),
        ({"shape": "tree", "max_children": 1.0}, TypeError, "max_children must be an int, not float"),
    ],
)
def test_a_refused_call_leaves_the_pending_tree(options, error, message):
    drafter = Drafter(filled(rollout(LONG, 0)))
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    plan_step(drafter, ["a"], policy=FixedBudget(4), shape="tree")
    with pytest.raises(error, match=message):
        drafter.draft(["a"], max_draft_tokens=[2], min_survival=[0.0], **options)
    if "max_children" not in options:
        with pytest.raises(error, match=message):
            plan_step(drafter, ["a"], policy=PriceBudget(), **options)
    drafter.extend("a", LONG[:5])
    assert drafter.counters("a").num_accepted_tokens == 4
