"""The JSON endpoint as its documented clients use it, over the scripted engine."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from engine import messages as engine
from engine.config import KeyConfig
from gateway.admission import digest
from gateway.errors import Violation
from gateway.json_protocol import JsonProtocol
from tests.gateway.conftest import Stack, StackMaker
from tests.gateway.raw_client import until
from tests.gateway.test_protocol import ENGINE, Bench, play_engine
from tests.scripted_engine import SAMPLE_RATE_HZ, Script, tone

FORMAT = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24_000}
SETTINGS = {"model_id": "any", "voice": {"mode": "id", "id": "ada"}, "output_format": FORMAT, "language": "en"}
PATIENCE_S = 10.0


class JsonClient:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.heard: list[dict[str, Any]] = []

    async def ask(self, context_id: str | None, transcript: str = "", **fields: Any) -> None:
        request = {**SETTINGS, "transcript": transcript, **fields}
        await self.socket.send(json.dumps(request if context_id is None else {**request, "context_id": context_id}))

    async def cancel(self, context_id: str) -> None:
        await self.socket.send(json.dumps({"context_id": context_id, "cancel": True}))

    async def hear(self) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            data = await self.socket.recv()
        assert isinstance(data, str) and len(data) <= 65_536
        message: dict[str, Any] = json.loads(data)
        assert message["context_id"] and isinstance(message["done"], bool) and message["status_code"]
        self.heard.append(message)
        return message

    async def hear_end(self, context_id: str | None = None) -> dict[str, Any]:
        while True:
            message = await self.hear()
            if context_id in (None, message["context_id"]) and message["type"] in ("done", "error"):
                return message

    async def hear_all(self, quiet_s: float = 0.15) -> list[dict[str, Any]]:
        heard = []
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(quiet_s):
                    heard.append(await self.hear())
        return heard

    def audio(self, context_id: str) -> bytes:
        chunks = [one for one in self.heard if one["context_id"] == context_id and one["type"] == "chunk"]
        return b"".join(base64.b64decode(chunk["data"]) for chunk in chunks)


@contextlib.asynccontextmanager
async def json_client(stack: Stack, query: str = "", **options: Any) -> AsyncIterator[JsonClient]:
    url = stack.address.replace("http", "ws", 1) + "tts/websocket?cartesia_version=2025-04-16" + query
    async with connect(url, compression=None, proxy=None, close_timeout=1, **options) as socket:
        yield JsonClient(socket)


def spoken(stack: Stack) -> str:
    return "".join(clause.text for clause in stack.engine.received if isinstance(clause, engine.Clause))


async def test_pieces_of_one_context_are_spoken_verbatim_and_end_in_one_done(stack: Stack) -> None:
    pieces = ["Größe: ", "3,5 ", "€", " — wow", "!  Next", " one. "]
    async with json_client(stack) as client:
        for piece in pieces:
            await client.ask("a", piece, **{"continue": True})
        await client.ask("a", "", **{"continue": False})
        end = await client.hear_end("a")
        assert end == {"type": "done", "done": True, "status_code": 206, "context_id": "a"}
        assert await client.hear_all() == []
        assert spoken(stack) == "".join(pieces)
        letters = sum(c.isalnum() for c in "".join(pieces))
        assert len(client.audio("a")) == 2 * 1_200 * letters
        assert {message["type"] for message in client.heard} == {"chunk", "done"}


async def test_a_request_without_a_context_gets_one_of_its_own(stack: Stack) -> None:
    async with json_client(stack) as client:
        await client.ask(None, "Hello.")
        await client.ask(None, "There.")
        ends = [await client.hear_end(), await client.hear_end()]
        assert len({end["context_id"] for end in ends}) == 2 and all(end["done"] for end in ends)


@pytest.mark.parametrize(
    ("encoding", "width", "silence"),
    [("pcm_s16le", 2, 0), ("pcm_f32le", 4, 0), ("pcm_mulaw", 1, 255), ("pcm_alaw", 1, 213)],
)
@pytest.mark.parametrize("rate", [8_000, 44_100])
async def test_every_format_is_what_was_asked_for(
    encoding: str, width: int, silence: int, rate: int, stack: Stack
) -> None:
    fmt = {"container": "raw", "encoding": encoding, "sample_rate": rate}
    async with json_client(stack) as client:
        await client.ask("a", "Hello there.", output_format=fmt)
        await client.ask("quiet", "🙂🙂", output_format=fmt)
        for _ in range(2):
            assert (await client.hear_end())["type"] == "done"
        assert len(client.audio("a")) == pytest.approx(width * rate * 0.05 * 10, abs=2 * width)
        assert client.audio("quiet") == bytes([silence]) * (width * rate // 10)


async def test_the_samples_are_the_engines_own(stack: Stack) -> None:
    async with json_client(stack) as client:
        await client.ask("a", "Hi.")
        await client.hear_end()
        (opened,) = stack.engine.received_of(engine.Open)
        assert isinstance(opened, engine.Open)
        expected = np.frombuffer(tone("ada", opened.seed, 0, 0, 2_400), dtype="<f4")
        got = np.frombuffer(client.audio("a"), dtype="<i2") / 32_767
        np.testing.assert_allclose(got, expected, atol=1 / 32_767)
        assert (opened.voice, opened.lang) == ("ada", "en")


@pytest.mark.parametrize("text", ["", " ", "\n", "...", "🙂🙂🙂", "***", "```", "\u200d", "\u0301"])
async def test_a_text_with_nothing_to_say_is_a_moment_of_silence_and_done(text: str, stack: Stack) -> None:
    async with json_client(stack) as client:
        await client.ask("a", text)
        assert (await client.hear_end("a"))["type"] == "done"
        assert client.audio("a") == (bytes(2 * 2_400) if text.strip() else b"")
        await client.ask("b", "Hello.")
        assert (await client.hear_end("b"))["type"] == "done"


async def test_an_emoji_cut_in_two_by_its_sender_harms_nothing(stack: Stack) -> None:
    async with json_client(stack) as client:
        for half in ("Hello \\ud83d", "\\ude42 there.", "\\\\ud83d"):
            await client.socket.send('{"context_id": "a", "continue": true, "transcript": "' + half + '"}')
        await client.socket.send('{"context_id": "\\udc00", "transcript": "Hi."}')
        await client.ask("a", "", **{"continue": False})
        assert {(await client.hear_end())["type"] for _ in range(2)} == {"done"}
        assert "Hello \ufffd\ufffd there.\\ud83d" in spoken(stack)


async def test_a_cancel_ends_with_done_and_the_id_stays_dead(make_stack: StackMaker) -> None:
    async with make_stack(Script(step_s=0.01)) as stack, json_client(stack) as client:
        await client.ask("a", "A rather long sentence, for somebody to cut in. " * 20, **{"continue": True})
        await client.hear()
        await client.cancel("a")
        assert (await client.hear_end("a"))["type"] == "done"
        await client.ask("a", "What was on its way already.", **{"continue": True})
        await client.cancel("a")
        assert await client.hear_all() == []
        await until(lambda: stack.engine.num_contexts == 0)
        await client.ask("b", "Go on.")
        assert (await client.hear_end("b"))["type"] == "done"


async def test_a_cancel_before_any_audio_leaves_nothing(make_stack: StackMaker) -> None:
    async with make_stack(Script(step_s=0.01)) as stack, json_client(stack) as client:
        await client.ask("a", "Hello.", **{"continue": True})
        await client.cancel("a")
        heard = await client.hear_all()
        assert [message["type"] for message in heard if message["context_id"] == "a"][-1] == "done"
        assert sum(message["type"] == "done" for message in heard) == 1
        await until(lambda: stack.server.num_contexts == 0)


async def test_flushes_that_were_asked_for_are_answered_in_order(stack: Stack) -> None:
    async with json_client(stack) as client:
        await client.ask("a", "One. ", **{"continue": True, "max_buffer_delay_ms": 0})
        await client.ask("a", "Two ", **{"continue": True, "flush": True})
        await client.ask("a", "", **{"continue": True, "flush": True})
        await client.ask("a", "three.", **{"continue": False})
        await client.hear_end("a")
        flushes = [message for message in client.heard if message["type"] == "flush_done"]
        assert [message["flush_id"] for message in flushes] == [1, 2]
        assert all(message["flush_done"] and not message["done"] for message in flushes)


async def test_thousands_of_flushes_are_answered_or_refused_and_remembered_no_longer(stack: Stack) -> None:
    async with json_client(stack) as client:
        for _ in range(2_000):
            await client.ask("a", "", **{"continue": True, "flush": True})
        await client.ask("a", "", **{"continue": False})
        await client.hear_end("a")
        flushes = [message["flush_id"] for message in client.heard if message["type"] == "flush_done"]
        assert flushes == list(range(1, 1 + len(flushes))) and len(flushes) > 100


async def test_without_buffering_a_transcript_is_spoken_at_once(stack: Stack) -> None:
    async with json_client(stack) as client:
        await client.ask("a", "No full stop here", **{"continue": True, "max_buffer_delay_ms": 0})
        assert (await client.hear())["type"] == "chunk"
        await client.cancel("a")


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown voice": ({"voice": {"mode": "id", "id": "nobody"}}, 404, "unknown_voice"),
    "embedding": ({"voice": {"mode": "embedding", "embedding": [0.1]}}, 400, "unsupported"),
    "container": ({"output_format": {**FORMAT, "container": "wav"}}, 400, "unsupported"),
    "encoding": ({"output_format": {**FORMAT, "encoding": "mp3"}}, 400, "unsupported"),
    "rate": ({"output_format": {**FORMAT, "sample_rate": 11_025}}, 400, "unsupported"),
    "speed": ({"generation_config": {"speed": 1.5}}, 400, "unsupported"),
    "volume": ({"generation_config": {"volume": 0.5}}, 400, "unsupported"),
    "emotion": ({"generation_config": {"emotion": "happy"}}, 400, "unsupported"),
    "transcript": ({"transcript": 5}, 400, "bad_message"),
    "fault": ({"transcript": "FAULT"}, 500, "engine_error"),
    "busy": ({"transcript": "BUSY"}, 503, "overloaded"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_an_error_names_its_context_says_not_done_and_ends_it(name: str, stack: Stack) -> None:
    fields, status, code = REFUSED[name]
    async with json_client(stack) as client:
        await client.ask("good", "A sentence that goes on.", **{"continue": True})
        await client.ask("bad", **{"transcript": "Hello.", **fields})
        error = await client.hear_end("bad")
        assert (error["type"], error["done"], error["status_code"], error["error_code"]) == (
            "error",
            False,
            status,
            code,
        )
        assert error["message"] and error["context_id"] == "bad"
        await client.ask("good", "", **{"continue": False})
        assert (await client.hear_end("good"))["type"] == "done"
        assert [one["type"] for one in client.heard if one["context_id"] == "bad"] == ["error"]
        assert await client.hear_all() == []


async def test_neutral_controls_and_a_foreign_catalogues_voice_are_taken(stack: Stack) -> None:
    voice = {"mode": "id", "id": "f786b574-daa5-4673-aa0c-cbe3e8534c02"}
    async with json_client(stack) as client:
        await client.ask(
            "a", "Hello.", voice=voice, add_timestamps=True, generation_config={"speed": 1.0}, speed="normal"
        )
        assert (await client.hear_end("a"))["type"] == "done"
        (opened,) = stack.engine.received_of(engine.Open)
        assert isinstance(opened, engine.Open) and opened.voice == "ada"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ("not json", 4400),
        ("[]", 4400),
        ('{"transcript": NaN}', 4400),
        ("[" * 60_000, 4400),
        ('{"\\u0041": ' + "[" * 900 + "]" * 900 + "}", 4400),
        (b"\x80", 1003),
        ('{"transcript": "' + "x" * 65_600 + '"}', 1009),
    ],
    ids=["words", "list", "nan", "nesting", "escaped nesting", "binary", "large"],
)
async def test_what_is_no_request_closes_the_socket(data: str | bytes, code: int, stack: Stack) -> None:
    async with json_client(stack) as client:
        await client.socket.send(data)
        await asyncio.wait_for(client.socket.wait_closed(), PATIENCE_S)
        assert client.socket.close_code == code


async def test_an_engine_that_dies_is_one_error_for_each_context(stack: Stack) -> None:
    async with json_client(stack) as client:
        for c in ("a", "b"):
            await client.ask(c, "STALL", **{"continue": True})
        await until(lambda: stack.engine.num_contexts == 2)
        stack.engine.kill()
        ends = {(await client.hear_end())["context_id"] for _ in range(2)}
        assert ends == {"a", "b"}
        assert {message["error_code"] for message in client.heard} == {"engine_restart"}
        await until(lambda: stack.server.link.ready is not None)
        await client.ask("a", "Again.")
        assert (await client.hear_end("a"))["type"] == "done"


async def test_a_key_may_come_in_the_services_own_header_or_in_the_query(make_stack: StackMaker) -> None:
    keys = {"agent": KeyConfig(sha256=digest("secret"))}
    async with make_stack(keys=keys) as stack:
        ways: list[dict[str, Any]] = [
            {"additional_headers": {"X-API-Key": "secret"}},
            {"additional_headers": {"Authorization": "Bearer secret"}},
            {"query": "&api_key=secret"},
        ]
        for way in ways:
            async with json_client(stack, **way) as client:
                await client.ask("a", "Hello.")
                assert (await client.hear_end("a"))["type"] == "done"
        for wrong in ({}, {"additional_headers": {"X-API-Key": "guess"}}, {"query": "&api_key="}):
            with pytest.raises(InvalidStatus) as caught:
                async with json_client(stack, **wrong):
                    pass
            assert caught.value.response.status_code == 401


async def test_a_pooled_socket_that_answers_no_pings_stays_open(make_stack: StackMaker) -> None:
    """As some clients' do between two turns: they read only while they wait for something."""
    async with make_stack(ping_ms=20, stall_ms=100) as stack, json_client(stack) as client:
        client.socket.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(0.4)
        client.socket.transport.resume_reading()  # type: ignore[attr-defined]
        await client.ask("a", "Hello.")
        assert (await client.hear_end("a"))["type"] == "done"


