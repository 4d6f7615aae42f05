"""`python -m bench.peers`: run every installed peer on a toy workload and print its settings and its draft."""

import json

from bench.peers import create, names

PROMPT = [10, 11, 12, 13, 14, 15, 16, 17, 18, 1]
RESPONSE = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
OTHER = [10, 11, 12, 13, 14, 15, 16, 30, 31]


def draft_of(name: str) -> tuple[dict[str, object], list[int]]:
    """Two earlier rollouts and a sibling, then a request that begins like them; the prompt holds that text as well."""
    peer = create(name, capacity=10_000) if name.startswith("sglang") else create(name)
    peer.add(0, PROMPT, RESPONSE)
    peer.add(0, PROMPT, OTHER)
    peer.start("sibling", 0, PROMPT)
    peer.extend("sibling", RESPONSE[:9])
    peer.start("request", 0, PROMPT)
    peer.extend("request", RESPONSE[:5])
    drafted = peer.draft("request", 4)
    peer.finish("sibling")
    peer.finish("request")
    return peer.applied_settings(), drafted


def main() -> None:
    """Print one block a peer."""
    print(f"after {RESPONSE[:5]} the likely continuation is {RESPONSE[5:9]}")
    for name in names():
        try:
            settings, drafted = draft_of(name)
        except ImportError as error:
            print(f"{name}: absent ({error}); install: sh bench/peers/install.sh VENV")
        else:
            print(f"{name}: draft {drafted}\n    {json.dumps(settings)}")


if __name__ == "__main__":
    main()
