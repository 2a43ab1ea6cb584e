"""Flow: speech tokens -> mel, offline and exactly incremental (CosyVoice3 reference, section on the flow).

Letters: B batch rows, T frames of 20 ms (prompt included), P prompt tokens, N generated tokens (2 frames each),
M 80 mel channels, D model width, H heads, E channels per head, S Euler steps, W frames of one chunk (50),
U units of a packed call (a unit is one chunk of one row with both guidance branches), w frames computed of each.

Incremental form: with the chunk mask a frame never looks past its own 50-frame chunk, so one chunk is solved once
and only its keys, values and position-convolution tails are kept, per Euler step and guidance branch. A chunk is a
page, and every query of a chunk sees the same keys: pages 0..own. No mask is needed, only lengths.

All that a step reads or writes lies in the store, at fixed addresses: a call brings only a table of indices. So one
body serves the CPU, where it runs as it is, and CUDA, where it is captured once per number of units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention import (
    Angles,
    AttendLayer,
    Columns,
    EachRow,
    Paged,
    RowsChoice,
    Unit,
    Units,
    Whole,
    dense_attend,
    has_kernels,
    median_ms,
    paged,
    paged_width,
    to_device,
    unit_columns,
)
from engine.cache import PagePool
from engine.dit import FRAMES_PER_TOKEN, Estimator, FlowShape, Modulations, Packed, PreLookahead, moved
from engine.flow_graphs import UNIT_TIERS, FlowGraphs
from engine.flow_whole import NO_TOKEN, WHOLE_TIERS, WholeGraphs, WholeSlots, eager_solve
from engine.graphs import Graphs
from engine.noise import MAX_FRAMES, flow_noise

__all__ = ["FRAMES_PER_TOKEN", "Flow", "FlowError", "FlowPrefix", "FlowRow", "FlowShape", "FlowStore", "FlowVoice"]

WHOLE_FRAMES = WHOLE_TIERS[0]  # solved in one call: 2 GB of activations in bfloat16, and its products are large


class FlowError(Exception):
    """The flow cannot take this row any further."""


class TooManyFrames(FlowError):
    """A row would pass the 15000 frames (300 s, prompt included) that the fixed noise covers."""


# --- what a row owns ---


@dataclass(frozen=True, slots=True, eq=False)
class FlowVoice:
    """A prompt: tokens int64 [P] on the host; mel [Tp, 80] (Tp = 2P for aligned prompts) and speaker embedding [192]
    on the flow's device, where a row's birth copies from them."""

    tokens: Tensor
    mel: Tensor
    embedding: Tensor


class FlowStore:
    """All that rows under way keep on the device, by page (one chunk of one row) and by lane (one row).

    The memory is not cleared, so pages and lanes never taken cost nothing. One page and one lane more than the pools
    give out belong to nobody: what fills up a captured call reads and writes them.
    """

    def __init__(
        self,
        shape: FlowShape,
        num_pages: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        lanes: int | None = None,
    ) -> None:
        """lanes: rows that may be under way at once, prompts under solution included; by default one per page."""
        self.shape, self.pool, self.lanes = shape, PagePool(num_pages), PagePool(lanes or num_pages)
        pages, rows = num_pages + 1, self.lanes.num_pages + 1
        wide, frames = torch.promote_types(dtype, torch.float32), shape.chunk_frames

        def empty(*size: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(size, device=device, dtype=dtype)

        # Keys and values of solved chunks.
        self.data = empty(shape.steps, 2, shape.depth, 2, pages, frames, shape.heads, shape.head_dim)
        # Of the chunk under solution on each page: the state, what no step changes, the prompt's mel.
        self.x = empty(pages, frames, shape.mel, dtype=wide)
        self.base = empty(pages, frames, shape.dim)
        self.cond = empty(pages, frames, shape.mel)
        # Of each row: what the position convolutions stand behind, the speaker, and 0 or, after a bad value, NaN.
        self.contexts = empty(rows, shape.steps, 2, 2, shape.context, shape.dim)
        self.embeddings = empty(rows, shape.speaker, dtype=wide)
        self.health = empty(rows, dtype=wide)

    @property
    def nobody(self) -> Unit:
        page, lane = self.pool.num_pages, self.lanes.num_pages
        return Unit(lane, 0, 0, self.shape.chunk_frames, [page], 0, is_last=True)

    @staticmethod
    def page_bytes(shape: FlowShape, dtype: torch.dtype = torch.float32) -> int:
        wide = torch.promote_types(dtype, torch.float32)
        kept = shape.steps * 2 * shape.depth * 2 * shape.heads * shape.head_dim + shape.dim + shape.mel
        return shape.chunk_frames * (kept * dtype.itemsize + shape.mel * wide.itemsize)


@dataclass(frozen=True, slots=True, eq=False)
class FlowPrefix:
    """The solved whole chunks of a prompt: pages (held by whoever keeps the prefix), convolution tails, frames."""

    pages: tuple[int, ...]
    contexts: Tensor | None  # [S, 2 branches, 2 convolutions, 30, D]; None: no chunk was whole
    frames: int


@dataclass(slots=True, eq=False)
class Staged:
    """Frames start..end of one row under solution; they lie on the row's last pages."""

    start: int
    end: int
    is_laid: bool = False  # the pages hold its state


