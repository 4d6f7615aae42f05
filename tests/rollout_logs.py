"""Small random rollout logs, for replay and simulation."""

import strategies
from hypothesis import strategies as st
from rollout_samples import rollout


@st.composite
def logs(draw, *, max_rollouts):
    """Rollouts of up to three prompts and steps, some with environment tokens, over few letters."""
    texts = draw(strategies.collections(max_size=16))
    log = []
    for _ in range(draw(st.integers(1, max_rollouts))):
        text = draw(st.sampled_from(texts))
        bits = draw(st.integers(0, 2 ** len(text)))  # the last one: no mask
        mask = None if bits == 2 ** len(text) else [bool(bits >> i & 1) for i in range(len(text))]
        step, prompt = draw(st.sampled_from([None, 0, 1, 5])), draw(st.sampled_from([[1], [1, 2], [3]]))
        log.append(rollout(text, step, prompt=prompt, response_mask=mask, reward=len(log) % 3))
    return log
