"""The commands of `das`: results go to stdout; errors, warnings and Ctrl-C end in `das.cli`, as exceptions."""

from __future__ import annotations

import click

from das import __version__
from das.commands.compare import compare
from das.commands.doctor import doctor
from das.commands.inspect import inspect
from das.commands.latency import latency
from das.commands.replay import replay
from das.commands.simulate import simulate
from das.commands.state import state


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(__version__, message="das %(version)s")
@click.pass_context
def das(context: click.Context) -> None:
    """Speculative decoding for RL rollouts, offline: what a rollout log holds and what drafting would bring on it."""
    if context.invoked_subcommand is None:
        raise click.UsageError("A command is missing.")


das.add_command(compare)
das.add_command(doctor)
das.add_command(inspect)
das.add_command(latency)
das.add_command(replay)
das.add_command(simulate)
das.add_command(state)
