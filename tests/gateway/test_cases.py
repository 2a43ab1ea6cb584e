"""Faults that users of such systems met, against a scripted engine. The numbers are those of the list of cases."""

from __future__ import annotations

import asyncio
import socket
import time

import msgpack
import numpy as np
import pytest

from engine import messages as engine
from tests.gateway.conftest import Stack, StackMaker
from tests.gateway.raw_client import check_promises, raw_client, until
from tests.gateway.test_wire import UNDECODABLE
from tests.scripted_engine import Script

SENTENCE = "This is a sentence of some length to be spoken. "


async def test_g01_a_cancel_before_the_first_audio_plays_nothing(make_stack: StackMaker) -> None:
    async with make_stack(Script(step_s=0.05)) as stack, raw_client(stack.address) as client:
        await client.say("open", c="a")
        await client.say("text", c="a", n=0, s=SENTENCE)
        await client.say("cancel", c="a")
        await client.hear_end("a")
        await client.hear_all()
        check_promises(client.of("a"))
        assert client.of("a")[-1]["t"] == "cancelled"
        assert client.audio("a") == b""
        await until(lambda: stack.engine.num_contexts == 0)
        assert stack.server.link.num_leases == 0


async def test_g02_nothing_is_heard_after_a_cancel_in_mid_audio(make_stack: StackMaker) -> None:
    script = Script(step_s=0.01, late_audio=True)
    async with make_stack(script) as stack, raw_client(stack.address) as client:
        await client.say("open", c="a")
        await client.say("text", c="a", n=0, s=SENTENCE * 20)
        while len(client.audio("a")) < 48_000:
            await client.hear_until("audio", "a")
        asked = time.perf_counter()
        await client.say("cancel", c="a")
        end = await client.hear_end("a")
        assert time.perf_counter() - asked < 0.5  # 50 ms is measured at leisure, this machine may be busy
        assert end["t"] == "cancelled"
        assert end["samples"] == len(client.audio("a")) // 2
        assert await client.hear_all() == []
        assert stack.engine.num_contexts == 0


@pytest.mark.parametrize("message", ["text", "flush", "end", "credit"])
async def test_g04_an_unknown_context_is_never_opened_implicitly(stack: Stack, message: str) -> None:
    async with raw_client(stack.address) as client:
        await client.say(message, c="ghost", n=0, s="Hello there.", f=0, ms=5)
        error = await client.hear()
        assert (error["t"], error["c"], error["code"]) == ("error", "ghost", "unknown_context")
        assert not stack.engine.received
        assert (await client.speak("ghost", SENTENCE))["t"] == "done"


async def test_g04_a_cancel_of_an_unknown_context_is_answered_and_of_a_finished_one_is_not(stack: Stack) -> None:
    async with raw_client(stack.address) as client:
        await client.say("cancel", c="ghost")
        assert await client.hear() == {"t": "cancelled", "c": "ghost", "samples": 0, "ms": 0.0, "text_upto": 0}
        await client.speak("a", SENTENCE)
        await client.say("cancel", c="a")
        await client.say("ping", x=1)
        assert (await client.hear())["t"] == "pong"


async def test_g12_a_socket_that_is_never_read_is_ended_and_others_go_on(make_stack: StackMaker) -> None:
    async with make_stack(stall_ms=600, ping_ms=60_000) as stack:
        with socket.create_connection(_host_and_port(stack.address)) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await _shake_hands(deaf)
            for c in "abcdefgh":
                deaf.sendall(_frame({"t": "open", "c": c, "fmt": {"enc": "f32le", "rate": 48000}, "pace": "none"}))
                deaf.sendall(_frame({"t": "text", "c": c, "n": 0, "s": SENTENCE * 20}))
            await until(lambda: stack.server.num_contexts == 8)
            async with raw_client(stack.address) as other:
                assert (await other.speak("mine", SENTENCE))["t"] == "done"
            await until(lambda: stack.server.metrics.value("rill_stalled_writers_total") == 1)
            await until(lambda: stack.engine.num_contexts == 0)
        assert stack.server.num_contexts == 0


def _host_and_port(address: str) -> tuple[str, int]:
    host, port = address.removeprefix("http://").removesuffix("/").split(":")
    return host, int(port)


async def _shake_hands(sock: socket.socket) -> None:
    """A WebSocket handshake by hand, so that no library reads behind our back."""
    sock.sendall(
        b"GET /v1/speech HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Protocol: rill.v1\r\n\r\n"
    )
    answer = await asyncio.to_thread(sock.recv, 1024)
    assert answer.startswith(b"HTTP/1.1 101")


