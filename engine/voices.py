"""A voice, and the `spk2info.pt` file that keeps voices in the official key layout.

P speech tokens of the prompt; its mel has 2P frames of 20 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SPEAKER_WIDTH = 192
MEL_BANDS = 80
NUM_CODES = 6561


class VoiceFileError(Exception):
    """A saved voice does not have the official layout; the text names the voice, the key and what was found."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Voice:
    """What the models take from a speaker's recording.

    prompt_text  ids of the instruction prefix and the transcript; empty for a voice without a recording
    tokens       int64 [P], codes 0..6560      mel  float32 [2P, 80], natural-log mel      embedding  float32 [192]
    """

    id: str
    name: str
    lang: str
    transcript: str
    prompt_text: tuple[int, ...]
    tokens: Tensor
    mel: Tensor
    embedding: Tensor

    def __post_init__(self) -> None:
        frames = 2 * self.tokens.numel()
        if self.mel.shape != (frames, MEL_BANDS):
            found = list(self.mel.shape)
            raise VoiceFileError(f"voice {self.id!r}: mel is {found}; its tokens ask for [{frames}, {MEL_BANDS}]")
        if self.embedding.shape != (SPEAKER_WIDTH,):
            found = list(self.embedding.shape)
            raise VoiceFileError(f"voice {self.id!r}: embedding is {found}, not [{SPEAKER_WIDTH}]")
        if wrong := [code for code in self.tokens.tolist() if not 0 <= code < NUM_CODES]:
            raise VoiceFileError(f"voice {self.id!r}: {wrong[0]} is no code; they are 0 to {NUM_CODES - 1}")
        if not bool(self.mel.isfinite().all() and self.embedding.isfinite().all()):
            raise VoiceFileError(f"voice {self.id!r}: mel or embedding holds what is no finite number")

    @property
    def has_prompt(self) -> bool:
        """False for a voice that is an embedding only (mode "sft")."""
        return self.tokens.numel() > 0

    @property
    def prompt_ms(self) -> int:
        return 40 * self.tokens.numel()


def read_voices(path: Path) -> dict[str, Voice]:
    """The voices of a `spk2info.pt`, by id. Raises VoiceFileError."""
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise VoiceFileError(f"{path.name} can't be read: {error}") from error
    except Exception as error:  # damaged bytes make the unpickler raise anything
        raise VoiceFileError(f"{path.name} is not a file of weights and plain values") from error
    if not isinstance(stored, Mapping):
        raise VoiceFileError(f"{path.name} holds a {type(stored).__name__}, not a mapping from id to voice")
    return {str(key): _from_entry(str(key), entry) for key, entry in stored.items()}


def write_voices(path: Path, voices: Iterable[Voice], *, mel_dtype: torch.dtype = torch.float32) -> None:
    """Write voices as the reference would store them, with `name`, `lang` and `transcript` beside its own keys.

    `mel_dtype` float16 halves the file; the reference copies a prompt's mel into a tensor of its own type.
    """
    torch.save({voice.id: _to_entry(voice, mel_dtype) for voice in voices}, path)


def _to_entry(voice: Voice, mel_dtype: torch.dtype) -> dict[str, Any]:
    tokens = voice.tokens.to(torch.int32)[None]
    count = torch.tensor([tokens.shape[1]], dtype=torch.int32)
    mel = voice.mel.to(mel_dtype)[None].contiguous()
    embedding = voice.embedding.float()[None]
    return {
        "prompt_text": torch.tensor([voice.prompt_text], dtype=torch.int32),
        "prompt_text_len": torch.tensor([len(voice.prompt_text)], dtype=torch.int32),
        "llm_prompt_speech_token": tokens,
        "llm_prompt_speech_token_len": count,
        "flow_prompt_speech_token": tokens,
        "flow_prompt_speech_token_len": count,
        "prompt_speech_feat": mel,
        "prompt_speech_feat_len": torch.tensor([mel.shape[1]], dtype=torch.int32),
        "llm_embedding": embedding,
        "flow_embedding": embedding,
        "name": voice.name,
        "lang": voice.lang,
        "transcript": voice.transcript,
    }


def _from_entry(key: str, entry: Mapping[str, Any]) -> Voice:
    """`flow_*` values win: the flow is what they must fit. An older entry holds `embedding` alone."""
    if not isinstance(entry, Mapping):
        raise VoiceFileError(f"voice {key!r} is a {type(entry).__name__}, not a mapping")
    tokens = _tensor(key, entry, "flow_prompt_speech_token", "llm_prompt_speech_token")
    mel = _tensor(key, entry, "prompt_speech_feat")
    embedding = _tensor(key, entry, "flow_embedding", "llm_embedding", "embedding")
    if embedding is None:
        raise VoiceFileError(f"voice {key!r} has none of flow_embedding, llm_embedding, embedding")
    tokens = torch.zeros(0) if tokens is None else tokens.flatten()
    mel = torch.zeros(0, MEL_BANDS) if mel is None else mel
    if mel.shape[-1:] != (MEL_BANDS,):
        raise VoiceFileError(f"voice {key!r}: prompt_speech_feat is {list(mel.shape)}, not [..., {MEL_BANDS}]")
    mel = mel.reshape(-1, MEL_BANDS)
    num_tokens = min(tokens.numel(), mel.shape[0] // 2)
    prompt_text = _tensor(key, entry, "prompt_text")
    return Voice(
        id=key,
        name=str(entry.get("name", key)),
        lang=str(entry.get("lang", "")),
        transcript=str(entry.get("transcript", "")),
        prompt_text=() if prompt_text is None else tuple(prompt_text.flatten().tolist()),
        tokens=tokens[:num_tokens].long(),
        mel=mel[: 2 * num_tokens].float(),
        embedding=embedding.flatten().float(),
    )


def _tensor(key: str, entry: Mapping[str, Any], *names: str) -> Tensor | None:
    for name in names:
        value = entry.get(name)
        if value is not None and not isinstance(value, Tensor):
            raise VoiceFileError(f"voice {key!r}: {name} is a {type(value).__name__}, not a tensor")
        if value is not None and not is_plain(value):
            raise VoiceFileError(f"voice {key!r}: {name} is no plain tensor of real numbers")
        if value is not None:
            return value
    return None


def is_plain(tensor: Tensor) -> bool:
    """A file may hold other kinds, which break later and elsewhere: sparse, quantised, complex, without data."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_complex() or tensor.is_meta)
