"""Recordings on their way in, and whose voices they become."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import messages as engine
from engine.config import KeyConfig
from gateway import wire
from gateway.client import VoiceError, connect
from gateway.context import Lease
from gateway.errors import EngineUnavailable, Refusal
from gateway.voices import DROPS, RECORDING_BYTES, Room, Uploads, visible
from tests.gateway.conftest import Stack, StackMaker
from tests.gateway.raw_client import RawClient, raw_client, until
from tests.gateway.test_protocol import caller
from tests.scripted_engine import Script

WORDS = {"name": "Mia", "transcript": "The words that are spoken."}


class FakePort:
    """The engine link's part that voices need; its other end is the test."""

    def __init__(self) -> None:
        self.ready: engine.Ready | None = engine.Ready(model="m", voices=[], sample_rate=24_000, lanes=4)
        self.room = Room(1 << 20)
        self.posted: list[engine.ToEngine] = []
        self.routes: dict[Lease, Callable[[engine.ToGateway], None]] = {}
        self.is_up = True

    def lease(self, deliver: Callable[[engine.ToGateway], None]) -> Lease:
        if not self.is_up:
            raise EngineUnavailable("away")
        lease = Lease(context=len(self.posted) + 1, epoch=1)
        self.routes[lease] = deliver
        return lease

    def post(self, message: engine.ToEngine) -> None:
        self.posted.append(message)

    def release(self, lease: Lease) -> None:
        self.routes.pop(lease, None)


class Bench:
    """One connection's uploads, and all that was answered."""

    def __init__(
        self,
        port: FakePort | None = None,
        *,
        owner: str = "key",
        is_allowed: bool = True,
        take_one: Callable[[], None] = lambda: None,
    ) -> None:
        self.port = port or FakePort()
        self.said: list[wire.ServerMessage] = []
        self.failed: list[tuple[str, str]] = []
        self.uploads = Uploads(
            self.port,
            owner=owner,
            is_allowed=is_allowed,
            take_one=take_one,
            say=self.said.append,
            fail=lambda refusal, v: self.failed.append((v, refusal.code)),
            wake=lambda: None,
        )

    def put(self, v: str, n: int, d: bytes, *, last: bool = False, **words: str) -> None:
        self.uploads.put(wire.VoicePut(v=v, n=n, d=d, last=last, **(words or WORDS if n == 0 else {})))

    def refusal(self, *part: Any, **rest: Any) -> tuple[str, str]:
        with pytest.raises(Refusal) as caught:
            self.put(*part, **rest)
        return caught.value.code, caught.value.text


def kept(lease: Lease, **owners: str) -> engine.VoiceKept:
    voice = engine.VoiceInfo(id="abc", name="Mia", lang="en", ms=5_000, owners=owners)
    return engine.VoiceKept(context=lease.context, epoch=lease.epoch, voice=voice)


# ---- the parts


def test_the_parts_go_to_the_engine_as_a_whole_and_the_memory_is_given_back() -> None:
    bench = Bench()
    bench.put("up", 0, b"RI", name="Mia", transcript="Hi.", lang="de-AT")
    bench.put("up", 1, b"FF")
    bench.put("up", 2, b"!", last=True)
    [sent] = bench.port.posted
    assert isinstance(sent, engine.VoicePut)
    assert (sent.audio, sent.name, sent.transcript, sent.lang, sent.owner) == (b"RIFF!", "Mia", "Hi.", "de-AT", "key")
    assert (bench.port.room.used, bench.uploads.num_open) == (5, 1)
    [(lease, deliver)] = bench.port.routes.items()
    deliver(kept(lease, key="My Mia"))
    assert bench.said == [wire.VoiceKept(v="up", voice="abc", name="My Mia", ms=5_000)]
    assert (bench.port.room.used, bench.uploads.num_open, bench.port.routes) == (0, 0, {})


WRONG_WORDS: dict[str, tuple[dict[str, str], str]] = {
    "no name": ({**WORDS, "name": " "}, "the name has 1 bytes; 1 to 64"),
    "a long name": ({**WORDS, "name": "é" * 33}, "the name has 66 bytes; 1 to 64"),
    "a name of control characters": ({**WORDS, "name": "a\x1b[2J"}, "printable"),
    "no transcript": ({**WORDS, "transcript": "\n "}, "the transcript is empty"),
    "a long transcript": ({**WORDS, "transcript": "é" * 3_000}, "6000 bytes; at most 4096"),
    "no language": ({**WORDS, "lang": "file:///etc/passwd"}, "language tag"),
}


