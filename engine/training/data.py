"""The training set on disk: what the teacher writes and every trainer reads.

A folder holds, each file complete the moment its name appears:

``shard-00000.npz``   about ten minutes of utterances. ``wave`` int16 [samples] at 24 kHz, ``phones`` int16 [units]
    (teacher symbol per 25 ms unit), ``f0`` float16 [2 * units] (Hz at 80 Hz, 0 where unvoiced), ``units`` int32
    [utterances + 1] (offsets; one unit is 600 samples, 2 F0 values), ``speaker`` int16 [utterances], ``text`` uint8
    (JSON list).
``tokens-00000.npz``  the speech tokens of that shard: ``ids`` int16 [tokens] and ``offsets`` int32 [utterances + 1].
``speakers.npz``      ``vectors`` float32 [labels, several, 192]: vectors of single utterances of each speaker label.
``prompts/NAME.wav``  the prompt utterance of a shipped voice, with ``NAME.txt`` beside it.
"""

import hashlib
import json
import random
import struct
import wave as wavefile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 24_000
UNIT_SAMPLES = 600
UNIT_SECONDS = UNIT_SAMPLES / SAMPLE_RATE
MEL_HOP = 480
HELD_OUT_EVERY = 400


@dataclass(frozen=True, slots=True)
class TeacherVoice:
    """One speaker of the training set: the teacher read at ``warp`` times its rate, in ``share`` of the utterances."""

    name: str
    warp: float
    share: float


VOICES = (
    TeacherVoice("heart", 1.0, 0.52),
    TeacherVoice("low", 0.8, 0.3),
    TeacherVoice("mellow", 0.88, 0.09),
    TeacherVoice("bright", 1.12, 0.09),
)
"""Speaker label = index here; Kokoro's follow."""


@dataclass(frozen=True, slots=True)
class KokoroVoice:
    """A style of Kokoro, or the mean of several by ``weights`` (equal ones where there are none); ``share`` of its
    readings is relative."""

    styles: tuple[str, ...]
    share: float = 1.0
    weights: tuple[float, ...] | None = None

    @property
    def is_british(self) -> bool:
        return self.styles[0].startswith("b")


_WOMEN = "af_alloy af_aoede af_bella af_jessica af_kore af_nova af_river af_sky"
_MEN = "am_adam am_echo am_eric am_fenrir am_liam am_onyx"
_BRITISH = "bf_alice bf_lily bm_daniel bm_fable bm_lewis"
_FOREIGN = (
    "af_nicole am_santa ef_dora em_alex ff_siwis hf_alpha hf_beta hm_omega hm_psi if_sara im_nicola jf_alpha "
    "jf_gongitsune jf_nezumi jf_tebukuro jm_kumo pf_dora pm_alex zf_xiaobei zf_xiaoni zf_xiaoxiao zf_xiaoyi zm_yunjian "
    "zm_yunxi zm_yunxia zm_yunyang"
)
"""Voices of other languages and two odd ones, reading English: timbres for the flow."""
SHIPPED = {"michael": "am_michael", "emma": "bf_emma", "george": "bm_george"}
"""Kokoro voices that ship beside heart."""
HELD_OUT_VOICES = tuple(KokoroVoice((style,)) for style in ("af_sarah", "am_puck", "bf_isabella"))
"""Never trained on: the test of cloning."""


def _blends(styles: list[str]) -> tuple[KokoroVoice, ...]:
    """Each style with the third after it: as many new voices of mixed kinds."""
    return tuple(KokoroVoice((one, other), 0.8) for one, other in zip(styles, styles[3:] + styles[:3], strict=True))


def _strangers(styles: list[str], count: int) -> Iterator[KokoroVoice]:
    """Blends of two or three styles of either sex by random weights, for the flow to learn what a speaker may be.

    Every other one goes beyond its styles: one weighs less than nothing.
    """
    dice = random.Random("strangers")
    for number in range(count):
        chosen = tuple(dice.sample(styles, dice.choice((2, 2, 3))))
        drawn = [dice.uniform(0.2, 1.0) for _ in chosen]
        last = -0.3 * drawn.pop() if number % 2 else drawn[-1] / sum(drawn)
        rest = sum(drawn[: len(chosen) - 1])
        weights = [round((1 - last) * one / rest, 3) for one in drawn[: len(chosen) - 1]]
        yield KokoroVoice(chosen, 0.3, (*weights, round(1 - sum(weights), 3)))


