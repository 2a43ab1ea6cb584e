"""From a recording to what the models are conditioned on: speech tokens, prompt mel, speaker embedding.

B batch, S samples, F frames. Source: CosyVoice3 reference, prompt audio. Parity: tests/engine/test_conditioning.py.
The features run on any device, in float32 or float64, with gradients: training uses them too.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchaudio.compliance import kaldi  # type: ignore[import-untyped]
from torchaudio.functional import resample  # type: ignore[import-untyped]

from engine.decoding import (
    MAX_FILE_BYTES,
    MAX_SECONDS,
    MIN_SECONDS,
    MODEL_RATES_HZ,
    BadVoice,
    check_rate,
    decode,
)
from engine.frontend import END_OF_PROMPT, has_speech
from engine.voices import Voice

if TYPE_CHECKING:
    from engine.frontend import Tokenizer

TOKEN_RATE_HZ, MEL_RATE_HZ = MODEL_RATES_HZ
MEL_MARGIN = 720  # samples that a mel frame reads on either side of its 480
SILENCE_DBFS = -60.0
CHARS_PER_SECOND = 40.0  # of a transcript: twice as fast as anybody speaks
MAX_PEAK = 2.0


# --- mel filters -----------------------------------------------------------------------------------------------------


def _slaney_mel(hz: np.ndarray) -> np.ndarray:
    """Linear below 1 kHz (15 mel), then 27 mel for each factor of 6.4."""
    log_part = 15.0 + 27.0 * np.log(np.maximum(hz, 1000.0) / 1000.0) / math.log(6.4)
    return np.asarray(np.where(hz < 1000.0, hz * 3.0 / 200.0, log_part))


def _slaney_hz(mel: np.ndarray) -> np.ndarray:
    return np.asarray(np.where(mel < 15.0, mel * 200.0 / 3.0, 1000.0 * 6.4 ** ((mel - 15.0) / 27.0)))


def slaney_filters(rate_hz: int, n_fft: int, bands: int) -> np.ndarray:
    """Triangles of unit area, 0 Hz to half the rate -> float32 [bands, n_fft // 2 + 1]."""
    top = _slaney_mel(np.array(rate_hz / 2.0))
    corners = _slaney_hz(np.linspace(0.0, float(top), bands + 2))
    bins = np.linspace(0.0, rate_hz / 2.0, n_fft // 2 + 1)
    rise = (bins - corners[:-2, None]) / np.diff(corners)[:-1, None]
    fall = (corners[2:, None] - bins) / np.diff(corners)[1:, None]
    area = (corners[2:] - corners[:-2])[:, None] / 2.0
    return np.asarray(np.maximum(0.0, np.minimum(rise, fall)) / area, dtype=np.float32)


_FILTERS = {
    "prompt": lambda: slaney_filters(MEL_RATE_HZ, 1920, 80),
    "whisper": lambda: slaney_filters(TOKEN_RATE_HZ, 400, 128),
}


# Cached outside inference mode, so that a later training step may save them for its backward pass.


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _filters(name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(_FILTERS[name]()).to(device, dtype)


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _hann(length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.hann_window(length, device=device, dtype=dtype)


# --- features --------------------------------------------------------------------------------------------------------


def prompt_mel(wave: Tensor) -> Tensor:
    """Log-mel that the flow takes and makes.

    wave  [B, S] at 24 kHz, in -1..1, S > 720 -> [B, S // 480, 80], natural log, 20 ms a frame; silence is -11.5129.
    """
    return log_mel(F.pad(wave, (MEL_MARGIN, MEL_MARGIN), mode="reflect")).transpose(1, 2)


def log_mel(padded: Tensor) -> Tensor:
    """Log-mel of waves that carry 720 samples of their surroundings on both sides: [B, 480 F + 1440] -> [B, 80, F]."""
    window = _hann(1920, padded.device, padded.dtype)
    spectrum = torch.view_as_real(torch.stft(padded, 1920, 480, window=window, center=False, return_complex=True))
    magnitude = (spectrum.square().sum(-1) + 1e-9).sqrt()  # [B, 961, F]
    mel = _filters("prompt", padded.device, padded.dtype) @ magnitude
    return mel.clamp(min=1e-5).log()


def whisper_logmel(wave: Tensor) -> Tensor:
    """Input of the speech tokenizer.

    wave  [B, S] at 16 kHz -> [B, 128, S // 160], 10 ms a frame. The floor is 8 below each row's own maximum, so a row
    padded with louder sound than its own is not the row alone.
    """
    window = _hann(400, wave.device, wave.dtype)
    spectrum = torch.stft(wave, 400, 160, window=window, center=True, pad_mode="reflect", return_complex=True)
    power = spectrum[..., :-1].abs().square()
    log = (_filters("whisper", wave.device, wave.dtype) @ power).clamp(min=1e-10).log10()
    return (torch.maximum(log, log.amax((1, 2), keepdim=True) - 8.0) + 4.0) / 4.0


def kaldi_fbank(wave: Tensor) -> Tensor:
    """Kaldi filter bank without dither: wave [B, S] at 16 kHz, in -1..1 -> [B, (S - 400) // 160 + 1, 80], log.

    The library takes one wave, and a frame reads 400 samples of it and nothing else: the rows go in end to end, each
    filled up to whole steps, and the frames that lie across a seam are left out.
    """
    batch, samples = wave.shape
    steps = -(-samples // 160)
    joined = F.pad(F.pad(wave, (0, 160 * steps - samples)).flatten(), (0, 240))
    bands: Tensor = kaldi.fbank(joined[None], dither=0.0, num_mel_bins=80, sample_frequency=TOKEN_RATE_HZ)
    return bands.view(batch, steps, 80)[:, : (samples - 400) // 160 + 1]


def speaker_feat(wave: Tensor) -> Tensor:
    """Input of the speaker encoder: `kaldi_fbank` less its mean over time, [B, F, 80]."""
    fbank = kaldi_fbank(wave)
    return fbank - fbank.mean(1, keepdim=True)


# --- recordings ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class Recording:
    """Mono sound: wave float32 [1, S] in -1..1, at its own rate."""

    wave: Tensor
    rate_hz: int

    @property
    def seconds(self) -> float:
        return self.wave.shape[-1] / self.rate_hz

    def at(self, rate_hz: int) -> Tensor:
        """[1, S'] at another rate, always derived from the original samples."""
        wave: Tensor = resample(self.wave, self.rate_hz, rate_hz)
        return wave


def load_audio(source: Path | str | bytes) -> Recording:
    """Decode a WAV, FLAC, Ogg or MP3 file, from a path or its bytes, and mix it down to mono.

    Never decodes more than the longest prompt allowed, whatever a header claims. Raises BadVoice.
    """
    data = source if isinstance(source, bytes) else _read(Path(source))
    samples, rate_hz = decode(data)
    recording = Recording(torch.from_numpy(samples)[None], rate_hz)
    check_recording(recording)
    return recording


def check_recording(recording: Recording) -> None:
    """Raise BadVoice unless the recording can condition a voice."""
    wave, seconds = recording.wave, recording.seconds
    check_rate(recording.rate_hz)
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise BadVoice(f"the recording lasts {_seconds(seconds)}; {MIN_SECONDS:g} to {MAX_SECONDS:g} s are accepted")
    if not bool(torch.isfinite(wave).all()):
        raise BadVoice("the recording holds samples that are not finite numbers")
    if (peak := float(wave.abs().max())) > MAX_PEAK:
        raise BadVoice(f"samples reach {peak:g}; full scale is 1, at most {MAX_PEAK:g} is accepted")
    level = 10.0 * math.log10(float(wave.double().square().mean()) + 1e-20)
    if level < SILENCE_DBFS:
        raise BadVoice(f"the recording is silent: {level:.0f} dBFS; at least {SILENCE_DBFS:g} dBFS is needed")


def check_transcript(transcript: str, seconds: float) -> None:
    """Raise BadVoice unless these can be the words of so long a recording."""
    words = transcript.rpartition(END_OF_PROMPT)[2].strip()
    if not has_speech(words):
        raise BadVoice("the transcript is empty; it must hold the words of the recording")
    most = int(CHARS_PER_SECOND * seconds)
    if len(words) > most:
        raise BadVoice(f"the transcript has {len(words)} characters; in {seconds:.1f} s at most {most} can be spoken")


def _seconds(seconds: float) -> str:
    return f"over {MAX_SECONDS:g} s" if seconds > MAX_SECONDS else f"{seconds:.2f} s"


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadVoice(f"the recording can't be read: {error.strerror}") from error


# --- the two encoders ------------------------------------------------------------------------------------------------


def align(tokens: Tensor, mel: Tensor) -> tuple[Tensor, Tensor]:
    """Cut tokens [P'] and mel [F, 80] to n tokens and 2n frames, the most that both hold."""
    num_tokens = min(mel.shape[0] // 2, tokens.numel())
    return tokens[:num_tokens], mel[: 2 * num_tokens]


class Conditioner:
    """The speech tokenizer and the speaker encoder of a checkpoint, both ONNX files, run on the CPU.

    Inputs are addressed by position: tokenizer (float32 [1, 128, F], int32 [1]) -> ids, encoder float32 [1, F, 80]
    -> [1, 192]. A GPU provider gives other embeddings (0.124 off at most), so it is not offered.
    """

    def __init__(self, speech_tokenizer: Path, speaker_encoder: Path, tokenizer: Tokenizer, threads: int = 1) -> None:
        self._speech_tokenizer = onnx_session(speech_tokenizer, threads)
        self._speaker_encoder = onnx_session(speaker_encoder, threads)
        self._tokenizer = tokenizer

    def voice(
        self, source: Path | str | bytes | Recording, transcript: str, *, name: str = "", lang: str = ""
    ) -> Voice:
        """The voice of a recording of 3 to 30 s and the words spoken in it. Raises BadVoice."""
        recording = source if isinstance(source, Recording) else load_audio(source)
        check_recording(recording)
        check_transcript(transcript, recording.seconds)
        wave = recording.at(TOKEN_RATE_HZ)
        tokens, mel = align(self.speech_tokens(wave), prompt_mel(recording.at(MEL_RATE_HZ))[0])
        voice_id = _content_id(recording, transcript)
        return Voice(
            id=voice_id,
            name=name or voice_id,
            lang=lang,
            transcript=transcript,
            prompt_text=tuple(self._tokenizer.prompt_ids(transcript, lang=lang)),
            tokens=tokens,
            mel=mel,
            embedding=self.embedding(wave),
        )

    def speech_tokens(self, wave: Tensor) -> Tensor:
        """Speech tokens of wave [1, S] at 16 kHz -> int64 [P], 25 a second."""
        logmel = whisper_logmel(wave)
        ids = run_onnx(self._speech_tokenizer, logmel.numpy(), np.array([logmel.shape[2]], dtype=np.int32))
        return torch.from_numpy(ids.astype(np.int64).ravel())

    def embedding(self, wave: Tensor) -> Tensor:
        """Speaker embedding of wave [1, S] at 16 kHz -> float32 [192], not normalised."""
        return torch.from_numpy(run_onnx(self._speaker_encoder, speaker_feat(wave).numpy()).astype(np.float32).ravel())


def _content_id(recording: Recording, transcript: str) -> str:
    digest = hashlib.sha256(recording.wave.numpy().tobytes())
    digest.update(f"\0{recording.rate_hz}\0{transcript}".encode())
    return digest.hexdigest()[:24]


def onnx_session(path: Path, threads: int) -> Any:
    """An ONNX model on the CPU; onnxruntime has no types to speak of."""
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_onnx(session: Any, *inputs: np.ndarray) -> np.ndarray:
    """The first output for inputs given by position."""
    names = [entry.name for entry in session.get_inputs()]
    return np.asarray(session.run(None, dict(zip(names, inputs, strict=True)))[0])
