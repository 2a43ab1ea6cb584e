from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import wire
from gateway.errors import Close, Refusal, Violation


def packed(value: Any) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


NESTED = b"\x81\xa1x" * 500 + b"\x80"
UNDECODABLE = {
    "empty": b"",
    "truncated": packed({"t": "ping"})[:-1],
    "trailing": packed({"t": "ping"}) + b"\x00",
    "duplicate keys": b"\x82\xa1t\xa4ping\xa1t\xa3end",
    "number as key": packed({1: "ping"}),
    "bytes as key": b"\x81\xc4\x01t\xa4ping",
    "ext": packed({"t": "ping", "x": msgpack.ExtType(5, b"abc")}),
    "timestamp": packed({"t": "ping", "x": msgpack.Timestamp(1, 0)}),
    "nan": packed({"t": "ping", "x": float("nan")}),
    "infinity": packed({"t": "open", "c": "a", "sampling": {"temperature": float("inf")}}),
    "nesting": NESTED,
    "nested five deep": packed({"t": {"a": {"b": {"c": {"d": 1}}}}}),
    "claims a map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "claims 4 GB of bytes": b"\x81\xa1t\xc6\xff\xff\xff\xff",
    "claims an array of 4 billion": b"\x81\xa1t\xdd\xff\xff\xff\xff",
    "too many containers": packed({"t": "ping", "x": [[{}] * 30] * 30}),
    "not a map": packed(["ping"]),
    "a number": b"\x05",
    "reserved byte": b"\xc1",
}


@pytest.mark.parametrize("data", UNDECODABLE.values(), ids=UNDECODABLE.keys())
def test_what_cannot_be_decoded_is_a_violation(data: bytes) -> None:
    with pytest.raises(Violation) as caught:
        wire.unpack(data)
    assert caught.value.close_code is Close.VIOLATION


def test_bad_utf8_and_size_have_their_own_close_codes() -> None:
    with pytest.raises(Violation) as caught:
        wire.unpack(b"\x81\xa1t\xa2\xff\xfe")
    assert caught.value.close_code is Close.BAD_UTF8
    with pytest.raises(Violation) as caught:
        wire.unpack(b"\x80" * (wire.MESSAGE_BYTES + 1))
    assert caught.value.close_code is Close.TOO_LARGE


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_give_a_map_or_a_violation(data: bytes) -> None:
    try:
        table = wire.unpack(data)
    except Violation:
        return
    assert all(isinstance(key, str) for key in table)
    try:
        wire.parse(table)
    except Refusal as refusal:
        assert refusal.code in ("bad_message", "unsupported")


