"""What a WebSocket server must bear, below rill.v1: pieces, sizes, control frames, and what is no WebSocket at all."""

from __future__ import annotations

import asyncio
import struct

import msgpack
import pytest

from tests.gateway.conftest import Stack, StackMaker
from tests.gateway.raw_client import raw_client
from tests.gateway.raw_socket import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT, frame, message, raw_socket, raw_tcp

PINGED = msgpack.packb({"t": "ping", "x": "hello"})


async def answer(stack: Stack, data: bytes) -> tuple[int, bytes]:
    """What comes back for these bytes, after the greeting."""
    async with raw_socket(stack.address) as client:
        await client.frame()
        client.send(data)
        return await client.frame()


def code(closing: tuple[int, bytes]) -> int:
    assert closing[0] == CLOSE
    return int(struct.unpack(">H", closing[1][:2])[0])


FRAGMENTED = {
    "two": frame(BINARY, PINGED[:3], is_final=False) + frame(CONTINUATION, PINGED[3:]),
    "one byte each": frame(BINARY, b"", is_final=False)
    + b"".join(frame(CONTINUATION, PINGED[i : i + 1], is_final=False) for i in range(len(PINGED)))
    + frame(CONTINUATION),
    "with empty ones": frame(BINARY, PINGED, is_final=False)
    + frame(CONTINUATION, is_final=False)
    + frame(CONTINUATION),
}


@pytest.mark.parametrize("data", FRAGMENTED.values(), ids=FRAGMENTED.keys())
async def test_a_message_may_come_in_fragments(stack: Stack, data: bytes) -> None:
    opcode, payload = await answer(stack, data)
    assert (opcode, msgpack.unpackb(payload)) == (BINARY, {"t": "pong", "x": "hello"})


async def test_a_frame_may_come_byte_by_byte(stack: Stack) -> None:
    async with raw_socket(stack.address) as client:
        await client.frame()
        for byte in message("ping", x=1):
            client.send(bytes([byte]))
            await client.writer.drain()
            await asyncio.sleep(0)
        assert msgpack.unpackb((await client.frame())[1])["t"] == "pong"


async def test_a_ping_between_fragments_is_answered_at_once(stack: Stack) -> None:
    async with raw_socket(stack.address) as client:
        await client.frame()
        client.send(frame(BINARY, PINGED[:3], is_final=False) + frame(PING, b"now"))
        assert await client.frame() == (PONG, b"now")
        client.send(frame(CONTINUATION, PINGED[3:]))
        assert msgpack.unpackb((await client.frame())[1])["t"] == "pong"


@pytest.mark.parametrize("data", [b"", b"x" * 125], ids=len)
async def test_a_websocket_ping_is_answered_with_its_own_bytes(stack: Stack, data: bytes) -> None:
    assert await answer(stack, frame(PING, data)) == (PONG, data)


async def test_a_pong_that_nobody_asked_for_is_ignored(stack: Stack) -> None:
    opcode, payload = await answer(stack, frame(PONG, b"?") + message("ping", x=1))
    assert (opcode, msgpack.unpackb(payload)["t"]) == (BINARY, "pong")


VIOLATIONS = {
    "a control frame of 126 bytes": (frame(PING, b"x" * 126), 1002),
    "a fragmented control frame": (frame(PING, b"x", is_final=False), 1002),
    "a continuation of nothing": (frame(CONTINUATION, b"x"), 1002),
    "a new message inside another": (frame(BINARY, b"x", is_final=False) + frame(BINARY, b"x"), 1002),
    "a reserved bit": (frame(BINARY, PINGED, reserved=4), 1002),
    "a reserved opcode": (frame(3, b"x"), 1002),
    "a reserved control opcode": (frame(11, b""), 1002),
    "no mask": (frame(BINARY, PINGED, is_masked=False), 1002),
    "a close frame of one byte": (frame(CLOSE, b"\x03"), 1002),
    "an illegal close code": (frame(CLOSE, struct.pack(">H", 1005)), 1002),
    "a close reason that is no UTF-8": (frame(CLOSE, struct.pack(">H", 1000) + b"\xff"), 1007),
    "a text frame": (frame(TEXT, b"hello"), 1003),
    "a text frame that is no UTF-8": (frame(TEXT, b"\xff\xfe"), 1007),
    "a byte too many": (frame(BINARY, b"\x80" * 65_537), 1009),
    "a claim of 8 EiB": (b"\x82\xff" + struct.pack(">Q", 1 << 62) + bytes(4), 1009),
    "fragments that add up to too much": (
        frame(BINARY, bytes(40_000), is_final=False) + frame(CONTINUATION, bytes(40_000)),
        1009,
    ),
    "a string that is no UTF-8": (frame(BINARY, b"\x81\xa1t\xa2\xff\xfe"), 1007),
    "no msgpack": (frame(BINARY, b"\xc1"), 4400),
    "nothing": (frame(BINARY), 4400),
}


@pytest.mark.parametrize(("data", "expected"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
async def test_each_violation_has_its_close_code_and_touches_nobody_else(
    stack: Stack, data: bytes, expected: int
) -> None:
    async with raw_client(stack.address) as other:
        assert code(await answer(stack, data)) == expected
        assert (await other.speak("a", "Hello."))["t"] == "done"


async def test_the_largest_message_is_taken(stack: Stack) -> None:
    empty = len(msgpack.packb({"t": "ping", "x": 1, "unknown": bytes(60_000)})) - 60_000
    data = msgpack.packb({"t": "ping", "x": 1, "unknown": bytes(65_536 - empty)})
    assert len(data) == 65_536
    assert msgpack.unpackb((await answer(stack, frame(BINARY, data)))[1])["t"] == "pong"


@pytest.mark.parametrize("status", [1000, 1001, 3000, 4999])
async def test_a_close_is_answered_with_its_code(stack: Stack, status: int) -> None:
    assert code(await answer(stack, frame(CLOSE, struct.pack(">H", status)))) == status


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/1.1\r\nHost: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1_000 + b"\r\n",
        b"BREW /v1/speech HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/speech HTTP/9.9\r\n\r\n",
        b"\x00" * 1000 + b"\r\n\r\n",
    ],
    ids=["TLS", "a long header", "many headers", "another method", "another HTTP", "zeros"],
)
async def test_what_is_no_request_is_refused_and_let_go(
    make_stack: StackMaker, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr("gateway.server.HANDSHAKE_S", 0.3)
    async with make_stack() as stack:
        async with raw_tcp(stack.address) as client:
            client.send(data)
            assert await client.is_over(5)
        async with raw_client(stack.address) as other:
            assert (await other.speak("a", "Hello."))["t"] == "done"
        assert not stack.server.pending
