"""A voice from a recording, by the real two processes and their children."""

from __future__ import annotations

import asyncio
import io
import os
import signal

import numpy as np
import pytest
import soundfile

from gateway import cli
from gateway.client import VoiceError, connect
from tests.e2e.conftest import Rill, wait_until
from tests.e2e.test_speech import PATIENCE_S, SENTENCE, hear

WORDS = "The boat went down the river, and nobody saw it again until the morning."


async def recording(rill: Rill, kind: str = "WAV") -> bytes:
    """What the server itself says, three seconds of it at least, as a file."""
    pcm = np.frombuffer(await hear(rill, WORDS, seed=1), dtype="<i2")
    file = io.BytesIO()
    soundfile.write(file, np.resize(pcm, max(len(pcm), 24_000 * 4)), 24_000, format=kind)
    return file.getvalue()


async def test_a_recording_becomes_a_voice_that_speaks_and_goes(rill: Rill) -> None:
    data = await recording(rill)
    async with asyncio.timeout(PATIENCE_S), connect(rill.address) as client:
        before = await client.voices()
        kept = await client.put_voice(data, WORDS, name="Mia", lang="en")
        listed = {voice.id: voice for voice in await client.voices()}[kept.voice]
        assert (listed.name, listed.lang, listed.ms) == ("Mia", "en", kept.ms)
        own = await hear(rill, SENTENCE, voice=kept.voice, seed=2)
        assert own
        assert own != await hear(rill, SENTENCE, seed=2)
        assert await hear(rill, SENTENCE, voice=kept.voice, seed=2, instruct="Speak slowly.") not in (b"", own)
        assert await hear(rill, SENTENCE, voice=kept.voice, seed=2, lang="de") not in (b"", own)
        assert await client.drop_voice(kept.voice) == before
        assert await client.drop_voice(kept.voice) == before, "it is gone, and may be dropped again"
        with pytest.raises(VoiceError, match="unknown_voice"):
            await client.drop_voice(before[0].id)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"https://example.com/voice.wav", "WAV, FLAC, Ogg or MP3"),
        (b"\0\0\0\x20ftypM4A " + bytes(500), "WAV, FLAC, Ogg or MP3"),
        (b"RIFF" + bytes(500), "can't be decoded"),
        (b"", "0 bytes"),
        (bytes(10 << 20) + b"x", "10485760 bytes"),
    ],
    ids=["url", "m4a", "broken", "empty", "large"],
)
async def test_what_is_no_recording_is_a_bad_voice_and_the_connection_lives(data: bytes, text: str, rill: Rill) -> None:
    async with asyncio.timeout(PATIENCE_S), connect(rill.address) as client:
        with pytest.raises(VoiceError, match=text) as caught:
            await client.put_voice(data, WORDS, name="Mia")
        assert (caught.value.code, caught.value.retry) == ("bad_voice", False)
        assert await client.voices()


@pytest.mark.slow
async def test_a_voice_outlives_the_engine_that_made_it(rill: Rill) -> None:
    data = await recording(rill, "FLAC")
    async with asyncio.timeout(PATIENCE_S), connect(rill.address) as client:
        kept = await client.put_voice(data, WORDS, name="Mia", lang="en")
        before = await hear(rill, SENTENCE, voice=kept.voice, seed=2)
        os.kill(rill.child("engine"), signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: not rill.readiness()["ready"])
        await asyncio.to_thread(wait_until, lambda: rill.readiness()["ready"], PATIENCE_S)
        assert kept.voice in {voice.id for voice in await client.voices()}
        assert await hear(rill, SENTENCE, voice=kept.voice, seed=2) == before
        await client.drop_voice(kept.voice)


@pytest.mark.slow
async def test_the_command_clones_a_file_and_says_why_it_can_not(
    rill: Rill, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path_factory.mktemp("clone")
    (folder / "mia.wav").write_bytes(await recording(rill))
    (folder / "text.wav").write_text("This is no recording.")
    base = ["say", "--url", rill.address, "-o", str(folder / "out.wav"), SENTENCE]

    async def rill_says(*arguments: str) -> int:
        return await asyncio.to_thread(cli.main, [*base, *arguments])

    assert await rill_says("--clone", str(folder / "mia.wav"), "--transcript", WORDS) == 0
    voice = capsys.readouterr().err.split("rill: voice ")[1].split(",")[0]
    assert soundfile.info(folder / "out.wav").frames > 0
    assert await rill_says("--clone", str(folder / "text.wav"), "--transcript", WORDS) == 1
    assert "bad_voice: the file can't be decoded as WAV, FLAC, Ogg or MP3" in capsys.readouterr().err
    assert await rill_says("--clone", str(folder / "mia.wav")) == 2
    assert await asyncio.to_thread(cli.main, ["voices", "--url", rill.address, "--drop", voice]) == 0