@pytest.mark.parametrize("name", WRONG_WORDS)
def test_wrong_words_are_a_bad_voice_with_value_and_limit(name: str) -> None:
    words, text = WRONG_WORDS[name]
    bench = Bench()
    code, why = bench.refusal("up", 0, b"x", **words)
    assert code == "bad_voice" and text in why
    bench.put("up", 1, b"x", last=True)  # what was on its way is met with silence
    assert (bench.port.posted, bench.port.room.used) == ([], 0)


def test_a_recording_over_ten_mebibytes_is_refused_when_it_passes_them() -> None:
    port = FakePort()
    port.room = Room()
    bench, part = Bench(port), bytes(1 << 20)
    for n in range(10):
        bench.put("up", n, part)
    assert port.room.used == RECORDING_BYTES
    code, why = bench.refusal("up", 10, b"x")
    assert (code, str(RECORDING_BYTES) in why) == ("bad_voice", True)
    assert port.room.used == 0


def test_an_empty_recording_is_refused() -> None:
    assert Bench().refusal("up", 0, b"", last=True) == ("bad_voice", "the recording is empty: 0 bytes")


@pytest.mark.parametrize("numbers", [[0, 2], [0, 0], [1], [0, 1, 1]], ids=str)
def test_parts_out_of_order_end_the_upload(numbers: list[int]) -> None:
    bench = Bench()
    for n in numbers[:-1]:
        bench.put("up", n, b"x")
    assert bench.refusal("up", numbers[-1], b"x")[0] == "bad_sequence"
    bench.put("up", 5, b"x")
    bench.put("up", 0, b"new", last=True)  # the id is free
    assert [sent.audio for sent in bench.port.posted if isinstance(sent, engine.VoicePut)] == [b"new"]


def test_what_all_connections_hold_is_bounded() -> None:
    port = FakePort()
    first, second = Bench(port), Bench(port)
    first.put("a", 0, bytes(1 << 20))
    assert second.refusal("a", 0, b"x")[0] == "overloaded"
    first.uploads.close()
    assert port.room.used == 0
    second.put("a", 0, b"x")


def test_a_third_recording_at_once_is_refused() -> None:
    bench = Bench()
    bench.put("a", 0, b"x")
    bench.put("b", 0, b"x")
    assert bench.refusal("c", 0, b"x")[0] == "overloaded"


def test_a_key_without_the_right_registers_and_drops_nothing() -> None:
    bench = Bench(is_allowed=False)
    assert bench.refusal("up", 0, b"x", last=True)[0] == "unsupported"
    with pytest.raises(Refusal):
        bench.uploads.drop(wire.VoiceDrop(voice="abc"))
    assert bench.port.posted == []


def test_drops_that_are_not_answered_are_bounded() -> None:
    bench = Bench()
    for number in range(DROPS):
        bench.uploads.drop(wire.VoiceDrop(voice=str(number)))
    with pytest.raises(Refusal, match="at most 16 drops"):
        bench.uploads.drop(wire.VoiceDrop(voice="one more"))
    assert len(bench.port.posted) == DROPS


def test_a_recording_beyond_the_quota_is_refused_before_it_takes_memory() -> None:
    quota = caller(voices_minute=2)
    bench = Bench(take_one=quota.take_voice)
    for v in "ab":
        bench.put(v, 0, b"x", last=True)
        deliver = list(bench.port.routes.values())[-1]
        deliver(kept(list(bench.port.routes)[-1]))
    used = bench.port.room.used
    assert bench.refusal("c", 0, b"x", last=True)[0] == "quota"
    assert (bench.port.room.used, len(bench.port.posted)) == (used, 2)


def test_a_lost_engine_and_a_server_that_goes_end_every_upload_once() -> None:
    bench = Bench()
    bench.put("a", 0, b"x", last=True)
    [(lease, deliver)] = bench.port.routes.items()
    deliver(engine.Failed(context=lease.context, epoch=1, code="engine_restart", message="", retry=True))
    bench.put("b", 0, b"x")
    bench.uploads.drop(wire.VoiceDrop(voice="abc"))
    bench.uploads.end_all(Refusal("draining", "bye"))
    bench.uploads.end_all(Refusal("draining", "bye"))
    assert bench.failed == [("a", "engine_restart"), ("b", "draining"), ("abc", "draining")]
    assert (bench.port.room.used, bench.port.routes) == (0, {})


