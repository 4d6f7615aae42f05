"""The options of commands that simulate engines: workers, places, training, how drafting and verifying interlock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeVar, get_args

import click

from das.analysis.events import Assignment
from das.analysis.logged_request import logged_batches
from das.analysis.simulate import MOST_TIME, WORKERS_BELOW
from das.analysis.worker import Execution
from das.commands.parameter_types import Count, Time
from das.rollout import Rollout

_Command = TypeVar("_Command", bound=Callable[..., Any])


def engine_options(command: _Command) -> _Command:
    """Give a command the parameters of `das.analysis.simulate.simulate` that describe engines and training."""
    at_least_one, time = Count(least=1), Time(most=MOST_TIME)
    options = [
        click.option(
            "--group-size",
            metavar="N",
            type=at_least_one,
            default=8,
            show_default=True,
            help="Samples of a prompt in a batch.",
        ),
        click.option(
            "--workers",
            "num_workers",
            metavar="N",
            type=Count(least=1, below=WORKERS_BELOW),
            default=1,
            show_default=True,
            help="Engines, each with a drafter of its own.",
        ),
        click.option(
            "--max-running",
            metavar="N",
            type=at_least_one,
            help="Requests that run at once on a worker; the next one starts when one ends.  [default: no limit]",
        ),
        click.option(
            "--assignment",
            type=click.Choice(get_args(Assignment)),
            default="prompt",
            show_default=True,
            help="Who generates what. prompt: as many prompts for each worker, samples together. round-robin: request "
            "by request. longest-first: the longest first, each to the worker with fewest tokens so far, by the logged "
            "lengths. shared-queue: whoever has room takes the next.",
        ),
        click.option(
            "--lag",
            metavar="N",
            type=Count(least=0),
            default=0,
            show_default=True,
            help="Training steps that generation may run ahead; 0: synchronous.",
        ),
        click.option(
            "--train-s",
            metavar="S",
            type=time,
            default=0.0,
            show_default=True,
            help="Seconds of a training step beside generation.",
        ),
        click.option(
            "--execution",
            type=click.Choice(get_args(Execution)),
            default="coupled",
            show_default=True,
            help="decoupled: the drafter runs ahead of the verifier, on hardware of its own. fastest-of-n: idle "
            "workers run copies of others' requests with unlimited drafts; the first to end wins.",
        ),
        click.option(
            "--draft-token-ms",
            metavar="MS",
            type=time,
            default=0.0,
            show_default=True,
            help="For a drafter that computes on the device: of one more draft token, for all requests together.",
        ),
    ]
    return reduce(lambda decorated, option: option(decorated), reversed(options), command)


def check_engine(engine: dict[str, Any], *, shapes: tuple[str, ...]) -> None:
    """Raise click.UsageError for options that do not go together."""
    if engine["execution"] == "fastest-of-n" and engine["lag"]:
        raise click.UsageError("--execution fastest-of-n goes with --lag 0.")
    if engine["execution"] == "decoupled" and "tree" in shapes:
        raise click.UsageError("--execution decoupled goes with --shape chain.")


def check_log(engine: dict[str, Any], rollouts: Sequence[Rollout]) -> None:
    """Raise click.UsageError for a log that `--lag` does not go with, or that has nothing to do for so many workers."""
    batches = logged_batches(rollouts, group_size=engine["group_size"])
    if engine["lag"] and any(batch.turn for batch in batches):
        raise click.UsageError("--lag 0 is what logs need in which the turns of a conversation are rows of their own.")
    at_once = min(len(rollouts), (1 + engine["lag"]) * max((len(batch.rollouts) for batch in batches), default=1))
    most = 2 * at_once if engine["execution"] == "fastest-of-n" else at_once  # a copy of each, too
    if engine["num_workers"] > most:
        raise click.UsageError(
            f"--workers {engine['num_workers']}: at most {at_once} requests of this log run at once, so workers beyond "
            f"{most} have nothing to do."
        )
