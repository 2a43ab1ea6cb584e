"""G29, G37: uploads that are no recording, or want more than one may take. The child is limited, and the parent never
waits for it in vain."""

from __future__ import annotations

import io
import json
import resource
import struct
import subprocess
import sys

import numpy as np
import pytest
import soundfile

from engine import decoding
from engine.decoding import MAX_FILE_BYTES, MEMORY_BYTES, PROGRAM, BadVoice, decode, decode_in_child
from tests.engine.test_conditioning import BAD_RECORDINGS, GOOD, encoded, speech

CHILD_FINDS = {"too short", "too long", "silent", "opposed channels", "not a number", "infinite", "unscaled"}


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
async def test_the_child_gives_what_the_decoder_gives(kind: str) -> None:
    data = encoded(np.stack([speech(3.2), speech(3.2)[::-1]], 1), 24000, kind)
    samples, rate_hz = await decode_in_child(data)
    here, _ = decode(data)
    assert rate_hz == 24000
    np.testing.assert_array_equal(samples, here)


async def test_a_file_that_is_refused_gives_the_same_words_from_the_child() -> None:
    data, _ = BAD_RECORDINGS["low rate"]
    with pytest.raises(BadVoice, match="8000 Hz; 16000 to 192000 Hz"):
        await decode_in_child(data)


async def test_what_is_no_recording_by_its_first_bytes_starts_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "PROGRAM", "/nonexistent")
    for data in (
        b"",
        b"https://example.com/a.wav",
        b"file:///etc/passwd",
        b"#EXTM3U\nhttp://169.254.169.254/latest/meta-data\n",
        b"\0\0\0\x20ftypM4A " + bytes(100),
        b"FORM\0\0\0\x20AIFFCOMM" + bytes(100),
        b"MThd\0\0\0\x06" + bytes(100),
        b"RIFF" + bytes(MAX_FILE_BYTES),
    ):
        with pytest.raises(BadVoice):
            await decode_in_child(data)


def flac_bomb(seconds: int) -> bytes:
    """Silence packs thousandfold: hours of it in a small file."""
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", 192_000, 8, "PCM_16", format="FLAC") as bomb:
        for _ in range(seconds):
            bomb.write(np.zeros((192_000, 8), np.int16))
    return file.getvalue()


async def test_a_flac_bomb_is_decoded_no_further_than_a_recording_may_last() -> None:
    data = flac_bomb(60)
    assert len(data) < 200_000
    samples, rate_hz = await decode_in_child(data)
    assert len(samples) == 30 * rate_hz + 1


async def test_an_opus_bomb_is_decoded_no_further_than_a_recording_may_last() -> None:
    data = encoded(np.zeros(48_000 * 300, np.float32), 48_000, "OGG", "OPUS")
    assert len(data) < 200_000
    samples, rate_hz = await decode_in_child(data)
    assert len(samples) == 30 * rate_hz + 1


def forged_wav(channels: int, rate_hz: int, bits: int, num_bytes: int) -> bytes:
    """A header that claims more than there is."""
    block = channels * bits // 8
    fmt = struct.pack("<HHIIHH", 1, channels, rate_hz, (rate_hz * block) & 0xFFFFFFFF, block & 0xFFFF, bits)
    head = b"WAVEfmt " + struct.pack("<I", 16) + fmt + b"data" + struct.pack("<I", num_bytes)
    return b"RIFF" + struct.pack("<I", num_bytes + 36) + head + bytes(4_000)


@pytest.mark.parametrize(
    "shape", [(1, 24_000, 16, 0x7FFFFF00), (65_535, 192_000, 32, 0x7FFFFFFF), (0, 0, 0, 0), (2, 2**32 - 1, 16, 1)]
)
async def test_a_forged_header_is_a_bad_voice(shape: tuple[int, int, int, int]) -> None:
    with pytest.raises(BadVoice):
        await decode_in_child(forged_wav(*shape))


@pytest.mark.parametrize("seed", range(4))
async def test_bytes_behind_a_true_beginning_are_a_bad_voice(seed: int) -> None:
    noise = np.random.default_rng(seed).bytes(20_000)
    with pytest.raises(BadVoice):
        await decode_in_child((b"RIFF", b"fLaC", b"OggS", b"ID3\x04")[seed] + noise)


# ---- the limits themselves


def in_child(body: str) -> subprocess.CompletedProcess[bytes]:
    """Runs statements after the child's own limits have been set."""
    program = f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r})\nimport decoding\ndecoding._limit()\n{body}"
    return subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, timeout=30, check=False)


def test_the_child_is_limited_in_memory_time_files_and_cores() -> None:
    names = ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_CORE", "RLIMIT_NOFILE")
    body = f"import json, resource; print(json.dumps([resource.getrlimit(getattr(resource, n)) for n in {names}]))"
    limits = json.loads(in_child(body).stdout)
    assert limits == [[MEMORY_BYTES] * 2, [decoding.PROCESSOR_S] * 2, [0, 0], [0, 0], [16, 16]]
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != MEMORY_BYTES, "ours is not touched"


def test_memory_past_the_limit_is_not_had() -> None:
    run = in_child("try: bytearray(2 << 30)\nexcept MemoryError: print('refused')")
    assert run.stdout == b"refused\n"


async def test_a_child_that_is_killed_or_hangs_is_a_bad_voice(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("child")
    for name, body, words in (
        ("killed", "import os; os.kill(os.getpid(), 9)", "within 10 s of a processor and 1024 MiB"),
        ("silent", "", "within 10 s"),
        ("hanging", "import time; time.sleep(60)", "longer than 0.3 s"),
    ):
        (folder / f"{name}.py").write_text(body)
        monkeypatch.setattr(decoding, "PROGRAM", folder / f"{name}.py")
        monkeypatch.setattr(decoding, "PATIENCE_S", 0.3 if name == "hanging" else 30.0)
        with pytest.raises(BadVoice, match=words):
            await decode_in_child(GOOD)
