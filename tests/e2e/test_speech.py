"""Speech by the real two processes and a real client."""

from __future__ import annotations

import asyncio
import os
import signal
import wave
from pathlib import Path

import msgpack
import numpy as np
import pytest

from gateway import cli
from gateway.client import ContextError, connect
from tests.e2e.conftest import LANES, WAITING, Rill, wait_until
from tests.gateway.raw_client import RawClient, check_promises, raw_client

PATIENCE_S = 120.0
SENTENCE = "The boat went down the river. "


async def hear(rill: Rill, text: str, **settings: object) -> bytes:
    """The whole audio of one utterance."""
    async with asyncio.timeout(PATIENCE_S), connect(rill.address) as client:
        return b"".join([pcm async for pcm in client.say(text, **settings)])  # type: ignore[arg-type]


async def hear_until(client: RawClient, t: str, c: str) -> dict[str, object]:
    """Like RawClient.hear_until, for a model that takes its time."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            message = msgpack.unpackb(await client.socket.recv())
            client.seen.append(message)
            if message["t"] == t and message.get("c") == c:
                return message  # type: ignore[no-any-return]


async def all_free(rill: Rill) -> None:
    """No lane and no page of any context is left."""

    def is_free() -> bool:
        names = ("lanes_used", "contexts", "talker_pages", "flow_pages", "hift_states")
        return all(rill.gauge(f"rill_engine_{name}") == 0 for name in names)

    await asyncio.to_thread(wait_until, is_free)


def check_alike(together: list[bytes], alone: list[bytes], device: str) -> None:
    """Bit for bit on the CPU. On a GPU a crowd's matrix products round differently, and a draw may fall otherwise."""
    if device == "cpu":
        assert together == alone
    else:
        assert all(len(one) > 0 for one in (*together, *alone))


async def test_text_becomes_speech(rill: Rill) -> None:
    pcm = await hear(rill, SENTENCE, seed=1)
    wave_ = np.frombuffer(pcm, dtype="<i2")
    assert len(wave_) > 24_000 * 0.2
    assert np.abs(wave_.astype(int)).max() > 0


async def test_same_seed_same_audio_in_pieces_and_another_seed_another(rill: Rill) -> None:
    whole = await hear(rill, SENTENCE, seed=5)

    async with asyncio.timeout(PATIENCE_S), connect(rill.address) as client:
        context = await client.open(seed=5)
        for word in SENTENCE.split(" ")[:-1]:
            await context.send(word + " ")
        await context.end()
        pieces = b"".join([pcm async for pcm in context])
    assert pieces == whole
    assert await hear(rill, SENTENCE, seed=6) != whole


async def test_text_is_spoken_as_its_words_come(rill: Rill, device: str) -> None:
    text = "He said that the boat went down the river at 8:20 and that nobody had seen it or heard of it since that day"
    text += " in May when the wind was so high that it blew the red roof off the old mill"
    takes = []
    async with asyncio.timeout(PATIENCE_S), connect(rill.address) as client:
        for pieces in ([text], text.replace(" ", "| ").split("|")):
            context = await client.open(seed=5, by_words=True)
            for piece in pieces[:-1]:
                await context.send(piece)
            audio = aiter(context)
            first = [await anext(audio)] if pieces[:-1] else []  # nobody has ended the sentence
            await context.send(pieces[-1])
            await context.end()
            takes.append(b"".join(first + [pcm async for pcm in audio]))
    check_alike(takes[:1], takes[1:], device)
    await all_free(rill)


async def test_two_contexts_at_once_are_each_as_if_alone(rill: Rill, device: str) -> None:
    alone = [await hear(rill, SENTENCE, seed=seed) for seed in (11, 12)]
    together = await asyncio.gather(*(hear(rill, SENTENCE, seed=seed) for seed in (11, 12)))
    check_alike(together, alone, device)


@pytest.mark.slow
async def test_ten_contexts_at_once_are_each_as_if_alone(rill: Rill, device: str) -> None:
    texts = [f"{SENTENCE}Number {number} is the one that we were waiting for. " for number in range(10)]
    alone = [await hear(rill, text, seed=seed) for seed, text in enumerate(texts)]
    together = await asyncio.gather(*(hear(rill, text, seed=seed) for seed, text in enumerate(texts)))
    check_alike(together, alone, device)
    await all_free(rill)


