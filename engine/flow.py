"""Flow: speech tokens -> mel, offline and exactly incremental (CosyVoice3 reference, section on the flow).

Letters: B batch rows, T frames of 20 ms (prompt included), P prompt tokens, N generated tokens (2 frames each),
M 80 mel channels, D model width, H heads, E channels per head, S the ten Euler steps, W frames of one chunk (50).

Incremental form: with the chunk mask a frame never looks past its own 50-frame chunk, so one chunk is solved once
and only its keys, values and position-convolution tails are kept, per Euler step and guidance branch. A chunk is a
page, and every query of a chunk sees the same keys: pages 0..own. No mask is needed, only lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.cache import PagePool
from engine.noise import MAX_FRAMES, flow_noise

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [B, T, H, E] -> [B, T, H*E]
NORM_EPS = 1e-6
TIME_FREQUENCIES = 128
FRAMES_PER_TOKEN = 2


class FlowError(Exception):
    """The flow cannot take this row any further."""


class TooManyFrames(FlowError):
    """A row would pass the 15000 frames (300 s, prompt included) that the fixed noise covers."""


@dataclass(frozen=True, slots=True)
class FlowShape:
    """Sizes of a flow. Everything but chunk, look-ahead, steps and guidance is read off the weights."""

    dim: int
    depth: int
    heads: int
    head_dim: int
    ff: int
    lookahead_channels: int
    mel: int = 80
    vocab: int = 6561
    speaker: int = 192
    conv_kernel: int = 31
    conv_groups: int = 16
    chunk_frames: int = 50
    lookahead: int = 3
    steps: int = 10
    cfg: float = 0.7

    @property
    def chunk_tokens(self) -> int:
        return self.chunk_frames // FRAMES_PER_TOKEN

    @property
    def context(self) -> int:
        """Frames of history that each position convolution keeps."""
        return self.conv_kernel - 1

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> FlowShape:
        """Sizes of an official state dict. Raises KeyError with the name of a missing tensor."""
        estimator = "decoder.estimator."
        vocab, mel = state["input_embedding.weight"].shape
        conv = state[estimator + "input_embed.conv_pos_embed.conv1.0.weight"]
        dim = conv.shape[0]
        head_dim = 2 * len(state[estimator + "rotary_embed.inv_freq"])
        blocks = {key.split(".")[3] for key in state if key.startswith(estimator + "transformer_blocks.")}
        return cls(
            dim=dim,
            depth=len(blocks),
            heads=state[estimator + "transformer_blocks.0.attn.to_q.weight"].shape[0] // head_dim,
            head_dim=head_dim,
            ff=state[estimator + "transformer_blocks.0.ff.ff.2.weight"].shape[1],
            lookahead_channels=state["pre_lookahead_layer.conv1.weight"].shape[0],
            mel=mel,
            vocab=vocab,
            speaker=state["spk_embed_affine_layer.weight"].shape[1],
            conv_kernel=conv.shape[2],
            conv_groups=dim // conv.shape[1],
        )


# --- the network ---


class PreLookahead(nn.Module):
    """Token i sees tokens i-2 .. i+3."""

    def __init__(self, shape: FlowShape) -> None:
        super().__init__()
        self.lookahead = shape.lookahead
        self.conv1 = nn.Conv1d(shape.mel, shape.lookahead_channels, shape.lookahead + 1)
        self.conv2 = nn.Conv1d(shape.lookahead_channels, shape.mel, 3)

    def forward(self, embedded: Tensor, *, finalize: bool) -> Tensor:
        """embedded [B, N, M] -> [B, N or N-3, M]; the last three are context only unless finalize."""
        x = embedded.transpose(1, 2)
        if finalize:
            x = F.pad(x, (0, self.lookahead))
        return self.tail(x, left=2)

    def tail(self, x: Tensor, *, left: int) -> Tensor:
        """x [B, M, left + n + 3] with 2 - left zeros still missing on the left -> [B, n, M].

        left = 2 means that x starts at token 0; left = 0 that it holds two tokens of history.
        """
        hidden = F.pad(F.leaky_relu(self.conv1(x), 0.01), (left, 0))
        kept = x[:, :, 2 - left : x.shape[2] - self.lookahead]
        return (self.conv2(hidden) + kept).transpose(1, 2)


class TimeEmbed(nn.Module):
    def __init__(self, shape: FlowShape) -> None:
        super().__init__()
        self.time_mlp = nn.Sequential(
            nn.Linear(2 * TIME_FREQUENCIES, shape.dim), nn.SiLU(), nn.Linear(shape.dim, shape.dim)
        )
        # Made on the CPU whatever the default device: exp in float32 differs on CUDA in its last bit, and the angles
        # are a thousand times that. Not a buffer, so that no cast of the weights rounds it.
        rank = torch.arange(TIME_FREQUENCIES, device="cpu", dtype=torch.float32)
        self.frequency = torch.exp(rank * (-math.log(10_000) / (TIME_FREQUENCIES - 1)))

    def forward(self, t: Tensor) -> Tensor:
        """t [B] in 0..1 -> [B, D] in the weights' dtype; the angles, up to 1000, stay in t's."""
        angle = 1000 * t[:, None] * self.frequency.to(t.device, t.dtype)
        features = torch.cat((angle.sin(), angle.cos()), dim=-1)
        return self.time_mlp(features.to(self.time_mlp[0].weight.dtype))


class ConvPos(nn.Module):
    """Two causal grouped convolutions, each followed by Mish."""

    def __init__(self, shape: FlowShape) -> None:
        super().__init__()
        self.context = shape.context
        size = (shape.dim, shape.dim, shape.conv_kernel)
        self.conv1 = nn.Sequential(nn.Conv1d(*size, groups=shape.conv_groups))
        self.conv2 = nn.Sequential(nn.Conv1d(*size, groups=shape.conv_groups))

    def forward(self, h: Tensor) -> Tensor:
        """h [B, T, D] from frame 0 -> [B, T, D]."""
        x = h.transpose(1, 2)
        for conv in (self.conv1, self.conv2):
            x = F.mish(conv(F.pad(x, (self.context, 0))))
        return x.transpose(1, 2)


class InputEmbed(nn.Module):
    def __init__(self, shape: FlowShape) -> None:
        super().__init__()
        self.proj = nn.Linear(4 * shape.mel, shape.dim)
        self.conv_pos_embed = ConvPos(shape)


class Rotary(nn.Module):
    """Interleaved-pair rotary table; only head 0 ever turns."""

    inv_freq: Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        exponent = torch.arange(0, head_dim, 2, device="cpu", dtype=torch.float32) / head_dim
        self.register_buffer("inv_freq", 1.0 / (10_000**exponent))

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [..., T] absolute frames -> cos, sin [..., T, E/2], never below float32."""
        wide = torch.promote_types(self.inv_freq.dtype, torch.float32)
        angle = positions.to(wide)[..., None] * self.inv_freq.to(wide)
        return angle.cos(), angle.sin()


