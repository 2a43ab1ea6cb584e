from __future__ import annotations

import numpy as np
import pytest

from gateway.encodings import Encoder
from gateway.wire import ENCODINGS, RATES


def floats(*values: float) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


def test_floats_beyond_full_scale_clip_and_never_wrap() -> None:
    """G28"""
    loud = floats(1.2, -1.2, 1.0, -1.0, 0.0, float("nan"), float("inf"))
    samples = np.frombuffer(Encoder("s16le", 24000).push(loud), dtype="<i2")
    assert samples.tolist() == [32767, -32767, 32767, -32767, 0, 0, 32767]
    wave = np.frombuffer(Encoder("f32le", 24000).push(loud), dtype="<f4")
    assert wave.tolist() == [1.0, -1.0, 1.0, -1.0, 0.0, 0.0, 1.0]


def test_g711_bytes_are_those_of_the_standard() -> None:
    ends = floats(0.0, 1.0, -1.0, 1.2, -1.2)
    assert Encoder("mulaw", 24000).push(ends).hex() == "ff80008000"
    assert Encoder("alaw", 24000).push(ends).hex() == "d5aa2aaa2a"


@pytest.mark.parametrize("enc", ["mulaw", "alaw"])
def test_g711_grows_with_the_sample(enc: str) -> None:
    """Codes of a rising ramp, put in the standard's order of size, never fall."""
    codes = np.frombuffer(Encoder(enc, 24000).push(np.linspace(0, 1, 3000, dtype="<f4").tobytes()), np.uint8)
    size = ~codes & 0x7F if enc == "mulaw" else (codes ^ 0x55) & 0x7F
    assert (np.diff(size.astype(int)) >= 0).all()
    assert len(set(size.tolist())) > 100


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("enc", ENCODINGS)
def test_the_declared_rate_is_the_real_one(enc: str, rate: int) -> None:
    encoder = Encoder(enc, rate)
    second = np.sin(np.arange(24_000) * 0.05).astype("<f4")
    out = b"".join(encoder.push(part.tobytes()) for part in np.array_split(second, 7)) + encoder.drain()
    assert abs(len(out) / encoder.bytes_per_sample - rate) <= 1


def test_resampled_audio_does_not_depend_on_how_it_came() -> None:
    tone = (0.5 * np.sin(np.arange(24_000) * 0.05)).astype("<f4")
    whole, parts = Encoder("s16le", 16000), Encoder("s16le", 16000)
    once = whole.push(tone.tobytes()) + whole.drain()
    cut = b"".join(parts.push(part.tobytes()) for part in np.array_split(tone, 13)) + parts.drain()
    assert once == cut


def test_resampling_keeps_the_pitch() -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(24_000) / 24_000).astype("<f4")
    encoder = Encoder("f32le", 8000)
    out = np.frombuffer(encoder.push(tone.tobytes()) + encoder.drain(), dtype="<f4")
    peak = np.abs(np.fft.rfft(out)).argmax() * 8000 / len(out)
    assert abs(peak - 440) < 2
