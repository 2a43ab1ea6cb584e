"""Text as the talker's ids, the way serving encodes it, and the same text broken into smaller pieces (BPE dropout)."""

import lzma
import random
import re
import wave as wavefile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchaudio.functional import resample  # type: ignore[import-untyped]

from engine.conditioning import onnx_session, run_onnx, whisper_logmel
from engine.frontend import END_OF_PROMPT, PROMPT_PREFIX, Tokenizer
from engine.training.data import FIRST_KOKORO, SHIPPED, VOICES

TOKENIZER_FOLDER = "CosyVoice-BlankEN"
SPEECH_TOKENIZER = "speech_tokenizer_v3.onnx"
BREAK = 0.1
ENDERS = ".?!;:"
PRONUNCIATIONS = "pronunciations.txt.xz"
"""Lines of a word and its CMU phonemes, say `weather W EH1 DH ER0`; optional."""


class TextIds:
    """The tokenizer of a data folder. `prefix` is what stands before every prompt text."""

    def __init__(self, data: Path) -> None:
        tokenizer = Tokenizer(data / TOKENIZER_FOLDER)
        self.prefix = tokenizer.encode(PROMPT_PREFIX + END_OF_PROMPT, allow_controls=True)
        self.vocabulary = -(-tokenizer.size // 8) * 8
        self._tokenizer = tokenizer
        self._plain = _copy(tokenizer)
        self._broken = _copy(tokenizer)
        self._broken.model.dropout = BREAK
        self._steered = tokenizer._steered
        self._pronunciations = read_pronunciations(data / PRONUNCIATIONS)

    def clean(self, texts: list[str]) -> list[list[int]]:
        return _encode(self._plain, texts)

    def broken(self, texts: list[str]) -> list[list[int]]:
        return _encode(self._broken, texts)

    def spelled(self, texts: list[str], seed: int) -> list[list[int]]:
        """A word or two of each text as CMU phonemes, the way a caller overrides a pronunciation."""
        dice = random.Random(seed)
        return _encode(self._steered, [self._spell(ended(text), dice) for text in texts])

    def _spell(self, text: str, dice: random.Random) -> str:
        known = [m for m in re.finditer(r"[A-Za-z']+", text) if m[0].lower() in self._pronunciations]
        chosen = dice.sample(known, min(len(known), dice.choice((1, 1, 2))))
        for word in sorted(chosen, key=lambda m: -m.start()):
            phonemes = "".join(f"[{phoneme}]" for phoneme in self._pronunciations[word[0].lower()])
            text = text[: word.start()] + phonemes + text[word.end() :]
        return text


def read_pronunciations(path: Path) -> dict[str, list[str]]:
    """Words in lower case and their phonemes; empty if there is no such file."""
    if not path.exists():
        return {}
    with lzma.open(path, "rt", encoding="ascii") as file:
        return {word: phonemes for word, *phonemes in map(str.split, file)}


def _copy(tokenizer: Tokenizer) -> Any:
    copy = type(tokenizer._plain).from_str(tokenizer._plain.to_str())
    copy.encode_special_tokens = True
    return copy


def _encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return [e.ids for e in tokenizer.encode_batch([ended(t) for t in texts], add_special_tokens=False)]


def ended(text: str) -> str:
    """Serving ends every segment with a sentence ender."""
    text = text.strip()
    return text if text[-1:] in ENDERS else text + "."


def read_wave(path: Path) -> torch.Tensor:
    """A mono 24 kHz 16-bit WAV -> float32 [1, S]."""
    with wavefile.open(str(path), "rb") as file:
        if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, 24000):
            raise ValueError(f"{path.name} is not mono 16-bit at 24000 Hz")
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return torch.from_numpy(samples.astype(np.float32) / 32768)[None]


def speech_tokens(session: Any, wave: torch.Tensor) -> NDArray[np.int16]:
    """Tokens of a 24 kHz wave [1, S] by the exported speech tokenizer, cut to whole pairs of mel frames."""
    logmel = whisper_logmel(resample(wave, 24000, 16000))
    ids = run_onnx(session, logmel.numpy(), np.array([logmel.shape[2]], dtype=np.int32))
    return ids.ravel().astype(np.int16)[: wave.shape[1] // 960]


def shipped_prompts(data: Path) -> Iterator[tuple[int, str, str, NDArray[np.int16]]]:
    """(speaker label, name, transcript, tokens) of every shipped prompt; nothing before the tokenizer is exported."""
    model = data / SPEECH_TOKENIZER
    if not model.exists():
        return
    session = onnx_session(model, 2)
    labels = {voice.name: label for label, voice in enumerate(VOICES)}
    labels |= {name: FIRST_KOKORO + number for number, name in enumerate(SHIPPED)}
    for path in sorted((data / "prompts").glob("*.wav")):
        if path.stem in labels:
            transcript = path.with_suffix(".txt").read_text(encoding="utf-8").strip()
            yield labels[path.stem], path.stem, transcript, speech_tokens(session, read_wave(path))