MESSAGES: list[wire.ClientMessage] = [
    wire.Open(c="a"),
    wire.Open(
        c="a",
        voice="v",
        fmt=wire.Format(enc="mulaw", rate=8000),
        lang="en",
        instruct="softly",
        seed=2**63 - 1,
        speed=1.0,
        sampling=wire.SamplingFields(mode="ras", temperature=0.8, top_p=0.9, top_k=25, repetition_penalty=1.1),
        window_ms=500,
        pace="none",
    ),
    wire.Text(c="a", n=0, s="Größe 3,5 €"),
    wire.Flush(c="a", f=3),
    wire.End(c="a"),
    wire.Cancel(c="a", played_ms=20.5),
    wire.Credit(c="a", ms=1000),
    wire.Voices(),
    wire.Ping(x=4),
    wire.VoicePut(v="up", n=0, d=b"RIFF", name="Mia", transcript="Größe 3,5", lang="de"),
    wire.VoicePut(v="up", n=1, d=b"", last=True),
    wire.VoiceDrop(voice="0123456789ab"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_client_messages_come_back_from_their_bytes(message: wire.ClientMessage) -> None:
    assert wire.parse(wire.unpack(wire.pack(message))) == message


SERVER_MESSAGES: list[wire.ServerMessage] = [
    wire.Ready(
        session="s",
        proto=wire.SUBPROTOCOL,
        limits=wire.Limits(contexts=1, text_bytes=2, message_bytes=3, idle_ms=4, window_ms=5),
        rates=wire.RATES,
        encs=wire.ENCODINGS,
        voices=(wire.Voice(id="a", name="A", lang="en", ms=5), wire.Voice(id="b", name="B")),
        model="m",
    ),
    wire.Opened(c="a", rate=24000, enc="s16le", seed=7, voice="v"),
    wire.Audio(c="a", q=0, pos=0, d=b"\x00\x01"),
    wire.Flushed(c="a", f=0, pos=10),
    wire.Taken(c="a", n=2),
    wire.Done(c="a", samples=10, ms=0.4, stats={"first_audio_ms": 12.5}),
    wire.Cancelled(c="a", samples=10, ms=0.4, text_upto=5),
    wire.Error(c="a", code="quota", msg="later", retry=True, after_ms=100, samples=0),
    wire.Error(code="bad_message", msg="no", retry=False),
    wire.Error(v="up", code="bad_voice", msg="8000 Hz", retry=False),
    wire.VoiceKept(v="up", voice="0123456789ab", name="Mia", ms=5000),
    wire.VoiceList(list=(wire.Voice(id="a", name="A"),)),
    wire.GoAway(deadline_ms=5000, why="shutdown"),
    wire.Pong(x="here"),
]


@pytest.mark.parametrize("message", SERVER_MESSAGES, ids=lambda message: type(message).__name__)
def test_server_messages_come_back_from_their_bytes(message: wire.ServerMessage) -> None:
    back = wire.read(wire.pack(message))
    if isinstance(back, wire.Ready) and isinstance(message, wire.Ready):
        assert (back.voices, back.limits, list(back.rates)) == (message.voices, message.limits, list(message.rates))
    else:
        assert back == message


def test_clients_ignore_unknown_types_and_keys() -> None:
    assert wire.read(packed({"t": "hologram", "c": "a"})) is None
    assert wire.read(packed({"t": "pong", "x": 1, "y": 2})) == wire.Pong(x=1)


WRONG = {
    "no type": {"c": "a"},
    "type is a number": {"t": 5},
    "unknown type": {"t": "sing"},
    "no id": {"t": "end"},
    "empty id": {"t": "end", "c": ""},
    "id of 65 bytes": {"t": "end", "c": "x" * 65},
    "id of 66 bytes in 33 characters": {"t": "end", "c": "é" * 33},
    "id is a number": {"t": "end", "c": 7},
    "text is bytes": {"t": "text", "c": "a", "n": 0, "s": b"hi"},
    "n is negative": {"t": "text", "c": "a", "n": -1, "s": "hi"},
    "n is a truth value": {"t": "text", "c": "a", "n": True, "s": "hi"},
    "seed is a fraction": {"t": "open", "c": "a", "seed": 0.5},
    "seed is too large": {"t": "open", "c": "a", "seed": 2**63},
    "fmt is a string": {"t": "open", "c": "a", "fmt": "s16le"},
    "temperature is out of range": {"t": "open", "c": "a", "sampling": {"temperature": 99}},
    "credit is negative": {"t": "credit", "c": "a", "ms": -5},
    "voice_put has text for audio": {"t": "voice_put", "v": "a", "n": 1, "d": "RIFF"},
    "voice_put has no upload": {"t": "voice_put", "n": 1, "d": b""},
    "voice_put begins without a name": {"t": "voice_put", "v": "a", "n": 0, "d": b"", "transcript": "Hi."},
    "voice_put begins without a transcript": {"t": "voice_put", "v": "a", "n": 0, "d": b"", "name": "Mia"},
    "voice_put's last is a number": {"t": "voice_put", "v": "a", "n": 1, "d": b"", "last": 1},
    "voice_drop names nothing": {"t": "voice_drop"},
    "ping carries a map": {"t": "ping", "x": {}},
}


@pytest.mark.parametrize("table", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_field_is_a_bad_message(table: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as caught:
        wire.parse(table)
    assert caught.value.code == "bad_message"


@pytest.mark.parametrize("fmt", [{"enc": "opus"}, {"rate": 11025}, {"rate": 24001}], ids=str)
def test_unknown_formats_are_unsupported(fmt: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as caught:
        wire.parse({"t": "open", "c": "a", "fmt": fmt})
    assert caught.value.code == "unsupported"


def test_a_million_empty_maps_are_refused_before_they_are_built() -> None:
    many = b"\x81\xa1x\xdd" + struct.pack(">I", 60_000) + b"\x80" * 60_000
    with pytest.raises(Violation):
        wire.unpack(many)
