"""An engine and its gateways as child processes: started, watched, started again with back-off, ended in order.

The engine is one process; gateways are as many as the profile says, at one port by SO_REUSEPORT. A child whose
configuration can't be (exit code 2), or that keeps dying before everything was ready once, is not tried again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, Self

from prometheus_client import multiprocess

from engine import config as profiles
from engine.config import GatewayConfig
from gateway.errors import ConfigError

BACKOFF_S: Final = (0.1, 5.0)  # first and longest wait before a dead child is started again
STEADY_S: Final = 10.0  # a child that lived so long starts the back-off anew
FIRST_TRIES: Final = 3
END_S: Final = 5.0  # for a child to go after SIGTERM, before it is killed
HUNG_S: Final = 20.0  # an engine younger than this is not killed for being silent: that was its predecessor
USAGE: Final = 2  # exit code of a child whose configuration can't be
READY: Final = "Rill is ready at "
SILENT: Final = "The engine is silent"


class Supervisor:
    """`async with` starts and ends the children. The gateways go first, so that callers are told, then the engine.

    `engine` is the module that is run as the engine; tests have one without a model.
    """

    def __init__(
        self,
        profile: Path,
        *,
        host: str | None = None,
        port: int | None = None,
        open_to_all: bool = False,
        engine: str = "engine",
    ) -> None:
        self._profile = profile
        self._engine_module = engine
        config = profiles.load(profile).gateway
        self._config: GatewayConfig = replace(
            config, host=config.host if host is None else host, port=config.port if port is None else port
        )
        self._open_to_all = open_to_all
        self._folder = tempfile.TemporaryDirectory(prefix="rill-")
        self._socket = str(Path(self._folder.name) / "engine.sock")
        self._port = self._config.port
        self._reserved: socket.socket | None = None
        self._engine: Child | None = None
        self.gateways: list[Child] = []
        self._addresses: dict[Child, str] = {}
        loop = asyncio.get_running_loop()
        self._address: asyncio.Future[str] = loop.create_future()
        self._failure: asyncio.Future[str] = loop.create_future()

    async def __aenter__(self) -> Self:
        environment = child_environment()
        if self._config.processes > 1:
            self._reserved = reserve(self._config.host, self._config.port)
            self._port = self._reserved.getsockname()[1]
            figures = Path(self._folder.name) / "metrics"
            figures.mkdir()
            environment["PROMETHEUS_MULTIPROC_DIR"] = str(figures)
        engine = self._engine_module
        self._engine = Child("engine", lambda: self._arguments(engine), child_environment(), self)
        self.gateways = [
            Child("gateway", lambda: self._arguments("gateway"), environment, self)
            for _ in range(self._config.processes)
        ]
        for child in (self._engine, *self.gateways):
            await child.start()
        return self

    async def __aexit__(self, *details: object) -> None:
        await asyncio.gather(*(child.end(self._config.drain_ms / 1000 + END_S) for child in self.gateways))
        if self._engine is not None:
            await self._engine.end(END_S)
        if self._reserved is not None:
            self._reserved.close()
        self._folder.cleanup()

    async def address(self) -> str:
        """The page's address, once the engine has answered every gateway."""
        return await asyncio.shield(self._address)

    async def failure(self) -> str:
        """Why there is no point in going on; waits until there is a reason."""
        return await asyncio.shield(self._failure)

    def pids(self, name: str) -> list[int]:
        """Process ids of the engine or of the gateways."""
        children = [self._engine, *self.gateways]
        return [child.pid for child in children if child is not None and child.name == name and child.pid]

    def reload(self) -> None:
        """Let the gateways read their keys again."""
        for child in self.gateways:
            child.signal(signal.SIGHUP)

    def _arguments(self, module: str) -> list[str]:
        words = [sys.executable, "-m", module, "--config", str(self._profile), "--socket", self._socket, "--leashed"]
        if module == "gateway":
            words += ["--host", self._config.host, "--port", str(self._port)]
            words += ["--without-keys"] if self._open_to_all else []
        return words

    # ---- what the children report

    @property
    def was_ready(self) -> bool:
        return self._address.done()

    def heard(self, child: Child, line: str) -> None:
        """A child's line on its standard output."""
        if line.startswith(READY):
            self._addresses[child] = line.removeprefix(READY)
            self._port = int(self._addresses[child].rstrip("/").rsplit(":", 1)[1])  # a restart keeps it
            if len(self._addresses) == len(self.gateways) and not self._address.done():
                self._address.set_result(self._addresses[child])
        elif line == SILENT and self._engine is not None and self._engine.age_s > HUNG_S:
            complain("the engine hangs; killing it")
            self._engine.signal(signal.SIGKILL)

    def fail(self, why: str) -> None:
        if not self._failure.done():
            self._failure.set_result(why)


class Child:
    """One process and the task that keeps it running."""

    def __init__(
        self, name: str, arguments: Callable[[], list[str]], environment: dict[str, str], supervisor: Supervisor
    ) -> None:
        self.name = name
        self._arguments = arguments
        self._environment = environment
        self._supervisor = supervisor
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._started = 0.0

    @property
    def pid(self) -> int:
        """0: it has never run."""
        return self._process.pid if self._process is not None else 0

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._started

    async def start(self) -> None:
        process = await self._spawn()
        self._task = asyncio.create_task(self._keep(process), name=f"keep-{self.name}")

    async def end(self, patience_s: float) -> None:
        """Stop keeping it; SIGTERM, and after a while SIGKILL."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(patience_s):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _spawn(self) -> asyncio.subprocess.Process:
        self._started = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            *self._arguments(),
            stdin=asyncio.subprocess.PIPE,  # ends when we do, even if we are killed
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C reaches us alone; we end them in order
            env=self._environment,
        )
        return self._process

    async def _keep(self, process: asyncio.subprocess.Process) -> None:
        wait_s, tries = BACKOFF_S[0], 0
        while True:
            code = await self._watch(process)
            tries += 1
            if not self._supervisor.was_ready and (code == USAGE or tries == FIRST_TRIES):
                self._supervisor.fail(f"the {self.name} ended with code {code} before it was ready")
                return
            wait_s = BACKOFF_S[0] if self.age_s > STEADY_S else min(2 * wait_s, BACKOFF_S[1])
            complain(f"the {self.name} ended with code {code}; starting it again in {wait_s:.1f} s")
            await asyncio.sleep(wait_s)
            process = await self._spawn()

    async def _watch(self, process: asyncio.subprocess.Process) -> int:
        """Until it has ended; its exit code."""
        assert process.stdout is not None
        async for line in process.stdout:
            self._supervisor.heard(self, line.decode().strip())
        code = await process.wait()
        if folder := self._environment.get("PROMETHEUS_MULTIPROC_DIR"):
            multiprocess.mark_process_dead(process.pid, folder)  # type: ignore[no-untyped-call]
        return code


def reserve(host: str, port: int) -> socket.socket:
    """A bound socket that holds the port for several listeners without listening. Raises ConfigError if it is taken."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    try:
        with socket.socket(family, socket.SOCK_STREAM) as alone:  # others with SO_REUSEPORT would let us in silently
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(where)
            where = alone.getsockname()
        shared = socket.socket(family, socket.SOCK_STREAM)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind(where)
    except OSError as error:
        raise ConfigError(f"can't listen at {host} port {port}: {error.strerror}") from error
    return shared


def child_environment() -> dict[str, str]:
    """Ours, with this package's own folder importable wherever we were started."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def complain(words: object) -> None:
    print(f"rill: {words}", file=sys.stderr, flush=True)
