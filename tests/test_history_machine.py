"""Random calls on a RolloutHistory with live requests, beside a naive model: one list of rollouts a prompt."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracle import NaiveSuffixTree, add_up
from rollout_samples import rollout, tree_of

from das import Drafter, RolloutHistory

PROMPTS = ([1, 2, 1], [2], [0, 1, 0, 1, 2])
KEYS = (10, 11, 10)  # two of the prompts go by one key of the caller's
PROBE = "probe"

texts = st.lists(st.integers(0, 2), min_size=1, max_size=6)
prompts = st.sampled_from(range(len(PROMPTS)))
steps = st.one_of(st.none(), st.integers(0, 5))
rewards = st.one_of(st.none(), st.integers(0, 9))
names = st.one_of(st.none(), st.sampled_from("abcd"))
times = st.sampled_from([0, 10**6])


@dataclass
class Entry:
    """A rollout of the model; `runs` are its stretches: (generated, token ids); `number` is None while it has none."""

    prompt: int
    runs: list
    step: int
    reward: float | None
    name: str | None
    number: int | None = None

    @property
    def response(self):
        return [token for _, token_ids in self.runs for token in token_ids]

    def as_tuple(self):
        mask = None
        if len(self.runs) > 1:
            mask = [generated for generated, token_ids in self.runs for _ in token_ids]
        return self.step, PROMPTS[self.prompt], self.response, mask, self.reward, self.name


@dataclass
class Window:
    """One key: its rollouts in order of arrival, and the requests that run."""

    entries: list = field(default_factory=list)
    open: dict = field(default_factory=dict)  # request id -> Entry
    current_step: int = 0
    has_finished: bool = False
    counted_requests: set = field(default_factory=set)  # ids of requests started without a step
    counted: set = field(default_factory=set)  # steps of entries that nobody told
    told: dict = field(default_factory=dict)  # counted step -> the one it turned out to be

    def find(self, entry, *, is_counted, has_step):
        """The entry that a new one is, by the rules of `PromptRecord.add`, read off the list of all entries."""
        named = [known for known in self.entries if entry.name is not None and known.name == entry.name]
        if named:
            return named[0]

        def candidates(step):
            return [known for known in self.entries if (known.step, known.response) == (step, entry.response)]

        if entry.name is None:
            numbered = [known for known in candidates(entry.step) if known.number == entry.number]
            if numbered:
                return numbered[0]
            others = [step for step in self.counted if step < entry.step or not has_step]
        else:
            others = [known.step for known in self.entries if is_counted and known.step > entry.step]
        for step in [entry.step, *sorted({*others} - {entry.step})]:
            for known in candidates(step):
                if entry.name is None and known.number is None:
                    return known
                if entry.name is not None and known.name is None and entry.number in (None, known.number):
                    return known
        return None


class HistoryMachine(RuleBasedStateMachine):
    @initialize(window_epochs=st.integers(1, 3))
    def create(self, window_epochs):
        self.window_epochs = window_epochs
        self.history = RolloutHistory(window_epochs=window_epochs)
        self.drafter = Drafter(self.history)
        self.windows = {}
        self.counts = Counter()
        self.num_requests = 0

    def window(self, prompt):
        return self.windows.setdefault(KEYS[prompt], Window())

    def open_ids(self):
        return [name for window in self.windows.values() for name in window.open]

    def pick_open(self, data):
        name = data.draw(st.sampled_from(self.open_ids()))
        return name, next(window for window in self.windows.values() if name in window.open)

    # --- the model of `add` ---

    def add_to_model(self, window, entry, *, step, is_counted=False):
        """Take in a rollout whose training step may be None, as the history documents it; True if it was new."""
        is_counted |= step is None
        entry.step = window.current_step if step is None else step
        if is_counted:
            entry.step = window.told.get(entry.step, entry.step)
        else:
            window.counted.discard(entry.step)
        known = window.find(entry, is_counted=is_counted, has_step=step is not None)
        epochs = {e.step for e in window.entries}
        if known is None and len(epochs) >= self.window_epochs and entry.step < min(epochs):
            self.counts["num_late"] += 1
            return False
        if known is None:
            self.counts["num_added"] += 1
            if is_counted and entry.step not in epochs:
                window.counted.add(entry.step)
            window.entries.append(entry)
        else:
            self.counts["num_updated"] += 1
            if entry.name is not None and known.name == entry.name:
                known.step = known.step if step is None else entry.step
            elif known.step != entry.step and not (is_counted and known.step in window.counted):
                told, counted = (known.step, entry.step) if is_counted else (entry.step, known.step)
                window.told[counted] = told
                window.told = dict(list(window.told.items())[-self.window_epochs :])
                window.counted.discard(counted)
                for other in window.entries:
                    other.step = told if other.step == counted else other.step
                known.step = told
            known.reward = known.reward if entry.reward is None else entry.reward
            known.name = known.name or entry.name
            known.number = entry.number if known.number is None else known.number
        window.current_step = max(window.current_step, (known or entry).step)
        last_epochs = sorted({e.step for e in window.entries})[-self.window_epochs :]
        stay = [e for e in window.entries if e.step in last_epochs]
        self.counts["num_expired"] += len(window.entries) - len(stay)
        window.entries = stay
        window.counted &= {e.step for e in stay}
        return known is None

    # --- rules ---

    @rule(prompt=prompts, response=texts, step=steps, reward=rewards, name=names, ordinal=st.integers(0, 1))
    def add(self, prompt, response, step, reward, name, ordinal):
        window = self.window(prompt)
        number = ordinal if name is None or ordinal else None
        entry = Entry(prompt, [(True, response)], step, reward, name, number)
        known = [e for e in window.entries if name is not None and e.name == name]
        if known:  # a name stands for one response here; that it may stand for another at another step has its own test
            response = known[0].response
        if known and step is not None:  # it moves to another epoch: in which order with equal ones is not promised
            taken = [(e.step, e.response) for e in window.entries]
            step = None if (step, response) in taken else step
        given_rollout = rollout(
            response, step, prompt=PROMPTS[prompt], prompt_key=KEYS[prompt],
            reward=reward, request_id=name, ordinal=ordinal,
        )  # fmt: skip
        entry.runs = [(True, response)]
        assert self.history.add(given_rollout) == self.add_to_model(window, entry, step=step)

    @rule(prompt=prompts, step=steps)
    def start(self, prompt, step):
        self.start_request(f"r{self.num_requests}", prompt, step)
        self.num_requests += 1

    def start_request(self, name, prompt, step):
        window = self.window(prompt)
        self.drafter.start(name, prompt_token_ids=PROMPTS[prompt], prompt_key=KEYS[prompt], training_step=step)
        is_counted = step is None
        if step is None:
            step = window.current_step + (window.has_finished and not window.open)
        if step > window.current_step:
            window.current_step, window.has_finished = step, False
        window.open[name] = Entry(prompt, [], step, None, name)
        if is_counted:
            window.counted_requests.add(name)
        self.check_tree(KEYS[prompt], window)

    @precondition(lambda self: self.open_ids())
    @rule(data=st.data(), response=texts)
    def extend(self, data, response):
        name, window = self.pick_open(data)
        self.drafter.extend(name, response)
        runs = window.open[name].runs
        if runs:
            runs[-1] = (True, [*runs[-1][1], *response])
        else:
            runs.append((True, response))

    @precondition(lambda self: self.open_ids())
    @rule(data=st.data(), pieces=st.lists(texts, min_size=1, max_size=2), response=texts)
    def call_a_tool(self, data, pieces, response):
        """Environment tokens, in one or two pieces, and the model's answer."""
        name, window = self.pick_open(data)
        for piece in pieces:
            self.drafter.extend(name, piece, generated=False)
        self.drafter.extend(name, response)
        window.open[name].runs += [(False, [token for piece in pieces for token in piece]), (True, response)]

    @precondition(lambda self: self.open_ids())
    @rule(data=st.data(), max_draft_tokens=st.integers(0, 5))
    def draft(self, data, max_draft_tokens):
        """Whatever is drafted, and whether or not it is verified, the window is the same."""
        name, _ = self.pick_open(data)
        draft = self.drafter.draft([name], max_draft_tokens=[max_draft_tokens], min_survival=[0.0])[name]
        assert set(draft.draft_token_ids) <= {0, 1, 2}

    @precondition(lambda self: self.open_ids())
    @rule(data=st.data(), reward=rewards, step=steps, keep=st.sampled_from([True, True, True, False]))
    def finish(self, data, reward, step, keep):
        name, window = self.pick_open(data)
        self.finish_request(name, window, reward=reward, step=step, keep=keep)

    def finish_request(self, name, window, *, reward=None, step=None, keep=True):
        self.drafter.finish(name, reward=reward, training_step=step, keep=keep)
        entry = window.open.pop(name)
        window.has_finished = True
        if keep and entry.runs:
            entry.reward = reward
            is_counted = step is None and name in window.counted_requests
            self.add_to_model(window, entry, step=entry.step if step is None else step, is_counted=is_counted)
        if not window.entries and not window.open:  # nothing is known of that prompt
            self.windows = {key: other for key, other in self.windows.items() if other is not window}

    @rule(keys=st.lists(st.sampled_from([*KEYS, 12345]), max_size=3))
    def prepare(self, keys):
        self.history.prepare(keys)

    @rule(max_us=times)
    def maintain(self, max_us):
        self.drafter.maintain(max_us=max_us)

    @rule(prompt=prompts)
    def start_and_forget(self, prompt):
        """A request that changes nothing but makes the tree up to date, which `start` then compares."""
        window = self.window(prompt)
        self.start_request(PROBE, prompt, window.current_step)
        self.finish_request(PROBE, window, keep=False)

    # --- what must hold ---

    def check_tree(self, key, window):
        """The tree of a request that has just started: exact where nothing else is open, else within bounds."""
        oracle = NaiveSuffixTree()
        handles = {}

        def index(entry, *, is_open):
            if entry.prompt not in handles:
                handles[entry.prompt] = oracle.add_prompt(PROMPTS[entry.prompt])
            handle = handles[entry.prompt]
            for generated, token_ids in entry.runs:
                if not generated:
                    handle = oracle.add_prompt(token_ids)
                    continue
                sequence = oracle.open(prompt=handle)
                oracle.extend(sequence, token_ids)
                if not (is_open and token_ids is entry.runs[-1][1]):
                    oracle.close(sequence)

        for entry in window.entries:
            index(entry, is_open=False)
        for entry in window.open.values():
            index(entry, is_open=True)
        tree = tree_of(self.history, key)
        tree.check_invariants()
        exact = oracle.table()
        settled = oracle.table(only_settled=True)
        for context, children in exact.items():
            for token, counts in children.items():
                seen = sum(tree.child_counts(context, token))
                low = sum(settled.get(context, {}).get(token, (0, 0)))
                assert low <= seen <= sum(counts), f"{context} -> {token}: {low} <= {seen} <= {sum(counts)}"
            if len(window.open) == 1:
                assert sum(tree.counts(context)) == sum(add_up(children.values())), f"after {context}"
        for context in ((), (0,), (1, 2), (2, 2, 2)):
            for token in {0, 1, 2} - exact.get(context, {}).keys():
                assert tree.child_counts(context, token) == (0, 0), f"{context} -> {token} is in no text"

    @invariant()
    def windows_agree(self):
        if not hasattr(self, "windows"):
            return
        for key, window in self.windows.items():
            stored = self.history.rollouts(key)
            assert [r.training_step for r in stored] == sorted(e.step for e in window.entries)
            assert sorted(map(repr, map(as_tuple, stored))) == sorted(repr(e.as_tuple()) for e in window.entries)
        entries = [e for window in self.windows.values() for e in window.entries]
        statistics = self.history.statistics()
        expected = {
            "num_prompts": len(self.windows),
            "num_rollouts": len(entries),
            "num_tokens": sum(len(e.response) for e in entries),
            **{name: self.counts[name] for name in ("num_added", "num_updated", "num_late", "num_expired")},
        }
        assert {name: getattr(statistics, name) for name in expected} == expected
        assert set(self.drafter.request_ids()) == set(self.open_ids())
        assert self.history.memory_bytes() == (
            statistics.rollout_bytes + statistics.tree_bytes + statistics.common_bytes
        )

    def teardown(self):
        if hasattr(self, "windows"):
            for window in list(self.windows.values()):
                for name in list(window.open):
                    self.finish_request(name, window)
            for key in list(self.windows):
                self.start_and_forget(KEYS.index(key))
            self.windows_agree()


def as_tuple(r):
    mask = None if r.response_mask is None else r.response_mask.tolist()
    reward = None if r.reward is None else int(r.reward)
    token_ids = r.prompt_token_ids.tolist(), r.response_token_ids.tolist()
    return r.training_step, *token_ids, mask, reward, r.request_id


TestHistoryMachine = HistoryMachine.TestCase
