"""The teacher: hibari (Apache-2.0) reads the corpus, with exact phoneme durations and F0.

    python -m engine.training.teacher --hibari DIR --corpus corpus.txt.xz --data DIR [--workers 16] [--hours H]

``--hibari`` is the folder that holds the unpacked ``hibari`` package. Each worker process takes every n-th sentence and
writes shards of about ten minutes; after the last sentence the reading starts over with another voice for each.
A warped voice is the teacher at speed 1 / f played at rate f: pitch and formants scale by f, the duration stays.
"""

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.training.corpus import read_corpus
from engine.training.data import (
    SAMPLE_RATE,
    UNIT_SAMPLES,
    UNIT_SECONDS,
    VOICES,
    Utterance,
    is_held_out,
    write_shard,
    write_wave,
)

DURATIONS = "/Clip_output_0"
OUTPUTS = ("lh", "theta", "ln", "lr", "phi", "f0", DURATIONS)
LOUDNESS_DBFS, MAX_PEAK = -23.0, 0.95
MIN_SECONDS, MAX_SECONDS = 0.4, 14.0
UNITS_BEFORE, UNITS_AFTER = 3, 6
"""Silence kept: 75 ms before the first loud unit, 150 ms after the last."""
QUIET = 0.01
SHARD_SECONDS = 600.0
PROMPT_TEXTS = (
    "The morning train was late again, so I sat by the window and read my book.",
    "We walked along the river until the sun went down behind the old bridge.",
    "She opened the letter slowly, and a small photograph fell out on the table.",
    "There is a quiet little garden behind the library where nobody ever goes.",
)
PROMPT_VOICES = ("heart", "low")


class Teacher:
    """hibari in one process and one thread: ``speak`` makes one `Utterance`."""

    def __init__(self, package: Path, model: Path) -> None:
        sys.path.insert(0, str(package))
        from hibari import Hibari, dsp  # type: ignore[import-not-found]

        self._hibari = Hibari(model=str(model), threads=1)
        self._synth = dsp.synth

    def speak(self, text: str, speaker: int, seed: int) -> Utterance | None:
        """One utterance in voice ``speaker``; None if it is too short, too long, or has nothing to say."""
        warp = VOICES[speaker].warp
        parts = [part for phonemes in self._hibari.phonemize(text) if (part := self._read(phonemes, 1 / warp, seed))]
        if not parts:
            return None
        wave, f0, phones = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        wave, f0, phones = warped(wave, f0, phones, warp)
        span = loud_span(wave)
        if not MIN_SECONDS <= (span.stop - span.start) * UNIT_SECONDS <= MAX_SECONDS:
            return None
        return Utterance(
            wave=levelled(wave[span.start * UNIT_SAMPLES : span.stop * UNIT_SAMPLES]),
            text=text,
            phones=phones[span],
            f0=f0[2 * span.start : 2 * span.stop].astype(np.float16),
            speaker=speaker,
            tokens=None,
        )

    def _read(self, phonemes: str, speed: float, seed: int) -> tuple[NDArray[Any], ...] | None:
        ids = self._hibari.ids(phonemes)
        if len(ids) < 3:
            return None
        feed = {"ids": np.array([ids], np.int64), "speed": np.array([speed], np.float32)}
        *spectra, durations = self._hibari.sess.run(OUTPUTS, feed)
        lh, theta, ln, lr, phi, f0 = (array[0] for array in spectra)
        wave = self._synth(lh, theta, ln, lr, phi, f0, np.random.default_rng(seed))
        phones = np.repeat(np.array(ids, np.int16), durations.ravel().astype(np.int64))
        if len(wave) != UNIT_SAMPLES * len(phones):
            raise ValueError(f"{len(wave)} samples for {len(phones)} units of {UNIT_SAMPLES}")
        return wave, np.where(f0 < 40.0, 0.0, f0).astype(np.float32), phones


def warped(
    wave: NDArray[np.float32], f0: NDArray[np.float32], phones: NDArray[np.int16], warp: float
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int16]]:
    """Play at ``warp`` times the rate: wave resampled to 24 kHz in whole units, labels on the new grid, F0 scaled."""
    if warp == 1.0:
        return wave, f0, phones
    from scipy.signal import resample_poly  # type: ignore[import-untyped]

    ratio = Fraction(warp).limit_denominator(100)
    stretched = resample_poly(wave, ratio.denominator, ratio.numerator)
    units = len(stretched) // UNIT_SAMPLES
    nearest = ((np.arange(2 * units) + 0.5) * warp).astype(np.int64).clip(0, len(f0) - 1)
    units_from = ((np.arange(units) + 0.5) * warp).astype(np.int64).clip(0, len(phones) - 1)
    return stretched[: units * UNIT_SAMPLES].astype(np.float32), f0[nearest] * warp, phones[units_from]


