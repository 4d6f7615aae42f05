"""`das doctor`: what is installed, which engine seams fit, what is off and why."""

from __future__ import annotations

import importlib
import importlib.util
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import click
import numpy

from das import __version__
from das.commands.terminal import print_json

# Modules of the adapters in integrations/, which das never imports by name: each offers `checks()`, that returns
# (what, state, text) rows.
_ADAPTERS = ("das_vllm.doctor", "das_sglang.doctor", "das_ray.doctor")
_STATES = ("ok", "off", "wrong")


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, whether it is "ok", "off" (and das works without) or "wrong", and why or what to do."""

    what: str
    state: str
    text: str


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Say what would happen on this machine: what is installed, which engine seams fit, what is off and why.

    Ends with code 1 if something is wrong; what is merely off, das works without.

    \b
    Keys of --json:
      checks   [{what, state ("ok", "off" or "wrong"), text}]
    """
    found = [*_own_checks(), *(check for name in _ADAPTERS for check in _checks_of(name))]
    if as_json:
        print_json({"checks": [asdict(check) for check in found]}, indent=1)
    else:
        width = max(len(check.what) for check in found)
        for check in found:  # lines, not a table: remedies are long, and made to be copied
            click.echo(f"{check.what:{width}}  {check.state:5}  {check.text}")
    context.exit(int(any(check.state == "wrong" for check in found)))


def _own_checks() -> Iterable[Check]:
    yield Check("das", "ok", f"{__version__}, native modules built, Python {platform.python_version()}")
    yield Check("numpy", "ok", numpy.__version__)


def _checks_of(module_name: str) -> Iterable[Check]:
    """Yield what an adapter says; one that is not installed is off, one that breaks is wrong."""
    package = module_name.partition(".")[0]
    try:
        if importlib.util.find_spec(module_name) is None:
            raise ModuleNotFoundError
    except ModuleNotFoundError:
        yield Check(package, "off", "this adapter is not installed")
        return
    try:
        for what, state, text in importlib.import_module(module_name).checks():
            yield Check(what, state if state in _STATES else "wrong", text)
    except Exception as error:  # the others' rows are worth having all the same
        yield Check(package, "wrong", f"its checks failed: {type(error).__name__}: {error}")
