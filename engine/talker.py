"""The talker: text ids in, speech ids out, one every 40 ms of audio. A Qwen2 decoder with speech embedding and head.

Letters: B lanes or batch rows, L positions, N packed rows, H hidden width, V speech ids (codes, then 200 control ids),
Q query heads, G key/value heads, D head width, S positions held in the cache.
Source: CosyVoice3 reference, section 3. Parity: tests/engine/test_talker.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.cache import PagePool
from engine.sampler import NUM_CONTROLS, Mask

PREFIX = "llm.model.model."
PAGE_ROWS = 32
WIDE = (torch.float32, torch.float64)


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
class Limits:
    """How many codes an utterance of `num_text` text ids may have (prompt text not counted)."""

    min_len: int
    max_len: int

    @classmethod
    def of(cls, num_text: int, *, shortest: float = 2.0, longest: float = 20.0) -> Self:
        return cls(int(shortest * num_text), int(longest * num_text))

    def mask(self, step: int, *, reference_exact: bool = False) -> Mask:
        """For the draw of code number `step`. The original masks sos alone, so its minimum stops nothing."""
        if step >= self.min_len:
            return Mask.NOTHING
        return Mask.SOS if reference_exact else Mask.CONTROLS

    def is_over(self, step: int) -> bool:
        return step >= self.max_len


class SilentRunFilter:
    """Of a run of silent ids only the first `limit` go on to the flow; the talker's own context keeps them all."""

    def __init__(self, ids: Iterable[int], limit: int = 5) -> None:
        self._ids = frozenset(ids)
        self._limit = limit
        self._run = 0

    def keep(self, code: int) -> bool:
        self._run = self._run + 1 if code in self._ids else 0
        return self._run <= self._limit


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
        """Widths from the tensors; head count, theta and eps from the Qwen2 config.json. KeyError names what lacks."""
        text_vocab, hidden = state[PREFIX + "embed_tokens.weight"].shape
        heads = int(config["num_attention_heads"])
        head_dim = state[PREFIX + "layers.0.self_attn.q_proj.weight"].shape[0] // heads
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        return cls(
            hidden=hidden,
            intermediate=state[PREFIX + "layers.0.mlp.gate_proj.weight"].shape[0],
            layers=len({k.removeprefix(PREFIX).split(".")[1] for k in state if k.startswith(PREFIX + "layers.")}),
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
        self._fused: list[FusedLayer] = []
        self._rotary = RotaryTable(shape)

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

    def prompt_ids(self, prompt_text: Sequence[int], text: Sequence[int], prompt_speech: Sequence[int]) -> list[int]:
        """The rows of `prefill_rows` as row ids."""
        special, first = self.shape.special, self.shape.speech_vocab
        words = [first + i for i in (*prompt_text, *text)]
        return [special.sos, *words, special.task, *prompt_speech]

    def rows_of(self, ids: Tensor) -> Tensor:
        """Row ids [N]: a speech id, or the size of that vocabulary plus a text id. -> [N, H]"""
        text = ids - self.shape.speech_vocab
        is_text = text >= 0
        words, sounds = self.text_rows(text.where(is_text, 0)), self.speech_rows(ids.where(~is_text, 0))
        return torch.where(is_text[:, None], words, sounds)

    def rows(self, named: Sequence[tuple[str, int]]) -> Tensor:
        """Rows named ("text" | "speech", id), in order -> [len, H]."""
        ids = [i + self.shape.speech_vocab * (kind == "text") for kind, i in named]
        return self.rows_of(index(ids, self.speech_embedding.weight.device))

    def hidden(self, rows: Tensor, positions: Tensor | None = None) -> Tensor:
        """All positions at once, without a cache and with gradients: rows [B, L, H] -> normed [B, L, H].

        positions [L] or [B, L] (default 0, 1, 2, ...) turn the rotary embedding only; attention is causal in row order,
        so padding belongs on the right.
        """
        if positions is None:
            positions = torch.arange(rows.shape[1], device=rows.device)
        cos, sin = self._rotary.at(positions, self.speech_embedding.weight.dtype)
        cos, sin = (t.unsqueeze(-3) if t.dim() == 3 else t[None, None] for t in (cos, sin))
        x = rows
        for layer in self.decoder.layers:
            x = layer(x, cos, sin)
        return self.decoder.norm(x)

    @torch.inference_mode()
    def extend(self, rows: Tensor, spans: Sequence[Span], store: TalkerStore) -> Tensor:
        """Appends each span's rows to its lane and gives the normed hidden of its last row.

        rows [N, H], the spans' rows laid end to end; every span's pages must hold start + count rows, of which the
        first `start` are written already. Prefill and decode may mix. Keys and values are written in place. -> [B, H]
        """
        turn = Turn.of(spans, rows, self._rotary)
        for layer, kv in zip(self.fused_layers(), store.layers, strict=True):
            rows = layer(rows, turn, kv)
        return self.decoder.norm(rows if len(rows) == len(spans) else rows[turn.last])

    def fused_layers(self) -> list[FusedLayer]:
        """The layers as few matmuls, rebuilt when a parameter has changed."""
        if not self._fused or not all(fused.is_current() for fused in self._fused):
            self._fused = [FusedLayer(layer, self.shape) for layer in self.decoder.layers]  # type: ignore[arg-type]
        return self._fused

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden [..., H] -> scores of the next id [..., V]."""
        return self.llm_decoder(hidden)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., D] turned in its two halves; the sign of the first half lies in sin already."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def widen(x: Tensor, heads: int) -> Tensor:
    """Key/value heads repeated for the query heads that share them: [B, G, L, D] -> [B, Q, L, D]."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


@dataclass(frozen=True, slots=True)
class Span:
    """`count` new rows of one lane at positions start, start+1, ...; `pages` hold all its rows, 32 each, in order."""

    pages: list[int]
    start: int
    count: int


class TalkerStore:
    """Keys and values of all lanes in pages of 32 rows. Who holds which page is the pool's affair.

    kv [layers, 2 (k, v), num_pages + 1, 32, G, D], left unwritten: a page that nobody has used costs no memory on the
    CPU, and no row is read before it was written, so neither garbage nor a former tenant's NaN reaches a lane. The last
    page is nobody's: what pads a launch is written there.
    """

    def __init__(self, shape: TalkerShape, num_pages: int, *, device: torch.device | str, dtype: torch.dtype) -> None:
        self.pool = PagePool(num_pages)
        size = (shape.layers, 2, num_pages + 1, PAGE_ROWS, shape.kv_heads, shape.head_dim)
        self.kv = torch.empty(size, device=device, dtype=dtype)
        self.layers = [(k, v) for k, v in self.kv.flatten(2, 3)]  # per layer, [num_pages * 32, G, D] each

    def cover(self, pages: list[int], rows: int) -> None:
        """Takes pages until the list holds `rows` rows. Raises OutOfPages, leaving the list as it was."""
        pages.extend(self.pool.take(max(0, -(-rows // PAGE_ROWS) - len(pages))))


class RotaryTable:
    """cos and signed sin of positions 0, 1, ..., kept and doubled when a lane grows past the end."""

    def __init__(self, shape: TalkerShape) -> None:
        # On the CPU whatever the default device: a power in float32 differs on CUDA in its last bits, and a position
        # of 8000 multiplies that.
        exponents = [torch.arange(0, shape.head_dim, 2, device="cpu", dtype=dtype) / shape.head_dim for dtype in WIDE]
        self._frequencies = [1.0 / shape.rope_theta**exponent for exponent in exponents]
        self._table = torch.empty(2, 0, 1, shape.head_dim)

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and signed sin [..., D]; float32 inside (float64 if asked): an angle of 8000 has no fraction in bf16."""
        frequency = self._frequencies[dtype == torch.float64].to(positions.device)
        angle = positions.to(frequency.dtype)[..., None] * frequency
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)

    def upto(self, rows: int, like: Tensor) -> Tensor:
        """[2, at least `rows`, 1, D] of the dtype and device of `like`."""
        table = self._table
        if table.shape[1] < rows or table.dtype != like.dtype or table.device != like.device:
            positions = torch.arange(max(1024, 2 * rows), device=like.device)
            self._table = table = torch.stack(self.at(positions, like.dtype)).unsqueeze(2)
        return table


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What one call of `extend` needs in every layer, worked out once.

    slots [N] cache row that each new row is written to        cos, sin [N, 1, D]        last [B] each span's last row
    decode    the rows [b] that are a span alone (a slice if all are), the cache rows they see [b, S], and which count
    prefill   per longer span: its rows, the cache rows it sees [S], and the mask [count, S] (None: plain causal)
    """

    slots: Tensor
    cos: Tensor
    sin: Tensor
    last: Tensor
    decode: tuple[Tensor | slice, Tensor, Tensor | None] | None
    prefill: list[tuple[slice, Tensor, Tensor | None]]

    @classmethod
    def of(cls, spans: Sequence[Span], rows: Tensor, table: RotaryTable) -> Self:
        device = rows.device
        ends = [0]
        for span in spans:
            ends.append(ends[-1] + span.count)
        assert ends[-1] == len(rows), f"spans cover {ends[-1]} rows of {len(rows)}"
        if len(spans) == 1:
            span = spans[0]
            seen = cache_rows(spans, device)[0]
            cos, sin = table.upto(span.start + span.count, rows)[:, span.start : span.start + span.count]
            slots = seen[span.start :]
        else:
            positions = [p for s in spans for p in positions_of(s)]
            cos, sin = table.upto(max(positions) + 1, rows)[:, index(positions, device)]
            places = (s.pages[p // PAGE_ROWS] * PAGE_ROWS + p % PAGE_ROWS for s in spans for p in positions_of(s))
            slots = index(list(places), device)
        single = [i for i, s in enumerate(spans) if s.count == 1]
        decode = None
        if single:
            alone = [spans[i] for i in single]
            longest = max(s.start for s in alone) + 1
            full = all(s.start + 1 == longest for s in alone)
            lengths = index([s.start + 1 for s in alone], device)
            seen_mask = None if full else (torch.arange(longest, device=device) < lengths[:, None])[:, None, None]
            which = slice(None) if len(single) == len(spans) else index([ends[i] for i in single], device)
            decode = (which, cache_rows(alone, device), seen_mask)
        prefill = [
            (slice(at, at + s.count), cache_rows([s], device)[0], late_mask(s, device))
            for at, s in zip(ends, spans, strict=False)
            if s.count > 1
        ]
        return cls(slots, cos, sin, index([e - 1 for e in ends[1:]], device), decode, prefill)


def index(values: Sequence[int] | list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(values).to(device, non_blocking=True)


def positions_of(span: Span) -> range:
    return range(span.start, span.start + span.count)


def cache_rows(spans: Sequence[Span], device: torch.device) -> Tensor:
    """[b, S] the cache row of every position; past a lane's end its own row 0: only rows it has written are read."""
    longest = max(s.start + s.count for s in spans)
    num_pages = -(-longest // PAGE_ROWS)
    held = [(s.pages + s.pages[:1] * num_pages)[:num_pages] for s in spans]
    rows = (index(held, device)[:, :, None] * PAGE_ROWS + torch.arange(PAGE_ROWS, device=device)).flatten(1)[
        :, :longest
    ]
    if all(s.start + s.count == longest for s in spans):
        return rows
    lengths = index([s.start + s.count for s in spans], device)
    return torch.where(torch.arange(longest, device=device) < lengths[:, None], rows, rows[:, :1])


def late_mask(span: Span, device: torch.device) -> Tensor | None:
    """What each new row may see when there are rows before the span: [count, start + count]."""
    if span.start == 0:
        return None
    return torch.ones(span.count, span.start + span.count, dtype=torch.bool, device=device).tril(span.start)


class FusedLayer:
    """One layer of the paged path: q, k, v as one matmul, gate and up as another, weights laid out [in, out].

    That layout halves the time of a one-row product on the CPU (x86, MKL). The matrices are copies: `is_current`
    notices when a parameter has been written (a load, an optimiser step) or moved since.
    """

    def __init__(self, layer: Layer, shape: TalkerShape) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        self.num_q, self.num_kv, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.eps = shape.eps
        self.qkv = joined(attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight)
        self.qkv_bias = torch.cat([attn.q_proj.bias, attn.k_proj.bias, attn.v_proj.bias])
        self.out = joined(attn.o_proj.weight)
        self.gate_up = joined(mlp.gate_proj.weight, mlp.up_proj.weight)
        self.down = joined(mlp.down_proj.weight)
        self.norm_in, self.norm_mlp = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self._parameters = list(layer.parameters())
        self._made_from = self._stamp()

    def is_current(self) -> bool:
        return self._made_from == self._stamp()

    def _stamp(self) -> list[tuple[int, int]]:
        return [(p.data_ptr(), p._version) for p in self._parameters]

    def __call__(self, x: Tensor, turn: Turn, kv: tuple[Tensor, Tensor]) -> Tensor:
        width = x.shape[-1:]
        qkv = torch.addmm(self.qkv_bias, F.rms_norm(x, width, self.norm_in, self.eps), self.qkv)
        x = torch.addmm(x, self.attend(qkv, turn, *kv), self.out)
        gate, up = torch.mm(F.rms_norm(x, width, self.norm_mlp, self.eps), self.gate_up).chunk(2, -1)
        return torch.addmm(x, F.silu(gate) * up, self.down)

    def attend(self, qkv: Tensor, turn: Turn, keys: Tensor, values: Tensor) -> Tensor:
        """qkv [N, (Q+2G) D], keys, values [cache rows, G, D] -> [N, Q D]."""
        heads = qkv.view(len(qkv), -1, self.head_dim)
        qk, v = heads.split([self.num_q + self.num_kv, self.num_kv], 1)
        q, k = rotate(qk, turn.cos, turn.sin).split([self.num_q, self.num_kv], 1)
        keys.index_copy_(0, turn.slots, k.to(keys.dtype))
        values.index_copy_(0, turn.slots, v.to(values.dtype))
        if turn.decode and not turn.prefill:
            return self.decode(q, turn.decode[1], turn.decode[2], keys, values)
        out = torch.empty_like(qkv[:, : self.num_q * self.head_dim])
        if turn.decode:
            which, rows, mask = turn.decode
            out[which] = self.decode(q[which], rows, mask, keys, values)
        for which, rows, mask in turn.prefill:
            out[which] = self.prefill(q[which], rows, mask, keys, values)
        return out

    def decode(self, q: Tensor, rows: Tensor, mask: Tensor | None, keys: Tensor, values: Tensor) -> Tensor:
        """q [b, Q, D] -> [b, Q D]. Query heads that share a key head stand in as its positions: nothing is repeated."""
        k, v = (gather(t, rows).to(q.dtype).transpose(1, 2) for t in (keys, values))  # [b, G, S, D]
        out = F.scaled_dot_product_attention(q.unflatten(1, (self.num_kv, -1)), k, v, attn_mask=mask)
        return out.flatten(1)

    def prefill(self, q: Tensor, rows: Tensor, mask: Tensor | None, keys: Tensor, values: Tensor) -> Tensor:
        """q [count, Q, D] of one lane, rows [S], mask [count, S] or None -> [count, Q D]."""
        k, v = (widen(gather(t, rows).to(q.dtype).transpose(0, 1)[None], self.num_q) for t in (keys, values))
        q = q.transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return out[0].transpose(0, 1).flatten(1)


def gather(cache: Tensor, rows: Tensor) -> Tensor:
    """cache[rows], but ten times as fast on the CPU: rows are copied whole."""
    return cache.index_select(0, rows.flatten()).unflatten(0, rows.shape)


def joined(*parts: Tensor) -> Tensor:
    """Weights [out_i, in] side by side, transposed: [in, sum of out_i]."""
    return torch.cat([p.detach() for p in parts]).t().contiguous()
