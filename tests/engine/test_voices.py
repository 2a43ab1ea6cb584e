import random
import subprocess
from pathlib import Path

import pytest
import torch

from engine.voices import Voice, VoiceFileError, read_voices, write_voices

OFFICIAL_KEYS = {
    "prompt_text",
    "prompt_text_len",
    "llm_prompt_speech_token",
    "llm_prompt_speech_token_len",
    "flow_prompt_speech_token",
    "flow_prompt_speech_token_len",
    "prompt_speech_feat",
    "prompt_speech_feat_len",
    "llm_embedding",
    "flow_embedding",
}


def voice(num_tokens: int = 5) -> Voice:
    return Voice(
        id="ada",
        name="Ada",
        lang="en",
        transcript="Hello.",
        prompt_text=(3, 1, 4),
        tokens=torch.arange(num_tokens),
        mel=torch.rand(2 * num_tokens, 80),
        embedding=torch.rand(192),
    )


def test_a_voice_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_voices(tmp_path / "spk2info.pt", [voice()])
    read = read_voices(tmp_path / "spk2info.pt")["ada"]
    made = torch.load(tmp_path / "spk2info.pt", weights_only=True)["ada"]
    assert (read.id, read.name, read.lang, read.transcript) == ("ada", "Ada", "en", "Hello.")
    assert read.prompt_text == (3, 1, 4)
    torch.testing.assert_close(read.tokens, torch.arange(5))
    torch.testing.assert_close(read.mel, made["prompt_speech_feat"][0])
    torch.testing.assert_close(read.embedding, made["flow_embedding"][0])
    assert (read.prompt_ms, read.has_prompt) == (200, True)


def test_the_file_has_the_official_keys_and_shapes(tmp_path: Path) -> None:
    write_voices(tmp_path / "spk2info.pt", [voice()])
    entry = torch.load(tmp_path / "spk2info.pt", weights_only=True)["ada"]
    assert set(entry) >= OFFICIAL_KEYS
    assert entry["llm_prompt_speech_token"].shape == (1, 5)
    assert entry["llm_prompt_speech_token"].dtype == torch.int32
    assert entry["prompt_speech_feat"].shape == (1, 10, 80)
    assert entry["llm_embedding"].shape == (1, 192)
    assert entry["prompt_text_len"].tolist() == [3]


def test_half_mels_take_half_the_room_and_come_back_in_float32(tmp_path: Path) -> None:
    for name, dtype in (("whole", torch.float32), ("half", torch.float16)):
        write_voices(tmp_path / name, [voice(100)], mel_dtype=dtype)
    whole, half = (read_voices(tmp_path / name)["ada"].mel for name in ("whole", "half"))
    assert half.dtype == torch.float32
    assert (tmp_path / "whole").stat().st_size - (tmp_path / "half").stat().st_size > 30_000
    assert torch.isfinite(half).all() and half.shape == whole.shape


def test_an_official_entry_is_read_without_our_keys(tmp_path: Path) -> None:
    write_voices(tmp_path / "spk2info.pt", [voice()])
    stored = torch.load(tmp_path / "spk2info.pt", weights_only=True)
    torch.save({"x": {key: stored["ada"][key] for key in OFFICIAL_KEYS}}, tmp_path / "official.pt")
    read = read_voices(tmp_path / "official.pt")["x"]
    assert (read.id, read.name, read.transcript) == ("x", "x", "")
    assert read.prompt_text == (3, 1, 4)


def test_an_embedding_alone_is_a_voice_without_a_prompt(tmp_path: Path) -> None:
    torch.save({"sft": {"embedding": torch.rand(1, 192)}}, tmp_path / "spk2info.pt")
    read = read_voices(tmp_path / "spk2info.pt")["sft"]
    assert not read.has_prompt
    assert read.mel.shape == (0, 80)


PROMPT = {
    "flow_prompt_speech_token": torch.arange(4)[None],
    "prompt_speech_feat": torch.rand(1, 11, 80),
    "flow_embedding": torch.rand(1, 192),
}


def test_a_longer_mel_is_cut_to_the_tokens(tmp_path: Path) -> None:
    torch.save({"x": PROMPT}, tmp_path / "spk2info.pt")
    assert read_voices(tmp_path / "spk2info.pt")["x"].mel.shape == (8, 80)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ([1, 2], "holds a list"),
        ({"x": 3}, "'x' is a int"),
        ({"x": {}}, "'x' has none of flow_embedding"),
        ({"x": {"flow_embedding": [0.0]}}, "flow_embedding is a list"),
        ({"x": {"flow_embedding": torch.rand(1, 100)}}, r"embedding is \[100\], not \[192\]"),
        ({"x": {"flow_embedding": torch.full((192,), torch.nan)}}, "no finite number"),
        ({"x": {"flow_embedding": torch.zeros(192, dtype=torch.complex64)}}, "flow_embedding is no plain tensor"),
        ({"x": PROMPT | {"prompt_speech_feat": torch.tensor(1.0)}}, r"prompt_speech_feat is \[\], not \[..., 80\]"),
        ({"x": PROMPT | {"prompt_speech_feat": torch.zeros(0, 0)}}, r"prompt_speech_feat is \[0, 0\]"),
        ({"x": PROMPT | {"flow_prompt_speech_token": torch.tensor([3, 6561])}}, "6561 is no code; they are 0 to 6560"),
        ({"x": PROMPT | {"flow_prompt_speech_token": torch.tensor([-1, 3])}}, "-1 is no code"),
    ],
)
def test_a_malformed_file_is_named(stored: object, message: str, tmp_path: Path) -> None:
    torch.save(stored, tmp_path / "spk2info.pt")
    with pytest.raises(VoiceFileError, match=message):
        read_voices(tmp_path / "spk2info.pt")


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"x": subprocess.Popen.__init__}, tmp_path / "spk2info.pt")
    with pytest.raises(VoiceFileError, match="weights"):
        read_voices(tmp_path / "spk2info.pt")


def test_a_damaged_file_is_named_whatever_the_damage(tmp_path: Path) -> None:
    write_voices(tmp_path / "whole.pt", [voice()])
    whole, dice, num_named = (tmp_path / "whole.pt").read_bytes(), random.Random(0), 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[dice.randrange(2000)] = dice.randrange(256)
        (tmp_path / "damaged.pt").write_bytes(damaged)
        try:
            read_voices(tmp_path / "damaged.pt")
        except VoiceFileError:
            num_named += 1
    assert num_named > 50


def test_a_mel_must_fit_the_tokens() -> None:
    with pytest.raises(VoiceFileError, match=r"mel is \[3, 80\]; its tokens ask for \[4, 80\]"):
        Voice(
            id="x",
            name="x",
            lang="",
            transcript="",
            prompt_text=(),
            tokens=torch.arange(2),
            mel=torch.rand(3, 80),
            embedding=torch.rand(192),
        )
