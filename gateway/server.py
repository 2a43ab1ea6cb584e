"""Sockets, the handshake, health and an ordered end. One process, one engine link, many sessions."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from engine.config import GatewayConfig
from engine.leash import on_parent_gone
from gateway import wire
from gateway.engine_link import EngineLink
from gateway.errors import ConfigError
from gateway.metrics import Metrics
from gateway.pages import StaticFiles, refuse, respond, respond_json
from gateway.protocol import ProtocolLimits
from gateway.session import Session

logger = logging.getLogger(__name__)

WRITE_LIMIT: Final = 16 * 1024  # bytes in our own buffer before a write waits
SEND_BUFFER: Final = 64 * 1024  # and in the kernel's: an ack never waits behind seconds of audio
UNSENT_LIMIT: Final = 16 * 1024
HANDSHAKE_S: Final = 10.0
RETRY_AFTER_S: Final = "1"


class GatewayServer:
    """`async with GatewayServer(config) as server:` listens at `server.address` until the block ends, then drains."""

    def __init__(self, config: GatewayConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._limits = ProtocolLimits(
            contexts=config.contexts,
            text_bytes=config.text_bytes,
            idle_ms=config.idle_ms,
            window_ms=config.window_ms,
        )
        self.metrics = Metrics()
        self.link = EngineLink(config.socket, self.metrics)
        self._files = StaticFiles()
        self._sessions: set[Session] = set()
        self._is_draining = False
        self._server: Server | None = None
        self._link_task: asyncio.Task[None] | None = None  # ends by cancellation, or by our bug

    @property
    def address(self) -> str:
        """Where the page is; the speech socket is at the same host and port."""
        assert self._server is not None, "not started"
        port = self._server.sockets[0].getsockname()[1]
        host = self._config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    @property
    def link_task(self) -> asyncio.Task[None]:
        assert self._link_task is not None, "not started"
        return self._link_task

    async def __aenter__(self) -> Self:
        self._server = await serve(
            self._handle,
            self._config.host,
            self._config.port,
            subprotocols=[Subprotocol(wire.SUBPROTOCOL)],
            compression=None,
            process_request=self._admit,
            server_header="rill",
            open_timeout=HANDSHAKE_S,
            ping_interval=self._config.ping_ms / 1000,
            ping_timeout=self._config.stall_ms / 1000,
            close_timeout=2,
            max_size=wire.MESSAGE_BYTES,
            write_limit=(WRITE_LIMIT, WRITE_LIMIT // 4),
        )
        self._link_task = asyncio.create_task(self.link.run(), name="engine-link")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop accepting, tell callers, wait until the drain deadline, end the rest."""
        assert self._server is not None and self._link_task is not None, "not started"
        self._is_draining = True
        await asyncio.gather(*(session.drain(self._config.drain_ms / 1000) for session in list(self._sessions)))
        self._server.close()
        await self._server.wait_closed()
        self._link_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._link_task

    # ---- before the upgrade

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """None lets the handshake go on; anything else is the answer."""
        if request.method != "GET":
            return refuse(HTTPStatus.METHOD_NOT_ALLOWED, "GET only", Allow="GET")
        path = urlsplit(request.path).path
        return self._admit_speech(request) if path == wire.PATH else self._answer(path)

    def _admit_speech(self, request: Request) -> Response | None:
        origins, hosts = request.headers.get_all("Origin"), request.headers.get_all("Host")
        if len(origins) > 1 or len(hosts) > 1:
            return refuse(HTTPStatus.BAD_REQUEST, "Origin and Host may be given once")
        if origins and not self._is_allowed(origins[0], "".join(hosts)):
            return refuse(HTTPStatus.FORBIDDEN, "this origin may not connect")
        offered = [name.strip() for name in ",".join(request.headers.get_all("Sec-WebSocket-Protocol")).split(",")]
        if "Upgrade" in request.headers and wire.SUBPROTOCOL not in offered:
            return refuse(HTTPStatus.BAD_REQUEST, f"subprotocol {wire.SUBPROTOCOL} must be offered")
        if self._is_draining:
            return refuse(HTTPStatus.SERVICE_UNAVAILABLE, "draining", Retry_After=RETRY_AFTER_S)
        if len(self._sessions) >= self._config.connections:
            return refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections", Retry_After=RETRY_AFTER_S)
        return None

    def _is_allowed(self, origin: str, host: str) -> bool:
        """The configured origins; with none, our own page. A loopback server believes only loopback names, so that a
        name that was made to point here (DNS rebinding) gains nothing."""
        if self._config.origins:
            return origin in self._config.origins
        own = urlsplit(origin)
        return own.netloc == host and (not is_loopback(self._config.host) or is_loopback(own.hostname or ""))

    def _answer(self, path: str) -> Response:
        match path:
            case "/livez":
                return respond(HTTPStatus.OK, b"alive\n")
            case "/readyz":
                return self._readiness()
            case "/metrics":
                text = self.metrics.render(is_engine_up=self.link.ready is not None, gauges=self.link.gauges)
                return respond(HTTPStatus.OK, text.encode(), "text/plain; version=0.0.4; charset=utf-8")
            case _:
                return self._files.get(path) or refuse(HTTPStatus.NOT_FOUND, "no such page")

    def _readiness(self) -> Response:
        gauges = self.link.gauges
        lanes = self.link.ready.lanes if self.link.ready is not None else 0
        is_full = gauges is not None and gauges.lanes_used >= gauges.lanes and gauges.waiting > 0
        why = "draining" if self._is_draining else "no engine" if self.link.ready is None else "full" if is_full else ""
        table = {
            "ready": not why,
            "why": why or "ready",
            "contexts": self.metrics.contexts,
            "lanes": lanes,
            "lanes_used": gauges.lanes_used if gauges is not None else 0,
        }
        return respond_json(HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK, table)

    # ---- after it

    async def _handle(self, connection: ServerConnection) -> None:
        _set_socket_options(connection, self._config.stall_ms)
        session = Session(
            connection,
            self.link,
            limits=self._limits,
            metrics=self.metrics,
            stall_s=self._config.stall_ms / 1000,
            clock=self._clock,
        )
        self._sessions.add(session)
        try:
            await session.run()
        finally:
            self._sessions.discard(session)


