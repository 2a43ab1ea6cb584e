"""Hear a checkpoint without the engine: text -> talker -> flow -> vocoder, all at once; or copies of true utterances.

    python -m engine.training.listen --checkpoint DIR --sentences FILE --out WAVS [--voice heart] [--temperature 0.9]
    python -m engine.training.listen --checkpoint DIR --held-out held_out.npz --stage tokens|mel --out WAVS

Writes 000.wav, 001.wav, ... and texts.txt (one line a file). ``--stage tokens`` resynthesises true tokens, which
leaves the talker out; ``--stage mel`` true mels, which leaves the flow out too.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.checkpoint import Checkpoint, load
from engine.conditioning import prompt_mel
from engine.frontend import Tokenizer, assemble, segments
from engine.training.data import write_wave
from engine.voices import Voice, read_voices


def draw(logits: Tensor, history: list[int], temperature: float, tau: float, dice: torch.Generator) -> int:
    """One id by the reference's repetition-aware sampling (top_p 0.8, top_k 25, window 10)."""
    scores = (logits / temperature).log_softmax(-1)
    best = scores.sort(descending=True, stable=True)
    before = best.values.exp().cumsum(0) - best.values.exp()
    count = max(1, min(25, int((before < 0.8).sum())))
    place = int(torch.multinomial(best.values[:count].exp(), 1, generator=dice))
    chosen = int(best.indices[place])
    if history[-10:].count(chosen) >= 10 * tau:
        scores[chosen] = -torch.inf
        chosen = int(torch.multinomial(scores.exp(), 1, generator=dice))
    return chosen


@torch.no_grad()
def speak_tokens(
    model: Checkpoint, voice: Voice, tokenizer: Tokenizer, text: str, temperature: float, seed: int
) -> list[int]:
    """The talker's ids for one segment; the whole context is computed again for every id, which is slow but simple."""
    talker, special = model.talker, model.talker.shape.special
    prompt = assemble("zero_shot", text, tokenizer, voice_prompt_text=voice.prompt_text)
    rows = talker.prefill_rows(torch.tensor(prompt.prompt_text), torch.tensor(prompt.text), voice.tokens)
    dice = torch.Generator().manual_seed(seed)
    said: list[int] = []
    for step in range(20 * prompt.num_target):
        logits = talker.logits(talker.hidden(rows[None])[0, -1]).clone()
        if step < 2 * prompt.num_target:
            logits[special.sos :] = -torch.inf
        chosen = draw(logits, said, temperature, model.settings.sampling.tau, dice)
        if chosen >= special.sos:
            break
        said.append(chosen)
        rows = torch.cat([rows, talker.speech_rows(torch.tensor([chosen]))])
    return said


@torch.no_grad()
def to_wave(model: Checkpoint, voice: Voice, tokens: list[int], *, streaming: bool) -> Tensor:
    """Tokens -> wave [S] at 24 kHz with the voice's prompt."""
    mel = model.flow.offline(
        torch.tensor([tokens]), voice.tokens[None], voice.mel[None], voice.embedding[None],
        streaming=streaming, finalize=True,
    )  # fmt: skip
    return model.hift.offline(mel)[0]


def write(path: Path, wave: Tensor) -> None:
    write_wave(path, (wave.clamp(-1, 1) * 32767).round().to(torch.int16).numpy())


def say_sentences(model: Checkpoint, voice: Voice, lines: list[str], out: Path, temperature: float, seed: int) -> None:
    tokenizer = Tokenizer(model.tokenizer_dir)
    spoken, began = 0.0, time.perf_counter()
    for number, line in enumerate(lines):
        parts = []
        for segment in segments(line, tokenizer, lang="en"):
            ids = speak_tokens(model, voice, tokenizer, segment, temperature, seed + number)
            parts.append(to_wave(model, voice, ids or [0], streaming=True))
        wave = torch.cat(parts)
        write(out / f"{number:03d}.wav", wave)
        spoken += len(wave) / 24000
        print(f"{number:03d} {len(wave) / 24000:5.2f} s  {line[:90]}", flush=True)
    print(f"{spoken:.1f} s in {time.perf_counter() - began:.1f} s")


def copy_held_out(model: Checkpoint, voice: Voice, file: Path, out: Path, stage: str, limit: int) -> list[str]:
    held = np.load(file)
    texts = []
    count = min(limit, sum(name.startswith("wave-") for name in held.files))
    for number in [n for n in range(count) if int(held[f"speaker-{n}"]) == 0]:
        wave = torch.from_numpy(held[f"wave-{number}"].astype(np.float32) / 32768)[None]
        if stage == "mel":
            with torch.no_grad():
                made = model.hift.offline(prompt_mel(wave).transpose(1, 2))[0]
        elif stage == "teacher":
            made = wave[0]
        else:
            made = to_wave(model, voice, [int(t) for t in held[f"tokens-{number}"]], streaming=True)
        write(out / f"{len(texts):03d}.wav", made)
        texts.append(bytes(held[f"text-{number}"]).decode())
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sentences", type=Path)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--stage", choices=["tokens", "mel", "teacher"], default="tokens")
    parser.add_argument("--voice")
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.out.mkdir(parents=True, exist_ok=True)
    model = load(given.checkpoint, "cpu")
    voices = read_voices(given.checkpoint / "spk2info.pt")
    voice = voices[given.voice or next(iter(voices))]
    if given.held_out:
        texts = copy_held_out(model, voice, given.held_out, given.out, given.stage, given.limit)
    else:
        texts = [line for line in given.sentences.read_text(encoding="utf-8").splitlines() if line.strip()][
            : given.limit
        ]
        say_sentences(model, voice, texts, given.out, given.temperature, given.seed)
    (given.out / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
