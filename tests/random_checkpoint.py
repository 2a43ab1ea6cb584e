"""Writes a checkpoint of random weights in the complete official layout, of any size, for tests and benches.

    python -m tests.random_checkpoint FOLDER [--size tiny|small|full] [--seed N]

Without the two ONNX files, which only new voices need. With stop_scale 0 the talker almost never draws a stop id, so an
utterance runs to its maximum (20 codes per text id); with 1 it stops soon after its minimum (2 codes per text id).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.checkpoint import BACKBONE, INV_FREQ, SETTINGS_FILE
from engine.flow import Flow, FlowShape
from engine.hift import Hift, HiftShape
from engine.talker import Talker, TalkerShape
from engine.voices import Voice, write_voices

SPECIALS = 281  # Qwen2's three and CosyVoice3's 278, appended to the vocabulary by the front end
State = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    talker: TalkerShape
    flow: FlowShape
    hift: HiftShape


TINY = Size(
    talker=TalkerShape(hidden=32, intermediate=64, layers=2, heads=4, kv_heads=2, head_dim=8, text_vocab=544),
    flow=FlowShape(dim=64, depth=2, heads=2, head_dim=32, ff=128, lookahead_channels=64),
    hift=HiftShape(base=32, f0_channels=32),
)
SMALL = Size(
    talker=TalkerShape(hidden=256, intermediate=1024, layers=6, heads=4, kv_heads=2, head_dim=64, text_vocab=1024),
    flow=FlowShape(dim=256, depth=8, heads=4, head_dim=64, ff=512, lookahead_channels=256),
    hift=HiftShape(base=128, f0_channels=128),
)
FULL = Size(
    talker=TalkerShape(hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, head_dim=64, text_vocab=151_936),
    flow=FlowShape(dim=1024, depth=22, heads=16, head_dim=64, ff=2048, lookahead_channels=1024),
    hift=HiftShape(base=512, f0_channels=512),
)
SIZES = {"tiny": TINY, "small": SMALL, "full": FULL}


def random_checkpoint(
    folder: Path,
    size: Size = TINY,
    *,
    seed: int = 0,
    stop_scale: float = 0.0,
    suffix: str = ".safetensors",
    dtype: torch.dtype = torch.float32,
    prompt_tokens: int = 40,
    voices: tuple[str, ...] = ("anna",),
) -> Path:
    """Fills `folder` (made if missing) and returns it. suffix ".safetensors" or ".pt"."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    parts = {
        "llm": talker_state(size.talker, generator, stop_scale),
        "flow": flow_state(size.flow, generator),
        "hift": hift_state(size.hift, generator),
    }
    for stem, state in parts.items():
        state = {key: value if key == INV_FREQ else value.to(dtype) for key, value in state.items()}
        (save_file if suffix == ".safetensors" else torch.save)(state, folder / (stem + suffix))
    write_backbone(folder / BACKBONE, size.talker)
    (folder / SETTINGS_FILE).write_text(SETTINGS, encoding="utf-8")
    made = [random_voice(name, prompt_tokens, generator) for name in voices]
    write_voices(folder / "spk2info.pt", made)
    return folder


def random_state(build: Callable[[], nn.Module], generator: torch.Generator) -> State:
    """A fan-in scaled draw for each weight, small biases, ones for gains."""
    with torch.device("meta"):
        empty = build().state_dict()
    return {key: random_tensor(key, tuple(value.shape), generator) for key, value in empty.items()}