@dataclass(slots=True, eq=False)
class FlowRow:
    """One segment's incremental state; only the flow writes it."""

    voice: FlowVoice
    ids: list[int]  # P + tokens so far
    prefix: FlowPrefix | None
    lane: int | None = None
    pages: list[int] = field(default_factory=list)
    frames: int = 0  # solved, from the start of the prompt
    frames_solved: int = 0  # solved by this row itself (a shared prefix is not counted)
    steps_done: int = 0
    staged: Staged | None = None
    is_born: bool = False  # the lane holds its tails and speaker
    is_ended: bool = False  # the final tokens are in
    is_closed: bool = False

    @property
    def is_staged(self) -> bool:
        return self.staged is not None

    @property
    def prompt_frames(self) -> int:
        return len(self.voice.mel)

    def close(self, store: FlowStore) -> None:
        """Gives pages and lane back, shared pages included. Safe to call twice and in the middle of a solve."""
        if self.is_closed:
            return
        self.is_closed = True
        store.pool.release(self.pages)
        store.lanes.release([] if self.lane is None else [self.lane])
        self.pages, self.lane, self.staged = [], None, None


@dataclass(frozen=True, slots=True, eq=False)
class Laying:
    """The index tables by which chunks are laid onto their pages: int64 views of one tensor [COLUMNS + 30, U]."""

    COLUMNS = 4

    pages: Tensor  # [U]
    starts: Tensor  # absolute frame
    lanes: Tensor
    given: Tensor  # frames of the prompt's mel
    ids: Tensor  # [30, U]: two tokens behind, 25, three ahead; NO_TOKEN where there is none

    @classmethod
    def of(cls, table: Tensor) -> Laying:
        return cls(*table[: cls.COLUMNS], ids=table[cls.COLUMNS :])


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Constants of the Euler steps, made once per device, dtype and set of weights."""

    steps: Tensor  # int64 [S], 0..S-1
    spans: Tensor  # [S], dt of each step
    angles: Angles
    noise: Tensor  # [MAX_FRAMES + W, M]; what stands behind the noise is zero, and nobody reads what comes of it
    net: Packed


# --- the flow ---


class Flow(nn.Module):
    """CosyVoice3's flow under its official tensor names; load_state_dict takes the official file as it is."""

    def __init__(self, shape: FlowShape) -> None:
        super().__init__()
        self.shape = shape
        self.input_embedding = nn.Embedding(shape.vocab, shape.mel)
        self.spk_embed_affine_layer = nn.Linear(shape.speaker, shape.mel)
        self.pre_lookahead_layer = PreLookahead(shape)
        self.decoder = nn.ModuleDict({"estimator": Estimator(shape)})
        self._tables: Tables | None = None
        self._packed: type[Packed] = Packed
        self._paged: Paged | None = None
        self._rows: RowsChoice | None = None
        self._graphs: FlowGraphs | None = None
        self._whole: WholeGraphs | None = None
        self.register_load_state_dict_post_hook(lambda module, _: module.forget_tables())

    @property
    def estimator(self) -> Estimator:
        return self.decoder["estimator"]  # type: ignore[return-value]

    def forget_tables(self) -> None:
        """Drops what is derived from the weights, graphs too; call it after changing weights in place."""
        self._tables = self._graphs = self._whole = None

    def train(self, mode: bool = True) -> Flow:
        self.forget_tables()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Flow:
        self.forget_tables()
        return super()._apply(fn, recurse)

    # Dense: training, golden parity, offline.

    def estimate(self, x: Tensor, mu: Tensor, spk: Tensor, cond: Tensor, t: Tensor, mask: Tensor | None) -> Tensor:
        """Velocity of the flow at time t; differentiable.

        x, mu, cond [B, M, T]; spk [B, M]; t [B] in 0..1; mask bool [B or 1, 1 or T, T], True = may attend, None for
        full attention -> [B, M, T]. Frames start at position 0. Padding frames give values without meaning.
        """
        speaker = spk[:, :, None].expand(-1, -1, x.shape[2])
        h = self.estimator.input_embed.proj(torch.cat((x, cond, mu, speaker), dim=1).transpose(1, 2))  # [B, T, D]
        h = self.estimator.input_embed.conv_pos_embed(h) + h
        rotary = self.estimator.rotary_embed.table(torch.arange(x.shape[2], device=x.device)[None])
        blocks, final = self.estimator.modulations(t)
        attend = dense_attend(mask)
        for block, modulation in zip(self.estimator.transformer_blocks, blocks.to(h.dtype), strict=True):
            h = block(h, modulation[:, None], rotary, attend)
        return self.estimator.head(h, final[:, None].to(h.dtype)).transpose(1, 2)

    def conditioning(self, tokens: Tensor, embedding: Tensor, finalize: bool = True) -> tuple[Tensor, Tensor]:
        """tokens [B, N], embedding [B, 192] -> mu [B, M, 2N or 2(N-3)], spk [B, M]; differentiable."""
        hidden = self.pre_lookahead_layer(self.input_embedding(tokens.clamp(min=0).long()), finalize=finalize)
        return hidden.transpose(1, 2).repeat_interleave(FRAMES_PER_TOKEN, dim=2), self.speaker(embedding)

    def speaker(self, embedding: Tensor) -> Tensor:
        """[B, 192], any length -> [B, M]."""
        return self.spk_embed_affine_layer(F.normalize(embedding.to(self.wide), dim=1, eps=1e-12).to(self.dtype))

    @property
    def dtype(self) -> torch.dtype:
        return self.spk_embed_affine_layer.weight.dtype

    @property
    def wide(self) -> torch.dtype:
        """Of the state x, the times and the mel: float32 at least, since the steps would add up rounding."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return self.spk_embed_affine_layer.weight.device

    def chunk_mask(self, frames: int) -> Tensor:
        """bool [1, T, T]: frame i may look at every frame before the end of its own 50-frame chunk."""
        index = torch.arange(frames, device=self.device)
        end = (index // self.shape.chunk_frames + 1) * self.shape.chunk_frames
        return (index[None, :] < end[:, None])[None]

    def grid(self) -> Tensor:
        """The eleven times of the cosine schedule, [S + 1]."""
        line = torch.linspace(0, 1, self.shape.steps + 1, dtype=self.wide)
        return 1 - torch.cos(line * 0.5 * math.pi)

    def times(self) -> tuple[Tensor, list[float]]:
        """t and dt of each step with the carried rounding of the reference: [S] and S floats."""
        grid = self.grid()
        t, dt = grid[0], grid[1] - grid[0]
        times, spans = [], []
        for k in range(self.shape.steps):
            times.append(t)
            spans.append(float(dt))
            t = t + dt
            if k + 2 <= self.shape.steps:
                dt = grid[k + 2] - t
        return torch.stack(times).to(self.device), spans

    def offline(
        self,
        tokens: Tensor,
        prompt_tokens: Tensor,
        prompt_mel: Tensor,
        embedding: Tensor,
        *,
        streaming: bool,
        finalize: bool,
    ) -> Tensor:
        """All at once, as the reference does it.

        tokens [1, N], prompt_tokens [1, P], prompt_mel [1, Tp, M], embedding [1, 192] -> mel [1, M, 2(P+N) - Tp],
        or six frames fewer unless finalize. streaming applies the chunk mask, else attention is full.
        Raises TooManyFrames past 15000 frames.
        """
        ids = torch.cat((prompt_tokens, tokens.to(prompt_tokens.device)), dim=1).to(self.device)
        mu, spk = self.conditioning(ids, embedding, finalize)
        frames = mu.shape[2]
        check_frames(frames)
        cond = torch.zeros_like(mu)
        cond[:, :, : prompt_mel.shape[1]] = prompt_mel.transpose(1, 2)[:, :, :frames]
        x = flow_noise(frames).to(self.device, self.wide)[None]
        mask = self.chunk_mask(frames) if streaming else None
        for t, dt in zip(*self.times(), strict=True):
            x = x + dt * self.guided(x, mu, spk, cond, t, mask)
        return x[:, :, prompt_mel.shape[1] :]

    def guided(self, x: Tensor, mu: Tensor, spk: Tensor, cond: Tensor, t: Tensor, mask: Tensor | None) -> Tensor:
        """Velocity with classifier-free guidance: the second row has no mu, speaker and cond. -> [1, M, T]."""
        pair = [torch.cat((part, torch.zeros_like(part))) for part in (mu, spk, cond)]
        both = torch.cat((x, x)).to(mu.dtype)
        given, free = self.estimate(both, *pair, t.expand(2), mask).to(x.dtype).chunk(2)
        return (1 + self.shape.cfg) * given - self.shape.cfg * free

    # The start.

    def warm(self, graphs: Graphs, store: FlowStore) -> None:
        """Takes the quickest kernels that work here, and captures every launch over this store. Nothing on the CPU."""
        if self.device.type == "cpu":
            return
        if has_kernels(self.dtype):
            kernels = import_module("engine.flow_kernels")
            self._packed, self._paged = kernels.FusedPacked, kernels.FusedPaged
        self.forget_tables()
        with torch.inference_mode():
            self._rows = RowsChoice.measured(self.tables().angles, store.data[0, 0, 0, 0, 0, 0], median_ms)
        if graphs.is_capturing and self._paged is not None:
            most_units = next((tier for tier in reversed(UNIT_TIERS) if tier >= max(32, store.lanes.num_pages)), None)
            self._graphs = FlowGraphs(self, store, graphs, most_units=most_units or UNIT_TIERS[0])
            self._whole = WholeGraphs(self, graphs)

    def step_ms(self, num_units: int) -> float | None:
        """Cost of one Euler step of so many units as measured at the start, if it was."""
        return None if self._graphs is None else self._graphs.step_ms(num_units)

    def _captured(self, store: FlowStore) -> FlowGraphs | None:
        return self._graphs if self._graphs is not None and self._graphs.store is store else None

    @property
    def laying_rows(self) -> int:
        """Rows of the table that lays units."""
        return Laying.COLUMNS + PreLookahead.BEHIND + self.shape.chunk_tokens + self.shape.lookahead

    def laying_nobody(self, store: FlowStore) -> Columns:
        """The column of a unit that is nobody's, [laying_rows, 1]."""
        head = [store.nobody.pages[0], 0, store.nobody.lane, 0]
        return np.array(head + [NO_TOKEN] * (self.laying_rows - len(head)))[:, None]

    # Incremental: rows, chunks, pages.

    def row(self, voice: FlowVoice, store: FlowStore | None = None, prefix: FlowPrefix | None = None) -> FlowRow:
        """A fresh row. With a prefix its solved pages are shared through the store's pool, else all is to solve."""
        row = FlowRow(voice, [max(0, code) for code in voice.tokens.tolist()], prefix)
        if prefix is not None:
            assert store is not None, "sharing a prefix needs the store that holds its pages"
            store.pool.share(prefix.pages)
            row.pages, row.frames = list(prefix.pages), prefix.frames
        return row

    def solve_prefix(self, voice: FlowVoice, store: FlowStore) -> FlowPrefix:
        """Solves the whole chunks of a prompt once. The result's pages stay taken until the holder releases them.

        Raises what the pools raise when they have too few; nothing is kept then.
        """
        row = self.row(voice)
        try:
            if self.begin(row, (), is_final=False):
                while row.steps_done < self.shape.steps:
                    self.step([row], store)
                self.finish(row, store)
            return self.prefix(row, store)
        except BaseException:
            row.close(store)
            raise

    def prefix(self, row: FlowRow, store: FlowStore) -> FlowPrefix:
        """Ends a row that solved the whole chunks of its prompt, packed with others or alone. Its pages pass on."""
        assert row.staged is None, "a prefix is solved to its end"
        contexts = None if row.lane is None else store.contexts[row.lane].clone()
        prefix = FlowPrefix(tuple(row.pages), contexts, row.frames)
        row.pages = []
        row.close(store)
        return prefix

    def pages_for(self, tokens: int) -> int:
        """Pages a row holds in the end when prompt and generated tokens are this many together."""
        return -(-tokens // self.shape.chunk_tokens)

    def begin(self, row: FlowRow, tokens: Iterable[int], is_final: bool) -> int:
        """Appends tokens, maybe none, and stages every frame that is now solvable. Touches no device memory.

        Those are whole chunks counted from the start of the prompt, and the rest too if is_final. -> number of new
        frames; 0 stages nothing. Raises TooManyFrames and leaves the row as it was.
        """
        assert row.staged is None, "a row is solved piece by piece: finish the staged one first"
        assert not row.is_closed, "a closed row has no pages"
        assert not row.is_ended, "nothing follows the final tokens: their chunk may be a partial one"
        new = [max(0, int(code)) for code in tokens]
        end = self._end_frame(len(row.ids) + len(new), is_final)
        check_frames(end)
        row.ids += new
        row.is_ended = is_final
        if end <= row.frames:
            return 0
        row.staged = Staged(row.frames, end)
        row.steps_done = 0
        return end - row.frames

    def _end_frame(self, num_tokens: int, is_final: bool) -> int:
        if is_final:
            return num_tokens * FRAMES_PER_TOKEN
        return max(0, num_tokens - self.shape.lookahead) // self.shape.chunk_tokens * self.shape.chunk_frames

    def reserve(self, row: FlowRow, store: FlowStore) -> None:
        """Takes a lane and the pages of the staged frames. Raises what the pools raise; step() calls it if nobody did.

        Touches no device memory.
        """
        assert row.staged is not None, "only staged frames need pages"
        if row.lane is None:
            (row.lane,) = store.lanes.take(1)
        missing = -(-row.staged.end // self.shape.chunk_frames) - len(row.pages)
        if missing > 0:
            row.pages.extend(store.pool.take(missing))

    @torch.inference_mode()
    def step(self, rows: Sequence[FlowRow], store: FlowStore) -> None:
        """One Euler step of every row, in one packed call; rows at their first step are laid onto their pages first.

        Rows may differ in step, length, voice and number of staged chunks; each brings its guidance twin. A row's
        result does not depend on the others beyond the rounding of differently shaped kernels. On CUDA this enqueues
        on the current stream and waits for nothing.
        """
        for row in rows:
            self.reserve(row, store)
        if new := [row for row in rows if not _staged(row).is_laid]:
            self._lay(new, store)
        self._advance([unit for row in rows for unit in self._units(row)], store)
        for row in rows:
            row.steps_done += 1

    def finish(self, row: FlowRow, store: FlowStore) -> Tensor:
        """Ends a solve: see finish_all."""
        return self.finish_all([row], store)[0]

    @torch.inference_mode()
    def finish_all(self, rows: Sequence[FlowRow], store: FlowStore) -> list[Tensor]:
        """Ends solves: of each row the new mel [M, frames after the prompt], maybe 0 frames of it.

        One copy for all, so the results are views of memory that lives as long as the last of them. It is enqueued
        on the current stream, which has to be that of step().
        """
        if not rows:
            return []
        pages = [row.pages[at // self.shape.chunk_frames] for row in rows for at in self._chunks(row)]
        solved = store.x[to_device(np.array(pages, dtype=np.int64), self.device)].flatten(0, 1)  # [frames, M]
        mels, at = [], 0
        for row in rows:
            assert row.steps_done == self.shape.steps, "all Euler steps come first"
            staged, width = _staged(row), len(self._chunks(row)) * self.shape.chunk_frames
            new = staged.end - staged.start
            mels.append(solved[at + min(new, max(0, row.prompt_frames - staged.start)) : at + new].T)
            row.staged, row.frames = None, staged.end
            row.frames_solved += new
            at += width
        return mels

    def faults(self, rows: Sequence[FlowRow], store: FlowStore) -> list[Tensor]:
        """For each row a view of the device: 0, or NaN once anything it solved was not finite."""
        return [store.health[row.lane] for row in rows]

    # What a step does.

    def _lay(self, rows: Sequence[FlowRow], store: FlowStore) -> None:
        """First frames of a solve: noise and the conditioned part of the input, onto the rows' pages."""
        self._bear([row for row in rows if not row.is_born], store)
        table: list[list[int]] = []
        for row in rows:
            _staged(row).is_laid = True
            for at in self._chunks(row):
                page, given = row.pages[at // self.shape.chunk_frames], max(0, row.prompt_frames - at)
                table.append([page, at, _lane(row), min(given, self.shape.chunk_frames), *self._window(row, at)])
        self._give_mels(rows, store)
        columns = np.ascontiguousarray(np.array(table).T)
        if (captured := self._captured(store)) is not None:
            captured.lay(columns)
        else:
            self.lay_units(to_device(columns, self.device), store)

    def _bear(self, rows: Sequence[FlowRow], store: FlowStore) -> None:
        """Fills the lanes of rows that never took a step."""
        if not rows:
            return
        kept, cleared = [], [store.health[_lane(row)] for row in rows]
        for row in rows:
            row.is_born, context = True, store.contexts[_lane(row)]
            if row.prefix is None or row.prefix.contexts is None:
                cleared.append(context)
            else:
                kept.append((context, row.prefix.contexts))
        torch._foreach_zero_(cleared)
        copy_all([(store.embeddings[_lane(row)], row.voice.embedding) for row in rows] + kept)

    def _give_mels(self, rows: Sequence[FlowRow], store: FlowStore) -> None:
        chunk, parts = self.shape.chunk_frames, []
        for row in rows:
            for at in self._chunks(row):
                if at < row.prompt_frames:
                    given = row.voice.mel[at : at + chunk]
                    parts.append((store.cond[row.pages[at // chunk], : len(given)], given))
        copy_all(parts)

    def _window(self, row: FlowRow, start: int) -> list[int]:
        """The tokens that the chunk at this frame looks at: 2 behind, its 25, 3 ahead."""
        first = start // FRAMES_PER_TOKEN - PreLookahead.BEHIND
        length = PreLookahead.BEHIND + self.shape.chunk_tokens + self.shape.lookahead
        window = row.ids[max(0, first) : first + length]
        behind = max(0, -first)
        assert row.is_ended or behind + len(window) == length, "only the end of a segment may lack its look-ahead"
        return [NO_TOKEN] * behind + window + [NO_TOKEN] * (length - behind - len(window))

    def lay_units(self, table: Tensor, store: FlowStore) -> None:
        """The body of laying: reads speakers and the prompt's mel, writes x and base of pages. table: see Laying."""
        laying, tables = Laying.of(table), self.tables()
        frames = torch.arange(self.shape.chunk_frames, device=self.device)
        hidden = self._looked_ahead(laying.ids.T)  # [U, 25, M]
        cond = torch.where((frames < laying.given[:, None])[..., None], store.cond[laying.pages], 0)  # [U, W, M]
        speaker = self.speaker(store.embeddings[laying.lanes])[:, None].expand_as(cond)
        store.base[laying.pages] = self._base(cond, hidden.repeat_interleave(FRAMES_PER_TOKEN, dim=1), speaker)
        store.x[laying.pages] = tables.noise[laying.starts[:, None] + frames]

    def _looked_ahead(self, ids: Tensor) -> Tensor:
        """ids [B, 2 + n + 3] with NO_TOKEN where there is none -> the look-ahead layer's output [B, n, M]."""
        is_token = ids >= 0
        embedded = self.input_embedding(ids.clamp(min=0)) * is_token[..., None]
        return self.pre_lookahead_layer.windows(embedded.transpose(1, 2), is_token[:, : -self.shape.lookahead])

    def _base(self, cond: Tensor, mu: Tensor, speaker: Tensor) -> Tensor:
        """The input projection of all but x, [..., M] each -> [..., D]."""
        proj = self.estimator.input_embed.proj
        return F.linear(torch.cat((cond, mu, speaker), dim=-1), proj.weight[:, self.shape.mel :], proj.bias)

    def _chunks(self, row: FlowRow) -> range:
        """First frames of the chunks under solution."""
        return range(_staged(row).start, _staged(row).end, self.shape.chunk_frames)

    def _units(self, row: FlowRow) -> list[Unit]:
        assert row.steps_done < self.shape.steps, "step() takes rows under solution"
        chunk, end = self.shape.chunk_frames, _staged(row).end
        return [
            Unit(
                lane=_lane(row),
                step=row.steps_done,
                start=at,
                frames=min(chunk, end - at),
                pages=row.pages[: at // chunk + 1],
                fresh=fresh,
                is_last=at + chunk >= end,
            )
            for fresh, at in enumerate(self._chunks(row))
        ]

    def _advance(self, units: list[Unit], store: FlowStore) -> None:
        if (captured := self._captured(store)) is not None:
            captured.advance(units)
            return
        most = max(len(unit.pages) for unit in units)
        table = to_device(unit_columns(units, store.nobody, len(units), most), self.device)
        data, angles, page = store.data, self.tables().angles, self.shape.chunk_frames
        if self._paged is not None:
            tables = Units.of(table, page)
            self.advance_units(tables, store, self._paged(data, tables, angles))
        else:
            tables = Units.of(table, paged_width(units, page, self.device))
            self.advance_units(tables, store, paged(data, tables, units, angles))

    def advance_units(self, units: Units, store: FlowStore, attend: AttendLayer) -> None:
        """The body of an Euler step: moves x of the units' pages; writes their keys, values and tails."""
        tables = self.tables()
        net, x = tables.net, store.x[units.pages, : units.width]  # [U, w, M]
        h = net.entered(x, store.base, units.pages)
        velocity = net.velocity(self._conv_pos(h, units, store) + h, units.steps, attend)
        net.move(store.x, velocity, units, tables.spans, 1 + self.shape.cfg, store.health)

    def _conv_pos(self, h: Tensor, units: Units, store: FlowStore) -> Tensor:
        """Position convolutions of h [U, 2, w, D] behind each row's tails, which slide on in place."""
        net = self.tables().net
        for index in range(2):
            x = net.with_history(h, units, store.contexts[:, :, :, index])  # [U, 2, 30 + w, D]
            h = net.conv_mish(x.flatten(0, 1), index).unflatten(0, (-1, 2))
        return h

    # Whole rows, both directions.

    @torch.inference_mode()
    def offline_all(self, requests: Sequence[tuple[FlowVoice, Sequence[int]]]) -> list[Tensor]:
        """Several whole rows in one packed call per Euler step, each frame looking at all of its own row.

        requests: voice and generated tokens of each -> mel [M, 2(P + N) - Tp] of each. Raises TooManyFrames. On CUDA
        this enqueues on the current stream and waits for nothing.
        """
        voices = [voice for voice, _ in requests]
        given = [(voice.tokens.numpy(), np.array(tokens, dtype=np.int64)) for voice, tokens in requests]
        ids = [np.maximum(np.concatenate(parts), 0) for parts in given]
        return [mel[len(voice.mel) :].T for mel, voice in zip(self._solve_whole(voices, ids), voices, strict=True)]

    @torch.inference_mode()
    def finish_whole(self, rows: Sequence[FlowRow]) -> list[Tensor]:
        """Ends rows as the reference does: instead of steps, all frames of each once more, looking both ways.

        Takes rows staged with their final tokens -> the mel [M, n] of the frames that no hop has given yet. They may
        not quite fit those before: a causal last hop is the default because played frames can't be solved again.
        """
        assert all(row.is_ended and _staged(row).start == row.frames for row in rows), "only a last hop ends a row"
        mels = self._solve_whole([row.voice for row in rows], [np.array(row.ids) for row in rows])
        given = [max(row.frames, row.prompt_frames) for row in rows]
        for row, mel in zip(rows, mels, strict=True):
            row.staged, row.frames = None, len(mel)
            row.frames_solved += len(mel)
        return [mel[start:].T for mel, start in zip(mels, given, strict=True)]

    def _solve_whole(self, voices: list[FlowVoice], ids: list[Columns]) -> list[Tensor]:
        """Mel [T, M] of each row, its prompt's frames included; as many rows at a time as memory is meant for."""
        lengths = [FRAMES_PER_TOKEN * len(row) for row in ids]
        check_frames(max(lengths))
        most, most_rows = WHOLE_FRAMES, len(lengths)
        if self._whole is not None:
            most, most_rows = min(most, self._whole.most_frames), self._whole.most_rows
        mels: list[Tensor] = []
        for group in groups_of(lengths, most, most_rows):
            mels += self._solve_group(voices[group], ids[group], lengths[group])
        return mels

    def _solve_group(self, voices: list[FlowVoice], ids: list[Columns], lengths: list[int]) -> list[Tensor]:
        captured = None if self._whole is None else self._whole.of(lengths)
        slots, lay, step = captured or eager_solve(self, lengths)
        given = [min(length, len(voice.mel)) for voice, length in zip(voices, lengths, strict=True)]
        slots.send(ids, given, self.shape.lookahead)
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        places = zip(voices, starts, given, strict=True)
        mels = [(slots.cond[at : at + count], voice.mel[:count]) for voice, at, count in places if count]
        copy_all(mels + [(slots.embeddings[row], voice.embedding) for row, voice in enumerate(voices)])
        lay()
        for _ in range(self.shape.steps):
            step()
        return list(slots.x[: sum(lengths)].clone().split(lengths))

    def rows_attention(self, whole: Whole) -> AttendLayer:
        back_end = EachRow if self._rows is None else self._rows.of(len(whole.positions))
        return back_end(whole, self.tables().angles)

    def lay_whole(self, slots: WholeSlots) -> None:
        """The body of laying whole rows: reads table, prompts' mels and speakers, writes all else of the slots."""
        table, whole = slots.table, slots.whole
        frames = torch.arange(FRAMES_PER_TOKEN, device=self.device)
        whole.rows.copy_(table.rows.repeat_interleave(FRAMES_PER_TOKEN))
        whole.positions.copy_((FRAMES_PER_TOKEN * table.positions[:, None] + frames).flatten())
        whole.ends.copy_(table.ends)
        at = torch.arange(len(table.rows), device=self.device)
        at = at + (PreLookahead.BEHIND + self.shape.lookahead) * table.rows
        hidden = self._looked_ahead(table.ids[None])[0, at]  # [N, M]
        is_given = whole.positions < table.given[whole.rows]
        cond = torch.where(is_given[:, None], slots.cond, 0).to(hidden.dtype)
        speakers = self.speaker(slots.embeddings)[whole.rows]
        slots.base.copy_(self._base(cond, hidden.repeat_interleave(FRAMES_PER_TOKEN, dim=0), speakers))
        slots.x.copy_(self.tables().noise[whole.positions])
        slots.step.zero_()

    def step_whole(self, slots: WholeSlots, attend: AttendLayer) -> None:
        """The body of an Euler step of whole rows: moves x, counts the step."""
        tables, net, x = self.tables(), self.tables().net, slots.x[None]
        entered = h = net.entered(x, slots.base[None], tables.steps[:1])  # [1, 2, F, D]
        for index in range(2):
            h = net.conv_mish_rows(h[0], slots.whole, index)[None]
        velocity = net.velocity(h + entered, slots.step, attend)
        slots.x.copy_(moved(x, velocity, tables.spans[slots.step], 1 + self.shape.cfg)[0])
        slots.step.add_(1)

    def tables(self) -> Tables:
        if self._tables is None:
            self._tables = self._make_tables()
        return self._tables

    @torch.inference_mode()
    def _make_tables(self) -> Tables:
        times, spans = self.times()
        frames = MAX_FRAMES + self.shape.chunk_frames
        noise = F.pad(flow_noise(MAX_FRAMES), (0, self.shape.chunk_frames)).T
        return Tables(
            steps=torch.arange(self.shape.steps, device=self.device),
            spans=torch.tensor(spans, device=self.device, dtype=self.wide),
            angles=Angles(*self.estimator.rotary_embed.table(torch.arange(frames, device=self.device))),
            noise=noise.to(self.device, self.wide).contiguous(),
            net=self._packed(self.estimator, Modulations.of(self.estimator, times)),
        )


def check_frames(frames: int) -> None:
    if frames > MAX_FRAMES:
        raise TooManyFrames(f"{frames} frames with the prompt, the fixed noise covers {MAX_FRAMES}")


def groups_of(sizes: Sequence[int], most: int, most_rows: int) -> Iterator[slice]:
    """Neighbours that are together no larger than this and no more, if they aren't alone."""
    start, total = 0, 0
    for place, size in enumerate(sizes):
        if place > start and (total + size > most or place - start == most_rows):
            yield slice(start, place)
            start, total = place, 0
        total += size
    yield slice(start, len(sizes))


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies second ones into first ones, in few launches where their dtypes are the same."""
    alike: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for to, given in pairs:
        alike.setdefault((to.dtype, given.dtype), []).append((to, given))
    for some in alike.values():
        torch._foreach_copy_(*map(list, zip(*some, strict=True)))


def _staged(row: FlowRow) -> Staged:
    assert row.staged is not None, "step() takes rows with staged frames"
    return row.staged


def _lane(row: FlowRow) -> int:
    assert row.lane is not None, "reserve() comes first"
    return row.lane
