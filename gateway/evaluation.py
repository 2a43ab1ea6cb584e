"""`rill eval`: how well a server speaks a list of texts.

Each text is spoken by each voice and seed, streaming and as a full response; the voice of a recording twice: cold, its
upload inside the measured time, and hot, once it is there. Then all is listened to (gateway/evaluation_ears.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
import wave
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import soundfile  # type: ignore[import-untyped]
import soxr  # type: ignore[import-untyped]

from gateway import evaluation_figures as figures
from gateway.bench import Serve, altered
from gateway.client import Client, ServerError, connect
from gateway.errors import ConfigError
from gateway.evaluation_ears import RATE_HZ as HEARD_HZ
from gateway.evaluation_ears import Ears, Wave, need
from gateway.evaluation_figures import Take
from gateway.evaluation_list import Line, read_list

RATE_HZ: Final = 24_000
MODES: Final = ("streaming", "full")
WARM_UP: Final = "Good morning."


class Judge(Protocol):
    """Who listens; `Ears`, or a test's. Waves are float32 [S] at 16 kHz."""

    def transcribe(self, wave: Wave) -> str: ...

    def spell(self, text: str) -> str: ...

    def embed(self, wave: Wave) -> npt.NDArray[np.float64] | None: ...

    def rate(self, wave: Wave) -> float | None: ...


# ---- speaking


def renewed(recording: bytes) -> bytes:
    """The same WAV by other bytes, so that no server has its voice: a chunk that decoders pass over comes last."""
    padded = recording + b"\0" * (len(recording) % 2)
    chunk = b"note" + (16).to_bytes(4, "little") + os.urandom(16)
    return b"RIFF" + (len(padded) + len(chunk) - 8).to_bytes(4, "little") + padded[8:] + chunk


@dataclass(slots=True)
class Speaker:
    """Speaks through one connection and keeps the sound in a folder."""

    client: Client
    mode: str
    folder: Path
    takes: list[Take] = field(default_factory=list)
    _number: itertools.count[int] = field(default_factory=itertools.count)

    async def say_all(self, lines: Sequence[Line], voices: Sequence[str | None], seeds: int, at_once: int) -> None:
        """Every line with its own voice or each of `voices`, `at_once` of them side by side."""
        for voice in voices if any(line.prompt is None for line in lines) else [None]:
            await self._warm(voice)
        work = [
            (line, voice, seed)
            for seed in range(seeds)
            for line in lines
            for voice in (voices if line.prompt is None else [None])
        ]
        queue = iter(work)

        async def some() -> None:
            for line, voice, seed in queue:
                await self._say(line, voice, seed)

        await asyncio.gather(*(some() for _ in range(at_once)))

    async def _warm(self, voice: str | None) -> None:
        async for _ in self.client.say(WARM_UP, voice=voice, seed=0):
            pass

    async def _say(self, line: Line, voice: str | None, seed: int) -> None:
        if line.prompt is None:
            await self._take(line, voice, seed, time.perf_counter(), "hot")
            return
        recording = renewed(await asyncio.to_thread(line.prompt.read_bytes))
        began_s = time.perf_counter()
        try:
            kept = await self.client.put_voice(recording, line.prompt_text, name=line.id[:64])
        except ServerError as error:
            for state in ("cold", "hot"):
                self.takes.append(self._blank(line, voice, seed, state, failure=str(error)))
            return
        try:
            await self._take(line, kept.voice, seed, began_s, "cold")
            await self._take(line, kept.voice, seed, time.perf_counter(), "hot")
        finally:
            with contextlib.suppress(ServerError):
                await self.client.drop_voice(kept.voice)

    def _blank(self, line: Line, voice: str | None, seed: int, state: str, *, failure: str = "") -> Take:
        named = line.prompt.name if line.prompt is not None else voice or "default"
        return Take(
            line=line.id, text=line.text, series=f"{self.mode} {state}", voice=named, seed=seed, failure=failure
        )

    async def _take(self, line: Line, voice: str | None, seed: int, began_s: float, state: str) -> None:
        take = self._blank(line, voice, seed, state)
        self.takes.append(take)
        pieces: list[bytes] = []
        try:
            async for pcm in self.client.say(line.text, voice=voice, seed=seed):
                take.wall_s = time.perf_counter() - began_s
                take.first_s = take.wall_s if take.first_s is None else take.first_s
                pieces.append(pcm)
        except ServerError as error:
            take.failure = str(error)
        sound = b"".join(pieces)
        take.audio_s = len(sound) / 2 / RATE_HZ
        take.path = self.folder / f"{self.mode}-{state}-{next(self._number):05d}.wav"
        write_wav(take.path, sound)


