"""From a recording to what the models are conditioned on: speech tokens, prompt mel, speaker embedding.

B batch, S samples, F frames. Source: CosyVoice3 reference, prompt audio. Parity: tests/engine/test_conditioning.py.
The features need torch alone and run on any device, in float32 or float64, with gradients: training uses them too.
"""

from __future__ import annotations

import hashlib
import io
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.voices import Voice

if TYPE_CHECKING:
    from engine.frontend import Tokenizer

MEL_RATE_HZ = 24_000
TOKEN_RATE_HZ = 16_000
MIN_SECONDS, MAX_SECONDS = 3.0, 30.0
MIN_RATE_HZ, MAX_RATE_HZ = 16_000, 192_000
MAX_CHANNELS = 8
MAX_FILE_BYTES = 64 * 2**20
SILENCE_DBFS = -60.0
MAX_PEAK = 2.0


class BadVoice(Exception):
    """A recording can't become a voice; the text names the value and the limit, never the file's content."""

    code, retryable = "bad_voice", False


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


def _kaldi_filters() -> np.ndarray:
    """Triangles of unit height on the HTK mel scale, 20 Hz to 8 kHz -> float32 [80, 257]; the Nyquist bin is unused."""
    low, high = (1127.0 * math.log(1.0 + hz / 700.0) for hz in (20.0, TOKEN_RATE_HZ / 2.0))
    corners = np.linspace(low, high, 82)
    bins = 1127.0 * np.log(1.0 + np.arange(256) * (TOKEN_RATE_HZ / 512) / 700.0)
    rise = (bins - corners[:-2, None]) / np.diff(corners)[:-1, None]
    fall = (corners[2:, None] - bins) / np.diff(corners)[1:, None]
    triangles = np.maximum(0.0, np.minimum(rise, fall)).astype(np.float32)
    return np.pad(triangles, ((0, 0), (0, 1)))


_FILTERS = {
    "prompt": lambda: slaney_filters(MEL_RATE_HZ, 1920, 80),
    "whisper": lambda: slaney_filters(TOKEN_RATE_HZ, 400, 128),
    "kaldi": _kaldi_filters,
}


