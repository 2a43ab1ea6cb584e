"""One caller from handshake to close: reads messages, writes what the protocol lets out, keeps the deadlines.

The reader never waits for anything but the next message, so a cancel is done before any await. The writer waits for
room in a small buffer; a socket that takes nothing for `stall_s` is aborted, since neither close() nor keepalive ends a
connection whose buffer is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Callable
from typing import Final

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from gateway.errors import Close, Refusal, Violation
from gateway.metrics import Metrics
from gateway.protocol import EnginePort, ProtocolLimits, SpeechProtocol

logger = logging.getLogger(__name__)

TICK_S: Final = 0.1


class Session:
    """Runs one connection. `stall_s`: how long one write may take."""

    def __init__(
        self,
        connection: ServerConnection,
        port: EnginePort,
        *,
        limits: ProtocolLimits,
        metrics: Metrics,
        stall_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.id = secrets.token_hex(8)
        self._connection = connection
        self._limits = limits
        self._metrics = metrics
        self._stall_s = stall_s
        self._clock = clock
        self._has_output = asyncio.Event()
        self._has_output.set()
        self._is_over = False
        self._is_idle = asyncio.Event()  # set by the writer, when nothing is open and all is written
        self._protocol = SpeechProtocol(
            session=self.id,
            port=port,
            limits=limits,
            metrics=metrics,
            clock=clock,
            seeds=random.Random(secrets.randbits(64)),
            wake=self._has_output.set,
        )

    @property
    def num_contexts(self) -> int:
        return self._protocol.num_contexts

    async def run(self) -> None:
        """Until the peer goes or breaks the protocol. All its contexts are cancelled on the way out."""
        self._metrics.sessions += 1
        tasks = [
            asyncio.create_task(self._write(), name=f"write-{self.id}"),
            asyncio.create_task(self._tick(), name=f"tick-{self.id}"),
        ]
        try:
            await self._read()
        except ConnectionClosed:
            pass
        except Violation as violation:
            logger.info("session %s: %s", self.id, violation)
            self._protocol.close()
            await self._close(violation.close_code, str(violation))
        except Exception:
            logger.exception("session %s: our bug", self.id)
            self._protocol.close()
            await self._close(Close.INTERNAL, "internal error")
        finally:
            self._protocol.close()
            self._is_over = True
            self._is_idle.set()
            self._metrics.sessions -= 1
            await _end(tasks)

    async def drain(self, deadline_s: float) -> None:
        """Announce the end, let open contexts finish until the deadline, then close with 1001."""
        self._protocol.drain(int(deadline_s * 1000))
        self._has_output.set()
        await self._until_idle(deadline_s)
        self._protocol.end_all(Refusal("draining", "the server is going away; try another", after_ms=1000))
        await self._until_idle(1.0)
        await self._close(Close.GOING_AWAY, "drained")

    async def _until_idle(self, deadline_s: float) -> None:
        if self._is_over:
            return
        self._is_idle.clear()
        self._has_output.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), deadline_s)

    async def _read(self) -> None:
        while True:
            data = await self._connection.recv()
            if isinstance(data, str):
                raise Violation("a text frame; messages are binary", Close.TEXT_FRAME)
            self._protocol.receive(data)
            if self._protocol.is_flooded:
                self._abort("answers are not being read")
            self._has_output.set()

    async def _write(self) -> None:
        """Writes until the connection ends; a write past its deadline ends it."""
        try:
            while True:
                await self._has_output.wait()
                self._has_output.clear()
                while (data := self._protocol.next_bytes()) is not None:
                    await self._send(data)
                if self._protocol.is_idle:
                    self._is_idle.set()
        except ConnectionClosed:
            self._protocol.close()

    async def _send(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._connection.send(data)
        except TimeoutError:
            self._abort("the socket is not being read")
            await self._connection.wait_closed()

    async def _tick(self) -> None:
        """Credit that grows with time, and the idle rule."""
        while True:
            await asyncio.sleep(TICK_S)
            if self._protocol.num_contexts:
                self._protocol.tick()
                self._has_output.set()
            elif self._clock() - self._protocol.received_at > self._limits.idle_ms / 1000:
                await self._close(Close.IDLE, "idle")

    def _abort(self, why: str) -> None:
        logger.info("session %s aborted: %s", self.id, why)
        self._metrics.num_stalled += 1
        self._protocol.close()
        self._connection.transport.abort()

    async def _close(self, code: Close, reason: str) -> None:
        """A closing handshake, but never for longer than a write may take."""
        try:
            async with asyncio.timeout(min(self._stall_s, 2)):
                await self._connection.close(code, reason)
        except TimeoutError:
            self._connection.transport.abort()


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            logger.error("session task failed", exc_info=result)