def write_wav(path: Path, sound: bytes) -> None:
    with path.open("wb") as file, wave.open(file, "wb") as target:
        target.setnchannels(1)
        target.setsampwidth(2)
        target.setframerate(RATE_HZ)
        target.writeframes(sound)


# ---- listening


def read_wav(path: Path) -> Wave:
    """float32 [S] at 16 kHz, channels mixed. Raises ConfigError."""
    try:
        samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, OSError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error
    return np.asarray(soxr.resample(samples.mean(axis=1), rate_hz, HEARD_HZ), dtype=np.float32)


def recorded(lines: Sequence[Line]) -> list[Take]:
    """Takes of the list's own recordings, which are the ceiling."""
    return [
        Take(
            line=line.id,
            text=line.text,
            series="recorded",
            voice=line.prompt.name if line.prompt else "default",
            path=line.recording,
            audio_s=soundfile.info(line.recording).duration,
        )
        for line in lines
        if line.recording is not None
    ]


def listen(takes: Sequence[Take], judge: Judge, references: dict[str, Sequence[Path]]) -> None:
    """Fill in what is heard. The same sound is listened to once."""
    heard: dict[bytes, Take] = {}
    print(f"rill: listening, {len(takes)} takes ...", file=sys.stderr, flush=True)
    for take in takes:
        if take.path is not None:
            before = heard.setdefault(sha256(take.path.read_bytes()).digest(), take)
            if before is take:
                sound = read_wav(take.path)
                take.heard, take.embedding, take.mos = judge.transcribe(sound), judge.embed(sound), judge.rate(sound)
            else:
                take.heard, take.embedding, take.mos = before.heard, before.embedding, before.mos
        take.judge(judge.spell(take.text), judge.spell(take.heard))
    found = {voice: [judge.embed(read_wav(path)) for path in paths] for voice, paths in references.items()}
    known = {voice: [one for one in some if one is not None] for voice, some in found.items()}
    figures.liken(takes, {voice: np.mean(some, axis=0) for voice, some in known.items() if some})


def references_of(lines: Sequence[Line], named: Sequence[tuple[str, Path]]) -> dict[str, Sequence[Path]]:
    """Recordings of each voice: a list's prompts, and those named, files or folders of WAV files."""
    found: dict[str, list[Path]] = {line.prompt.name: [line.prompt] for line in lines if line.prompt is not None}
    for voice, path in named:
        paths = sorted(path.glob("*.wav")) if path.is_dir() else [path]
        if not paths:
            raise ConfigError(f"--reference {voice}={path}: no WAV file in it")
        found.setdefault(voice, []).extend(paths)
    return dict(found)


# ---- the command


