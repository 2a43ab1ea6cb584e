"""The talker of all lanes on CUDA: kernels over page tables, one graph per tier, nothing read from the host in between.

A launch uploads one array of indices, padded to its tier with a lane that is none, and replays. The residual stream is
float32; products, keys and values are of the model's type. Letters as in engine/talker.py; D lanes that draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from engine import talker_kernels as kernels
from engine.graphs import Body, Graphs
from engine.sampler import LaneDraws, upload
from engine.talker import PAGE_ROWS, Layer, RMSNorm, RotaryTable, Talker, TalkerShape, TalkerStore

PREFILL_TIERS = (4096, 2048, 1024, 512, 256, 128, 64)  # rows
FIRST_DRAWS = 64  # prompts that one launch may complete
MAX_ROWS = 16_384  # of a lane
KEY_SPLITS = 4
LEAST_ROWS = 64  # of a step's products; fewer cost no less, and one shape means one order of summation


def can_serve(shape: TalkerShape, dtype: torch.dtype) -> bool:
    """Whether the kernels take such a talker."""
    is_power = shape.head_dim & (shape.head_dim - 1) == 0
    is_wide = dtype in (torch.float32, torch.bfloat16, torch.float16)
    return is_wide and is_power and shape.head_dim >= 16 and shape.speech_vocab <= 8192


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


Attend = Callable[[Tensor, Tensor, Tensor, Tensor], None]  # qkv, keys, values, out


class PagedLayer:
    """One layer: its weights joined, and what lies between the products fused."""

    def __init__(self, layer: Layer, shape: TalkerShape) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        projections = (attn.q_proj, attn.k_proj, attn.v_proj)
        self.qkv = torch.cat([p.weight.detach() for p in projections])
        self.qkv_bias = torch.cat([p.bias.detach() for p in projections])
        self.gate_up = torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()])
        self.out, self.down = attn.o_proj.weight.detach(), mlp.down_proj.weight.detach()
        self.norm_in, self.norm_mlp = layer.input_layernorm, layer.post_attention_layernorm
        self.width, self.inner = shape.heads * shape.head_dim, shape.intermediate

    def __call__(
        self, x: Tensor, late: Tensor | None, num: int, attend: Attend, keys: Tensor, values: Tensor
    ) -> Tensor:
        """x [N, H] float32, changed in place but for the last sum, which is returned: `late` of the next layer.

        Rows from `num` on are anything: only the products touch them.
        """
        dtype = self.qkv.dtype
        qkv = F.linear(add_norm(x, late, num, self.norm_in, dtype), self.qkv, self.qkv_bias)
        mixed = self.qkv.new_empty(len(x), self.width)
        attend(qkv, keys, values, mixed)
        both = F.linear(add_norm(x, F.linear(mixed, self.out), num, self.norm_mlp, dtype), self.gate_up)
        inner = self.qkv.new_empty(len(x), self.inner)
        kernels.gate[(num, -(-self.inner // 1024))](both, inner, WIDTH=self.inner, BLOCK=1024)
        return F.linear(inner, self.down)


def add_norm(x: Tensor, late: Tensor | None, num: int, norm: RMSNorm, dtype: torch.dtype) -> Tensor:
    """x += late, then its norm, in the first `num` rows."""
    out = torch.empty_like(x, dtype=dtype)
    width = x.shape[1]
    kernels.add_norm[(num,)](
        x, late, norm.weight, out, norm.eps, WIDTH=width, BLOCK=power_of_two(width), ADDS=late is not None
    )
    return out


class PagedTalker:
    """Page tables, weights and graphs. The last lane of every table is the padding: it holds the padding page only."""

    def __init__(self, talker: Talker, store: TalkerStore, draws: LaneDraws, *, lanes: int) -> None:
        self.shape, self.store, self.draws, self.padding = talker.shape, store, draws, lanes
        self.device, self.dtype = store.kv.device, store.kv.dtype
        self.max_rows = min(MAX_ROWS, store.pool.num_pages * PAGE_ROWS)
        width = 2 + self.max_rows // PAGE_ROWS  # a row count, the pages, and one for the padding of a last block
        self.table = torch.full((lanes + 1, width), store.pool.num_pages, device=self.device)
        self.table[:, 0] = 0
        positions = torch.arange(self.max_rows + PAGE_ROWS, device=self.device)
        self.rotary = torch.stack(RotaryTable(talker.shape).at(positions, torch.float32)).contiguous()
        self.step_tiers = [1 << i for i in range(power_of_two(lanes).bit_length() - 1, -1, -1)]
        self.num_first = min(FIRST_DRAWS, power_of_two(lanes))
        rows = max(self.step_tiers[0], self.num_first)
        # Where the programs that split a lane's keys meet; the counters are zero between launches.
        self.partial = torch.empty(self._attention_numbers(rows), dtype=torch.float32, device=self.device)
        self.arrived = torch.zeros(rows * talker.shape.kv_heads, dtype=torch.int32, device=self.device)
        self.layers = [PagedLayer(layer, talker.shape) for layer in talker.decoder.layers]  # type: ignore[arg-type]
        self.norm = talker.decoder.norm
        self.head = talker.llm_decoder.weight.detach()
        self.speech = talker.speech_embedding.weight.detach()
        self.text = talker.decoder.embed_tokens.weight.detach()
        self.staged = torch.zeros(3 * PREFILL_TIERS[0] + 2 * rows, dtype=torch.int64, device=self.device)
        self.ids = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self._steps: dict[int, Body] = {}
        self._prefills: dict[int, Body] = {}

    def _attention_numbers(self, rows: int) -> int:
        return rows * self.shape.kv_heads * KEY_SPLITS * self._heads * (self.shape.head_dim + 2)

    @property
    def _heads(self) -> int:
        return max(16, power_of_two(self.shape.heads // self.shape.kv_heads))

    @property
    def _precision(self) -> str:
        return "ieee" if self.dtype == torch.float32 else "tf32"

    def warm(self, graphs: Graphs) -> None:
        """Captures every tier, the largest first."""
        upload(self.staged, [0] * len(self.staged))
        for rows in PREFILL_TIERS:
            upload(self.staged[: 3 * rows + 2 * self.num_first], self._packed(rows, [], []))
            self._prefills[rows] = graphs.capture(f"talker prefill {rows}", partial(self._prefill_body, rows))
        for lanes in self.step_tiers:
            upload(self.staged[:lanes], [self.padding] * lanes)
            self._steps[lanes] = graphs.capture(f"talker step {lanes}", partial(self._step_body, lanes))

    # Launches

    def seat(self, lane: int, pages: Sequence[int], rows: int) -> None:
        """The pages of a lane, and how many rows it will hold when it takes its first step."""
        rest = self.table.shape[1] - 1 - len(pages)
        upload(self.table[lane], [rows, *pages, *[self.store.pool.num_pages] * rest])

    def decode(self, lanes: Sequence[int]) -> Tensor:
        """-> ids [B], valid until the next launch."""
        tier = next(t for t in reversed(self.step_tiers) if t >= len(lanes))
        upload(self.staged[:tier], [*lanes, *[self.padding] * (tier - len(lanes))])
        self._steps[tier]()
        return self.ids[: len(lanes)]

    def prefill(self, chunks: Sequence[Chunk]) -> Tensor:
        """One group of `launches`. -> first ids [D] of those that end, valid until the next launch."""
        ending = [chunk for chunk in chunks if chunk.is_end]
        rows = next(t for t in reversed(PREFILL_TIERS) if t >= sum(chunk.padded for chunk in chunks))
        upload(self.staged[: 3 * rows + 2 * self.num_first], self._packed(rows, chunks, ending))
        self._prefills[rows]()
        return self.ids[: len(ending)]

    def chunks(self, lane: int, start: int, ids: Sequence[int], *, is_end: bool) -> Iterator[Chunk]:
        """One lane's rows in pieces that a launch can take; it draws after the last if that ends its prompt."""
        most = PREFILL_TIERS[0]
        for at in range(0, len(ids), most):
            yield Chunk(lane, start + at, ids[at : at + most], is_end and at + most >= len(ids))

    def launches(self, chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
        """Chunks in groups that share a launch."""
        group: list[Chunk] = []
        for chunk in chunks:
            if not self._fits([*group, chunk]):
                yield group
                group = []
            group.append(chunk)
        if group:
            yield group

    def _fits(self, chunks: Sequence[Chunk]) -> bool:
        num_rows, num_ends = sum(chunk.padded for chunk in chunks), sum(chunk.is_end for chunk in chunks)
        return num_rows <= PREFILL_TIERS[0] and num_ends <= self.num_first

    def _packed(self, rows: int, chunks: Sequence[Chunk], ending: Sequence[Chunk]) -> list[int]:
        """Row ids, lanes and positions [rows] each, then the rows that end a prompt and their lanes [D] each.

        Each chunk is filled up to whole blocks with rows behind its end: what they write is written again by the rows
        that belong there, before anyone reads it.
        """
        ids, lanes, positions, ends = [], [], [], []
        for chunk in chunks:
            fill = chunk.padded - len(chunk.ids)
            ids += [*chunk.ids, *[0] * fill]
            lanes += [chunk.lane] * chunk.padded
            positions += range(chunk.start, chunk.start + chunk.padded)
            if chunk.is_end:
                ends.append(len(ids) - fill - 1)
        rest, unused = rows - len(ids), self.num_first - len(ends)
        ids += [0] * rest
        lanes += [self.padding] * rest
        positions += [at % BLOCK_ROWS for at in range(rest)]
        drawing = [chunk.lane for chunk in ending]
        return [*ids, *lanes, *positions, *ends, *[0] * unused, *drawing, *[self.padding] * unused]

    # Bodies

    def _step_body(self, num: int) -> None:
        lanes, x = self.staged[:num], self._residual(max(num, LEAST_ROWS))
        width = x.shape[1]
        kernels.embed_last[(num,)](lanes, self.draws.record, self.speech, x, WIDTH=width, BLOCK=power_of_two(width))
        late = self._run(x, num, partial(self._attend_step, lanes))
        self._draw(x, late, lanes, grows=1)

    def _prefill_body(self, rows: int) -> None:
        ids, lanes, positions = self.staged[: 3 * rows].view(3, rows)
        ends, drawing = self.staged[3 * rows : 3 * rows + 2 * self.num_first].view(2, self.num_first)
        x = self._residual(rows)
        width, num_speech = x.shape[1], self.shape.speech_vocab
        kernels.embed[(rows,)](ids, self.speech, self.text, x, num_speech, WIDTH=width, BLOCK=power_of_two(width))
        late = self._run(x, rows, partial(self._attend_prompt, lanes, positions))
        self._draw(x.index_select(0, ends), late.index_select(0, ends), drawing, grows=0)

    def _residual(self, rows: int) -> Tensor:
        return torch.empty(rows, self.shape.hidden, dtype=torch.float32, device=self.device)

    def _run(self, x: Tensor, num: int, attend: Attend) -> Tensor:
        """All layers; what is returned is still to be added to x."""
        late = None
        for layer, (keys, values) in zip(self.layers, self.store.layers, strict=True):
            late = layer(x, late, num, attend, keys, values)
        assert late is not None, "a talker has layers"
        return late

    def _attend_step(self, lanes: Tensor, qkv: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        shape = self.shape
        kernels.decode_attention[(len(lanes), shape.kv_heads, KEY_SPLITS)](
            qkv, lanes, self.table, self.rotary, keys, values, self.partial, self.arrived, out,
            score_scale(shape), self.table.shape[1], self.rotary.shape[1],
            Q=shape.heads, G=shape.kv_heads, D=shape.head_dim, HEADS=self._heads, BLOCK=64, SPLITS=KEY_SPLITS,
            PRECISION=self._precision, num_warps=4, num_stages=2,
        )  # fmt: skip

    def _attend_prompt(
        self, lanes: Tensor, positions: Tensor, qkv: Tensor, keys: Tensor, values: Tensor, out: Tensor
    ) -> None:
        shape = self.shape
        kernels.write_rows[(len(lanes),)](
            qkv, lanes, positions, self.table, self.rotary, keys, values, self.table.shape[1], self.rotary.shape[1],
            Q=shape.heads, G=shape.kv_heads, D=shape.head_dim, HEADS=power_of_two(shape.heads + 2 * shape.kv_heads),
        )  # fmt: skip
        rows = BLOCK_ROWS if self.dtype != torch.float32 else 4
        kernels.prefill_attention[(len(lanes) // rows, shape.kv_heads)](
            qkv, lanes, positions, self.table, keys, values, out, score_scale(shape), self.table.shape[1],
            Q=shape.heads, G=shape.kv_heads, D=shape.head_dim, HEADS=power_of_two(shape.heads // shape.kv_heads),
            ROWS=rows, BLOCK=64 if rows == BLOCK_ROWS else 32, PRECISION=self._precision, num_warps=4, num_stages=2,
        )  # fmt: skip

    def _draw(self, x: Tensor, late: Tensor, lanes: Tensor, *, grows: int) -> None:
        """x [N, H] before the last sum and norm; its first rows are of the lanes [D]."""
        draws, vocab = self.draws, self.shape.speech_vocab
        logits = wide_product(add_norm(x, late, len(lanes), self.norm, self.dtype), self.head)
        kernels.draw[(len(lanes),)](
            logits, lanes, draws.record, draws.recent, draws.seen.view(torch.uint8), self.table, self.ids,
            self.padding, vocab, self.table.shape[1], grows, BLOCK=power_of_two(vocab), num_warps=8,
        )  # fmt: skip


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x W' in float32, never rounded to less."""
    if weight.dtype == torch.float32:
        return F.linear(x, weight)
    return torch.mm(x, weight.T, out_dtype=torch.float32)


BLOCK_ROWS = 16


@dataclass(frozen=True, slots=True)
class Chunk:
    """Row ids of one lane's prompt from row `start` on; with the last of them the lane draws."""

    lane: int
    start: int
    ids: Sequence[int]
    is_end: bool

    @property
    def padded(self) -> int:
        return -(-len(self.ids) // BLOCK_ROWS) * BLOCK_ROWS


def score_scale(shape: TalkerShape) -> float:
    """The kernels' exponentials are powers of two."""
    return math.log2(math.e) / math.sqrt(shape.head_dim)


def smoke(device: torch.device) -> None:
    """Runs the smallest kernel. Raises whatever keeps Triton from compiling."""
    both = torch.zeros(1, 32, device=device)
    kernels.gate[(1, 1)](both, torch.empty(1, 16, device=device), WIDTH=16, BLOCK=16)
    assert triton.__version__, "imported"