def rotate_head0(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, H, E] with head 0 turned by cos, sin [B or 1, T, E/2]; the other heads carry no position."""
    a, b = x[:, :, 0].to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((turned.to(x.dtype)[:, :, None], x[:, :, 1:]), dim=2)


class Attention(nn.Module):
    def __init__(self, shape: FlowShape) -> None:
        super().__init__()
        self.split = (shape.heads, shape.head_dim)
        inner = shape.heads * shape.head_dim
        self.to_q = nn.Linear(shape.dim, inner)
        self.to_k = nn.Linear(shape.dim, inner)
        self.to_v = nn.Linear(shape.dim, inner)
        self.to_out = nn.ModuleList([nn.Linear(inner, shape.dim)])

    def forward(self, a: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = (project(a).unflatten(-1, self.split) for project in (self.to_q, self.to_k, self.to_v))
        return self.to_out[0](attend(rotate_head0(q, *rotary), rotate_head0(k, *rotary), v))


class Block(nn.Module):
    """One DiT block. Modulation order: shift, scale, gate of the attention, then of the feed-forward."""

    def __init__(self, shape: FlowShape) -> None:
        super().__init__()
        self.attn_norm = nn.ModuleDict({"linear": nn.Linear(shape.dim, 6 * shape.dim)})
        self.attn = Attention(shape)
        inner = nn.Sequential(nn.Linear(shape.dim, shape.ff), nn.GELU(approximate="tanh"))
        self.ff = nn.ModuleDict({"ff": nn.Sequential(inner, nn.Identity(), nn.Linear(shape.ff, shape.dim))})

    def forward(self, h: Tensor, modulation: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """h [B, T, D], modulation [B or 1, 1, 6D] -> [B, T, D]."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation.chunk(6, dim=-1)
        h = torch.addcmul(h, gate_a, self.attn(normed(h, shift_a, scale_a), rotary, attend))
        return torch.addcmul(h, gate_m, self.ff["ff"](normed(h, shift_m, scale_m)))


