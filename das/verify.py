"""Exact verification of deterministic drafts: the reference that engines are held to. No engine runs this code.

A draft is chosen before anything is sampled, so there are two ways to verify it that leave the target's distribution as
it is. Accept or resample: take draft token x with probability p(x), else sample from p without x. Sample, then match:
sample a token at every position of the draft and follow the draft as far as it says the same. From the same noise, the
second emits the very tokens that decoding without drafts emits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from das._token_ids import token_id_array
from das.checked_values import check_int
from das.rollout import TokenIds

FloatArray = npt.NDArray[np.float64]


def accept_or_resample(
    draft_token_ids: TokenIds,
    probabilities: npt.ArrayLike,
    *,
    random_generator: np.random.Generator,
    parents: Sequence[int] | None = None,
) -> list[int]:
    """Verify a draft by rejection, and return what is emitted: the accepted tokens and one more.

    At each position the draft's tokens there are tried in order: x_i is taken with probability
    p(x_i) / (1 - p(x_1) - ... - p(x_i-1)). Where none is, a token is sampled from p without them.

    Args:
        draft_token_ids: n token ids, each below the size of the vocabulary.
        probabilities: [1 + n, vocabulary]: the target's distribution after the context, and after the context and the
            path to each draft token; each row sums to 1 within 1e-6.
        random_generator: where the randomness comes from.
        parents: of a tree, as `Draft.parents`: which draft token comes before each, -1 for the context. Tokens at one
            position must differ. None: a chain.

    Returns:
        1 to 1 + n token ids, distributed as if sampled one by one.

    Raises:
        TypeError, ValueError: not token ids, not parents, another shape, a negative probability, a row that does not
        sum to 1, a token beyond the vocabulary, or the same token twice at one position.

    Complexity: O(tokens * vocabulary).

    Source: Leviathan et al. 2023 (arXiv 2211.17192), Theorem 3.5, for drafts that put all weight on one token;
    several tokens at one position as in SpecInfer (arXiv 2305.09781), section 4.3.
    """
    tokens, links = _draft(draft_token_ids, parents)
    rows = _distributions(probabilities, num_rows=1 + len(tokens))
    if tokens and max(tokens) >= rows.shape[1]:
        raise ValueError(f"draft_token_ids holds {max(tokens)}; the vocabulary of probabilities has {rows.shape[1]}")
    children = _children(tokens, links)
    emitted: list[int] = []
    node = -1
    while True:
        rest = rows[1 + node].copy()
        accepted = None
        for child in children.get(node, ()):
            token = tokens[child]
            if random_generator.random() * rest.sum() < rest[token]:
                accepted = child
                break
            rest[token] = 0.0
        if accepted is None:
            emitted.append(int(random_generator.choice(len(rest), p=rest / rest.sum())))
            return emitted
        emitted.append(tokens[accepted])
        node = accepted


def match_samples(
    draft_token_ids: TokenIds, sampled_token_ids: TokenIds, *, parents: Sequence[int] | None = None
) -> list[int]:
    """Follow a draft as far as it says what was sampled, and return what is emitted.

    Args:
        draft_token_ids: n token ids.
        sampled_token_ids: 1 + n token ids: what was sampled after the context, and after the context and the path to
            each draft token. Only those on the accepted path matter.
        parents: of a tree, as in `accept_or_resample`; the same token may be there twice. None: a chain.

    Returns:
        1 to 1 + n token ids, the sampled ones: those that the draft foretold, and the first it did not.

    Raises:
        TypeError, ValueError: not token ids, not parents, or another number of samples.

    Complexity: O(tokens).
    """
    tokens, links = _draft(draft_token_ids, parents)
    samples = token_id_array(sampled_token_ids, "sampled_token_ids").tolist()
    if len(samples) != 1 + len(tokens):
        raise ValueError(
            f"sampled_token_ids has {len(samples)} entries; it must have {1 + len(tokens)}, one after the context and "
            "one after each draft token"
        )
    emitted = [samples[0]]
    last = -1
    for node, (token, parent) in enumerate(zip(tokens, links, strict=True)):
        if parent == last and token == emitted[-1]:
            last = node
            emitted.append(samples[1 + node])
    return emitted


def sample_token(probabilities: npt.ArrayLike, noise: npt.ArrayLike) -> int:
    """Return the token with the greatest log-probability plus noise: with Gumbel noise, a sample of the distribution.

    Args:
        probabilities: [vocabulary], not negative, some greater than 0; need not sum to 1.
        noise: [vocabulary], as `position_noise` returns.

    Raises:
        ValueError: shapes differ, a negative probability, or none greater than 0.

    Complexity: O(vocabulary).

    Source: the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014, arXiv 1411.0030).
    """
    weights, noise = np.asarray(probabilities, np.float64), np.asarray(noise, np.float64)
    if weights.ndim != 1 or weights.shape != noise.shape:
        raise ValueError(f"probabilities has shape {weights.shape}, noise {noise.shape}; both must be [vocabulary]")
    if not (weights >= 0).all() or not (weights > 0).any():
        raise ValueError("probabilities must not be negative, and some must be greater than 0")
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(weights) + noise))


def position_noise(seed: int, request_id: str, position: int, *, num_tokens: int) -> FloatArray:
    """Return the Gumbel noise of one position of one request: the same whenever and wherever it is asked for.

    Args:
        seed: of the run, 0 <= seed < 2**63.
        request_id: of the generation.
        position: of the token before the one to be sampled, in prompt and response together, 0 <= position < 2**62.
        num_tokens: size of the vocabulary, at least 1.

    Returns:
        float64 [num_tokens].

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or out of range.

    Complexity: O(num_tokens).
    """
    check_int(position, "position", below=1 << 62)
    check_int(num_tokens, "num_tokens", below=1 << 62)
    key = (request_seed(seed, request_id), int(position))
    return np.random.Generator(np.random.Philox(key=np.array(key, np.uint64))).gumbel(size=num_tokens)


def request_seed(seed: int, request_id: str) -> int:
    """Return the seed of one request of a run: stable over processes and machines.

    Args:
        seed: of the run, 0 <= seed < 2**63.
        request_id: of the generation.

    Returns:
        0 <= seed < 2**63.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or out of range.

    Complexity: O(length of request_id).
    """
    check_int(seed, "seed", below=1 << 63)
    if not isinstance(request_id, str):
        raise TypeError(f"request_id must be a str, not {type(request_id).__name__}")
    content = int(seed).to_bytes(8, "little") + request_id.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def _distributions(probabilities: npt.ArrayLike, *, num_rows: int) -> FloatArray:
    rows = np.asarray(probabilities, np.float64)
    if rows.ndim != 2 or len(rows) != num_rows:
        raise ValueError(f"probabilities has shape {rows.shape}; it must be ({num_rows}, vocabulary)")
    if not (rows >= 0).all():
        raise ValueError("probabilities holds a negative number, or one that is not a number")
    sums = rows.sum(axis=1)
    if not (np.abs(sums - 1.0) < 1e-6).all():
        row = int(np.argmax(np.abs(sums - 1.0)))
        raise ValueError(f"probabilities[{row}] sums to {sums[row]}; it must sum to 1")
    return rows


def _draft(draft_token_ids: TokenIds, parents: Sequence[int] | None) -> tuple[list[int], list[int]]:
    tokens: list[int] = token_id_array(draft_token_ids, "draft_token_ids").tolist()
    links = list(range(-1, len(tokens) - 1)) if parents is None else list(parents)
    if len(links) != len(tokens):
        raise ValueError(f"parents has {len(links)} entries; it must have {len(tokens)}, one a draft token")
    for node, parent in enumerate(links):
        if isinstance(parent, bool) or not isinstance(parent, (int, np.integer)):
            raise TypeError(f"parents[{node}] is {parent!r}, of type {type(parent).__name__}; it must hold ints")
        if not -1 <= parent < node:
            raise ValueError(f"parents[{node}] is {parent}; it must be -1 <= parents[{node}] < {node}")
    return tokens, links


def _children(tokens: list[int], links: list[int]) -> dict[int, list[int]]:
    """Return the draft's nodes by the node that they follow, -1 for the context."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(links):
        siblings = children.setdefault(parent, [])
        if tokens[node] in [tokens[other] for other in siblings]:
            raise ValueError(f"draft_token_ids holds {tokens[node]} twice at one position")
        siblings.append(node)
    return children
