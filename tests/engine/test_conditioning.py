import io
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import soundfile
import torch
from onnx import TensorProto, helper
from torch import Tensor
from torchaudio.functional import resample  # type: ignore[import-untyped]

from engine.conditioning import (
    BadVoice,
    Conditioner,
    Recording,
    align,
    kaldi_fbank,
    load_audio,
    prompt_mel,
    slaney_filters,
    speaker_feat,
    whisper_logmel,
)
from tests.golden_fixtures import fixture

GOLDEN = fixture("frontend")
FEATURES: dict[str, tuple[Callable[[Tensor], Tensor], str, float]] = {
    "prompt_mel": (prompt_mel, "wave24", 1e-3),
    "whisper_logmel": (whisper_logmel, "wave16", 1e-4),
    "kaldi_fbank": (lambda wave: kaldi_fbank(wave)[0], "wave16", 2e-3),
    "speaker_feat": (speaker_feat, "wave16", 2e-3),
    "wave16": (lambda wave: resample(wave, 24000, 16000), "wave24", 1e-5),
}


def speech(seconds: float, rate_hz: int = 24000) -> np.ndarray:
    """A voiced sound with a moving pitch, float32 [S]."""
    time = np.arange(int(seconds * rate_hz)) / rate_hz
    phase = 2 * np.pi * (140 * time + 3 * np.sin(2 * np.pi * 0.7 * time))
    return (0.2 * sum(np.sin(k * phase) / k for k in range(1, 8))).astype(np.float32)


def encoded(samples: np.ndarray, rate_hz: int, kind: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format=kind, subtype=subtype)
    return file.getvalue()


# features


@pytest.mark.golden
@pytest.mark.parametrize("case", sorted(GOLDEN.cases))
@pytest.mark.parametrize("name", sorted(FEATURES))
def test_features_equal_the_reference(case: str, name: str) -> None:
    feature, source, bound = FEATURES[name]
    own = re.search(rf"\b{case}: (\S+) for {name}\b", GOLDEN.manifest["tolerance"])
    bound = float(own[1]) if own else bound
    found = feature(GOLDEN.tensor(f"{case}/{source}"))
    torch.testing.assert_close(found, GOLDEN.tensor(f"{case}/{name}"), atol=bound, rtol=0)


@pytest.mark.golden
def test_filters_equal_the_reference() -> None:
    for rate_hz, n_fft, bands, name in ((24000, 1920, 80, "mel80"), (16000, 400, 128, "mel128_whisper")):
        found = torch.from_numpy(slaney_filters(rate_hz, n_fft, bands))
        torch.testing.assert_close(found, GOLDEN.tensor(f"filters/{name}"), atol=1e-7, rtol=0)


