"""Writes a checkpoint of the official size with random weights, for benches: what it says is noise, its cost is real.

    python -m tests.bench.full_size FOLDER [--voices 64] [--prompt-tokens 125] [--ratio 2] [--seed 0]

Talker of 24 layers x 896, flow of 22 x 1024, vocoder of 512, as published, in bfloat16 (1.7 GB). A text of n tokens
always gives ratio * n speech tokens: both bounds of its length are set to the same value, and no id counts as
silence. The tokenizer and the two ONNX models are the embedded voice's. Voices are voice-00, voice-01, ...
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from engine.checkpoint import BACKBONE, SETTINGS_FILE
from engine.config import ModelConfig
from engine.frontend import Tokenizer
from engine.voices import Voice, write_voices
from tests.random_checkpoint import FULL, SETTINGS, random_checkpoint, random_voice

EMBEDDED = ModelConfig().folder
TRANSCRIPT = "The ferry to the islands leaves from the second pier at a quarter past nine, if the wind allows it."
FIXED_LENGTH = """\
silent_tokens: []
llm: !new:cosyvoice.llm.llm.CosyVoice3LM
    min_token_text_ratio: {ratio}
    max_token_text_ratio: {ratio}
"""


def full_size(folder: Path, *, voices: int = 64, prompt_tokens: int = 125, ratio: float = 2.0, seed: int = 0) -> Path:
    """Fills `folder` (made if missing) and returns it."""
    random_checkpoint(folder, FULL, seed=seed, dtype=torch.bfloat16, voices=())
    for file in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copyfile(EMBEDDED / BACKBONE / file, folder / BACKBONE / file)
    for file in ("speech_tokenizer_v3.onnx", "campplus.onnx"):
        shutil.copyfile(EMBEDDED / file, folder / file)
    official = "llm: !new:cosyvoice.llm.llm.CosyVoice3LM\n"
    settings = SETTINGS.replace(official, FIXED_LENGTH.format(ratio=ratio))
    (folder / SETTINGS_FILE).write_text(settings, encoding="utf-8")
    write_voices(folder / "spk2info.pt", random_voices(folder, voices, prompt_tokens, seed))
    return folder


def random_voices(folder: Path, count: int, prompt_tokens: int, seed: int) -> list[Voice]:
    generator = torch.Generator().manual_seed(seed + 1)
    prompt_text = tuple(Tokenizer(folder / BACKBONE).prompt_ids(TRANSCRIPT, lang="en"))
    names = [f"voice-{number:02d}" for number in range(count)]
    made = [random_voice(name, prompt_tokens, generator) for name in names]
    return [replace(voice, transcript=TRANSCRIPT, prompt_text=prompt_text) for voice in made]


def main() -> None:
    parser = argparse.ArgumentParser(description="write a full-size checkpoint of random weights")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--voices", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=125)
    parser.add_argument("--ratio", type=float, default=2.0, help="speech tokens for each text token")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    full_size(given.folder, voices=given.voices, prompt_tokens=given.prompt_tokens, ratio=given.ratio, seed=given.seed)


if __name__ == "__main__":
    main()
