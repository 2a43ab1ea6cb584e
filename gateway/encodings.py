"""From the engine's float32 at 24 kHz to the samples a caller asked for.

Floats are clipped, never wrapped. Rates other than 24 kHz pass through soxr's streaming resampler, one stream from
flush to flush: what its filter still holds is let out at a flush and at the end, so that both are complete.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import soxr  # type: ignore[import-untyped]

from engine.messages import SAMPLE_RATE_HZ

Floats = npt.NDArray[np.float32]
Shorts = npt.NDArray[np.int16]

MULAW_BIAS: Final = 132
MULAW_CLIP: Final = 32_635


def shorts(wave: Floats) -> Shorts:
    """Linear 16 bit: full scale is 32767, what lies outside is clipped, NaN is silence."""
    samples: Shorts = np.rint(clipped(wave) * 32_767.0).astype(np.int16)
    return samples


def clipped(wave: Floats) -> Floats:
    """Within full scale; NaN is silence."""
    if not np.isfinite(wave.sum()):  # a sum is cheap, and catches every NaN
        wave = np.nan_to_num(wave, nan=0.0, posinf=1.0, neginf=-1.0)
    return np.minimum(np.maximum(wave, -1.0), 1.0)


def write_s16le(wave: Floats) -> bytes:
    return shorts(wave).astype("<i2").tobytes()


def write_f32le(wave: Floats) -> bytes:
    return clipped(wave).astype("<f4").tobytes()


def write_mulaw(wave: Floats) -> bytes:
    return _mulaw_table()[shorts(wave).view(np.uint16)].tobytes()


def write_alaw(wave: Floats) -> bytes:
    return _alaw_table()[shorts(wave).view(np.uint16)].tobytes()


def _all_shorts() -> npt.NDArray[np.int32]:
    return np.arange(65_536, dtype=np.uint16).view(np.int16).astype(np.int32)


@cache
def _mulaw_table() -> npt.NDArray[np.uint8]:
    """G.711 mu-law byte of every 16 bit sample, indexed by the sample's unsigned bits."""
    pcm = _all_shorts()
    magnitude = np.minimum(np.abs(pcm), MULAW_CLIP) + MULAW_BIAS
    exponent = np.floor(np.log2(magnitude)).astype(np.int32) - 7
    mantissa = (magnitude >> (exponent + 3)) & 0x0F
    sign = np.where(pcm < 0, 0x80, 0)
    table: npt.NDArray[np.uint8] = (~(sign | exponent << 4 | mantissa) & 0xFF).astype(np.uint8)
    return table


@cache
def _alaw_table() -> npt.NDArray[np.uint8]:
    """G.711 A-law byte of every 16 bit sample, indexed by the sample's unsigned bits."""
    pcm = _all_shorts() >> 3
    magnitude = np.where(pcm < 0, -pcm - 1, pcm)
    segment = np.maximum(np.floor(np.log2(np.maximum(magnitude, 1))).astype(np.int32) - 4, 0)
    mantissa = (magnitude >> np.maximum(segment, 1)) & 0x0F
    mask = np.where(pcm < 0, 0x55, 0xD5)
    table: npt.NDArray[np.uint8] = ((segment << 4 | mantissa) ^ mask).astype(np.uint8)
    return table


_WRITERS: Final[dict[str, tuple[int, Callable[[Floats], bytes]]]] = {
    "s16le": (2, write_s16le),
    "f32le": (4, write_f32le),
    "mulaw": (1, write_mulaw),
    "alaw": (1, write_alaw),
}


class Encoder:
    """One context's audio in its own format. Raises KeyError for an encoding that isn't in the table."""

    def __init__(self, enc: str, rate: int) -> None:
        self.rate = rate
        self.bytes_per_sample, self._write = _WRITERS[enc]
        self._stream: Any = None
        self._taken = 0  # samples at 24 kHz since the last drain
        self._drained = 0  # samples at the context's rate, up to there

    @property
    def position(self) -> int:
        """Samples of the context's rate that what was pushed amounts to; some may still be in the filter."""
        return self._drained + self._taken * self.rate // SAMPLE_RATE_HZ

    def push(self, pcm: bytes) -> bytes:
        """pcm: float32, little endian, 24 kHz -> whole samples of the context's format."""
        wave = np.frombuffer(pcm, dtype="<f4")
        self._taken += len(wave)
        if self.rate == SAMPLE_RATE_HZ:
            return self._write(wave)
        if self._stream is None:
            self._stream = soxr.ResampleStream(SAMPLE_RATE_HZ, self.rate, 1, dtype="float32")
        return self._write(self._stream.resample_chunk(np.nan_to_num(wave)))

    def drain(self) -> bytes:
        """What the filter still holds. What comes next starts from silence."""
        self._drained, self._taken = self.position, 0
        if self._stream is None:
            return b""
        tail = self._stream.resample_chunk(np.zeros(0, dtype=np.float32), last=True)
        self._stream = None
        return self._write(tail)
