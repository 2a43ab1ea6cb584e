"""A gateway over a scripted engine, both in the test's own loop."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.config import GatewayConfig
from gateway.server import GatewayServer
from gateway.spans import Tracer, no_spans
from tests.scripted_engine import Script, ScriptedEngine


@dataclass
class Stack:
    """Both processes' stand-ins."""

    engine: ScriptedEngine
    server: GatewayServer

    @property
    def address(self) -> str:
        return self.server.address


StackMaker = Callable[..., AbstractAsyncContextManager[Stack]]


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """Short, since a Unix socket's path may have about a hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="rill-") as folder:
        yield Path(folder) / "engine.sock"


@pytest.fixture
def make_stack(socket_path: Path) -> StackMaker:
    """`async with make_stack(Script(...), contexts=2) as stack:` settings are the [gateway] table's."""

    @contextlib.asynccontextmanager
    async def make(script: Script | None = None, tracer: Tracer = no_spans, **settings: Any) -> AsyncIterator[Stack]:
        config = GatewayConfig(**{"port": 0, "socket": str(socket_path), "drain_ms": 300, **settings})
        async with ScriptedEngine(socket_path, script) as engine, GatewayServer(config, tracer=tracer) as server:
            if engine.script.is_ready:
                await server.link.is_ready.wait()
            yield Stack(engine, server)

    return make


@pytest.fixture
async def stack(make_stack: StackMaker) -> AsyncIterator[Stack]:
    async with make_stack() as stack:
        yield stack
