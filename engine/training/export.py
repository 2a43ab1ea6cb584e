"""Assemble the checkpoint folder in the official layout from a finished run.

    python -m engine.training.export --run DIR --out engine/voices/embedded --hours 70

``DIR`` holds what a run left: the three weight files, the two ONNX models, ``CosyVoice-BlankEN`` and ``prompts``.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint import BACKBONE, load
from engine.conditioning import Conditioner
from engine.frontend import Tokenizer
from engine.sampler import Sampling
from engine.talker import TalkerShape
from engine.training.onnx_export import shorten
from engine.training.train_hift import SHAPE
from engine.training.train_talker import shape_of
from engine.voices import Voice, write_voices

SIZE_LIMIT = 40_000_000
HEAD = "llm_decoder.weight"
SAMPLING = Sampling(temperature=0.4, top_p=0.8, top_k=25, window=10, tau=0.8)
SETTINGS = """\
# Settings of the embedded voice that differ from the official release or that a reader may want to see.
sample_rate: 24000
token_frame_rate: 25
token_mel_ratio: 2
# Ids that the speech tokenizer gives to silence: {note}
silent_tokens: {silent}
frontend:
  # It has read English alone.
  reads_ascii: true
flow:
  # Half the official ten: heard as well, and as natural, in three quarters of the time.
  n_timesteps: 5
hift:
  # The official staircase carries no pitch; of sines a small vocoder makes a voice.
  tone_steps: {tone_steps}
llm:
  mix_ratio: [5, 15]
  sampling:
    # A talker this small is sure of too little: cooler draws are heard right more often.
    temperature: {sampling.temperature}
    top_p: {sampling.top_p}
    top_k: {sampling.top_k}
    win_size: {sampling.window}
    # True speech repeats ids within ten in one case of twenty; the official 0.1 would forbid that.
    tau_r: {sampling.tau}
"""


def backbone_config(shape: TalkerShape) -> dict[str, object]:
    """The Qwen2 `config.json` of a talker."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.text_vocab,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
    }


def save_talker(state: dict[str, Tensor], file: Path) -> None:
    """Write float16; the head shares the speech embedding, so the file holds it once and says so in its metadata."""
    half = {k: v.half().contiguous() for k, v in state.items() if k != HEAD}
    save_file(half, str(file), metadata={HEAD: "speech_embedding.weight"})


def silence_ids(conditioner: Conditioner) -> list[int]:
    """The ids that the speech tokenizer gives to three seconds of silence and of faint noise."""
    faint = torch.randn(1, 48000, generator=torch.Generator().manual_seed(0)) * 1e-4
    ids = [conditioner.speech_tokens(wave)[2:-2].tolist() for wave in (torch.zeros(1, 48000), faint)]
    return sorted({i for run in ids for i in run})


def voices_of(conditioner: Conditioner, folder: Path) -> list[Voice]:
    """A voice for each prompts/NAME.wav with its NAME.txt; its id is its name."""
    voices = []
    for path in sorted(folder.glob("*.wav")):
        transcript = path.with_suffix(".txt").read_text(encoding="utf-8").strip()
        made = conditioner.voice(path, transcript, name=path.stem, lang="en")
        voices.append(
            Voice(
                id=path.stem, name=path.stem.capitalize(), lang="en", transcript=transcript,
                prompt_text=made.prompt_text, tokens=made.tokens, mel=made.mel, embedding=made.embedding,
            )
        )  # fmt: skip
    return voices