def loud_span(wave: NDArray[np.float32]) -> slice:
    """The units to keep: those with sound, and a little silence on both sides."""
    rms = np.sqrt(np.square(wave.reshape(-1, UNIT_SAMPLES)).mean(1))
    loud = np.flatnonzero(rms > QUIET * rms.max()) if rms.max() > 1e-5 else np.zeros(0, np.int64)
    if not len(loud):
        return slice(0, 0)
    return slice(max(0, int(loud[0]) - UNITS_BEFORE), min(len(rms), int(loud[-1]) + 1 + UNITS_AFTER))


def levelled(wave: NDArray[np.float32]) -> NDArray[np.int16]:
    """-23 dBFS RMS, peak at most 0.95, as int16."""
    rms, peak = float(np.sqrt(np.square(wave).mean())), float(np.abs(wave).max())
    gain = min(10 ** (LOUDNESS_DBFS / 20) / rms, MAX_PEAK / peak)
    return np.rint(wave * gain * 32767).astype(np.int16)


def aligned_model(package: Path, out: Path) -> Path:
    """A copy of the teacher's network that also returns each phoneme's duration."""
    import onnx

    model = onnx.load(str(package / "hibari" / "assets" / "hibari.onnx"))
    if DURATIONS not in {output for node in model.graph.node for output in node.output}:
        raise ValueError(f"the teacher's network has no tensor {DURATIONS}")
    if DURATIONS not in {output.name for output in model.graph.output}:
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(DURATIONS))
    onnx.save(model, str(out))
    return out


def speaker_of(text_number: int, lap: int) -> int:
    """The voice of a sentence: by share, another draw on each lap over the corpus."""
    draw = random.Random(f"{text_number}/{lap}").random()
    for speaker, voice in enumerate(VOICES):
        draw -= voice.share
        if draw < 0:
            return speaker
    return 0


def read_part(package: Path, model: Path, corpus: Path, folder: Path, part: int, parts: int, hours: float) -> None:
    """One worker: read sentences ``part, part + parts, ...`` until ``hours`` are written; shard numbers interleave."""
    os.nice(2)
    teacher = Teacher(package, model)
    texts = read_corpus(corpus)[part::parts]
    written, lap, number = 0.0, 0, part
    while written < hours * 3600:
        for batch in _batches(teacher, texts, part, lap):
            write_shard(folder, number, batch)
            number += parts
            written += sum(utterance.seconds for utterance in batch)
            if written >= hours * 3600:
                return
        lap += 1


def _batches(teacher: Teacher, texts: list[str], part: int, lap: int) -> Iterable[list[Utterance]]:
    """Lists of utterances of a shard's length each; the first is short so that training can start."""
    batch: list[Utterance] = []
    seconds, limit = 0.0, SHARD_SECONDS / (1 if lap else 4)
    for position, text in enumerate(texts):
        voice = 0 if is_held_out(text) and lap == 0 else speaker_of(position * 64 + part, lap)
        utterance = teacher.speak(text, voice, seed=position * 64 + part + lap * 7_919)
        if utterance is None:
            continue
        batch.append(utterance)
        seconds += utterance.seconds
        if seconds >= limit:
            yield batch
            batch, seconds, limit = [], 0.0, SHARD_SECONDS
    if batch:
        yield batch


def write_prompts(package: Path, model: Path, folder: Path) -> None:
    """The recordings that the shipped voices are made from: per voice the one nearest 4.2 s."""
    folder.mkdir(parents=True, exist_ok=True)
    teacher = Teacher(package, model)
    labels = {voice.name: label for label, voice in enumerate(VOICES)}
    for name in PROMPT_VOICES:
        spoken = [u for text in PROMPT_TEXTS if (u := teacher.speak(text, labels[name], seed=1))]
        best = min(spoken, key=lambda utterance: abs(utterance.seconds - 4.2))
        write_wave(folder / f"{name}.wav", best.wave)
        (folder / f"{name}.txt").write_text(best.text + "\n")


def watch(folder: Path, workers: list[Any]) -> None:
    """Print the pace until every worker has ended."""
    start = time.monotonic()
    while any(worker.is_alive() for worker in workers):
        time.sleep(10)
        num_bytes = sum(path.stat().st_size for path in folder.glob("shard-*.npz"))
        hours = num_bytes / (2 * SAMPLE_RATE * 3600)
        elapsed = time.monotonic() - start
        print(f"teacher: {hours:.2f} h after {elapsed:.0f} s, {hours * 3600 / elapsed:.0f} x real time", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hibari", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--hours", type=float, default=120.0, help="speech to write, all workers together")
    args = parser.parse_args()
    args.data.mkdir(parents=True, exist_ok=True)
    model = aligned_model(args.hibari, args.data / "teacher.onnx")
    write_prompts(args.hibari, model, args.data / "prompts")
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(
            target=read_part,
            args=(args.hibari, model, args.corpus, args.data, part, args.workers, args.hours / args.workers),
        )
        for part in range(args.workers)
    ]
    for worker in workers:
        worker.start()
    watch(args.data, workers)
    if failed := [worker.exitcode for worker in workers if worker.exitcode]:
        raise SystemExit(f"{len(failed)} teacher processes failed, exit codes {failed}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