def normed(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift, F.layer_norm(h, h.shape[-1:], eps=NORM_EPS), 1 + scale)


class Estimator(nn.Module):
    """The DiT: one call gives the velocity of every frame."""

    def __init__(self, shape: FlowShape) -> None:
        super().__init__()
        self.time_embed = TimeEmbed(shape)
        self.input_embed = InputEmbed(shape)
        self.rotary_embed = Rotary(shape.head_dim)
        self.transformer_blocks = nn.ModuleList([Block(shape) for _ in range(shape.depth)])
        self.norm_out = nn.ModuleDict({"linear": nn.Linear(shape.dim, 2 * shape.dim)})
        self.proj_out = nn.Linear(shape.dim, shape.mel)

    def modulations(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """t [B] -> per block [depth, B, 6D] and for the last norm [B, 2D] (scale, shift)."""
        time = F.silu(self.time_embed(t))
        blocks = torch.stack([block.attn_norm["linear"](time) for block in self.transformer_blocks])
        return blocks, self.norm_out["linear"](time)

    def head(self, h: Tensor, modulation: Tensor) -> Tensor:
        """h [B, T, D], modulation [B or 1, 1, 2D] -> velocity [B, T, M]."""
        scale, shift = modulation.chunk(2, dim=-1)
        return self.proj_out(normed(h, shift, scale))


def dense_attend(mask: Tensor | None) -> Attend:
    """mask bool [B or 1, 1 or T, T], True = may attend."""
    spread = None if mask is None else mask[:, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=spread).transpose(1, 2).flatten(2)

    return attend


# --- what a row owns ---


@dataclass(frozen=True, slots=True, eq=False)
class FlowVoice:
    """A prompt: tokens int64 [P], mel [Tp, 80] (Tp = 2P for aligned prompts), speaker embedding [192]."""

    tokens: Tensor
    mel: Tensor
    embedding: Tensor


class FlowStore:
    """Keys and values of all rows: [S, 2 branches, depth, 2 (k, v), num_pages, W, H, E]; a page is one chunk.

    The memory is not cleared, so pages never taken cost nothing. Who holds which page is the pool's business.
    """

    def __init__(
        self,
        shape: FlowShape,
        num_pages: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.shape, self.pool = shape, PagePool(num_pages)
        size = (shape.steps, 2, shape.depth, 2, num_pages, shape.chunk_frames, shape.heads, shape.head_dim)
        self.data = torch.empty(size, device=device, dtype=dtype)

    @staticmethod
    def page_bytes(shape: FlowShape, dtype: torch.dtype = torch.float32) -> int:
        frame = shape.steps * 2 * shape.depth * 2 * shape.heads * shape.head_dim
        return frame * shape.chunk_frames * dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class FlowPrefix:
    """The solved whole chunks of a prompt: pages (held by whoever keeps the prefix), convolution tails, frames."""

    pages: tuple[int, ...]
    contexts: Tensor  # [S, 2 branches, 2 convolutions, 30, D]
    frames: int


@dataclass(slots=True, eq=False)
class Staged:
    """Frames start..end of one row under solution."""

    start: int
    end: int
    x: Tensor  # [n, M], moved at every step
    base: Tensor  # [2 branches, n, D], the part of the input projection that no step changes


@dataclass(slots=True, eq=False)
class FlowRow:
    """One segment's incremental state; only the flow writes it."""

    voice: FlowVoice
    speaker: Tensor  # [M]
    ids: Tensor  # int64 [P + tokens so far]
    contexts: Tensor  # [S, 2, 2, 30, D]
    pages: list[int] = field(default_factory=list)
    frames: int = 0  # solved, from the start of the prompt
    frames_solved: int = 0  # solved by this row itself (a shared prefix is not counted)
    steps_done: int = 0
    staged: Staged | None = None
    is_ended: bool = False  # the final tokens are in
    is_closed: bool = False

    @property
    def is_staged(self) -> bool:
        return self.staged is not None

    @property
    def prompt_frames(self) -> int:
        return len(self.voice.mel)

    def close(self, store: FlowStore) -> None:
        """Gives the pages back, shared ones included. Safe to call twice and in the middle of a solve."""
        if self.is_closed:
            return
        self.is_closed = True
        store.pool.release(self.pages)
        self.pages, self.staged = [], None


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """One chunk of one row in a packed call."""

    row: int  # place of its row in the call
    step: int
    start: int  # absolute frame
    frames: int  # real ones; the rest of the width is padding
    pages: list[int]  # pages 0..own
    is_first: bool  # of its row in this call

    @property
    def keys(self) -> int:
        return self.start + self.frames


@dataclass(slots=True, eq=False)
class Tables:
    """Constants of the ten Euler steps, made once per device, dtype and set of weights."""

    steps: list[float]  # dt of each step
    blocks: Tensor  # [S, depth, 1, 6D]
    final: Tensor  # [S, 1, 2D]
    cos: Tensor  # [frames, E/2]
    sin: Tensor
    noise: Tensor  # [frames, M]


# --- the flow -----


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
        self.register_load_state_dict_post_hook(lambda module, _: module.forget_tables())

    @property
    def estimator(self) -> Estimator:
        return self.decoder["estimator"]  # type: ignore[return-value]

    def forget_tables(self) -> None:
        """Drops the constants derived from the weights; call it after changing weights in place."""
        self._tables = None

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
        for block, modulation in zip(self.estimator.transformer_blocks, blocks, strict=True):
            h = block(h, modulation[:, None], rotary, attend)
        return self.estimator.head(h, final[:, None]).transpose(1, 2)

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
        """Of the state x, the times and the mel: float32 at least, since ten steps would add up rounding."""
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
        mu, spk = self.conditioning(torch.cat((prompt_tokens, tokens), dim=1), embedding, finalize)
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

    # Incremental: rows, chunks, pages.

    def row(self, voice: FlowVoice, store: FlowStore | None = None, prefix: FlowPrefix | None = None) -> FlowRow:
        """A fresh row. With a prefix its solved pages are shared through the store's pool, else all is to solve."""
        shape = self.shape
        size = (shape.steps, 2, 2, shape.context, shape.dim)
        with torch.inference_mode():
            row = FlowRow(
                voice=voice,
                speaker=self.speaker(voice.embedding.to(self.device)[None])[0],
                ids=voice.tokens.to(self.device, torch.int64),
                contexts=torch.zeros(size, device=self.device, dtype=self.dtype),
            )
            if prefix is not None:
                assert store is not None, "sharing a prefix needs the store that holds its pages"
                store.pool.share(prefix.pages)
                row.pages = list(prefix.pages)
                row.frames = prefix.frames
                row.contexts.copy_(prefix.contexts)
        return row

    def solve_prefix(self, voice: FlowVoice, store: FlowStore) -> FlowPrefix:
        """Solves the whole chunks of a prompt once. The result's pages stay taken until the holder releases them.

        Raises what the pool raises when it has too few pages; nothing is kept then.
        """
        row = self.row(voice)
        try:
            if self.begin(row, row.ids[:0], is_final=False):
                while row.steps_done < self.shape.steps:
                    self.step([row], store)
                self.finish(row)
        except BaseException:
            row.close(store)
            raise
        return FlowPrefix(pages=tuple(row.pages), contexts=row.contexts, frames=row.frames)

    def pages_for(self, tokens: int) -> int:
        """Pages a row holds in the end when prompt and generated tokens are this many together."""
        return -(-tokens // self.shape.chunk_tokens)

    @torch.inference_mode()
    def begin(self, row: FlowRow, tokens: Tensor, is_final: bool) -> int:
        """Appends tokens int64 [n] (n may be 0) and stages every frame that is now solvable.

        Those are whole chunks counted from the start of the prompt, and the rest too if is_final. -> number of new
        frames; 0 stages nothing. Raises TooManyFrames and leaves the row as it was.
        """
        assert row.staged is None, "a row is solved piece by piece: finish the staged one first"
        assert not row.is_closed, "a closed row has no pages"
        assert not row.is_ended, "nothing follows the final tokens: their chunk may be a partial one"
        total = len(row.ids) + len(tokens)
        end = self._end_frame(total, is_final)
        check_frames(end)
        row.ids = torch.cat((row.ids, tokens.to(row.ids)))
        row.is_ended = is_final
        if end <= row.frames:
            return 0
        row.staged = self._stage(row, row.frames, end, is_final)
        row.steps_done = 0
        return end - row.frames

    def _end_frame(self, num_tokens: int, is_final: bool) -> int:
        if is_final:
            return num_tokens * FRAMES_PER_TOKEN
        return max(0, num_tokens - self.shape.lookahead) // self.shape.chunk_tokens * self.shape.chunk_frames

    def _stage(self, row: FlowRow, start: int, end: int, is_final: bool) -> Staged:
        mu = self._mu(row.ids, start // FRAMES_PER_TOKEN, end // FRAMES_PER_TOKEN, is_final)  # [n, M]
        cond = torch.zeros_like(mu)
        given = row.voice.mel[start:end].to(mu)
        cond[: len(given)] = given
        weight, bias = self.estimator.input_embed.proj.weight, self.estimator.input_embed.proj.bias
        rest = torch.cat((cond, mu, row.speaker.expand_as(mu)), dim=1)
        base = torch.stack((F.linear(rest, weight[:, self.shape.mel :], bias), bias.expand(end - start, -1)))
        return Staged(start=start, end=end, x=self.tables(end).noise[start:end].clone(), base=base)

    def _mu(self, ids: Tensor, first: int, last: int, is_final: bool) -> Tensor:
        """Rows first..last of the look-ahead layer's output, each twice: [2(last - first), M]."""
        history = min(first, 2)
        window = ids[first - history : last + self.shape.lookahead].clamp(min=0)
        x = self.input_embedding(window).T[None]  # [1, M, history + n + look-ahead]
        missing = last + self.shape.lookahead - len(ids)
        assert missing <= 0 or is_final, "only the end of a segment may lack its look-ahead"
        hidden = self.pre_lookahead_layer.tail(F.pad(x, (0, max(0, missing))), left=2 - history)[0]
        return hidden.repeat_interleave(FRAMES_PER_TOKEN, dim=0)

    def reserve(self, row: FlowRow, store: FlowStore) -> None:
        """Takes the pages of the staged frames. Raises what the pool raises; step() calls it if nobody did."""
        assert row.staged is not None, "only staged frames need pages"
        missing = -(-row.staged.end // self.shape.chunk_frames) - len(row.pages)
        if missing > 0:
            row.pages.extend(store.pool.take(missing))

    @torch.inference_mode()
    def step(self, rows: Sequence[FlowRow], store: FlowStore) -> None:
        """One Euler step of every row, in one packed call.

        Rows may differ in step, length, voice and number of staged chunks; each brings its guidance twin. A row's
        result does not depend on the others beyond the rounding of differently shaped kernels.
        """
        for row in rows:
            self.reserve(row, store)
        units = [unit for place, row in enumerate(rows) for unit in self._units(place, row)]
        width = units[0].frames if len(units) == 1 else self.shape.chunk_frames
        tables = self.tables(max(unit.keys for unit in units))
        x = torch.cat([padded(part, width) for row in rows for part in self._pieces(row)]).view(len(units), width, -1)
        velocity = self._velocity(x, units, rows, store, tables)
        for row, part in zip(rows, self._regroup(velocity, units), strict=True):
            self._move(row, part, tables)

    def _units(self, place: int, row: FlowRow) -> list[Unit]:
        assert row.staged is not None and row.steps_done < self.shape.steps, "step() takes rows under solution"
        chunk, staged = self.shape.chunk_frames, row.staged
        return [
            Unit(
                place, row.steps_done, at, min(chunk, staged.end - at), row.pages[: at // chunk + 1], at == staged.start
            )
            for at in range(staged.start, staged.end, chunk)
        ]

    def _pieces(self, row: FlowRow) -> tuple[Tensor, ...]:
        assert row.staged is not None, "checked in _units"
        return row.staged.x.split(self.shape.chunk_frames)

    @staticmethod
    def _regroup(velocity: Tensor, units: list[Unit]) -> list[Tensor]:
        """velocity [U, width, M] -> per row [n, M]."""
        parts: dict[int, list[Tensor]] = {}
        for unit, part in zip(units, velocity, strict=True):
            parts.setdefault(unit.row, []).append(part[: unit.frames])
        return [torch.cat(part) for part in parts.values()]

    @staticmethod
    def _move(row: FlowRow, velocity: Tensor, tables: Tables) -> None:
        assert row.staged is not None, "checked in _units"
        row.staged.x.add_(velocity, alpha=tables.steps[row.steps_done])
        row.steps_done += 1

    def finish(self, row: FlowRow) -> Tensor:
        """Ends a solve of ten steps: the new mel [M, frames after the prompt], maybe 0 frames of it."""
        assert row.staged is not None and row.steps_done == self.shape.steps, "all Euler steps come first"
        staged, row.staged = row.staged, None
        row.frames_solved += staged.end - staged.start
        row.frames = staged.end
        return staged.x[max(0, row.prompt_frames - staged.start) :].T

    def _velocity(
        self, x: Tensor, units: list[Unit], rows: Sequence[FlowRow], store: FlowStore, tables: Tables
    ) -> Tensor:
        """x [U, width, M] -> guided velocity [U, width, M]. Both branches of a unit are neighbours: [U*2, ...]."""
        num_units, width, _ = x.shape
        net, steps = self.estimator, [unit.step for unit in units]
        h = F.linear(x.to(self.dtype), net.input_embed.proj.weight[:, : self.shape.mel])[:, None] + self._bases(
            rows, width
        )
        h = (self._conv_pos(h, units, rows) + h).flatten(0, 1)  # [U*2, width, D]
        rotary = tuple(stacked(part, units, width) for part in (tables.cos, tables.sin))
        pages = PagedAttention(store, units, width)
        for layer, block in enumerate(net.transformer_blocks):
            h = block(h, by_step(tables.blocks[:, layer], steps), rotary, pages.layer(layer))
        v = net.head(h, by_step(tables.final, steps)).to(x.dtype).unflatten(0, (num_units, 2))
        return torch.lerp(v[:, 1], v[:, 0], 1 + self.shape.cfg)

    def _bases(self, rows: Sequence[FlowRow], width: int) -> Tensor:
        """[U, 2, width, D]."""
        parts = [part for row in rows for part in row.staged.base.split(self.shape.chunk_frames, dim=1)]  # type: ignore[union-attr]
        return torch.stack([F.pad(part, (0, 0, 0, width - part.shape[1])) for part in parts])

    def _conv_pos(self, h: Tensor, units: list[Unit], rows: Sequence[FlowRow]) -> Tensor:
        """Position convolutions of h [U, 2, width, D] behind each row's tails, which slide on in place."""
        net = self.estimator.input_embed.conv_pos_embed
        for index, conv in enumerate((net.conv1[0], net.conv2[0])):
            x = self._with_history(h, units, rows, index)  # [U, 2, 30 + width, D]
            h = F.mish(conv(x.flatten(0, 1).transpose(1, 2))).transpose(1, 2).unflatten(0, (len(units), 2))
        return h

    def _with_history(self, h: Tensor, units: list[Unit], rows: Sequence[FlowRow], index: int) -> Tensor:
        context = self.shape.context
        tails = []
        for place, unit in enumerate(units):
            own = rows[unit.row].contexts[unit.step, :, index]
            tails.append(own if unit.is_first else h[place - 1, :, -context:])
        x = torch.cat((torch.stack(tails), h), dim=2)
        last = [place for place in range(len(units)) if place + 1 == len(units) or units[place + 1].is_first]
        kept = [rows[units[place].row].contexts[units[place].step, :, index] for place in last]
        torch._foreach_copy_(kept, [x[at, :, units[at].frames : units[at].frames + context] for at in last])
        return x

    def tables(self, frames: int) -> Tables:
        """Constants covering at least this many frames."""
        if self._tables is None or len(self._tables.noise) < frames:
            self._tables = self._make_tables(min(MAX_FRAMES, max(frames, 3_000)))
        return self._tables

    @torch.inference_mode()
    def _make_tables(self, frames: int) -> Tables:
        times, spans = self.times()
        blocks, final = self.estimator.modulations(times)
        cos, sin = self.estimator.rotary_embed.table(torch.arange(frames, device=self.device))
        noise = flow_noise(frames).T.contiguous().to(self.device, self.wide)
        return Tables(spans, blocks.transpose(0, 1)[:, :, None].contiguous(), final[:, None], cos, sin, noise)


def check_frames(frames: int) -> None:
    if frames > MAX_FRAMES:
        raise TooManyFrames(f"{frames} frames with the prompt, the fixed noise covers {MAX_FRAMES}")


def padded(x: Tensor, width: int) -> Tensor:
    """x [n, M] with zero frames behind, [width, M]."""
    return x if len(x) == width else F.pad(x, (0, 0, 0, width - len(x)))


def by_step(table: Tensor, steps: list[int]) -> Tensor:
    """Rows of table [S, 1, C] for both branches of each unit: [U*2, 1, C], or [1, 1, C] if all are at one step."""
    if len(set(steps)) == 1:
        return table[steps[0] : steps[0] + 1]
    return table[torch.tensor(steps, device=table.device).repeat_interleave(2)]


def stacked(table: Tensor, units: list[Unit], width: int) -> Tensor:
    """Rotary rows of each unit for both branches: [U*2, width, E/2], or one shared row if there is one unit.

    Padding frames of a last unit may run past the table; they take its first rows, since nothing reads them.
    """
    if len(units) == 1:
        return table[units[0].start : units[0].start + width][None]
    starts = [unit.start if unit.start + width <= len(table) else 0 for unit in units]
    return torch.stack([table[at : at + width] for at in starts]).repeat_interleave(2, dim=0)


def gathers_padded(device: torch.device) -> bool:
    """Whether many units share one padded attention call: few launches on an accelerator, wasted work on a CPU."""
    return device.type != "cpu"


class PagedAttention:
    """Writes the keys and values of one packed call into their pages and attends over pages 0..own of each unit."""

    def __init__(self, store: FlowStore, units: list[Unit], width: int) -> None:
        self.store, self.units, self.width = store, units, width
        self.is_packed = len(units) > 1 and gathers_padded(store.data.device)
        device = store.data.device
        self.steps = torch.tensor([unit.step for unit in units], device=device)
        self.own = torch.tensor([unit.pages[-1] for unit in units], device=device)
        self.tables = [torch.tensor(unit.pages, device=device) for unit in units] if not self.is_packed else []
        if self.is_packed:
            self._plan(device)

    def _plan(self, device: torch.device) -> None:
        """Page table [U, pages] whose missing places repeat a written page, and the mask [U*2, 1, 1, keys]."""
        most = max(len(unit.pages) for unit in self.units)
        # Never an unwritten page behind the mask: its bits may be NaN, and 0 * NaN is NaN.
        table = [unit.pages + unit.pages[:1] * (most - len(unit.pages)) for unit in self.units]
        self.table = torch.tensor(table, device=device)
        keys = torch.tensor([unit.keys for unit in self.units], device=device)
        index = torch.arange(most * self.store.shape.chunk_frames, device=device)
        self.mask = (index < keys[:, None]).repeat_interleave(2, dim=0)[:, None, None]

    def layer(self, layer: int) -> Attend:
        data = self.store.data[:, :, layer]  # [S, 2, 2 (k, v), pages, W, H, E]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._write(data, k, v)
            return self._attend_packed(data, q) if self.is_packed else self._attend_each(data, q)

        return attend

    def _write(self, data: Tensor, k: Tensor, v: Tensor) -> None:
        both = torch.stack((k, v), dim=1).unflatten(0, (len(self.units), 2)).to(data.dtype)  # [U, 2, kv, width, H, E]
        if len(self.units) == 1:
            unit = self.units[0]
            data[unit.step, :, :, unit.pages[-1], : self.width] = both[0]
        else:
            data[self.steps, :, :, self.own, : self.width] = both

    def _attend_each(self, data: Tensor, q: Tensor) -> Tensor:
        out = []
        for index, unit in enumerate(self.units):
            past = self._past(data[unit.step], index)  # [2, kv, pages, W, H, E]
            k, v = past.flatten(2, 3)[:, :, : unit.keys].to(q.dtype).transpose(2, 3).unbind(1)
            pair = q[2 * index : 2 * index + 2].transpose(1, 2)
            out.append(F.scaled_dot_product_attention(pair, k, v).transpose(1, 2).flatten(2))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _past(self, data: Tensor, index: int) -> Tensor:
        """Pages of a unit out of data [2, kv, pages, W, H, E]; neighbouring pages are a view, which spares the copy."""
        pages = self.units[index].pages
        if pages == list(range(pages[0], pages[0] + len(pages))):
            return data[:, :, pages[0] : pages[0] + len(pages)]
        return data.index_select(2, self.tables[index])

    def _attend_packed(self, data: Tensor, q: Tensor) -> Tensor:
        branch = torch.arange(2, device=q.device)[None, :, None]
        place = (self.steps[:, None, None], branch, self.table[:, None])
        k, v = (data[:, :, kv][place].flatten(2, 3).flatten(0, 1).to(q.dtype).transpose(1, 2) for kv in (0, 1))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=self.mask)
        return out.transpose(1, 2).flatten(2)
