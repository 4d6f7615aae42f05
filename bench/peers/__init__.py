"""The peers the benchmarks measure das against: one file each, one protocol, nothing imported before it is asked for.

Every bench script runs a peer in a process of its own. `python -m bench.peers` shows which ones are installed.
A peer that is not installed raises ImportError with the reason; scripts report it as absent.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol


class Peer(Protocol):
    """A drafter as the benchmarks drive it. Token ids are plain ints; one thread; nothing is drawn at random.

    Texts become visible in call order: a response added, or a token extended, can be drafted from by the next call,
    by the request itself and, where the peer can, by others; after `finish` it stays visible.
    """

    name: str

    def applied_settings(self) -> dict[str, object]:
        """What really is in force: every setting that changes drafts or cost, and the versions of the packages."""

    def add(self, prompt_key: int, prompt_token_ids: Sequence[int], response_token_ids: Sequence[int]) -> None:
        """Index one finished earlier rollout. Peers without history ignore it."""

    def start(self, request_id: str, prompt_key: int, prompt_token_ids: Sequence[int]) -> None:
        """Begin a request."""

    def draft(self, request_id: str, max_draft_tokens: int) -> list[int]:
        """Propose the next tokens of the request: a chain of at most `max_draft_tokens`."""

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Append the tokens that the request just emitted."""

    def finish(self, request_id: str) -> None:
        """End the request."""

    def memory_bytes(self) -> int | None:
        """The peer's own estimate of what it holds; None where it has none. Scripts measure resident memory."""


class TreePeer(Peer, Protocol):
    """A peer that can also propose a tree."""

    def draft_tree(self, request_id: str, max_draft_tokens: int) -> tuple[list[int], list[int]]:
        """Propose at most `max_draft_tokens` tokens and, for each, the index of its parent; -1 is the context's end."""


_PEERS: dict[str, tuple[str, str, dict[str, object]]] = {
    "naive": ("naive", "Naive", {}),
    "prompt_lookup_2_5": ("prompt_lookup", "PromptLookup", {"min_tokens": 2, "max_tokens": 5}),
    "prompt_lookup_5_5": ("prompt_lookup", "PromptLookup", {"min_tokens": 5, "max_tokens": 5}),
    "suffix_decoding": ("suffix_decoding", "SuffixDecoding", {}),
    "arctic": ("arctic", "Arctic", {}),
    "arctic_depth24": ("arctic", "Arctic", {"max_tree_depth": 24, "max_cached_requests": 10_000}),
    "arctic_per_prompt": ("arctic", "Arctic", {"per_prompt": True}),
    "sglang_ngram": ("sglang_ngram", "SGLangNgram", {}),
    "sglang_ngram_breadth1": ("sglang_ngram", "SGLangNgram", {"max_bfs_breadth": 1}),
}


def names() -> list[str]:
    """All peers, installed or not."""
    return list(_PEERS)


def create(name: str, **settings: object) -> Peer:
    """Make a peer; `settings` replace those of its name.

    Raises ValueError for an unknown name, and ImportError for a peer that is not installed.
    """
    if name not in _PEERS:
        raise ValueError(f"name must be one of {', '.join(_PEERS)}; got {name!r}")
    module, kind, defaults = _PEERS[name]
    peer: Peer = getattr(import_module(f"bench.peers.{module}"), kind)(name, **{**defaults, **settings})
    return peer
