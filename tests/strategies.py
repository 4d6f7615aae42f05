"""Hypothesis strategies, aimed at where suffix trees break: few letters, repetition, late branching, siblings."""

from hypothesis import strategies as st

MAX_TOKEN_ID = 2**31 - 1

token_ids = st.one_of(st.sampled_from([0, MAX_TOKEN_ID]), st.integers(0, 9), st.integers(0, MAX_TOKEN_ID))
alphabets = st.lists(token_ids, min_size=1, max_size=4, unique=True)
max_orders = st.one_of(st.integers(1, 4), st.integers(1, 16))  # small ones often: the depth limit bites sooner


def fibonacci_word(a, b, length):
    """The word a, ab, aba, abaab, ...: every prefix is full of borders, so suffixes stay pending for long."""
    before, word = [a], [a, b]
    while len(word) < length:
        before, word = word, word + before
    return word[:length]


def words(alphabet, *, min_size=1, max_size=24):
    letters = st.sampled_from(alphabet)
    lengths = st.integers(min_size, max_size)
    periods = st.lists(letters, min_size=1, max_size=4)
    return st.one_of(
        st.lists(letters, min_size=min_size, max_size=max_size),
        st.builds(lambda period, length: (period * length)[:length], periods, lengths),
        st.builds(fibonacci_word, letters, letters, lengths),
    )


@st.composite
def slices(draw, texts, *, max_size):
    """A piece of one of the texts."""
    text = draw(st.sampled_from(texts))
    start = draw(st.integers(0, len(text)))
    return list(text[start : start + draw(st.integers(1, max_size))])


@st.composite
def riding_words(draw, alphabet, texts, *, max_size=8):
    """A piece of an earlier text, which then goes on as there or otherwise: what a sibling does to a suffix tree."""
    last = draw(st.lists(st.sampled_from(alphabet), max_size=1))
    return (draw(slices(texts, max_size=max_size)) + last)[:max_size] or [draw(st.sampled_from(alphabet))]


def words_after(alphabet, texts, *, max_size=24):
    """Words, half of them pieces of the texts so far."""
    fresh = words(alphabet, max_size=max_size)
    return st.one_of(riding_words(alphabet, texts, max_size=max_size), fresh) if texts else fresh


def contexts(alphabet, texts, *, max_order):
    """Contexts of at most max_order tokens, the empty one included; half of them drawn from the texts."""
    fresh = words(alphabet, min_size=0, max_size=max_order)
    return st.one_of(slices(texts, max_size=max_order), fresh) if texts else fresh


@st.composite
def families(draw, alphabet, *, max_size=24):
    """Words that share a long prefix and diverge late, some of them equal."""
    prefix = draw(words(alphabet, max_size=max_size - 2))
    return [prefix + draw(words(alphabet, max_size=2)) for _ in range(draw(st.integers(2, 4)))]


@st.composite
def collections(draw, *, max_size=24):
    """Several words over one alphabet."""
    alphabet = draw(alphabets)
    unrelated = st.lists(words(alphabet, max_size=max_size), min_size=1, max_size=4)
    return draw(st.one_of(unrelated, families(alphabet, max_size=max_size)))


@st.composite
def call_lists(draw, *, max_calls=16):
    """Calls that index tokens, as (method, ...): prompts and sequences are named by the order of their creation.

    ("add_prompt", ids), ("add", ids, prompt), ("open", prompt), ("extend", sequence, ids), ("close", sequence);
    prompt 0 is none. Every call is valid when it is made.
    """
    alphabet = draw(alphabets)
    calls, texts, num_prompts, num_sequences, open_sequences = [], [], 0, 0, []
    for _ in range(draw(st.integers(1, max_calls))):
        methods = ["add_prompt", "add", "open"] + ["extend", "extend", "extend", "close"] * bool(open_sequences)
        method = draw(st.sampled_from(methods))
        if method in ("extend", "close"):
            sequence = draw(st.sampled_from(open_sequences))
        if method in ("add", "open"):
            prompt = draw(st.integers(0, num_prompts))
        if method in ("add_prompt", "add", "extend"):
            texts.append(draw(words_after(alphabet, texts)))
        if method == "add_prompt":
            num_prompts += 1
            calls.append((method, texts[-1]))
        elif method == "add":
            calls.append((method, texts[-1], prompt))
        elif method == "open":
            open_sequences.append(num_sequences)
            num_sequences += 1
            calls.append((method, prompt))
        elif method == "extend":
            calls.append((method, sequence, texts[-1]))
        else:
            open_sequences.remove(sequence)
            calls.append((method, sequence))
    return calls