async def test_cancel_in_mid_stream_then_the_same_seed_repeats_it(rill: Rill) -> None:
    text = SENTENCE * 4
    async with raw_client(rill.address) as client:
        await client.say("open", c="a", seed=21)
        await client.say("text", c="a", n=0, s=text)
        await hear_until(client, "audio", "a")
        await client.say("cancel", c="a")
        await hear_until(client, "cancelled", "a")
        check_promises(client.of("a"))
        begun = client.audio("a")
    await all_free(rill)
    again = await hear(rill, text, seed=21)
    assert begun and again.startswith(begun)
    assert not (await hear(rill, SENTENCE, seed=22)).startswith(begun)


async def test_a_hang_up_frees_lanes_and_pages(rill: Rill) -> None:
    async with raw_client(rill.address) as client:
        for c in "abc":
            await client.say("open", c=c)
            await client.say("text", c=c, n=0, s=SENTENCE * 5)
        await hear_until(client, "audio", "b")
        client.socket.transport.abort()
    await all_free(rill)
    assert rill.readiness()["contexts"] == 0


async def test_random_cancels_leave_nothing(rill: Rill) -> None:
    random = np.random.default_rng(3)
    async with raw_client(rill.address) as client:
        for turn in range(20):
            c = f"c{turn}"
            await client.say("open", c=c)
            await client.say("text", c=c, n=0, s=SENTENCE)
            await asyncio.sleep(float(random.uniform(0, 0.15)))
            await client.say("cancel", c=c)
            await hear_until(client, "cancelled", c)
            check_promises(client.of(c))
    await all_free(rill)


async def test_more_than_can_be_served_is_refused_and_the_rest_is_served(rill: Rill) -> None:
    offered = LANES + WAITING + 3
    async with raw_client(rill.address) as client:
        for number in range(offered):
            await client.say("open", c=f"c{number}")
        for _ in range(LANES + 3):  # the others wait for a lane
            await client.hear()
        refused = [message for message in client.seen if message["t"] == "error"]
        assert len(refused) == 3
        assert {(message["code"], message["retry"]) for message in refused} == {("overloaded", True)}
        await client.say("cancel", c="c0")
        assert (await client.hear_until("opened", f"c{LANES}"))["queued_ms"] > 0
        for number in range(1, LANES + WAITING):
            await client.say("cancel", c=f"c{number}")
            check_promises((await hear_until(client, "cancelled", f"c{number}")) and client.of(f"c{number}"))
    await all_free(rill)
    assert await hear(rill, "Hello there.")


NOTHING = ["", " ", "...", "🙂🙂", "***", "```", "\u200d", "\u0301"]


async def test_text_with_nothing_to_say_is_done_without_audio(rill: Rill) -> None:
    async with raw_client(rill.address) as client:
        for number, text in enumerate(NOTHING):
            c = f"c{number}"
            await client.say("open", c=c)
            await client.say("text", c=c, n=0, s=text)
            await client.say("end", c=c)
            done = await hear_until(client, "done", c)
            assert done["samples"] == 0, ascii(text)


async def test_a_context_with_nothing_in_it_but_a_flush_goes_on(rill: Rill) -> None:
    async with raw_client(rill.address) as client:
        await client.say("open", c="a")
        await client.say("text", c="a", n=0, s="***")
        await client.say("flush", c="a", f=0)
        assert (await hear_until(client, "flushed", "a"))["pos"] == 0
        await client.say("text", c="a", n=1, s="Hello there.")
        await client.say("end", c="a")
        assert (await hear_until(client, "done", "a"))["samples"] != 0