NUM_STRANGERS = 200
_ENGLISH = f"{_WOMEN} {_MEN} {_BRITISH}".split()
KOKORO = (
    *(KokoroVoice((style,), 8.0) for style in SHIPPED.values()),
    *(KokoroVoice((style,)) for style in _ENGLISH),
    *_blends(_ENGLISH),
    *(KokoroVoice((style,)) for style in _FOREIGN.split()),
    *_strangers([*_ENGLISH, *_FOREIGN.split()], NUM_STRANGERS),
)
KOKORO_WARPS = (0.9, 1.12)
FIRST_KOKORO = len(VOICES)
"""Labels: the four above, Kokoro's at its own rate, at each warp, then the voices held out."""
FIRST_HELD_OUT = FIRST_KOKORO + (1 + len(KOKORO_WARPS)) * len(KOKORO)
NUM_LABELS = FIRST_HELD_OUT + len(HELD_OUT_VOICES)


@dataclass(frozen=True, slots=True)
class Utterance:
    """One spoken sentence; arrays are views into the shard.

    ``wave`` int16 [600 * units] at 24 kHz; ``phones`` int16 [units]; ``f0`` float16 [2 * units] Hz; ``tokens`` int16
    [n], or None until the shard is tokenised. ``n <= mel_frames // 2``: keep ``2 * n`` mel frames beside them.
    """

    wave: NDArray[np.int16]
    text: str
    phones: NDArray[np.int16]
    f0: NDArray[np.float16]
    speaker: int
    tokens: NDArray[np.int16] | None

    @property
    def seconds(self) -> float:
        return len(self.wave) / SAMPLE_RATE

    @property
    def mel_frames(self) -> int:
        return len(self.wave) // MEL_HOP


def is_held_out(text: str) -> bool:
    """Whether this sentence is kept out of every training stage (one in 400, chosen by its hash)."""
    return _text_hash(text) % HELD_OUT_EVERY == 0