async def test_a_client_that_stops_reading_in_mid_audio_is_ended_and_holds_nothing(make_stack: StackMaker) -> None:
    """G11: a turn is cut by forgetting it; the socket stays open, and unread."""
    script = Script(samples_per_char=SAMPLE_RATE_HZ)
    async with make_stack(script, stall_ms=300, window_ms=30_000) as stack, json_client(stack) as client:
        client.socket.transport.pause_reading()  # type: ignore[attr-defined]
        for number in range(8):
            await client.ask(f"a{number}", "A long sentence for nobody to hear. " * 10)
        await until(lambda: stack.engine.num_contexts > 0)
        await until(lambda: stack.server.num_sessions == 0)
        assert stack.server.num_contexts == 0
        await until(lambda: stack.engine.num_contexts == 0)


# ---- any order

KEYS = ["context_id", "transcript", "continue", "flush", "cancel", "voice", "output_format", "language", "speed"]


class JsonBench(Bench):
    """The state machine without sockets; what it writes is JSON."""

    dialect = JsonProtocol

    def read(self) -> list[dict[str, Any]]:
        new = [json.loads(data) for data in self.protocol.to_send()]
        self.log += new
        return new


ASKS = st.fixed_dictionaries(
    {"context_id": st.sampled_from(["a", "b", "c"]), "transcript": st.sampled_from(["", " ", "Hi there. ", "🙂"])},
    optional={
        "continue": st.booleans(),
        "flush": st.booleans(),
        "cancel": st.booleans(),
        "max_buffer_delay_ms": st.sampled_from([0, 3_000, -1]),
        "voice": st.sampled_from([{"mode": "id", "id": "ada"}, {"id": "nobody"}, {"mode": "embedding"}, None]),
        "output_format": st.sampled_from([FORMAT, {"container": "wav"}, {"encoding": "pcm_mulaw"}]),
        "generation_config": st.sampled_from([{"speed": 1}, {"speed": 2}, None]),
    },
)