def _set_socket_options(connection: ServerConnection, stall_ms: int) -> None:
    """A small send buffer and, where the system has them, limits on unsent and unacknowledged data."""
    sock = connection.transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    for name, value in (("TCP_NOTSENT_LOWAT", UNSENT_LIMIT), ("TCP_USER_TIMEOUT", stall_ms)):
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def is_loopback(host: str) -> bool:
    """True for names and addresses that only this machine can reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, *, without_keys: bool) -> None:
    """Raises ConfigError for a host that others can reach, unless the operator said that it may go without keys."""
    if not is_loopback(host) and not without_keys:
        raise ConfigError(
            f"host {host} can be reached by others and callers need no key; say --without-keys to allow it"
        )


async def run(config: GatewayConfig, announce: Callable[[str], None], *, is_leashed: bool = False) -> None:
    """Serve until SIGTERM or SIGINT or, leashed, the parent's end.

    `announce` gets the address once, when the engine is ready to speak.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if is_leashed:
        on_parent_gone(stop.set)
    try:
        async with GatewayServer(config) as server:
            greeter = asyncio.create_task(_greet(server, announce), name="greeter")
            stopper = asyncio.create_task(stop.wait(), name="stopper")
            await asyncio.wait((stopper, server.link_task), return_when=asyncio.FIRST_COMPLETED)
            greeter.cancel()
            stopper.cancel()
    except OSError as error:
        raise ConfigError(f"can't listen at {config.host} port {config.port}: {error.strerror}") from error


async def _greet(server: GatewayServer, announce: Callable[[str], None]) -> None:
    await server.link.is_ready.wait()
    announce(server.address)