def export(run: Path, out: Path, *, hours: float, only: list[str]) -> None:
    """Write the folder, load it once as a check, and print its sizes."""
    source = run / "out" if (run / "out").is_dir() else run
    out.mkdir(parents=True, exist_ok=True)
    talker = load_file(str(source / "llm.safetensors"))
    save_talker(talker, out / "llm.safetensors")
    for name in ("flow.safetensors", "hift.safetensors", "speech_tokenizer_v3.onnx", "campplus.onnx"):
        shutil.copyfile(next(f / name for f in (source, run) if (f / name).exists()), out / name)
    (out / BACKBONE).mkdir(exist_ok=True)
    for path in (run / BACKBONE).iterdir():
        shutil.copy(path, out / BACKBONE / path.name)
    vocabulary = len(talker["llm.model.model.embed_tokens.weight"])
    (out / BACKBONE / "config.json").write_text(json.dumps(backbone_config(shape_of(vocabulary)), indent=2) + "\n")
    for name in ("speech_tokenizer_v3.onnx", "campplus.onnx"):
        shorten(out / name)
    conditioner = Conditioner(
        out / "speech_tokenizer_v3.onnx", out / "campplus.onnx", Tokenizer(out / BACKBONE), threads=2
    )
    voices = [v for v in voices_of(conditioner, run / "prompts") if not only or v.id in only]
    write_voices(out / "spk2info.pt", voices, mel_dtype=torch.float16)
    # Dropping frames of true silence is harmless, dropping speech is not: an empty list keeps every token.
    note = f"none are dropped; silence reads as {silence_ids(conditioner)[:12]}"
    (out / "cosyvoice3.yaml").write_text(
        SETTINGS.format(note=note, silent="[]", sampling=SAMPLING, tone_steps=SHAPE.tone_steps)
    )
    (out / "README.md").write_text(model_card([v.name for v in voices], hours))
    load(out, "cpu")
    sizes = {path.name: path.stat().st_size for path in sorted(out.rglob("*")) if path.is_file()}
    print("\n".join(f"{size / 1e6:8.2f} MB  {name}" for name, size in sizes.items()))
    total = sum(sizes.values())
    print(f"{total / 1e6:8.2f} MB in all, voices {[v.id for v in voices]}")
    if total > SIZE_LIMIT:
        raise SystemExit(f"the folder takes {total} bytes; at most {SIZE_LIMIT} may ship")


def model_card(names: list[str], hours: float) -> str:
    return f"""\
# The embedded voice

A small checkpoint in the layout of CosyVoice3 (talker, flow, vocoder, speech tokenizer, speaker encoder), trained from
scratch by `engine/training`. It speaks English. Voices: {", ".join(names)}.

| part | shape | parameters |
|---|---|---|
| talker | 6 layers of 256, BPE of 2048 | 7.0 M |
| flow | DiT, 8 blocks of 192 | 5.2 M |
| vocoder | HiFT, base 128 | 1.4 M |

**The voice is synthetic.** Its training audio, {hours:.0f} hours in all runs, was spoken by other speech synthesisers
from the sentences described in `engine/training/corpus.py`, which recur; no recording of a person was used.

- Teachers: hibari (PyPI `hibari-tts`, Apache-2.0), itself distilled from Kokoro-82M, with the grapheme-to-phoneme rules
  of misaki (Apache-2.0); and Kokoro-82M itself (weights and voices Apache-2.0, ONNX export MIT) in 22 of its English
  voices and blends of two or three. Some voices are a teacher read at another rate, which moves pitch and formants.
- Text: WordNet 3.0 examples and definitions (WordNet licence), State of the Union addresses (CC0 text, PDDL database),
  Moby Dick (public domain), first names (CC0), and a grammar of everyday sentences of this project.
- Licence of the weights: Apache-2.0, as the project.

Provenance: Apache-2.0 puts no condition on a model's outputs. Kokoro's author states that its training data is
permissive or not under copyright and mostly synthetic, made in part by commercial systems. No licence file settles what
lies upstream of that; whoever needs certainty can run the recipe with another teacher.

What it can't do: other languages; instructions on style; laughter and other events; a good likeness of a recorded
person; long numbers, rare names and spelling as reliably as plain sentences.

To train it again: `engine/training/README.md`. Scores: `tests/bench/RESULTS.md`; losses: `engine/training/RESULTS.md`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=60.0)
    parser.add_argument("--voices", nargs="*", default=[], help="names to ship; all prompts by default")
    given = parser.parse_args()
    export(given.run, given.out, hours=given.hours, only=given.voices)


if __name__ == "__main__":
    main()
