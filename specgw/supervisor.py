"""Runs the verifier and the proposer as children of `specgw serve`, on unix sockets.

Children are spawned, never forked, and each holds the read end of a pipe whose write end only this
process has: however it dies, the pipe closes and they stop. A child that dies is started again; one
that dies before it ever served ends the whole.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgw.config import EngineArgs, child_environment
from specgw.errors import ConfigError
from specgw.health import wait_until_serving

logger = logging.getLogger(__name__)

_MIN_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0
_STABLE_S = 30.0  # a child that lived this long is started again at once
_STOP_TIMEOUT_S = 10.0


class ChildFailed(ConfigError):
    """A service could not be started; it has said why on standard error."""

    def __init__(self, name: str, exit_code: int) -> None:
        super().__init__([f"the {name} ended with exit code {exit_code} before it was ready"])


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One service to run: its module, and where it listens."""

    name: str
    module: str
    address: str
    config_file: Path


class Child:
    """A service process and its successors."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self._process: asyncio.subprocess.Process | None = None
        self._keep_alive: int | None = None  # write end of the child's parent pipe

    @property
    def pid(self) -> int:
        """The process now running."""
        assert self._process is not None  # started
        return self._process.pid

    async def start(self) -> None:
        """Starts the process and returns when it serves.

        Raises:
            ChildFailed: if it ends first.
        """
        process = await self._spawn()
        serving = asyncio.create_task(wait_until_serving(self.spec.address))
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise ChildFailed(self.spec.name, ended.result())
        finally:
            serving.cancel()
            ended.cancel()
        logger.info("service ready", extra={"service": self.spec.name, "pid": process.pid})

    async def keep_running(self) -> None:
        """Starts the process again whenever it ends. Runs until cancelled."""
        backoff_s = _MIN_BACKOFF_S
        loop = asyncio.get_running_loop()
        while True:
            assert self._process is not None  # started
            began = loop.time()
            exit_code = await self._process.wait()
            logger.error("service ended", extra={"service": self.spec.name, "exit_code": exit_code})
            backoff_s = _MIN_BACKOFF_S if loop.time() - began > _STABLE_S else 2 * backoff_s
            await asyncio.sleep(min(backoff_s, _MAX_BACKOFF_S))
            try:
                await self.start()
            except (ChildFailed, OSError):
                logger.exception("service not started", extra={"service": self.spec.name})

    async def stop(self) -> None:
        """Lets the process drain, and kills it if it does not end."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._close_pipe()  # not before: its end is a reason to drain, and SIGTERM a second one

    async def _spawn(self) -> asyncio.subprocess.Process:
        self._close_pipe()
        read_end, self._keep_alive = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", self.spec.module),
                *("--config", str(self.spec.config_file)),
                *("--parent-pipe", str(read_end)),
                stdin=asyncio.subprocess.DEVNULL,
                env=child_environment(),
                pass_fds=(read_end,),
            )
        finally:
            os.close(read_end)
        return self._process

    def _close_pipe(self) -> None:
        if self._keep_alive is not None:
            os.close(self._keep_alive)
            self._keep_alive = None


@contextlib.asynccontextmanager
async def embedded_services(args: EngineArgs) -> AsyncIterator[Sequence[Child]]:
    """Runs a verifier and, if the method has a model, a proposer, in that order; yields them.

    Raises:
        ChildFailed: if one of them cannot be started.
    """
    directory = Path(tempfile.mkdtemp(prefix="specgw-"))
    children = [Child(spec) for spec in _child_specs(args, directory)]
    try:
        await asyncio.gather(*(child.start() for child in children))
        watches = [asyncio.create_task(child.keep_running()) for child in children]
        try:
            yield children
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.wait(watches)
    finally:
        await asyncio.gather(*(child.stop() for child in children))
        shutil.rmtree(directory, ignore_errors=True)


def _child_specs(args: EngineArgs, directory: Path) -> list[ChildSpec]:
    """Writes each child's configuration. On a GPU the two share what the user lets specgw have."""
    verifier, proposer = f"unix:{directory}/verifier.sock", f"unix:{directory}/proposer.sock"
    if args.speculative_config is None or args.drafts_locally:
        config = _child_config(args, 1.0, verifier={"listen": verifier, "proposers": []})
        return [_child_spec(directory, "verifier", verifier, config)]
    share = args.specgw.proposer.embedded_memory_share
    settings: dict[str, Mapping[str, Any]] = {
        "verifier": {"listen": verifier, "proposers": [proposer]},
        "proposer": {"listen": proposer},
    }
    return [
        _child_spec(directory, name, address, _child_config(args, memory_share, **settings))
        for name, address, memory_share in (
            ("verifier", verifier, 1 - share),
            ("proposer", proposer, share),
        )
    ]


def _child_spec(directory: Path, name: str, address: str, config: Mapping[str, Any]) -> ChildSpec:
    config_file = directory / f"{name}.json"  # JSON is YAML
    config_file.write_text(json.dumps(config), encoding="utf-8")
    return ChildSpec(name, f"{name}_svc", address, config_file)


def _child_config(
    args: EngineArgs, memory_share: float, **settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the effective configuration for a child, without the clients' keys."""
    config = args.model_dump(mode="json", exclude={"api_key"}, exclude_none=True)
    config["gpu_memory_utilization"] *= memory_share
    for service, own in settings.items():
        config["specgw"][service].update(own)
    return config
