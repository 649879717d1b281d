"""The options that a service's own command has: the same for verifier and proposer."""

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path

import click

_OPTIONS = (
    click.option("--config", "file", type=click.Path(path_type=Path), help="YAML configuration."),
    click.option("--listen", help="Address: host:port or unix:/path."),
    click.option("--parent-pipe", type=int, hidden=True),  # ends with it
)


def service_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds `file`, `listen` and `parent_pipe` to a command.

    A service with a parent leaves the parent's process group: ctrl-C is for the parent, which
    drains first. It stays in the parent's session: Linux schedules each session apart, so that
    priorities would not count between services in sessions of their own.
    """

    @functools.wraps(function)
    def run(file: Path | None, listen: str | None, parent_pipe: int | None) -> None:
        if parent_pipe is not None:
            with contextlib.suppress(PermissionError):  # it leads a session of its own
                os.setpgid(0, 0)
        function(file, listen, parent_pipe)

    command: Callable[..., None] = run
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
