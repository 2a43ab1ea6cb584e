"""Everything that is packed is unpacked the same; everything else is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgpack
import pytest

from engine.messages import (
    TABLE,
    Audio,
    BadPipeMessage,
    Cancel,
    Cancelled,
    Clause,
    ClauseDone,
    ClauseTaken,
    Credit,
    Done,
    End,
    Failed,
    Gauges,
    Message,
    Open,
    Opened,
    Ready,
    SamplingChoice,
    VoiceDrop,
    VoiceDropped,
    VoiceInfo,
    VoiceKept,
    VoicePut,
    pack,
    unpack,
)

WHOSE = {"context": 7, "epoch": 2}
SAMPLES: list[Message] = [
    Open(**WHOSE, voice="ada", seed=-(2**63), sampling=SamplingChoice(mode="ras", top_p=0.5), instruct="softly"),
    Open(**WHOSE, voice="", seed=2**63 - 1, lang="en", streaming=False, allow_controls=True),
    Clause(**WHOSE, index=0, text="Größe \U0001f642"),
    End(**WHOSE),
    Cancel(**WHOSE),
    Credit(**WHOSE, samples=72_000),
    Ready(
        model="m",
        voices=[VoiceInfo(id="a", name="A", lang="en", ms=1), VoiceInfo(id="b", name="", lang="", ms=0)],
        sample_rate=24_000,
        lanes=4,
    ),
    VoicePut(**WHOSE, owner="key", name="Mia", transcript="Größe", lang="de", audio=b"RIFF\x00\xff"),
    VoiceDrop(**WHOSE, owner="key", voice="a"),
    VoiceKept(**WHOSE, voice=VoiceInfo(id="a", name="A", lang="en", ms=1, owners={"key": "Mia", "": "mine"})),
    VoiceDropped(**WHOSE),
    Opened(**WHOSE),
    ClauseTaken(**WHOSE, index=3),
    Audio(**WHOSE, pcm=b"\x00\x01\x02\xff"),
    ClauseDone(**WHOSE, index=1, samples=960),
    Done(**WHOSE, samples=960, stats={"first_audio_ms": 1.5}),
    Cancelled(**WHOSE),
    Failed(**WHOSE, code="overloaded", message="no lane", retry=True, after_ms=500),
    Gauges(lanes_used=1, lanes=2, talker_pages=3, flow_pages=4, step_ms=0.5),
]


def test_every_message_of_the_table_has_a_sample() -> None:
    assert {type(message) for message in SAMPLES} == set(TABLE.values())


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_what_is_packed_unpacks_to_the_same(message: Message) -> None:
    assert unpack(msgpack.unpackb(msgpack.packb(pack(message)))) == message


def test_unknown_keys_are_ignored_and_an_int_may_stand_for_a_float() -> None:
    table = pack(Done(**WHOSE, samples=1)) | {"later": [1], "stats": {"x": 2}}
    assert unpack(table) == Done(**WHOSE, samples=1, stats={"x": 2.0})


@pytest.mark.parametrize(
    "table",
    [
        [],
        None,
        {},
        {"t": 3},
        {"t": "hello"},
        {"t": "end", "context": 1},
        {"t": "end", "context": "1", "epoch": 2},
        {"t": "end", "context": True, "epoch": 2},
        {"t": "audio", **WHOSE, "pcm": "text"},
        {"t": "done", **WHOSE, "samples": 1, "stats": {"x": "y"}},
        {"t": "open", **WHOSE, "voice": "", "seed": 1, "sampling": {"top_k": 1.5}},
        {"t": "ready", "model": "m", "voices": [3], "sample_rate": 1, "lanes": 1},
    ],
    ids=str,
)
def test_what_is_no_message_is_refused_by_name(table: Any) -> None:
    with pytest.raises(BadPipeMessage):
        unpack(table)


@pytest.mark.parametrize("module", ["engine.messages", "engine.config", "engine.scheduler"])
def test_the_door_needs_neither_torch_nor_numpy(module: str) -> None:
    check = f"import {module}, sys; assert not {{'torch', 'numpy', 'gateway'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
