"""A WebSocket client by hand, for what no library would send, and for clients that don't read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

import msgpack

from tests.gateway.raw_client import PATIENCE_S

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
REQUEST = (
    "GET {path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Protocol: rill.v1\r\n\r\n"
)


def frame(opcode: int, data: bytes = b"", *, is_final: bool = True, is_masked: bool = True, reserved: int = 0) -> bytes:
    """One frame; the mask is zero, so that the payload stays readable."""
    size, mask = len(data), 0x80 if is_masked else 0
    if size < 126:
        length = bytes([mask | size])
    elif size < 1 << 16:
        length = bytes([mask | 126]) + struct.pack(">H", size)
    else:
        length = bytes([mask | 127]) + struct.pack(">Q", size)
    return bytes([(0x80 if is_final else 0) | reserved << 4 | opcode]) + length + bytes(4 if is_masked else 0) + data


def message(t: str, **fields: object) -> bytes:
    """A whole rill.v1 message in one frame."""
    return frame(BINARY, msgpack.packb({"t": t, **fields}))


class RawSocket:
    """Bytes out, frames in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def frame(self) -> tuple[int, bytes]:
        """The next frame: its opcode and payload."""
        async with asyncio.timeout(PATIENCE_S):
            first, second = await self.reader.readexactly(2)
            size = second & 0x7F
            if size == 126:
                size = struct.unpack(">H", await self.reader.readexactly(2))[0]
            elif size == 127:
                size = struct.unpack(">Q", await self.reader.readexactly(8))[0]
            return first & 0x0F, await self.reader.readexactly(size)

    async def close_code(self) -> int | None:
        """That of the close frame; None if the connection ended without one."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                opcode, data = await self.frame()
                if opcode == CLOSE:
                    return int(struct.unpack(">H", data[:2])[0])
        return None

    async def is_over(self, patience_s: float = PATIENCE_S) -> bool:
        """Has the other side let go? Whatever it still says is thrown away."""
        try:
            async with asyncio.timeout(patience_s):
                while await self.reader.read(1 << 16):
                    pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True


@contextlib.asynccontextmanager
async def raw_tcp(address: str, *, receive_bytes: int = 0) -> AsyncIterator[RawSocket]:
    """Connected, nothing said. With `receive_bytes`, no more than about that is buffered for one who doesn't read."""
    host, port = address.removeprefix("http://").removesuffix("/").split(":")
    sock = socket.create_connection((host, int(port)))
    if receive_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=sock, limit=receive_bytes or 1 << 16)
    try:
        yield RawSocket(reader, writer)
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def raw_socket(address: str, path: str = "/v1/speech", *, receive_bytes: int = 0) -> AsyncIterator[RawSocket]:
    """Upgraded; the greeting is not read."""
    async with raw_tcp(address, receive_bytes=receive_bytes) as client:
        client.send(REQUEST.format(path=path).encode())
        answer = await client.reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 101"), answer
        yield client