@pytest.mark.parametrize("feature", [prompt_mel, whisper_logmel, kaldi_fbank, speaker_feat])
def test_a_row_of_a_batch_equals_the_row_alone(feature: Callable[[Tensor], Tensor]) -> None:
    waves = torch.randn(3, 9600, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for row, found in zip(waves, feature(waves), strict=True):
        torch.testing.assert_close(found, feature(row[None])[0])


def test_the_mel_has_gradients() -> None:
    wave = torch.randn(2, 2400, dtype=torch.float64, requires_grad=True)
    prompt_mel(wave).sum().backward()
    assert wave.grad is not None
    assert bool(wave.grad.isfinite().all()) and float(wave.grad.abs().max()) > 0
    silent = torch.zeros(1, 2400, requires_grad=True)
    mel = prompt_mel(silent)
    mel.sum().backward()
    assert silent.grad is not None and bool(silent.grad.isfinite().all())
    torch.testing.assert_close(mel, torch.full_like(mel, -11.5129), atol=1e-4, rtol=0)


@pytest.mark.gpu
def test_the_mel_on_a_gpu_is_as_exact_as_on_the_cpu() -> None:
    """Near the floor a log-mel is mostly rounding of the loud bands, so float64 is the judge of both."""
    wave = torch.from_numpy(speech(1.0))[None]
    truth = prompt_mel(wave.double())
    on_cpu, on_gpu = (float((prompt_mel(w).cpu() - truth).square().mean().sqrt()) for w in (wave, wave.cuda()))
    assert on_gpu <= 2 * on_cpu + 1e-5, f"rms error {on_gpu} on the GPU, {on_cpu} on the CPU"


@pytest.mark.parametrize("samples", [721, 959, 960, 24001])
def test_frames_count_whole_hops(samples: int) -> None:
    wave = torch.randn(1, samples)
    assert prompt_mel(wave).shape == (1, samples // 480, 80)
    assert whisper_logmel(wave).shape == (1, 128, samples // 160)
    assert kaldi_fbank(wave).shape == (1, (samples - 400) // 160 + 1, 80)


@pytest.mark.parametrize("old_hz", [16000, 22050, 24000, 32000, 44100, 48000, 96000])
def test_a_tone_keeps_its_pitch_level_and_place_through_resampling(old_hz: int) -> None:
    def tone(rate_hz: int) -> Tensor:
        return torch.sin(2 * torch.pi * 1000 * torch.arange(rate_hz, dtype=torch.float64) / rate_hz)[None]

    found = resample(tone(old_hz), old_hz, 24000)
    assert found.shape == (1, 24000)
    torch.testing.assert_close(found[:, 500:-500], tone(24000)[:, 500:-500], atol=5e-3, rtol=0)


# recordings


@pytest.mark.parametrize(
    ("kind", "subtype", "rate_hz"),
    [
        ("WAV", "PCM_16", 16000),
        ("WAV", "PCM_24", 48000),
        ("WAV", "FLOAT", 22050),
        ("WAV", "PCM_U8", 24000),
        ("FLAC", "PCM_16", 44100),
        ("OGG", "VORBIS", 44100),
        ("MP3", "MPEG_LAYER_III", 44100),
    ],
)
def test_common_formats_are_read(kind: str, subtype: str, rate_hz: int, tmp_path: Path) -> None:
    data = encoded(speech(3.5, rate_hz), rate_hz, kind, subtype)
    (tmp_path / "voice").write_bytes(data)
    for source in (data, tmp_path / "voice", str(tmp_path / "voice")):
        recording = load_audio(source)
        assert recording.rate_hz == rate_hz
        assert recording.seconds == pytest.approx(3.5, abs=0.06)
        assert recording.at(16000).shape[0] == 1


def test_channels_are_averaged() -> None:
    left, right = speech(3.0), 0.3 * speech(3.0)[::-1]
    recording = load_audio(encoded(np.stack([left, right], axis=1), 24000, subtype="FLOAT"))
    torch.testing.assert_close(recording.wave[0], torch.from_numpy((left + right) / 2), atol=1e-6, rtol=0)


def with_value(value: float) -> np.ndarray:
    samples = speech(3.0)
    samples[1000] = value
    return samples


def claims_more(data: bytes) -> bytes:
    """A WAV header that promises far more than the file holds."""
    return data[:4] + struct.pack("<I", 0xF0000000) + data[8:40] + struct.pack("<I", 0xEFFFFFD0) + data[44:]


GOOD = encoded(speech(4.0), 24000)
BAD_RECORDINGS = {
    "empty": (b"", "0 bytes"),
    "text": (b"This is not audio at all.\n" * 20, "can't be decoded"),
    "m4a": (b"\0\0\0\x20ftypM4A \0\0\0\0M4A mp42isom" + bytes(500), "can't be decoded"),
    "header only": (GOOD[:44], "truncated|0.00 s"),
    "no samples": (encoded(np.zeros(0, np.float32), 24000), "0.00 s; 3 to 30 s"),
    "half a header": (GOOD[:20], "can't be decoded|truncated"),
    "truncated wav": (GOOD[:-5000], "truncated"),
    "truncated flac": (encoded(speech(4.0), 24000, "FLAC")[:-9000], "truncated|can't be decoded"),
    "truncated ogg": (encoded(speech(8.0), 24000, "OGG")[:-9000], "truncated|can't be decoded"),
    "ogg and the start of a page": (encoded(speech(4.0), 24000, "OGG") + b"OggS", "truncated"),
    "forged length": (claims_more(GOOD), "truncated"),
    "too short": (encoded(speech(2.9), 24000), "2.90 s; 3 to 30 s"),
    "too long": (encoded(speech(31.0), 24000), "over 30 s; 3 to 30 s"),
    "low rate": (encoded(speech(4.0, 8000), 8000), "8000 Hz; 16000 to"),
    "odd rate": (encoded(speech(4.0, 16001), 16001), "16001 Hz; one in a simpler ratio to 16000 Hz"),
    "silent": (encoded(np.zeros(96000, np.float32), 24000), "silent: -200 dBFS; at least -60"),
    "opposed channels": (encoded(np.stack([speech(4.0), -speech(4.0)], 1), 24000), "silent"),
    "not a number": (encoded(with_value(np.nan), 24000, subtype="FLOAT"), "not finite"),
    "infinite": (encoded(with_value(np.inf), 24000, subtype="FLOAT"), "not finite"),
    "unscaled": (encoded(32768 * speech(3.0), 24000, subtype="FLOAT"), "full scale is 1"),
    "many channels": (encoded(np.zeros((24000, 9), np.float32), 24000), "9 channels; at most 8"),
}


@pytest.mark.parametrize("name", BAD_RECORDINGS)
def test_a_recording_that_is_no_voice_says_why(name: str) -> None:
    data, message = BAD_RECORDINGS[name]
    with pytest.raises(BadVoice, match=message):
        load_audio(data)


def test_a_missing_file_is_a_bad_voice(tmp_path: Path) -> None:
    with pytest.raises(BadVoice, match="can't be read: No such file"):
        load_audio(tmp_path / "none.wav")


@pytest.mark.parametrize("seconds", [3.0, 30.0])
def test_the_limits_themselves_are_accepted(seconds: float) -> None:
    assert load_audio(encoded(speech(seconds, 16000), 16000)).seconds == seconds


@pytest.mark.parametrize("seed", range(30))
def test_damaged_files_never_give_another_error(seed: int) -> None:
    random = np.random.default_rng(seed)
    kinds = ("WAV", "FLAC", "OGG", "MP3")
    damaged = bytearray(encoded(speech(3.2), 24000, kinds[seed % 4]))
    for place in random.integers(0, min(len(damaged), 4000), 20):
        damaged[place] = random.integers(256)
    try:
        recording = load_audio(bytes(damaged))
    except BadVoice:
        return
    assert 3.0 <= recording.seconds <= 30.0


# the two encoders


def save_model(path: Path, nodes: list[onnx.NodeProto], inputs: list, outputs: list, constants: dict) -> Path:
    initializers = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def tiny_tokenizer(path: Path) -> Path:
    """ids [1, ceil(F / 4)], each the length that the second input named."""
    nodes = [
        helper.make_node("Slice", ["mel", "start", "end", "axis", "step"], ["fourth"]),
        helper.make_node("ReduceMean", ["fourth"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
        helper.make_node("Cast", ["len"], ["length"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["nothing", "length"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["ids"], to=TensorProto.INT32),
    ]
    inputs = [
        helper.make_tensor_value_info("mel", TensorProto.FLOAT, [1, 128, "F"]),
        helper.make_tensor_value_info("len", TensorProto.INT32, [1]),
    ]
    outputs = [helper.make_tensor_value_info("ids", TensorProto.INT32, [1, "P"])]
    constants = {
        "start": np.array([0]),
        "end": np.array([2**31 - 1]),
        "axis": np.array([2]),
        "step": np.array([4]),
        "zero": np.array(0, np.float32),
    }
    return save_model(path, nodes, inputs, outputs, constants)


def tiny_speaker_encoder(path: Path) -> Path:
    """embedding [1, 192]: the largest of each band over time, twice, and 32 bands again."""
    nodes = [
        helper.make_node("ReduceMax", ["fbank"], ["bands"], axes=[1], keepdims=0),
        helper.make_node("Slice", ["bands", "start", "end", "axis"], ["some"]),
        helper.make_node("Concat", ["bands", "bands", "some"], ["embedding"], axis=1),
    ]
    inputs = [helper.make_tensor_value_info("fbank", TensorProto.FLOAT, [1, "T", 80])]
    outputs = [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, [1, 192])]
    constants = {"start": np.array([0]), "end": np.array([32]), "axis": np.array([1])}
    return save_model(path, nodes, inputs, outputs, constants)


class Letters:
    """Stands for the tokenizer: one id for each character."""

    def prompt_ids(self, transcript: str, *, lang: str = "") -> list[int]:
        return [ord(c) for c in transcript]


@pytest.fixture(scope="module")
def conditioner(tmp_path_factory: pytest.TempPathFactory) -> Conditioner:
    folder = tmp_path_factory.mktemp("onnx")
    tokenizer, encoder = tiny_tokenizer(folder / "t.onnx"), tiny_speaker_encoder(folder / "s.onnx")
    return Conditioner(tokenizer, encoder, Letters())


def test_a_recording_becomes_a_voice(conditioner: Conditioner) -> None:
    voice = conditioner.voice(encoded(speech(3.48), 24000), "Hi", name="Ada", lang="en")
    assert voice.tokens.shape == (87,) and voice.tokens.dtype == torch.int64
    assert set(voice.tokens.tolist()) == {348}  # the frames that the tokenizer was told
    assert voice.mel.shape == (174, 80)
    assert (voice.name, voice.lang, voice.transcript, voice.prompt_text) == ("Ada", "en", "Hi", (72, 105))


def test_a_voice_holds_the_features_of_its_own_rates(conditioner: Conditioner) -> None:
    recording = load_audio(encoded(speech(3.48, 48000), 48000))
    voice = conditioner.voice(recording, "Hi")
    torch.testing.assert_close(voice.mel, prompt_mel(resample(recording.wave, 48000, 24000))[0][:174])
    highest = speaker_feat(resample(recording.wave, 48000, 16000)).amax(1)[0]
    torch.testing.assert_close(voice.embedding, torch.cat([highest, highest, highest[:32]]))


@pytest.mark.parametrize("samples", range(72_000, 72_000 + 960, 120))
def test_tokens_and_mel_are_cut_two_to_one(samples: int, conditioner: Conditioner) -> None:
    voice = conditioner.voice(Recording(torch.from_numpy(speech(4.0)[:samples])[None], 24000), "Hi")
    assert voice.mel.shape[0] == 2 * voice.tokens.shape[0]
    assert voice.tokens.shape[0] == samples // 960


def test_alignment_keeps_what_both_hold() -> None:
    tokens, mel = align(torch.arange(9), torch.rand(15, 80))
    assert (tokens.shape[0], mel.shape[0]) == (7, 14)
    tokens, mel = align(torch.arange(6), torch.rand(15, 80))
    assert (tokens.shape[0], mel.shape[0]) == (6, 12)


def test_the_id_is_the_contents_hash(conditioner: Conditioner) -> None:
    data = encoded(speech(3.2), 24000)
    first = conditioner.voice(data, "Hi").id
    assert conditioner.voice(data, "Hi", name="other").id == first
    assert conditioner.voice(data, "Ho").id != first
    assert conditioner.voice(encoded(0.9 * speech(3.2), 24000), "Hi").id != first


def test_a_voice_needs_its_transcript(conditioner: Conditioner) -> None:
    with pytest.raises(BadVoice, match="transcript is empty"):
        conditioner.voice(GOOD, " \n")