def random_tensor(key: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if key.endswith(("norm.weight", "alpha")) or "layernorm" in key:
        return torch.ones(shape)
    if len(shape) < 2:
        return 0.02 * torch.randn(shape, generator=generator)
    if key.endswith(("embed_tokens.weight", "embedding.weight")):
        return torch.randn(shape, generator=generator)
    fan_in = max(1, torch.Size(shape[1:]).numel())
    return torch.randn(shape, generator=generator) * fan_in**-0.5


def talker_state(shape: TalkerShape, generator: torch.Generator, stop_scale: float) -> State:
    """Head rows of three times unit scale: likely codes stand far above the control ids, whose rows stop_scale sets."""
    state = random_state(lambda: Talker(shape), generator)
    head = state["llm_decoder.weight"].mul_(3.0)
    head[shape.num_codes :] *= stop_scale
    return state


def flow_state(shape: FlowShape, generator: torch.Generator) -> State:
    """Gentle last layer, so that the ten steps end near the noise they began with and not far outside a mel's range."""
    state = random_state(lambda: Flow(shape), generator)
    state["decoder.estimator.proj_out.weight"] *= 0.1
    state[INV_FREQ] = inv_freq(shape.head_dim)
    return state


def hift_state(shape: HiftShape, generator: torch.Generator) -> State:
    """Gentle last layer: its exponential would else clip every sample."""
    state = random_state(lambda: Hift(shape), generator)
    state["conv_post.weight"] *= 0.08
    state["f0_predictor.classifier.bias"].fill_(120.0)  # a voice's pitch, so that there is a voiced source
    return state


def inv_freq(width: int) -> Tensor:
    return 1.0 / 10_000 ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


def random_voice(name: str, tokens: int, generator: torch.Generator) -> Voice:
    return Voice(
        id=name,
        name=name.title(),
        lang="en",
        transcript="You are a helpful assistant.<|endofprompt|>a short sentence",
        prompt_text=(*range(65, 80), 259, *range(97, 110)),
        tokens=torch.randint(0, 6561, (tokens,), generator=generator),
        mel=torch.randn(2 * tokens, 80, generator=generator) - 5.0,
        embedding=torch.randn(192, generator=generator),
    )


def write_backbone(folder: Path, shape: TalkerShape) -> None:
    """config.json and a byte-level BPE of 256 bytes and no words: every byte of a text is one id."""
    folder.mkdir(exist_ok=True)
    config = {
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.eps,
        "vocab_size": shape.text_vocab,
        "tie_word_embeddings": True,
    }
    files = {
        "config.json": json.dumps(config),
        "vocab.json": json.dumps({letter: i for i, letter in enumerate(byte_letters())}),
        "merges.txt": "#version: 0.2\n",
        "tokenizer_config.json": json.dumps({"tokenizer_class": "Qwen2Tokenizer", "model_max_length": 32768}),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def byte_letters() -> list[str]:
    """The printable letter that byte-level BPE writes for each byte 0..255."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte if byte in shown else 256 + hidden.index(byte)) for byte in range(256)]


SETTINGS = """\
sample_rate: 24000
token_frame_rate: 25
token_mel_ratio: 2
chunk_size: 25
llm: !new:cosyvoice.llm.llm.CosyVoice3LM
    mix_ratio: [5, 15]
    sampling: !name:cosyvoice.utils.common.ras_sampling
        top_p: 0.8
        top_k: 25
        win_size: 10
        tau_r: 0.1
flow: !new:cosyvoice.flow.flow.CausalMaskedDiffWithDiT
    pre_lookahead_len: 3
    decoder: !new:cosyvoice.flow.flow_matching.CausalConditionalCFM
        cfm_params: !new:omegaconf.DictConfig
            content:
                inference_cfg_rate: 0.7
        estimator: !new:cosyvoice.flow.DiT.dit.DiT
            static_chunk_size: !ref <chunk_size> * <token_mel_ratio>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="write a checkpoint of random weights")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--layers", type=int, help="layers of the talker, to shrink a full-size one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop-scale", type=float, default=0.0)
    given = parser.parse_args()
    size = SIZES[given.size]
    if given.layers:
        size = replace(size, talker=replace(size.talker, layers=given.layers))
    random_checkpoint(given.folder, size, seed=given.seed, stop_scale=given.stop_scale)


if __name__ == "__main__":
    main()
