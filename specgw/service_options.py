"""The options that a service's own command has: the same for verifier and proposer."""

from collections.abc import Callable
from pathlib import Path

import click

_OPTIONS = (
    click.option("--config", "file", type=click.Path(path_type=Path), help="YAML configuration."),
    click.option("--listen", help="Address: host:port or unix:/path."),
    click.option("--parent-pipe", type=int, hidden=True),  # ends with it
)


def service_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds `file`, `listen` and `parent_pipe` to a command."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
