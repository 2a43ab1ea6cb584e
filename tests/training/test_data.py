"""The training set's files: what is written comes back, in pieces and while it grows."""

from pathlib import Path

import numpy as np
import pytest

from engine.training.data import (
    Shards,
    Utterance,
    is_held_out,
    map_npz,
    read_speakers,
    write_npz,
    write_shard,
    write_tokens,
)


def utterance(units: int, text: str, speaker: int = 0) -> Utterance:
    rng = np.random.default_rng(units)
    return Utterance(
        wave=rng.integers(-9000, 9000, 600 * units).astype(np.int16),
        text=text,
        phones=rng.integers(0, 178, units).astype(np.int16),
        f0=rng.uniform(80, 300, 2 * units).astype(np.float16),
        speaker=speaker,
        tokens=None,
    )


def test_utterances_come_back_as_written(tmp_path: Path) -> None:
    written = [utterance(20, "One."), utterance(33, "Two – zwei.", speaker=2)]
    write_shard(tmp_path, 0, written)
    data = Shards(tmp_path)
    for before, after in zip(written, data.utterances(), strict=True):
        assert (after.text, after.speaker, after.tokens) == (before.text, before.speaker, None)
        np.testing.assert_array_equal(after.wave, before.wave)
        np.testing.assert_array_equal(after.phones, before.phones)
        np.testing.assert_array_equal(after.f0, before.f0)
    assert data.num_seconds == pytest.approx(53 * 0.025)


def test_refresh_appends_and_never_moves_an_index(tmp_path: Path) -> None:
    write_shard(tmp_path, 5, [utterance(20, "Late shard first.")])
    data = Shards(tmp_path)
    write_shard(tmp_path, 0, [utterance(21, "Then another."), utterance(22, "And one more.")])
    assert data.refresh() == 2
    assert data.refresh() == 0
    assert [data.utterance(i).text for i in range(3)] == ["Late shard first.", "Then another.", "And one more."]


def test_tokens_arrive_later(tmp_path: Path) -> None:
    write_shard(tmp_path, 3, [utterance(40, "First."), utterance(8, "Second.")])
    data = Shards(tmp_path)
    assert not data.is_tokenised(0)
    write_tokens(tmp_path, 3, [np.arange(25, dtype=np.int16), np.arange(5, dtype=np.int16)])
    data.refresh()
    assert data.is_tokenised(1)
    tokens = data.utterance(1).tokens
    assert tokens is not None
    assert tokens.tolist() == [0, 1, 2, 3, 4]


def test_held_out_sentences_are_apart(tmp_path: Path) -> None:
    texts = [f"Sentence {i}." for i in range(12_000)]
    share = sum(map(is_held_out, texts)) / len(texts)
    assert 1 / 800 < share < 1 / 200
    kept = next(text for text in texts if is_held_out(text))
    used = next(text for text in texts if not is_held_out(text))
    write_shard(tmp_path, 0, [utterance(20, used), utterance(20, kept)])
    data = Shards(tmp_path)
    assert (data.train, data.held_out) == ([0], [1])


def test_a_half_written_file_is_invisible(tmp_path: Path) -> None:
    (tmp_path / ".shard-00000.npz.partial").write_bytes(b"PK")
    assert len(Shards(tmp_path)) == 0


def test_mapped_arrays_equal_numpys(tmp_path: Path) -> None:
    arrays = {"a": np.arange(7, dtype=np.int16), "b": np.zeros((0, 3), np.float32), "c": np.eye(3)}
    write_npz(tmp_path / "x.npz", arrays)
    mapped = map_npz(tmp_path / "x.npz")
    for name, array in arrays.items():
        np.testing.assert_array_equal(mapped[name], array)
        assert mapped[name].dtype == array.dtype


def test_speaker_vectors(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((4, 3, 192)).astype(np.float32)
    write_npz(tmp_path / "speakers.npz", {"vectors": vectors})
    np.testing.assert_array_equal(read_speakers(tmp_path), vectors)
