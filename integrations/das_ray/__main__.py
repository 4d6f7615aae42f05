"""Start, stop and look at a history service: python -m das_ray start NAME --directory DIR [--shards N] ..."""

from __future__ import annotations

import argparse
import json
import sys

from das_ray.exchange import ServiceError
from das_ray.settings import INSTALL_RAY


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        import ray

        from das_ray.service import RayShards, start_history, stop_history
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        print(f"das_ray: {error}: {INSTALL_RAY}", file=sys.stderr)
        return 1
    try:
        ray.init(address=options.address, namespace=options.namespace, log_to_driver=False, logging_level="ERROR")
        if options.command == "start":
            actors = start_history(
                options.name,
                directory=options.directory,
                num_shards=options.shards,
                window_epochs=options.window_epochs,
                max_bytes=options.max_bytes,
                namespace=options.namespace,
            )
            print(f'{len(actors)} shards run. In the settings of an engine: "shared_history": "ray:{options.name}"')
        elif options.command == "stop":
            print(f"{stop_history(options.name, namespace=options.namespace)} shards ended; their directories stay")
        else:
            print(json.dumps(RayShards(options.name, namespace=options.namespace).statistics(), indent=1))
    except (ConnectionError, ServiceError, ValueError) as error:
        print(f"das_ray: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m das_ray", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("start", "start the service, or find the one that runs"),
        ("stop", "end it"),
        ("status", "print the counters of its shards as JSON"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("name", help='of the service: "ray:NAME" in an engine\'s settings')
        command.add_argument("--address", default="auto", help="of the Ray cluster")
        command.add_argument("--namespace", default="das", help="of Ray")
        if name == "start":
            command.add_argument("--directory", required=True, help="where the shards keep what they acknowledge")
            command.add_argument("--shards", type=int, default=1, help="a directory goes with one number")
            command.add_argument("--window-epochs", type=int, default=4, help="that each prompt keeps")
            command.add_argument("--max-bytes", type=int, default=8 << 30, help="of all shards together, in memory")
    return parser


if __name__ == "__main__":
    sys.exit(main())