def test_a_recording_is_refused_while_the_engine_is_away() -> None:
    bench = Bench()
    bench.port.is_up = False
    assert bench.refusal("a", 0, b"x", last=True)[0] == "engine_restart"
    assert bench.port.room.used == 0


PARTS = st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans())
OTHERS = st.sampled_from(["kept", "failed", "dropped", "drop", "end"])


@given(st.lists(st.one_of(PARTS, OTHERS), max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_parts_in_any_order_end_each_upload_once_and_leak_no_memory(steps: list[Any]) -> None:
    bench, begun = Bench(), []
    for turn, step in enumerate(steps):
        if isinstance(step, tuple):
            v, n, last = step
            begun += [v] * (n == 0)
            with contextlib.suppress(Refusal):
                bench.put(v, n, b"12345", last=last)
        elif step == "drop":
            bench.uploads.drop(wire.VoiceDrop(voice="abc"))
        elif step == "end":
            bench.uploads.end_all(Refusal("draining", "bye"))
        elif bench.port.routes:
            lease, deliver = list(bench.port.routes.items())[turn % len(bench.port.routes)]
            key = {"context": lease.context, "epoch": lease.epoch}
            deliver(
                {
                    "kept": kept(lease, key="Mia"),
                    "failed": engine.Failed(**key, code="bad_voice", message="short", retry=False),
                    "dropped": engine.VoiceDropped(**key),
                }[step]
            )
        assert bench.port.room.used <= 5 * len(steps)
    answered = [message.v for message in bench.said if isinstance(message, wire.VoiceKept)]
    ends = answered + [v for v, _ in bench.failed if v != "abc"]
    for v in "abc":
        assert ends.count(v) <= begun.count(v), "no more ends than beginnings"
    bench.uploads.close()
    assert (bench.port.room.used, bench.port.routes, bench.uploads.num_open) == (0, {}, 0)


# ---- whose it is


def test_a_voice_is_seen_by_those_who_registered_it_under_their_own_names() -> None:
    voices = [
        engine.VoiceInfo(id="ada", name="Ada", lang="en", ms=4_000),
        engine.VoiceInfo(id="abc", name="Mia", lang="de", ms=5_000, owners={"one": "Mia", "two": "M."}),
    ]
    ready = engine.Ready(model="m", voices=voices, sample_rate=24_000, lanes=1)
    assert [voice.name for voice in visible(ready, "one")] == ["Ada", "Mia"]
    assert [voice.name for voice in visible(ready, "two")] == ["Ada", "M."]
    assert [voice.name for voice in visible(ready, "three")] == ["Ada"]
    assert visible(None, "one") == ()


# ---- through the gateway


async def upload(client: RawClient, v: str, audio: bytes, **words: str) -> dict[str, Any]:
    await client.say("voice_put", v=v, n=0, d=audio[:4], **{**WORDS, **words})
    await client.say("voice_put", v=v, n=1, d=audio[4:], last=True)
    while True:
        message = await client.hear()
        if message.get("v") == v:
            return message


async def test_a_registered_voice_speaks_is_listed_and_is_dropped(stack: Stack) -> None:
    async with raw_client(stack.address) as client:
        voice = await upload(client, "up", b"RIFF....", lang="de")
        assert voice == {"t": "voice", "v": "up", "voice": voice["voice"], "name": "Mia", "ms": 5_000}
        await client.say("voices")
        listed = (await client.hear_until("voices"))["list"]
        assert listed[-1] == {"id": voice["voice"], "name": "Mia", "lang": "de", "ms": 5_000}
        assert (await client.speak("a", "Hello.", voice=voice["voice"]))["t"] == "done"
        await client.say("voice_drop", voice=voice["voice"])
        answer = await client.hear_until("voices")
        assert answer["v"] == voice["voice"] and len(answer["list"]) == len(listed) - 1
        assert (await client.speak("b", "Hello.", voice=voice["voice"]))["code"] == "unknown_voice"


async def test_a_second_drop_changes_nothing_and_anothers_voice_is_not_dropped(stack: Stack) -> None:
    async with raw_client(stack.address) as client:
        voice = (await upload(client, "up", b"RIFF...."))["voice"]
        for name in (voice, voice, "ada", "nobody"):
            await client.say("voice_drop", voice=name)
        answers = [await client.hear() for _ in range(4)]
        assert [answer.get("code", answer["t"]) for answer in answers] == [
            "voices",
            "voices",
            "unknown_voice",
            "voices",
        ]
        assert (await client.speak("a", "Hello.", voice="ada"))["t"] == "done"


async def test_every_connection_and_a_later_one_know_a_new_voice(stack: Stack) -> None:
    async with raw_client(stack.address) as first, raw_client(stack.address) as second:
        voice = (await upload(first, "up", b"RIFF...."))["voice"]
        assert (await second.speak("a", "Hello.", voice=voice))["t"] == "done"
    async with raw_client(stack.address) as third:
        assert (await third.speak("a", "Hello.", voice=voice))["t"] == "done"


async def test_an_upload_that_fails_leaves_the_socket_and_its_contexts_alone(make_stack: StackMaker) -> None:
    async with make_stack(Script(step_s=0.01)) as stack, raw_client(stack.address) as client:
        await client.say("open", c="a")
        await client.say("text", c="a", n=0, s="A sentence of some length goes on meanwhile.")
        await client.say("end", c="a")
        error = await upload(client, "up", b"RIFF....", transcript="FAULT")
        assert (error["t"], error["code"], error["retry"]) == ("error", "bad_voice", False)
        assert "8000 Hz" in error["msg"] and "c" not in error
        busy = await upload(client, "up", b"RIFF....", transcript="BUSY")
        assert (busy["code"], busy["retry"], busy["after_ms"]) == ("overloaded", True, 500)
        assert (await client.hear_end("a"))["t"] == "done"


async def test_an_engine_that_dies_over_a_recording_says_so_once(stack: Stack) -> None:
    async with raw_client(stack.address) as client:
        await client.say("voice_put", v="up", n=0, d=b"RIFF", last=True, name="Mia", transcript="DIE")
        error = await client.hear_until("error")
        assert (error["v"], error["code"], error["retry"]) == ("up", "engine_restart", True)
        assert stack.server.link.num_leases == 0
        await until(lambda: stack.server.link.ready is not None)
        assert (await upload(client, "up", b"RIFF...."))["t"] == "voice"


async def test_a_connection_that_goes_gives_its_memory_back(stack: Stack) -> None:
    async with raw_client(stack.address) as client:
        await client.say("voice_put", v="a", n=0, d=bytes(60_000), **WORDS)
        await client.say("voice_put", v="b", n=0, d=bytes(60_000), last=True, name="Mia", transcript="STALL")
        await until(lambda: stack.server.link.room.used == 120_000)
    await until(lambda: stack.server.link.room.used == 0)
    assert stack.server.link.num_leases == 0


async def test_two_large_recordings_at_once_do_not_overflow_the_pipe(stack: Stack) -> None:
    recordings = [bytes([number]) * (9 << 20) for number in (1, 2)]
    async with connect(stack.address) as one, connect(stack.address) as other:
        first = await one.put_voice(recordings[0], "Hi.", name="Mia")
        second = await other.put_voice(recordings[1], "Hi.", name="Mia")
    assert first.voice != second.voice
    puts = [message for message in stack.engine.received if isinstance(message, engine.VoicePut)]
    assert [message.audio for message in puts] == recordings


async def test_keys_do_not_see_use_or_drop_each_others_voices(make_stack: StackMaker) -> None:
    from gateway.admission import digest

    keys = {name: KeyConfig(sha256=digest(f"secret-{name}")) for name in ("one", "two")}
    keys["mute"] = KeyConfig(sha256=digest("secret-mute"), voices=False)
    async with (
        make_stack(keys=keys) as stack,
        connect(stack.address, key="secret-one") as one,
        connect(stack.address, key="secret-two") as two,
        connect(stack.address, key="secret-mute") as mute,
    ):
        mia = await one.put_voice(b"RIFF....", "Hi.", name="Mia")
        assert [voice.name for voice in await two.voices()] == ["Ada", "Bert"]
        with pytest.raises(VoiceError, match="no voice of yours"):
            await two.drop_voice(mia.voice)
        same = await two.put_voice(b"RIFF....", "Hi.", name="Mine")
        assert same.voice == mia.voice
        assert [voice.name for voice in await one.voices()] == ["Ada", "Bert", "Mia"]
        assert len(await one.drop_voice(mia.voice)) == 2
        assert [voice.name for voice in await two.voices()] == ["Ada", "Bert", "Mine"]
        with pytest.raises(VoiceError, match="may not register"):
            await mute.put_voice(b"RIFF....", "Hi.", name="Mia")
