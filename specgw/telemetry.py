"""Logging and labels as all services do them: a constant message, values as fields.

`logger.info("session created", extra={"session_id": 7})` prints
`2026-01-01 12:00:00,000 INFO verifier_svc.scheduler session created session_id=7`.
"""

import contextlib
import json
import logging
import threading
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class FieldFormatter(logging.Formatter):
    """Appends a record's extra fields as `key=value`; text with spaces or quotes is quoted."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        fields = (
            f"{key}={_printable(value)}"
            for key, value in vars(record).items()
            if key not in _STANDARD_ATTRIBUTES
        )
        return " ".join((super().formatMessage(record), *fields))


def configure_logging(level: int = logging.INFO) -> None:
    """Sends the process's logs to standard error. Entry points call it once; nothing else does."""
    to_stderr = logging.StreamHandler()
    to_stderr.setFormatter(FieldFormatter())
    logging.basicConfig(level=level, handlers=[to_stderr], force=True)


def name_thread(name: str) -> None:
    """Names the calling thread for the system's tools, where it is Linux. At most 15 characters."""
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


def tell_simulation(registry: CollectorRegistry, service: str) -> None:
    """Says in a service's metrics that no model runs behind them."""
    text = "SIMULATION: no model runs, tokens are invented."
    Gauge(f"specgw_{service}_simulation", text, registry=registry).set(1)


def tell_synthetic(registry: CollectorRegistry, service: str) -> None:
    """Says in a service's metrics that drafts are accepted at given rates, whatever they are."""
    text = "SYNTHETIC: drafts are accepted at given rates, the output is no answer of the model."
    Gauge(f"specgw_{service}_synthetic_acceptance", text, registry=registry).set(1)


def _printable(value: Any) -> str:
    text = str(value)
    plain = text.isprintable() and text and not set(text) & set(' "=')
    return text if plain else json.dumps(text)
