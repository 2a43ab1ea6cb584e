"""Many voices: Kokoro's labels, packs and warped copies, the tokenizer's anchor, the speaker encoder's targets."""

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.training import kokoro, onnx_export, speaker_encoder, speech_tokenizer
from engine.training.corpus import short_texts, spread
from engine.training.data import (
    FIRST_HELD_OUT,
    FIRST_KOKORO,
    HELD_OUT_VOICES,
    KOKORO,
    NUM_LABELS,
    SHIPPED,
    KokoroVoice,
    Shards,
    Utterance,
    read_speakers,
    write_npz,
    write_shard,
)
from engine.training.resident import SHARES, drawn, group_sizes

CPU = torch.device("cpu")


def said(label: int, units: int = 160, text: str = "A small red door.") -> Utterance:
    rng = np.random.default_rng(label)
    f0 = np.full(2 * units, 120.0 + label)
    wave = 0.2 * np.sin(2 * np.pi * f0[0] * np.arange(600 * units) / 24000) + 0.01 * rng.standard_normal(600 * units)
    phones = np.repeat(rng.integers(43, 60, units // 4), 4).astype(np.int16)
    return Utterance((wave * 20000).astype(np.int16), text, phones, f0.astype(np.float16), label, None)


def test_held_out_voices_have_no_part_in_any_other() -> None:
    held = {style for voice in HELD_OUT_VOICES for style in voice.styles}
    assert not held & {style for voice in KOKORO for style in voice.styles}
    assert [voice.styles[0] for voice in KOKORO[: len(SHIPPED)]] == list(SHIPPED.values())
    assert len({(voice.styles, voice.weights) for voice in KOKORO}) == len(KOKORO)
    weighted = [voice.weights for voice in KOKORO if voice.weights]
    assert all(abs(sum(weights) - 1) < 0.01 for weights in weighted)
    assert -0.31 <= min(map(min, weighted)) < -0.1, "some go beyond their styles, none far"


def test_held_out_voices_are_kept_out_of_training(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, [said(FIRST_KOKORO), said(FIRST_HELD_OUT)])
    data = Shards(tmp_path)
    assert (data.train, data.held_out) == ([0], [1])
    reel = speech_tokenizer.Reel(tmp_path, CPU, 1.0)
    reel.refresh()
    assert reel.parts["speaker"][0].tolist() == [FIRST_KOKORO]


def test_a_pack_keeps_labels_and_nearly_the_wave(tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    before = [said(FIRST_KOKORO, 80), said(FIRST_HELD_OUT, 120, "Two doors.")]
    kokoro.write_pack(tmp_path, 3, before)
    after = kokoro.read_pack(tmp_path / "pack-00003.npz")
    for one, other in zip(before, after, strict=True):
        assert (one.text, one.speaker) == (other.text, other.speaker)
        np.testing.assert_array_equal(one.phones, other.phones)
        np.testing.assert_allclose(one.f0.astype(float), other.f0.astype(float), atol=0.5)
        error = one.wave.astype(float) - other.wave.astype(float)
        assert np.square(error).mean() < 0.03 * np.square(one.wave.astype(float)).mean()


def test_warped_copies_have_labels_of_their_own() -> None:
    pytest.importorskip("scipy")
    copies = kokoro.at_all_rates(said(FIRST_KOKORO + 2))
    assert [copy.speaker for copy in copies] == [FIRST_KOKORO + 2 + lap * len(KOKORO) for lap in range(3)]
    for copy in copies:
        assert len(copy.wave) == 600 * len(copy.phones) and len(copy.f0) == 2 * len(copy.phones)
    assert copies[1].f0.mean() < copies[0].f0.mean() < copies[2].f0.mean()
    assert len(kokoro.at_all_rates(said(FIRST_HELD_OUT))) == 1


def test_a_few_utterances_of_kokoro_get_their_share() -> None:
    draws = torch.rand(4000, 2, generator=torch.Generator().manual_seed(0))
    rows = drawn((80, 5, 15), draws)
    assert rows.min() == 0 and rows.max() == 99
    shares = [float(((rows >= low) & (rows < high)).float().mean()) for low, high in ((0, 80), (80, 85), (85, 100))]
    assert shares == pytest.approx(SHARES, abs=0.03)
    assert set(drawn((0, 0, 5), draws).tolist()) == set(drawn((5, 0, 0), draws).tolist()) == set(range(5))
    assert group_sizes(np.array([0, 3, FIRST_KOKORO, FIRST_KOKORO + len(SHIPPED)])) == (2, 1, 1)


def test_the_module_comes_back_from_its_onnx_file(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    torch.manual_seed(0)
    model = speech_tokenizer.SpeechTokenizer(48, 2).eval()
    for parameter in model.parameters():  # trained ones are never alike: the exporter keeps one of two that are
        parameter.data = (parameter.data + 0.1 * torch.randn_like(parameter)).half().float()
    path = tmp_path / speech_tokenizer.ONNX_FILE
    example = (torch.randn(1, 128, 80), torch.tensor([80], dtype=torch.int32))
    axes: tuple[dict[str, dict[int, str]], dict[str, dict[int, str]]]
    axes = {"feats": {2: "frames"}, "feats_length": {}}, {"indices": {1: "tokens"}}
    onnx_export.export_fp16(model, example, path, *axes)
    assert onnx_export.compare(model, path, [example]) == 1.0
    back = speech_tokenizer.recovered(path).state_dict()
    assert all(torch.equal(value, back[name]) for name, value in model.state_dict().items())


def test_the_anchor_holds_hibaris_codes_alone(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, [said(0), said(FIRST_KOKORO + 1)])
    reel = speech_tokenizer.Reel(tmp_path, CPU, 1.0)
    reel.refresh()
    torch.manual_seed(0)
    anchor, moved = (speech_tokenizer.SpeechTokenizer(48, 1).eval().requires_grad_(False) for _ in range(2))
    batch = reel.crops(8, 64)
    lengths = (batch.num_units * 5 // 2).to(torch.int32)
    logmel = speech_tokenizer.whisper_logmel(batch.wave)
    assert float(speech_tokenizer.drift(anchor.squashed(logmel, lengths), batch, anchor)) == pytest.approx(0, abs=1e-9)
    away = moved.squashed(logmel, lengths)
    assert float(speech_tokenizer.drift(away, batch, anchor)) > 0
    batch.speaker.fill_(FIRST_KOKORO)
    assert float(speech_tokenizer.drift(away, batch, anchor)) == 0


def test_an_encoder_that_is_there_names_the_voices(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    torch.manual_seed(0)
    model = speaker_encoder.SpeakerEncoder(48)
    model(torch.randn(8, 90, 80))  # its averages
    model.fold()
    axes: tuple[dict[str, dict[int, str]], dict[str, dict[int, str]]] = {"input": {1: "frames"}}, {"output": {}}
    onnx_export.export_fp16(model, (torch.randn(1, 200, 80),), tmp_path / speaker_encoder.ENCODER, *axes)
    write_shard(tmp_path, 0, [said(0), said(FIRST_KOKORO + 1)])
    speaker_encoder.write_known_vectors(tmp_path, CPU)
    vectors = read_speakers(tmp_path)
    assert vectors.shape == (NUM_LABELS, speaker_encoder.VECTORS, 192)
    assert np.abs(vectors).sum((1, 2)).nonzero()[0].tolist() == [0, FIRST_KOKORO + 1]


def test_every_voice_is_read_for_so_long() -> None:
    class Reader:
        def speak(self, text: str, voice: KokoroVoice, label: int) -> Utterance:
            return said(label, 80, text)

    texts = [f"Sentence {number}." for number in range(3000)]
    found: Counter[int] = Counter()
    for part in (0, 1):
        args = argparse.Namespace(each=3.0, processes=2)
        found.update(u.speaker for u in kokoro.readings_of_each(texts, Reader(), args, part))  # type: ignore[arg-type]
    assert found == {FIRST_KOKORO + n: 2 * (8 if n < len(SHIPPED) else 1) for n in range(len(KOKORO))}


def test_targets_keep_their_angles_in_fewer_dimensions(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((NUM_LABELS, 256)).astype(np.float16)
    assert speaker_encoder.read_targets(tmp_path, CPU) is None
    write_npz(tmp_path / "speaker_targets.npz", {"vectors": vectors})
    targets = speaker_encoder.read_targets(tmp_path, CPU)
    assert targets is not None and targets.shape == (NUM_LABELS, 192)
    classes = torch.tensor([5, 9, 5 + FIRST_HELD_OUT])  # the last is warped: it has no target
    loss = speaker_encoder.target_loss(torch.cat([targets[[5, 9]], -targets[[5]]]), classes, targets)
    assert float(loss) == pytest.approx(0, abs=1e-5)


def test_short_texts_are_spread_over_the_beginning() -> None:
    import random

    texts = short_texts(["table", "run"] * 50, random.Random(0))
    assert {"Yes.", "no.", "7.", "K?", "Of course!"} <= set(texts)
    assert all(len(text.split()) <= 6 for text in texts)
    among = spread(["x"] * 10, [str(i) for i in range(100)], 0.3, random.Random(0))
    assert [text for text in among if text != "x"] == [str(i) for i in range(100)]
    assert max(place for place, text in enumerate(among) if text == "x") < 41