def _text_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def write_npz(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write an uncompressed npz so that a reader never sees half of it."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        np.savez(file, **arrays)
    partial.replace(path)


def map_npz(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an uncompressed npz as memory maps: processes share the pages, nothing is read until used."""
    with zipfile.ZipFile(path) as archive:
        return {entry.filename.removesuffix(".npy"): _map_member(path, entry) for entry in archive.infolist()}


def _map_member(path: Path, entry: zipfile.ZipInfo) -> NDArray[Any]:
    with path.open("rb") as file:
        file.seek(entry.header_offset)
        header = file.read(30)
        name_length, extra_length = struct.unpack("<HH", header[26:30])
        file.seek(name_length + extra_length, 1)
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        if 0 in shape:
            return np.zeros(shape, dtype)
        return np.memmap(path, dtype, "r", file.tell(), shape)


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of utterances, mapped."""

    number: int
    wave: NDArray[np.int16]
    phones: NDArray[np.int16]
    f0: NDArray[np.float16]
    units: NDArray[np.int32]
    speaker: NDArray[np.int16]
    text: list[str]

    def __len__(self) -> int:
        return len(self.text)

    def units_of(self, index: int) -> slice:
        return slice(int(self.units[index]), int(self.units[index + 1]))


def read_shard(path: Path) -> Shard:
    """Map one shard file."""
    arrays = map_npz(path)
    texts = json.loads(bytes(np.asarray(arrays["text"])))
    return Shard(
        number=int(path.stem.split("-")[1]),
        wave=arrays["wave"],
        phones=arrays["phones"],
        f0=arrays["f0"],
        units=np.array(arrays["units"]),
        speaker=np.array(arrays["speaker"]),
        text=texts,
    )


def write_shard(folder: Path, number: int, utterances: list[Utterance]) -> Path:
    """Write utterances as shard ``number``; tokens are not kept."""
    units = np.cumsum([0, *(len(u.phones) for u in utterances)]).astype(np.int32)
    path = folder / f"shard-{number:05d}.npz"
    write_npz(
        path,
        {
            "wave": np.concatenate([u.wave for u in utterances]),
            "phones": np.concatenate([u.phones for u in utterances]),
            "f0": np.concatenate([u.f0 for u in utterances]),
            "units": units,
            "speaker": np.array([u.speaker for u in utterances], np.int16),
            "text": np.frombuffer(json.dumps([u.text for u in utterances]).encode(), np.uint8),
        },
    )
    return path


def write_tokens(folder: Path, number: int, tokens: list[NDArray[np.int16]]) -> None:
    """Write the speech tokens of shard ``number``, one array an utterance, in its order."""
    offsets = np.cumsum([0, *(len(t) for t in tokens)]).astype(np.int32)
    write_npz(folder / f"tokens-{number:05d}.npz", {"ids": np.concatenate(tokens), "offsets": offsets})


class Shards:
    """All utterances of a folder so far, by index; ``refresh`` picks up the shards written since.

    Indices never change: a new shard only appends. Held-out sentences are listed apart from the rest.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.shards: list[Shard] = []
        self._tokens: dict[int, tuple[NDArray[np.int16], NDArray[np.int32]]] = {}
        self._where: list[tuple[int, int]] = []
        self._known: set[str] = set()
        self.train: list[int] = []
        self.held_out: list[int] = []
        self.num_seconds = 0.0
        self.refresh()

    def __len__(self) -> int:
        return len(self._where)

    def refresh(self) -> int:
        """Take in new shards and token files; the number of new utterances."""
        before = len(self)
        for path in sorted(self.folder.glob("shard-*.npz")):
            if path.name not in self._known:
                self._known.add(path.name)
                self._append(read_shard(path))
        for path in self.folder.glob("tokens-*.npz"):
            number = int(path.stem.split("-")[1])
            if number not in self._tokens:
                arrays = map_npz(path)
                self._tokens[number] = (arrays["ids"], np.array(arrays["offsets"]))
        return len(self) - before

    def _append(self, shard: Shard) -> None:
        position = len(self.shards)
        self.shards.append(shard)
        self.num_seconds += len(shard.phones) * UNIT_SECONDS
        for index, text in enumerate(shard.text):
            is_kept = is_held_out(text) or shard.speaker[index] >= FIRST_HELD_OUT
            (self.held_out if is_kept else self.train).append(len(self._where))
            self._where.append((position, index))

    def utterance(self, index: int) -> Utterance:
        """Utterance ``index``; IndexError beyond the last."""
        position, row = self._where[index]
        shard = self.shards[position]
        span = shard.units_of(row)
        return Utterance(
            wave=shard.wave[span.start * UNIT_SAMPLES : span.stop * UNIT_SAMPLES],
            text=shard.text[row],
            phones=shard.phones[span],
            f0=shard.f0[2 * span.start : 2 * span.stop],
            speaker=int(shard.speaker[row]),
            tokens=self._tokens_of(shard.number, row),
        )

    def is_tokenised(self, index: int) -> bool:
        """Whether the speech tokens of this utterance are there yet."""
        return self.shards[self._where[index][0]].number in self._tokens

    def utterances(self, indices: list[int] | None = None) -> Iterator[Utterance]:
        """The utterances at ``indices`` (all of them by default)."""
        return (self.utterance(i) for i in (range(len(self)) if indices is None else indices))

    def _tokens_of(self, number: int, row: int) -> NDArray[np.int16] | None:
        if number not in self._tokens:
            return None
        ids, offsets = self._tokens[number]
        return ids[offsets[row] : offsets[row + 1]]


def write_wave(path: Path, samples: NDArray[np.int16]) -> None:
    """A mono 24 kHz 16-bit WAV file."""
    with wavefile.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(samples.astype("<i2").tobytes())


def read_speakers(folder: Path) -> NDArray[np.float32]:
    """The speaker vectors, [labels, several, 192]."""
    return np.array(map_npz(folder / "speakers.npz")["vectors"])