def _frame(table: dict[str, object]) -> bytes:
    """A masked binary frame; the mask is zero."""
    data: bytes = msgpack.packb(table)
    length = bytes([0x80 | len(data)]) if len(data) < 126 else bytes([0x80 | 126]) + len(data).to_bytes(2, "big")
    return b"\x82" + length + bytes(4) + data


NOTHING = [
    "",
    " ",
    "\n",
    "...",
    "!!!",
    "🙂🙂",
    "***",
    "---",
    "```",
    "\u200d\u200d",
    "\u0301",
    "。",
    "\t \r\n",
    "#",
    "—",
    "¿?",
]


@pytest.mark.parametrize("nothing", NOTHING, ids=ascii)
async def test_g14_text_with_nothing_to_say_is_done_without_audio(stack: Stack, nothing: str) -> None:
    async with raw_client(stack.address) as client:
        end = await client.speak("a", nothing)
        assert (end["t"], end["samples"]) == ("done", 0)
        for order in ([nothing, SENTENCE], [SENTENCE, nothing]):
            await client.say("open", c="b")
            for n, piece in enumerate(order):
                await client.say("text", c="b", n=n, s=piece)
            await client.say("end", c="b")
            end = await client.hear_end("b")
            assert end["t"] == "done" and end["samples"] > 0


async def test_g16_every_open_context_gets_its_terminal_when_one_fails(stack: Stack) -> None:
    async with raw_client(stack.address) as client:
        texts = {"a": SENTENCE, "b": "Now FAULT comes. ", "c": SENTENCE, "d": ""}
        for c, text in texts.items():
            await client.say("open", c=c)
            await client.say("text", c=c, n=0, s=text)
            await client.say("end", c=c)
        ends = {}
        while len(ends) < len(texts):
            message = await client.hear()
            if message["t"] in ("done", "error"):
                ends[message["c"]] = message
        assert ends["b"]["code"] == "engine_error"
        assert [ends[c]["t"] for c in "acd"] == ["done"] * 3
        for c in texts:
            check_promises(client.of(c))


@pytest.mark.parametrize("enc", ["s16le", "f32le", "mulaw", "alaw"])
async def test_g27_no_message_is_larger_than_64_kib(make_stack: StackMaker, enc: str) -> None:
    script = Script(step_samples=480_000)
    async with make_stack(script) as stack, raw_client(stack.address) as client:
        fmt = {"enc": enc, "rate": 48_000}
        end = await client.speak("a", SENTENCE * 2, fmt=fmt)  # the client checks each message's size
        assert end["t"] == "done"
        width = {"s16le": 2, "f32le": 4}.get(enc, 1)
        sizes = [len(message["d"]) / width / 48 for message in client.of("a") if message["t"] == "audio"]
        assert max(sizes) <= 200
        assert min(sizes[:-1]) >= 20


async def test_g28_loud_audio_clips_on_the_wire(make_stack: StackMaker) -> None:
    async with make_stack(Script(amplitude=1.2)) as stack, raw_client(stack.address) as client:
        await client.speak("a", SENTENCE, seed=1)
        wave = np.frombuffer(client.audio("a"), dtype="<i2").astype(int)
        assert wave.max() == 32767
        assert np.abs(np.diff(wave)).max() < 8_000  # a wrapped sample would jump by 65536


@pytest.mark.parametrize("data", UNDECODABLE.values(), ids=UNDECODABLE.keys())
async def test_g36_what_cannot_be_decoded_closes_that_socket_alone(stack: Stack, data: bytes) -> None:
    async with raw_client(stack.address) as other, raw_client(stack.address) as client:
        await client.socket.send(data)
        assert await client.close_code() == 4400
        assert (await other.speak("a", SENTENCE))["t"] == "done"


@pytest.mark.parametrize(
    ("data", "code"),
    [("hello", 1003), (b"\x81\xa1t\xa2\xff\xfe", 1007), (b"\x80" * (1 << 20), 1009), (b"\x80" * 65_537, 1009)],
    ids=["text frame", "bad UTF-8", "1 MiB of empty maps", "a byte too many"],
)
async def test_g36_other_frames_have_their_own_close_codes(stack: Stack, data: str | bytes, code: int) -> None:
    async with raw_client(stack.address) as client:
        await client.socket.send(data)
        assert await client.close_code() == code


async def test_g36_what_decodes_but_is_wrong_is_answered_and_the_socket_lives(stack: Stack) -> None:
    async with raw_client(stack.address) as client:
        for table in ({"t": "sing"}, {"x": 1}, {"t": None}, {"t": "open"}, {"t": "open", "c": "a", "seed": "x"}):
            await client.socket.send(msgpack.packb(table))
            error = await client.hear()
            assert (error["t"], error["code"]) == ("error", "bad_message")
        assert (await client.speak("a", SENTENCE))["t"] == "done"