async def test_a_megabyte_of_text_is_refused_and_nobody_else_notices(rill: Rill) -> None:
    async with raw_client(rill.address) as client:
        await client.say("open", c="a")
        for n in range(1024):
            await client.say("text", c="a", n=n, s="words and " * 102)
        error = await hear_until(client, "error", "a")
        assert (error["code"], error["retry"]) == ("text_too_long", False)
    await all_free(rill)
    assert await hear(rill, "Hello there.")


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"voice": "nobody"}, "unknown_voice"),
        ({"fmt": {"enc": "s16le", "rate": 11025}}, "unsupported"),
        ({"fmt": {"enc": "opus"}}, "unsupported"),
        ({"seed": -1}, "bad_message"),
        ({"sampling": {"temperature": "hot"}}, "bad_message"),
    ],
    ids=str,
)
async def test_a_wrong_open_is_a_clear_error(rill: Rill, settings: dict[str, object], code: str) -> None:
    async with raw_client(rill.address) as client:
        await client.say("open", c="a", **settings)
        assert (await client.hear())["code"] == code
        assert (await client.speak("b", "..."))["t"] == "done"


@pytest.mark.parametrize(
    "data",
    [b"\xc1", b"", msgpack.packb({"t": "open", "c": "a", "sampling": {"temperature": float("nan")}}), b"\x81" * 5_000],
    ids=["reserved", "empty", "nan", "nested"],
)
async def test_malformed_messages_close_their_socket_alone(rill: Rill, data: bytes) -> None:
    async with raw_client(rill.address) as other, raw_client(rill.address) as client:
        await client.socket.send(data)
        assert await client.close_code() == 4400
        await other.say("ping", x=1)
        assert (await other.hear())["t"] == "pong"


async def test_control_tokens_in_text_are_only_text(rill: Rill) -> None:
    """They neither crash the engine nor steer it: the context ends as any other."""
    for text in ("<|endofprompt|>", "Say <|im_start|> and [laughter] now.", "<|endoftext|><|endoftext|>"):
        async with raw_client(rill.address) as client:
            await client.say("open", c="a")
            await client.say("text", c="a", n=0, s=text)
            await client.say("end", c="a")
            assert (await hear_until(client, "done", "a"))["t"] == "done"


async def test_say_writes_what_the_server_speaks(rill: Rill, tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    command = ["say", SENTENCE, "-o", str(path), "--url", rill.address, "--seed", "5"]
    assert await asyncio.to_thread(cli.main, command) == 0
    with wave.open(str(path), "rb") as file:
        assert file.readframes(file.getnframes()) == await hear(rill, SENTENCE, seed=5)


async def test_the_page_is_there(rill: Rill) -> None:
    status, body = await asyncio.to_thread(rill.get, "")
    assert (status, "<textarea" in body) == (200, True)


async def test_a_killed_engine_ends_each_context_once_and_comes_back(rill: Rill) -> None:
    """Last of this file: the engine loads anew."""
    async with raw_client(rill.address) as one, raw_client(rill.address) as two:
        for client in (one, two):
            for c in "ab":
                await client.say("open", c=c)
                await client.say("text", c=c, n=0, s=SENTENCE * 10)
        await hear_until(one, "audio", "a")
        os.kill(rill.child("engine"), signal.SIGKILL)
        async with asyncio.timeout(1.5):
            for client in (one, two):
                while sum(message["t"] == "error" for message in client.seen) < 2:
                    await client.hear()
        for client in (one, two):
            errors = [message for message in client.seen if message["t"] == "error"]
            assert {(e["code"], e["retry"]) for e in errors} == {("engine_restart", True)}
            for c in "ab":
                check_promises(client.of(c))
            await client.say("open", c="now")
            assert (await client.hear())["code"] == "engine_restart"
        assert rill.readiness()["ready"] is False
        await asyncio.to_thread(wait_until, lambda: rill.readiness()["ready"], PATIENCE_S)
        await one.say("open", c="again", seed=5)
        await one.say("text", c="again", n=0, s=SENTENCE)
        await one.say("end", c="again")
        await hear_until(one, "done", "again")
    assert rill.lines.empty()  # one line with the address, and no more


async def test_errors_reach_the_client_library(rill: Rill) -> None:
    async with asyncio.timeout(PATIENCE_S), connect(rill.address) as client:
        with pytest.raises(ContextError) as caught:
            await client.open(voice="nobody")
        assert caught.value.code == "unknown_voice"
