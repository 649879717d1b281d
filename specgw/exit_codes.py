"""How commands end: 2 with one line for each problem if the configuration is at fault."""

import contextlib
import sys
from collections.abc import Iterator

from specgw.errors import ConfigError

CONFIG_EXIT_CODE = 2


@contextlib.contextmanager
def exit_on_config_error() -> Iterator[None]:
    """Turns a ConfigError into its lines on standard error and the exit code."""
    try:
        yield
    except ConfigError as error:
        for problem in error.problems:
            sys.stderr.write(f"specgw: {problem}\n")
        sys.exit(CONFIG_EXIT_CODE)