def add_arguments(parser: argparse.ArgumentParser, default_profile: Path) -> None:
    parser.add_argument("list", type=Path, help="id|prompt text|prompt wav|text[|recording of the text] a line")
    parser.add_argument("--url", help="a running server that streams; default: servers of our own, by --config")
    parser.add_argument("--full-url", help='a running server of [engine] mode = "full"')
    parser.add_argument("--key", default=os.environ.get("RILL_KEY"), help="an API key; default: RILL_KEY's value")
    parser.add_argument("--config", type=Path, default=default_profile, help="the profile; default: the embedded voice")
    parser.add_argument("--modes", type=_modes, default=MODES, help="of our own servers; default streaming,full")
    parser.add_argument("--voices", type=_words, default=(None,), help="for lines without a prompt, by commas")
    parser.add_argument(
        "--reference", type=_reference, action="append", default=[], metavar="VOICE=WAV", help="of a voice, or a folder"
    )
    parser.add_argument("--repeat", type=_count, default=1, help="seeds of each line; shows each text's results too")
    parser.add_argument("--at-once", type=_count, default=1, help="requests on their way; speeds are then a crowd's")
    parser.add_argument("--lang", default="en", help="of the texts, for the recogniser; default en")
    parser.add_argument("--recogniser", type=Path, help="a folder that faster-whisper loads; default: Whisper base")
    parser.add_argument("--threads", type=_count, default=2, help="of the recogniser; default 2")
    parser.add_argument("--words-only", action="store_true", help="no likeness and no naturalness")
    parser.add_argument("--keep", type=Path, help="a folder that the sound is written to")
    parser.add_argument("--json", type=Path, help="the results and every take, besides the last line")
    parser.add_argument("--plot", type=Path, help="a picture of the figures")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _modes(text: str) -> tuple[str, ...]:
    if unknown := set(text.split(",")) - set(MODES):
        raise argparse.ArgumentTypeError(f"{sorted(unknown)}, allowed are streaming and full")
    return tuple(text.split(","))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _reference(text: str) -> tuple[str, Path]:
    voice, equals, path = text.partition("=")
    if not (voice and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not VOICE=WAV")
    return voice, Path(path)


async def run(options: argparse.Namespace, serve: Serve) -> int:
    """Speak, listen, print the table, and JSON on the last line. -> 1 if something was not spoken."""
    lines = read_list(options.list)
    references = references_of(lines, options.reference)
    if options.keep is not None and not options.keep.is_dir():
        raise ConfigError(f"--keep {options.keep}: no such folder")
    if options.plot is not None:
        need("matplotlib")  # before the work, not after it
    with tempfile.TemporaryDirectory(prefix="rill-eval-") as name:
        folder = Path(name)
        judge = Ears(
            folder,
            lang=options.lang,
            threads=options.threads,
            recogniser=options.recogniser,
            words_only=options.words_only,
        )
        takes = recorded(lines) + await speak(options, lines, folder, serve)
        await asyncio.to_thread(listen, takes, judge, references)
    found = figures.report(takes, by_text=options.repeat > 1)
    show(found, takes, options.json, options.plot)
    return int(any(take.failure for take in takes))


async def speak(options: argparse.Namespace, lines: Sequence[Line], folder: Path, serve: Serve) -> list[Take]:
    """One mode after the other, so that neither takes the other's time."""
    takes: list[Take] = []
    urls = {"streaming": options.url, "full": options.full_url}
    is_ours = not any(urls.values())
    for mode in options.modes if is_ours else [mode for mode in MODES if urls[mode]]:
        print(f"rill: speaking, {mode} ...", file=sys.stderr, flush=True)
        server = _server(urls[mode], options.config, folder, mode, serve)
        async with server as url, connect(url, key=options.key) as client:
            speaker = Speaker(client, mode, options.keep or folder)
            await speaker.say_all(lines, options.voices, options.repeat, options.at_once)
        takes += speaker.takes
    return takes


@contextlib.asynccontextmanager
async def _server(url: str | None, profile: Path, folder: Path, mode: str, serve: Serve) -> AsyncIterator[str]:
    """A running server, or one that forgets its callers' voices with its end."""
    if url is not None:
        yield url
        return
    async with serve(altered(profile, folder, {"mode": mode}, {"voices": ""})) as address:
        yield address


def show(found: dict[str, Any], takes: Sequence[Take], json_path: Path | None, plot_path: Path | None) -> None:
    print(figures.table(found))
    for take in takes:
        if take.failure:
            print(f"not spoken, {take.series}: {take.line}: {take.failure}")
    if json_path is not None:
        whole = {**found, "all": [figures.plain(take) for take in takes]}
        json_path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if plot_path is not None:
        figures.plot(found, plot_path)
    print(json.dumps(found), flush=True)
