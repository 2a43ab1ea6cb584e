"""One caller from handshake to close: reads messages, writes what the protocol lets out, keeps the deadlines.

The reader never waits for anything but the next message, so a cancel is done before any await. The writer waits for
room in a small buffer; a socket that takes nothing for `stall_s` is aborted, since neither close() nor keepalive ends a
connection whose buffer is full. The server calls `tick` often; all deadlines are looked at there.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable
from typing import Final

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from gateway.admission import Bucket
from gateway.errors import Close, Refusal, Violation
from gateway.logs import event as log
from gateway.metrics import Metrics
from gateway.protocol import EnginePort, ProtocolLimits, Quota, SpeechProtocol
from gateway.spans import Tracer

logger = logging.getLogger(__name__)

MESSAGES_MINUTE: Final = 60_000  # of one connection, which may come at once; more is a flood
BURST: Final = 32  # messages taken before others get their turn
UNREAD_BYTES: Final = 256 * 1024  # in our write buffer: pongs that nobody reads, since `send` waits at a tenth of it
LAST_WORDS_S: Final = 1.0  # for the errors of what a drain has ended
CLOSE_S: Final = 2.0


class Session:
    """Runs one connection. `stall_s`: how long one write may take. `expires_at`: when it is asked to go."""

    def __init__(
        self,
        connection: ServerConnection,
        port: EnginePort,
        protocol: type[SpeechProtocol],
        *,
        limits: ProtocolLimits,
        quota: Quota,
        metrics: Metrics,
        tracer: Tracer,
        stall_s: float,
        expires_at: float,
        goaway_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.id = secrets.token_hex(8)
        self._connection = connection
        self._limits = limits
        self._metrics = metrics
        self._stall_s = stall_s
        self._expires_at = expires_at
        self._goaway_s = goaway_s
        self._clock = clock
        self._messages = Bucket(MESSAGES_MINUTE, clock())
        self._writing_since: float | None = None
        self._leave_by: float | None = None  # when what is still open is ended
        self._has_output = asyncio.Event()
        self._has_output.set()
        self._verdict: asyncio.Future[tuple[Close, str]] = asyncio.get_running_loop().create_future()
        self._protocol = protocol(
            session=self.id,
            port=port,
            limits=limits,
            quota=quota,
            metrics=metrics,
            tracer=tracer,
            clock=clock,
            seeds=random.Random(secrets.randbits(64)),
            wake=self._has_output.set,
        )

    @property
    def num_contexts(self) -> int:
        return self._protocol.num_contexts

    def states(self) -> list[str]:
        return self._protocol.states()

    async def run(self) -> None:
        """Until the peer goes, breaks the protocol or is sent away. All its contexts are cancelled on the way out."""
        self._metrics.sessions.inc()
        log(logger, "session begins", session=self.id, key=self._protocol.quota.name or None)
        tasks = [
            asyncio.create_task(self._write(), name=f"write-{self.id}"),
            asyncio.create_task(self._obey(), name=f"end-{self.id}"),
        ]
        try:
            await self._read()
        except ConnectionClosed:
            pass
        except Violation as violation:
            log(logger, "session broke the protocol", session=self.id, why=str(violation))
            self._protocol.close()
            await self._close(violation.close_code, str(violation))
        except Exception:
            logger.exception("session %s: our bug", self.id)
            self._protocol.close()
            await self._close(Close.INTERNAL, "internal error")
        finally:
            self._protocol.close()
            self._metrics.sessions.dec()
            await _end(tasks)
            log(logger, "session ends", session=self.id, code=self._connection.close_code)

    async def _read(self) -> None:
        count = 0
        while True:
            data = await self._connection.recv()
            if self._messages.take(1, self._clock()) > 0:
                raise Violation(f"more than {MESSAGES_MINUTE} messages a minute", Close.RATE)
            self._protocol.receive(data)
            if self._protocol.is_flooded:
                self._abort("answers are not being read")
            self._has_output.set()
            count += 1
            if count % BURST == 0:
                await asyncio.sleep(0)  # `recv` doesn't wait while there is more

    # ---- out

    async def _write(self) -> None:
        """Writes until the connection ends; `tick` ends it if a write passes its deadline."""
        try:
            while True:
                await self._has_output.wait()
                self._has_output.clear()
                while (data := self._protocol.next_bytes()) is not None:
                    self._writing_since = self._clock()
                    await self._connection.send(data)
                    self._writing_since = None
        except ConnectionClosed:
            self._protocol.close()

    def _abort(self, why: str) -> None:
        log(logger, "session aborted", session=self.id, why=why)
        self._metrics.stalled.inc()
        self._protocol.close()
        self._connection.transport.abort()

    # ---- deadlines

    def tick(self, now: float) -> None:
        """Look at every deadline. Called many times a second."""
        if self._connection.transport.is_closing():
            return
        if self._is_stalled(now):
            self._abort("the socket is not being read")
            return
        if self._leave_by is not None:
            self._leave(now, self._leave_by)
        elif now >= self._expires_at:
            self.retire("age", self._goaway_s)
        if self._protocol.num_contexts:
            self._protocol.tick()
        elif now - self._protocol.received_at > self._limits.idle_ms / 1000:
            self.dismiss(Close.IDLE, "idle")
        if self._protocol.has_output:
            self._has_output.set()

    def _is_stalled(self, now: float) -> bool:
        has_waited = self._writing_since is not None and now - self._writing_since > self._stall_s
        return has_waited or self._connection.transport.get_write_buffer_size() > UNREAD_BYTES

    def retire(self, why: str, deadline_s: float) -> None:
        """Announce the end: no new contexts, what is open may finish until the deadline, then 1001."""
        self._leave_by = self._clock() + deadline_s
        self._protocol.drain(int(deadline_s * 1000), why)
        self._has_output.set()

    def _leave(self, now: float, deadline: float) -> None:
        if self._protocol.is_idle and self._writing_since is None or now > deadline + LAST_WORDS_S:
            self.dismiss(Close.GOING_AWAY, "drained")
        elif now > deadline:
            self._protocol.end_all(Refusal("draining", "the server is going away; try another", after_ms=1000))

    def dismiss(self, code: Close, reason: str) -> None:
        """Close the connection as soon as may be; the first reason counts."""
        if not self._verdict.done():
            self._verdict.set_result((code, reason))

    async def _obey(self) -> None:
        code, reason = await self._verdict
        self._protocol.close()
        await self._close(code, reason)

    async def _close(self, code: Close, reason: str) -> None:
        """A closing handshake, but never for longer than a write may take."""
        try:
            async with asyncio.timeout(min(self._stall_s, CLOSE_S)):
                await self._connection.close(code, reason)
        except TimeoutError:
            self._connection.transport.abort()


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            logger.error("session task failed", exc_info=result)
