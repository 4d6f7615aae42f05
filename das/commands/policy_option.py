"""The options that say which policy drafts how much, and what a pass costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeVar

import click

from das.adaptive_budget import AdaptiveBudget
from das.budget import BudgetPolicy, FixedBudget, NoDraft, PriceBudget, UnlimitedBudget
from das.class_budget import LengthClassBudget
from das.commands.latency_option import latency_of
from das.latency import LatencyModel
from das.length_budget import LengthAwareBudget
from das.throughput_budget import ThroughputBudget

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class _Choice:
    """A policy that can be named.

    Args:
        make: makes it.
        options: that it takes.
        setting: which of them a number behind the name is, as in fixed=8; None: it takes none.
    """

    make: Callable[..., BudgetPolicy]
    options: tuple[str, ...] = ()
    setting: str | None = None


POLICIES = {
    "length-aware": _Choice(LengthAwareBudget, ("max_draft_tokens", "latency"), "max_draft_tokens"),
    "throughput": _Choice(ThroughputBudget, ("max_draft_tokens", "latency"), "max_draft_tokens"),
    "class": _Choice(LengthClassBudget, ("min_survival",), "min_survival"),
    "fixed": _Choice(FixedBudget, ("max_draft_tokens",), "max_draft_tokens"),
    "price": _Choice(PriceBudget, ("max_draft_tokens", "min_survival"), "min_survival"),
    "unlimited": _Choice(UnlimitedBudget, ("max_draft_tokens",), "max_draft_tokens"),
    "none": _Choice(NoDraft),
    "aimd": _Choice(partial(AdaptiveBudget, "aimd"), ("max_draft_tokens",), "max_draft_tokens"),
    "beg-mab": _Choice(partial(AdaptiveBudget, "beg-mab"), ("latency", "max_running"), "max_running"),
    "goodput": _Choice(partial(AdaptiveBudget, "goodput"), ("max_draft_tokens", "latency"), "max_draft_tokens"),
    "batch-threshold": _Choice(
        partial(AdaptiveBudget, "batch-threshold"), ("max_draft_tokens", "max_running"), "max_running"
    ),
}


def latency_option(command: _Command) -> _Command:
    """Give a command the parameter latency."""
    return click.option(
        "--latency",
        metavar="PRESET|MS,MS",
        callback=latency_of,
        help="What passes cost, for the times reported and for --policy length-aware, throughput, beg-mab, goodput: a "
        "name from `das latency list` or c_base_ms,c_tok_ms[,c_kv_ms[,c_engine_ms]], which `das latency fit` finds.  "
        "[default: 5,0.025]",
    )(command)


def policy_options(command: _Command) -> _Command:
    """Give a command the parameters policy_name, max_draft_tokens, latency, min_survival and threshold."""
    options = [
        click.option(
            "--policy",
            "policy_name",
            type=click.Choice(list(POLICIES)),
            default="length-aware",
            show_default=True,
            help="throughput: draft while a token is worth its cost at the batch that runs now. length-aware: so, too, "
            "and a token is worth more to requests that may end last. price: while it is likely enough. class: long "
            "requests to 16 tokens, medium ones to 8, short ones none. fixed, unlimited: to the cap. The last four are "
            "published baselines, see `das.AdaptiveBudget`.",
        ),
        click.option(
            "--max-draft-tokens",
            metavar="N",
            type=int,
            help="Longest draft, 0 to 64.  [default: fixed, batch-threshold 8, others 16]",
        ),
        latency_option,
        click.option(
            "--min-survival",
            metavar="P",
            type=float,
            help="With --policy price, class: draft while all drafted tokens together are accepted with at least this "
            "probability.  [default: price 0.15, class 0]",
        ),
        click.option(
            "--threshold",
            metavar="N",
            type=int,
            help="With --policy beg-mab, batch-threshold: draft nothing while more requests run.  [default: 32]",
        ),
    ]
    return reduce(lambda decorated, option: option(decorated), reversed(options), command)


def policy_of(name: str, *, latency: LatencyModel | None, **options: float | None) -> BudgetPolicy:
    """Return the policy that options describe.

    Args:
        name: of POLICIES.
        latency: for those that take one; None: they learn it.
        options: max_draft_tokens, min_survival, max_running; None: the policy's own.

    Raises:
        click.UsageError: an option that the policy does not take, or a value out of range.
    """
    choice = POLICIES[name]
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        if option not in choice.options:
            fitting = ", ".join(policy for policy, other in POLICIES.items() if option in other.options)
            flag = f"--{_called(option).replace('_', '-')}"
            raise click.UsageError(f"{flag} goes with --policy {fitting}, not with {name}.")
    if "latency" in choice.options and latency is not None:
        return _made(partial(choice.make, latency=latency), given)
    return _made(choice.make, given)


def policy_named(text: str, *, latency: LatencyModel) -> BudgetPolicy:
    """Return the policy that a name with or without a number describes: length-aware, fixed=8, price=0.3.

    Raises:
        click.UsageError: no such policy, or a number that it does not take.
    """
    name, has_number, number = text.partition("=")
    if name not in POLICIES:
        raise click.UsageError(f"--policy {text}: {name!r} is none of {', '.join(POLICIES)}.")
    setting = POLICIES[name].setting
    if not has_number:
        return policy_of(name, latency=latency)
    if setting is None:
        raise click.UsageError(f"--policy {text}: {name} takes no number.")
    try:
        value = float(number) if setting == "min_survival" else int(number)
    except ValueError:
        raise click.UsageError(f"--policy {text}: {number!r} is no {_called(setting)}.") from None
    return policy_of(name, latency=latency, **{setting: value})


def _called(option: str) -> str:
    """What the command line calls a policy's option: --max-running is that of an engine."""
    return "threshold" if option == "max_running" else option


def _made(make: Callable[..., BudgetPolicy], options: dict[str, float]) -> BudgetPolicy:
    try:
        return make(**options)
    except ValueError as error:
        raise click.UsageError(f"{error}.".replace("max_running", _called("max_running"))) from None