@given(st.lists(st.one_of(ASKS, ENGINE, st.just("time")), max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_request_in_any_state_is_answered_within_its_context_and_ends_it_once(steps: list[Any]) -> None:
    bench = JsonBench(contexts=2)
    is_asked: set[str] = set()  # since its last end
    for turn, step in enumerate(steps):
        if isinstance(step, dict):
            is_asked.add(step["context_id"])
            bench.protocol.receive(json.dumps(step))
        elif step == "time":
            bench.now += 0.7
            bench.protocol.tick()
        else:
            play_engine(bench, step, turn)
        for message in bench.read():
            c, kind = message["context_id"], message["type"]
            assert c in is_asked, f"{kind} after the end"
            assert kind in ("chunk", "flush_done", "done", "error")
            assert message["done"] is (kind == "done")
            if kind in ("done", "error"):
                is_asked.remove(c)
    bench.protocol.close()
    assert bench.read() == []
    assert not bench.port.routes and bench.protocol.num_contexts == 0


JSON = st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=20), st.lists, max_leaves=10)


@given(st.text(max_size=200) | JSON.map(json.dumps) | st.dictionaries(st.sampled_from(KEYS), JSON).map(json.dumps))
@settings(max_examples=150, deadline=None)
def test_any_text_is_a_request_or_a_violation(data: str) -> None:
    bench = JsonBench()
    with contextlib.suppress(Violation):
        bench.protocol.receive(data)
    for message in bench.read():
        assert message["context_id"] and message["type"] in ("done", "error")
