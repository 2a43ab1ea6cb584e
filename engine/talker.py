"""The talker: text ids in, speech ids out, one every 40 ms of audio. A Qwen2 decoder with a speech embedding and a speech head.

Letters: B lanes or batch rows, L positions, N packed rows, H hidden width, V speech ids (codes, then 200 control ids),
Q query heads, G key/value heads, D head width, S positions held in the cache.
Source: CosyVoice3 reference, section 3. Parity: tests/engine/test_talker.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_CONTROLS = 200  # ids after the last code: sos, eos, task, fill, and 196 that only ever mean "stop"
PREFIX = "llm.model.model."
PAGE_ROWS = 32


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The ids that follow the codes in the speech vocabulary; every one of them ends plain decoding."""

    sos: int
    eos: int
    task: int
    fill: int

    @classmethod
    def after(cls, num_codes: int) -> Self:
        return cls(num_codes, num_codes + 1, num_codes + 2, num_codes + 3)


@dataclass(frozen=True, slots=True)
class TalkerShape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    text_vocab: int
    speech_vocab: int = 6761
    rope_theta: float = 1e6
    eps: float = 1e-6

    @property
    def num_codes(self) -> int:
        return self.speech_vocab - NUM_CONTROLS

    @property
    def special(self) -> SpecialIds:
        return SpecialIds.after(self.num_codes)

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], config: Mapping[str, Any]) -> Self:
        """Widths from the tensors; head count, theta and eps from the Qwen2 config.json. Raises KeyError naming what lacks."""
        text_vocab, hidden = state[PREFIX + "embed_tokens.weight"].shape
        heads = int(config["num_attention_heads"])
        head_dim = state[PREFIX + "layers.0.self_attn.q_proj.weight"].shape[0] // heads
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        return cls(
            hidden=hidden,
            intermediate=state[PREFIX + "layers.0.mlp.gate_proj.weight"].shape[0],
            layers=1
            + max(int(k.removeprefix(PREFIX).split(".")[1]) for k in state if k.startswith(PREFIX + "layers.")),
            heads=heads,
            kv_heads=state[PREFIX + "layers.0.self_attn.k_proj.weight"].shape[0] // head_dim,
            head_dim=head_dim,
            text_vocab=text_vocab,
            speech_vocab=state["speech_embedding.weight"].shape[0],
            rope_theta=float(config.get("rope_theta", rope.get("rope_theta", 1e6))),
            eps=float(config.get("rms_norm_eps", 1e-6)),
        )


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class SelfAttention(nn.Module):
    def __init__(self, shape: TalkerShape) -> None:
        super().__init__()
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.head_dim = shape.head_dim

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, L, H]; cos, sin [B|1, 1, L, D] -> [B, L, H], full causal attention."""
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, *(widen(t, q.shape[1]) for t in (k, v)), is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: TalkerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: TalkerShape) -> None:
        super().__init__()
        self.self_attn = SelfAttention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, shape: TalkerShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.text_vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)


class Talker(nn.Module):
    """State-dict names are the official ones, so a cleaned `llm.pt` loads strictly."""

    def __init__(self, shape: TalkerShape) -> None:
        super().__init__()
        self.shape = shape
        self.llm = nn.ModuleDict({"model": nn.ModuleDict({"model": Decoder(shape)})})
        self.speech_embedding = nn.Embedding(shape.speech_vocab, shape.hidden)
        self.llm_decoder = nn.Linear(shape.hidden, shape.speech_vocab, bias=False)

    @property
    def decoder(self) -> Decoder:
        decoder = self.llm["model"]["model"]  # type: ignore[index]
        assert isinstance(decoder, Decoder), "built so in __init__"
        return decoder

    def text_rows(self, ids: Tensor) -> Tensor:
        """Text ids of any shape -> [..., H]."""
        return self.decoder.embed_tokens(ids)

    def speech_rows(self, ids: Tensor) -> Tensor:
        """Speech ids (codes or control ids) of any shape -> [..., H]."""
        return self.speech_embedding(ids)

    def prefill_rows(self, prompt_text: Tensor, text: Tensor, prompt_speech: Tensor) -> Tensor:
        """[sos | prompt_text | text | task | prompt_speech], each 1-D ids, maybe empty -> [1+Lp+L+1+P, H]."""
        special = self.shape.special
        sos, task = self.speech_rows(text.new_tensor([special.sos, special.task]).long()).split(1)
        words = self.text_rows(torch.cat([prompt_text, text]).long())
        return torch.cat([sos, words, task, self.speech_rows(prompt_speech.long())])

    def hidden(self, rows: Tensor, positions: Tensor | None = None) -> Tensor:
        """All positions at once, without a cache and with gradients: rows [B, L, H] -> normed [B, L, H].

        positions [L] or [B, L] (default 0, 1, 2, ...) turn the rotary embedding only; attention is causal in row order, so
        padding belongs on the right.
        """
        if positions is None:
            positions = torch.arange(rows.shape[1], device=rows.device)
        dtype = self.speech_embedding.weight.dtype
        cos, sin = rotary(positions, self.shape, dtype)
        cos, sin = (t.unsqueeze(-3) if t.dim() == 3 else t[None, None] for t in (cos, sin))
        x = rows
        for layer in self.decoder.layers:
            x = layer(x, cos, sin)
        return self.decoder.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden [..., H] -> scores of the next id [..., V]."""
        return self.llm_decoder(hidden)


def rotary(positions: Tensor, shape: TalkerShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and signed sin [..., D]; float32 inside (float64 when asked), as the angle at position 8000 has no bits left in bf16."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, shape.head_dim, 2, device=positions.device, dtype=wide) / shape.head_dim
    angle = positions.to(wide)[..., None] * (1.0 / shape.rope_theta**exponent)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., D] turned in its two halves; the sign of the first half lies in sin already."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def widen(x: Tensor, heads: int) -> Tensor:
    """Key/value heads repeated for the query heads that share them: [B, G, L, D] -> [B, Q, L, D]."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)