@lru_cache(maxsize=32)
def _filters(name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(_FILTERS[name]()).to(device, dtype)


@lru_cache(maxsize=32)
def _hann(length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.hann_window(length, device=device, dtype=dtype)


@lru_cache(maxsize=8)
def _povey(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.hann_window(400, periodic=False, device=device, dtype=dtype).pow(0.85)


# --- features --------------------------------------------------------------------------------------------------------


def prompt_mel(wave: Tensor) -> Tensor:
    """Log-mel that the flow takes and makes.

    wave  [B, S] at 24 kHz, in -1..1, S > 720 -> [B, S // 480, 80], natural log, 20 ms a frame; silence is -11.5129.
    """
    padded = F.pad(wave, (720, 720), mode="reflect")
    window = _hann(1920, wave.device, wave.dtype)
    spectrum = torch.view_as_real(torch.stft(padded, 1920, 480, window=window, center=False, return_complex=True))
    magnitude = (spectrum.square().sum(-1) + 1e-9).sqrt()  # [B, 961, F]
    mel = _filters("prompt", wave.device, wave.dtype) @ magnitude
    return mel.clamp(min=1e-5).log().transpose(1, 2)


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
    """Kaldi filter bank without dither: wave [B, S] at 16 kHz, in -1..1 -> [B, (S - 400) // 160 + 1, 80], log."""
    frames = wave.unfold(-1, 400, 160)
    frames = frames - frames.mean(-1, keepdim=True)
    before = torch.cat([frames[..., :1], frames[..., :-1]], dim=-1)
    frames = (frames - 0.97 * before) * _povey(wave.device, wave.dtype)
    power = torch.fft.rfft(frames, n=512).abs().square()  # [B, F, 257]
    energies: Tensor = power @ _filters("kaldi", wave.device, wave.dtype).T
    return energies.clamp(min=torch.finfo(torch.float32).eps).log()


def speaker_feat(wave: Tensor) -> Tensor:
    """Input of the speaker encoder: `kaldi_fbank` less its mean over time, [B, F, 80]."""
    fbank = kaldi_fbank(wave)
    return fbank - fbank.mean(1, keepdim=True)


@lru_cache(maxsize=16)
def _sinc_kernel(old: int, new: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, int]:
    """One filter for each of the `new` phases -> [new, 1, taps], and how far it reaches to the left."""
    cutoff = 0.99 * min(old, new)
    reach = math.ceil(6 * old / cutoff)
    phase = -torch.arange(new, dtype=torch.float64)[:, None] / new
    time = (phase + torch.arange(-reach, reach + old, dtype=torch.float64) / old) * cutoff
    time = time.clamp(-6, 6)
    kernel = torch.sinc(time) * torch.cos(time * math.pi / 12).square() * cutoff / old
    return kernel[:, None].to(device, dtype), reach


def resample(wave: Tensor, old_hz: int, new_hz: int) -> Tensor:
    """Windowed sinc (Hann, 6 zero crossings, cut off at 0.99 of Nyquist): [B, S] -> [B, ceil(S * new_hz / old_hz)]."""
    if old_hz == new_hz:
        return wave
    step = math.gcd(old_hz, new_hz)
    old, new = old_hz // step, new_hz // step
    kernel, reach = _sinc_kernel(old, new, wave.device, wave.dtype)
    padded = F.pad(wave, (reach, reach + old))[:, None]
    phases = F.conv1d(padded, kernel, stride=old)  # [B, new, n]
    return phases.transpose(1, 2).flatten(1)[:, : math.ceil(new * wave.shape[-1] / old)]


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
        return resample(self.wave, self.rate_hz, rate_hz)


def load_audio(source: Path | str | bytes) -> Recording:
    """Decode a WAV, FLAC, Ogg or MP3 file, from a path or its bytes, and mix it down to mono.

    Never decodes more than the longest prompt allowed, whatever a header claims. Raises BadVoice.
    """
    data = source if isinstance(source, bytes) else _read(Path(source))
    samples, rate_hz = _decode(data)
    recording = Recording(torch.from_numpy(samples.mean(axis=1, dtype=np.float32))[None], rate_hz)
    check_recording(recording)
    return recording


def check_recording(recording: Recording) -> None:
    """Raise BadVoice unless the recording can condition a voice."""
    wave, seconds = recording.wave, recording.seconds
    if not MIN_RATE_HZ <= recording.rate_hz <= MAX_RATE_HZ:
        raise BadVoice(f"the sample rate is {recording.rate_hz} Hz; {MIN_RATE_HZ} to {MAX_RATE_HZ} Hz are accepted")
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise BadVoice(f"the recording lasts {_seconds(seconds)}; {MIN_SECONDS:g} to {MAX_SECONDS:g} s are accepted")
    if not bool(torch.isfinite(wave).all()):
        raise BadVoice("the recording holds samples that are not finite numbers")
    if (peak := float(wave.abs().max())) > MAX_PEAK:
        raise BadVoice(f"samples reach {peak:g}; full scale is 1, at most {MAX_PEAK:g} is accepted")
    level = 10.0 * math.log10(float(wave.double().square().mean()) + 1e-20)
    if level < SILENCE_DBFS:
        raise BadVoice(f"the recording is silent: {level:.0f} dBFS; at least {SILENCE_DBFS:g} dBFS is needed")


def _seconds(seconds: float) -> str:
    return f"over {MAX_SECONDS:g} s" if seconds > MAX_SECONDS else f"{seconds:.2f} s"


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadVoice(f"the recording can't be read: {error.strerror}") from error


def _decode(data: bytes) -> tuple[np.ndarray, int]:
    """-> float32 [S, channels], sample rate; at most a little over MAX_SECONDS of it."""
    import soundfile  # type: ignore[import-untyped]  # training runs on machines without it

    if not data:
        raise BadVoice("the file is empty: 0 bytes")
    if len(data) > MAX_FILE_BYTES:
        raise BadVoice(f"the file has over {MAX_FILE_BYTES} bytes, the most accepted")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.channels > MAX_CHANNELS:
                raise BadVoice(f"the recording has {file.channels} channels; at most {MAX_CHANNELS} are accepted")
            rate_hz, promised = file.samplerate, file.frames
            longest = int(MAX_SECONDS * rate_hz) + 1
            samples = file.read(min(promised, longest), dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, RuntimeError, ValueError, OverflowError, MemoryError) as error:
        raise BadVoice("the file can't be decoded as WAV, FLAC, Ogg or MP3 audio") from error
    if len(samples) < min(promised, longest) or _is_cut_short(data):
        raise BadVoice("the file is truncated: it ends before the audio that its header promises")
    return samples, rate_hz


def _is_cut_short(data: bytes) -> bool:
    """Whether a container says that it is longer than the bytes there; decoders read such files without complaint."""
    if data[:4] == b"RIFF":
        promised = int.from_bytes(data[4:8], "little")
        return promised < 0xFFFFFF00 and promised + 8 > len(data) + 1  # writers to a pipe leave the largest number
    if data[:4] == b"OggS":
        return not data[data.rfind(b"OggS") + 5] & 4  # the last page of a whole stream says that it is the last
    return False


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
        self._speech_tokenizer = _session(speech_tokenizer, threads)
        self._speaker_encoder = _session(speaker_encoder, threads)
        self._tokenizer = tokenizer

    def voice(
        self, source: Path | str | bytes | Recording, transcript: str, *, name: str = "", lang: str = ""
    ) -> Voice:
        """The voice of a recording of 3 to 30 s and the words spoken in it. Raises BadVoice."""
        recording = source if isinstance(source, Recording) else load_audio(source)
        check_recording(recording)
        if not transcript.strip():
            raise BadVoice("the transcript is empty; it must hold the words of the recording")
        wave = recording.at(TOKEN_RATE_HZ)
        tokens, mel = align(self.speech_tokens(wave), prompt_mel(recording.at(MEL_RATE_HZ))[0])
        voice_id = _content_id(recording, transcript)
        return Voice(
            id=voice_id,
            name=name or voice_id,
            lang=lang,
            transcript=transcript,
            prompt_text=tuple(self._tokenizer.prompt_ids(transcript)),
            tokens=tokens,
            mel=mel,
            embedding=self.embedding(wave),
        )

    def speech_tokens(self, wave: Tensor) -> Tensor:
        """Speech tokens of wave [1, S] at 16 kHz -> int64 [P], 25 a second."""
        logmel = whisper_logmel(wave)
        ids = _run(self._speech_tokenizer, logmel.numpy(), np.array([logmel.shape[2]], dtype=np.int32))
        return torch.from_numpy(ids.astype(np.int64).ravel())

    def embedding(self, wave: Tensor) -> Tensor:
        """Speaker embedding of wave [1, S] at 16 kHz -> float32 [192], not normalised."""
        return torch.from_numpy(_run(self._speaker_encoder, speaker_feat(wave).numpy()).astype(np.float32).ravel())


def _content_id(recording: Recording, transcript: str) -> str:
    digest = hashlib.sha256(recording.wave.numpy().tobytes())
    digest.update(f"\0{recording.rate_hz}\0{transcript}".encode())
    return digest.hexdigest()[:24]


def _session(path: Path, threads: int) -> Any:
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _run(session: Any, *inputs: np.ndarray) -> np.ndarray:
    names = [entry.name for entry in session.get_inputs()]
    return np.asarray(session.run(None, dict(zip(names, inputs, strict=True)))[0])