async def test_g35_a_lost_engine_ends_each_context_once_and_the_sockets_stay(make_stack: StackMaker) -> None:
    async with (
        make_stack(Script(step_s=0.02)) as stack,
        raw_client(stack.address) as one,
        raw_client(stack.address) as two,
    ):
        for client in (one, two):
            for c in "ab":
                await client.say("open", c=c)
                await client.say("text", c=c, n=0, s=SENTENCE * 20)
        await one.hear_until("audio", "a")
        await two.hear_until("audio", "b")
        lost = time.perf_counter()
        stack.engine.kill()
        for client in (one, two):
            ends = [await client.hear_end("a"), [m for m in client.of("b") if m["t"] == "error"]]
            assert ends[0]["code"] == "engine_restart" and ends[0]["retry"] is True
            if not ends[1]:
                ends[1] = [await client.hear_end("b")]
            assert time.perf_counter() - lost < 1.0
        await stack.server.link.is_ready.wait()
        for client in (one, two):
            await client.hear_all()
            for c in "ab":
                check_promises(client.of(c))
            assert (await client.speak("c", SENTENCE))["t"] == "done"


async def test_while_the_engine_is_away_an_open_is_refused_for_now(make_stack: StackMaker) -> None:
    async with make_stack(Script(is_ready=False)) as stack, raw_client(stack.address) as client:
        await client.say("open", c="a")
        error = await client.hear()
        assert (error["code"], error["retry"], error["after_ms"] > 0) == ("engine_restart", True, True)


async def test_an_overloaded_engine_refuses_and_says_when_to_try_again(make_stack: StackMaker) -> None:
    async with make_stack(Script(lanes=1, waiting=1, step_s=0.02)) as stack, raw_client(stack.address) as client:
        for c in "ab":
            await client.say("open", c=c)
            await client.hear_until("opened", c)
        await client.say("open", c="c")
        error = await client.hear_end("c")
        assert (error["code"], error["retry"], error["after_ms"]) == ("overloaded", True, 500)
        for c in "ab":
            await client.say("text", c=c, n=0, s="Still here.")
            await client.say("end", c=c)
            assert (await client.hear_end(c))["t"] == "done"


async def test_a_hang_up_frees_everything(make_stack: StackMaker) -> None:
    async with make_stack(Script(step_s=0.01)) as stack:
        async with raw_client(stack.address) as client:
            for c in "abc":
                await client.say("open", c=c)
                await client.say("text", c=c, n=0, s=SENTENCE * 20)
            await client.hear_until("audio")
            client.socket.transport.abort()
        await until(lambda: stack.engine.num_contexts == 0)
        assert stack.server.link.num_leases == 0
        assert stack.server.num_contexts == 0


async def test_same_seed_same_audio_alone_in_a_crowd_and_in_pieces(stack: Stack) -> None:
    async with raw_client(stack.address) as client:
        await client.speak("alone", SENTENCE * 3, seed=5)
        for c, seed in (("same", 5), ("other", 6)):
            await client.say("open", c=c, seed=seed)
        for n, character in enumerate(SENTENCE * 3):
            for c in ("same", "other"):
                await client.say("text", c=c, n=n, s=character)
        for c in ("same", "other"):
            await client.say("end", c=c)
        ends = set()
        while ends != {"same", "other"}:
            message = await client.hear()
            if message["t"] == "done":
                ends.add(message["c"])
        assert client.audio("same") == client.audio("alone") != client.audio("other")


async def test_a_megabyte_of_text_is_bounded_and_others_go_on(make_stack: StackMaker) -> None:
    """G22"""
    async with (
        make_stack(Script(step_s=0.005), text_bytes=65_536) as stack,
        raw_client(stack.address) as client,
        raw_client(stack.address) as other,
    ):
        await client.say("open", c="a")
        for n in range(1024):
            await client.say("text", c="a", n=n, s="words and " * 102)
        assert (await client.hear_end("a"))["code"] == "text_too_long"
        assert (await other.speak("b", "Still here."))["t"] == "done"


async def test_credit_rests_the_engine_row(stack: Stack) -> None:
    async with raw_client(stack.address) as client:
        await client.say("open", c="a")
        await client.say("credit", c="a", ms=1_000)
        await client.say("text", c="a", n=0, s=SENTENCE * 20)
        await client.say("end", c="a")
        await client.hear_all()
        assert len(client.audio("a")) == 48_000
        made = sum(len(link.contexts) and next(iter(link.contexts.values())).samples for link in stack.engine.links)
        assert made <= 10 * engine.SAMPLE_RATE_HZ
        await client.say("credit", c="a", ms=10_000_000)
        assert (await client.hear_end("a"))["t"] == "done"
