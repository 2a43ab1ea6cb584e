"""Sockets, the handshake, health and an ordered end. One process, one engine link, many sessions."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import logging
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.frames import DATA_OPCODES, Frame
from websockets.http11 import Request, Response
from websockets.protocol import Event
from websockets.typing import Subprotocol

from engine import config as profiles
from engine.config import GatewayConfig, KeyConfig
from engine.leash import on_parent_gone
from engine.messages import Gauges
from gateway import json_protocol, wire
from gateway.admission import Admission, Bucket, Caller, Tickets
from gateway.engine_link import EngineLink
from gateway.errors import Close, ConfigError, Denied
from gateway.json_protocol import JsonProtocol
from gateway.logs import event as log
from gateway.metrics import STATES, Metrics
from gateway.pages import StaticFiles, refuse, respond, respond_json
from gateway.protocol import ProtocolLimits, SpeechProtocol
from gateway.session import Session
from gateway.spans import Tracer, make_tracer, no_spans
from gateway.supervisor import READY, SILENT

logger = logging.getLogger(__name__)

WRITE_LIMIT: Final = 8 * 1024  # bytes in our own buffer before a write waits
SEND_BUFFER: Final = 64 * 1024  # and in the kernel's: an ack never waits behind seconds of audio
UNSENT_LIMIT: Final = 8 * 1024
RECEIVE_BUFFER: Final = 32 * 1024  # all that is read at once is parsed at once, while everybody waits
SCRAPS_MINUTE: Final = 10_000  # pings, pongs and fragments of one connection, which no message is counted for
BACKLOG: Final = 512
HANDSHAKE_S: Final = 5.0
TICK_S: Final = 0.1
TICKS_PER_GAUGE: Final = 10
DRAIN_MARGIN_S: Final = 4.0  # beyond the deadline: last words and closing handshakes


class Connection(ServerConnection):
    """A connection with what it owes at the door: a pending handshake, then a caller's place."""

    def __init__(self, door: GatewayServer, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.caller: Caller | None = None
        self.dialect: type[SpeechProtocol] = SpeechProtocol
        self._admission = door.admission
        self._pending = door.pending
        self._knocked_at: str | None = None
        self._scraps = Bucket(SCRAPS_MINUTE, door.clock())
        self._clock = door.clock

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        address = self._admission.address(peer[0] if peer else "")
        if self._admission.knock(address):
            self._knocked_at = address
            self._pending.add(self)
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.settle()
        if self.caller is not None:
            self.caller.leave()
        super().connection_lost(exc)

    def process_event(self, event: Event) -> None:
        """A frame: one that ends no message costs us as much as one that does."""
        super().process_event(event)
        is_scrap = isinstance(event, Frame) and not (event.fin and event.opcode in DATA_OPCODES)
        if is_scrap and self._scraps.take(1, self._clock()) > 0 and not self.transport.is_closing():
            log(logger, "connection aborted", why=f"over {SCRAPS_MINUTE} control frames and fragments a minute")
            self.transport.abort()

    def settle(self) -> None:
        """The request is here, or never will be. Idempotent."""
        self._pending.discard(self)
        if self._knocked_at is not None:
            self._admission.settle(self._knocked_at)
            self._knocked_at = None


class GatewayServer:
    """`async with GatewayServer(config) as server:` listens at `server.address` until the block ends, then drains."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer = no_spans,
        on_silence: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self.clock = clock
        self._tracer = tracer
        self._limits = ProtocolLimits(
            contexts=config.contexts,
            text_bytes=config.text_bytes,
            idle_ms=config.idle_ms,
            context_idle_ms=config.context_idle_ms,
            window_ms=config.window_ms,
        )
        self.metrics = Metrics()
        self.link = EngineLink(config.socket, self.metrics, clock=clock, on_silence=on_silence)
        tickets = Tickets(Path(config.socket).parent / "tickets", config.ticket_ms / 1000, time.time)
        self.admission = Admission(config, tickets, clock)
        self._files = StaticFiles()
        self.pending: set[Connection] = set()  # connections that have not made their request
        self._sessions: dict[Session, Caller] = {}
        self._is_draining = False
        self._is_empty = asyncio.Event()  # the last session of a drain is over
        self._server: Server | None = None
        self._tasks: list[asyncio.Task[None]] = []  # they end by cancellation, or by our bug

    @property
    def address(self) -> str:
        """Where the page is; the speech socket is at the same host and port."""
        assert self._server is not None, "not started"
        port = self._server.sockets[0].getsockname()[1]
        host = self._config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_contexts(self) -> int:
        return sum(session.num_contexts for session in self._sessions)

    async def __aenter__(self) -> Self:
        self._server = await serve(
            self._handle,
            self._config.host,
            self._config.port,
            select_subprotocol=_select_subprotocol,
            compression=None,
            process_request=self._admit,
            server_header="rill",
            open_timeout=HANDSHAKE_S,
            ping_interval=self._config.ping_ms / 1000,
            ping_timeout=self._config.stall_ms / 1000,
            close_timeout=2,
            max_size=wire.MESSAGE_BYTES,
            write_limit=(WRITE_LIMIT, WRITE_LIMIT // 4),
            create_connection=partial(Connection, self),  # type: ignore[arg-type]  # a type or what makes one
            reuse_port=self._config.processes > 1 or None,
            backlog=BACKLOG,
        )
        self._tasks = [
            asyncio.create_task(self.link.run(), name="engine-link"),
            asyncio.create_task(self._tick(), name="ticks"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def failure(self) -> None:
        """Returns when the server can't go on, by our bug."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    async def stop(self) -> None:
        """Tell callers, wait until the drain deadline, end the rest, stop listening. Until then `/readyz` says why."""
        assert self._server is not None, "not started"
        self._is_draining = True
        drain_s = self._config.drain_ms / 1000
        for session in self._sessions:
            session.retire("shutdown", drain_s)
        if not self._sessions:
            self._is_empty.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s + DRAIN_MARGIN_S):
                await self._is_empty.wait()
        for connection in list(self.pending):
            connection.transport.abort()
        self._server.close()
        await self._server.wait_closed()
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                logger.error("a task of the server failed", exc_info=result)

    def reload(self, keys: Mapping[str, KeyConfig]) -> None:
        """Other keys from now on: connections whose key is gone are closed."""
        self.admission.reload(keys)
        for session, caller in self._sessions.items():
            if self.admission.is_revoked(caller):
                session.dismiss(Close.KEY_REVOKED, "the key is not valid any more")

    async def _tick(self) -> None:
        """Every session's deadlines, the loop's lag, and once a second the gauges."""
        for count in itertools.count():
            due = self.clock() + TICK_S
            await asyncio.sleep(TICK_S)
            now = self.clock()
            self.metrics.loop_lag.observe(max(now - due, 0.0))
            for session in list(self._sessions):
                session.tick(now)
            if count % TICKS_PER_GAUGE == 0:
                states = Counter(state for session in self._sessions for state in session.states())
                for state in STATES:
                    self.metrics.contexts.labels(state).set(states[state])

    # ---- before the upgrade

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """None lets the handshake go on; anything else is the answer."""
        assert isinstance(connection, Connection), "made by our own factory"
        connection.settle()
        try:
            if request.method != "GET":
                raise Denied(HTTPStatus.METHOD_NOT_ALLOWED, "GET only")
            url = urlsplit(request.path)
            if url.path == wire.PATH:
                self._admit_caller(connection, request.headers, url.query)
            elif url.path == json_protocol.PATH:
                connection.dialect = JsonProtocol
                connection.ping_timeout = None  # its clients pong only while they listen; TCP tells of dead ones
                self._admit_caller(connection, json_protocol.with_key(request.headers, url.query), url.query)
            else:
                return self._answer(url.path, connection, request.headers)
        except Denied as denied:
            self.metrics.turned_away.labels(str(denied.status.value)).inc()
            return refuse(denied)
        return None

    def _admit_caller(self, connection: Connection, headers: Headers, query: str) -> None:
        """Raises Denied."""
        origins, hosts = headers.get_all("Origin"), headers.get_all("Host")
        if len(origins) > 1 or len(hosts) > 1:
            raise Denied(HTTPStatus.BAD_REQUEST, "Origin and Host may be given once")
        if origins and not self._is_allowed(origins[0], "".join(hosts)):
            raise Denied(HTTPStatus.FORBIDDEN, "this origin may not connect")
        if "Upgrade" not in headers:
            raise Denied(HTTPStatus.UPGRADE_REQUIRED, "this is a WebSocket")
        offered = [name.strip() for name in ",".join(headers.get_all("Sec-WebSocket-Protocol")).split(",")]
        if connection.dialect is SpeechProtocol and wire.SUBPROTOCOL not in offered:
            raise Denied(HTTPStatus.BAD_REQUEST, f"subprotocol {wire.SUBPROTOCOL} must be offered")
        if self._is_draining:
            raise Denied(HTTPStatus.SERVICE_UNAVAILABLE, "draining", retry_after_s=1)
        if len(self._sessions) >= self._config.connections:
            raise Denied(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections", retry_after_s=1)
        connection.caller = self.admission.enter(self._address(connection, headers), headers, query)

    def _address(self, connection: Connection, headers: Headers) -> str:
        peer = connection.remote_address
        return self.admission.address(peer[0] if peer else "", headers)

    def _is_allowed(self, origin: str, host: str) -> bool:
        """The configured origins; with none, our own page. A loopback server believes only loopback names, so that a
        name that was made to point here (DNS rebinding) gains nothing."""
        if self._config.origins:
            return origin in self._config.origins
        own = urlsplit(origin)
        return own.netloc == host and (not is_loopback(self._config.host) or is_loopback(own.hostname or ""))

    def _answer(self, path: str, connection: Connection, headers: Headers) -> Response:
        """What is not the speech socket. Raises Denied."""
        match path:
            case "/livez":
                return respond(HTTPStatus.OK, b"alive\n")
            case "/readyz":
                return self._readiness()
            case "/metrics":
                is_local = is_loopback(self._address(connection, headers))
                if not self.admission.may_see_metrics(headers, is_local=is_local):
                    raise Denied(HTTPStatus.UNAUTHORIZED, "a key is needed")
                return respond(HTTPStatus.OK, self.metrics.render(), "text/plain; version=0.0.4; charset=utf-8")
            case "/ticket":
                ticket = self.admission.ticket(self._address(connection, headers), headers)
                return respond_json(HTTPStatus.OK, {"ticket": ticket, "expires_ms": self._config.ticket_ms})
            case _:
                if (page := self._files.get(path)) is not None:
                    return page
                raise Denied(HTTPStatus.NOT_FOUND, "no such page")

    def _readiness(self) -> Response:
        gauges = self.link.gauges
        lanes = self.link.ready.lanes if self.link.ready is not None else 0
        why = self._why_not_ready()
        table = {
            "ready": not why,
            "why": why or "ready",
            "contexts": self.num_contexts,
            "lanes": lanes,
            "lanes_used": gauges.lanes_used if gauges is not None else 0,
            "places": _places(gauges) if gauges is not None else lanes,
        }
        return respond_json(HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK, table)

    def _why_not_ready(self) -> str:
        """Empty if a new caller would be served. An engine opens its pipe when it is warm."""
        if self._is_draining:
            return "draining"
        if self.link.ready is None:
            return "engine gone" if self.link.was_ready else "engine not warm"
        if len(self._sessions) >= self._config.connections:
            return "too many connections"
        return "engine full" if self.link.gauges is not None and _is_full(self.link.gauges) else ""

    # ---- after it

    async def _handle(self, connection: ServerConnection) -> None:
        assert isinstance(connection, Connection) and connection.caller is not None, "admitted before the upgrade"
        _set_socket_options(connection, self._config.stall_ms)
        session = Session(
            connection,
            self.link,
            connection.dialect,
            limits=self._limits,
            quota=connection.caller,
            metrics=self.metrics,
            tracer=self._tracer,
            stall_s=self._config.stall_ms / 1000,
            expires_at=self.clock() + self._config.age_ms / 1000 * random.uniform(0.9, 1.1),
            goaway_s=self._config.goaway_ms / 1000,
            clock=self.clock,
        )
        self._sessions[session] = connection.caller
        if self._is_draining:  # it was let in just before
            session.retire("shutdown", 0.0)
        try:
            await session.run()
        finally:
            del self._sessions[session]
            if not self._sessions and self._is_draining:
                self._is_empty.set()


def _is_full(gauges: Gauges) -> bool:
    """Would a new context have to wait?"""
    return gauges.lanes_used >= _places(gauges)


def _places(gauges: Gauges) -> int:
    """Lanes, or as many of them as can be played, where the engine has measured that."""
    return min(gauges.lanes, gauges.places or gauges.lanes)


def _set_socket_options(connection: ServerConnection, stall_ms: int) -> None:
    """Small buffers and, where the system has them, limits on unsent and unacknowledged data."""
    sock = connection.transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    for name, value in (("TCP_NOTSENT_LOWAT", UNSENT_LIMIT), ("TCP_USER_TIMEOUT", stall_ms)):
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _select_subprotocol(connection: ServerConnection, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    """Ours where it is offered. That it must be, on its path, was seen to before."""
    return Subprotocol(wire.SUBPROTOCOL) if wire.SUBPROTOCOL in offered else None


def is_loopback(host: str) -> bool:
    """True for names and addresses that only this machine can reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(config: GatewayConfig, *, without_keys: bool) -> None:
    """Raises ConfigError for a host that others can reach, unless there are keys or the operator said to go without."""
    if not is_loopback(config.host) and not config.keys and not without_keys:
        raise ConfigError(
            f"host {config.host} can be reached by others and there are no keys; `rill key NAME` makes one, "
            "--without-keys goes without"
        )


async def run(
    config: GatewayConfig,
    announce: Callable[[str], None],
    *,
    load_keys: Callable[[], Mapping[str, KeyConfig]],
    is_leashed: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT or, leashed, the parent's end. SIGHUP reads the keys again.

    `announce` gets one line with the address, when the engine has answered, and one whenever it hangs.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if is_leashed:
        on_parent_gone(stop.set)
    tracer = make_tracer() if config.spans else no_spans
    try:
        async with GatewayServer(config, tracer=tracer, on_silence=lambda: announce(SILENT)) as server:
            loop.add_signal_handler(signal.SIGHUP, _reload, server, load_keys)
            tasks = [
                asyncio.create_task(_greet(server, announce), name="greeter"),
                asyncio.create_task(stop.wait(), name="stopper"),
                asyncio.create_task(server.failure(), name="failure"),
            ]
            await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
    except OSError as error:
        raise ConfigError(f"can't listen at {config.host} port {config.port}: {error.strerror}") from error


def _reload(server: GatewayServer, load_keys: Callable[[], Mapping[str, KeyConfig]]) -> None:
    try:
        keys = load_keys()
    except profiles.ConfigError as error:
        logger.error("the keys stay as they are: %s", error)
        return
    server.reload(keys)
    logger.info("%d keys from now on", len(keys))


async def _greet(server: GatewayServer, announce: Callable[[str], None]) -> None:
    await server.link.is_ready.wait()
    announce(f"{READY}{server.address}")
