"""The DiT of the flow, layer by layer, under its official tensor names (CosyVoice3 reference, section on the flow).

Letters: B batch rows, T frames of 20 ms, M 80 mel channels, D model width, H heads, E channels per head, S the ten
Euler steps, U units of a packed call, each with both guidance branches and w frames.

Two forms of one network. `Estimator` called layer by layer on [B, T, D] is what trains and what parity is measured
against. `Packed` runs the same weights on [U, 2, w, D] with units at different Euler steps, in the pieces that a GPU
wants fused: its own are plain torch, `engine/flow_kernels.py` overrides them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention import Attend, AttendLayer, Units, Whole, rotate_head0

NORM_EPS = 1e-6
TIME_FREQUENCIES = 128
FRAMES_PER_TOKEN = 2


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


class PreLookahead(nn.Module):
    """Token i sees tokens i-2 .. i+3."""

    BEHIND = 2

    def __init__(self, shape: FlowShape) -> None:
        super().__init__()
        self.lookahead = shape.lookahead
        self.conv1 = nn.Conv1d(shape.mel, shape.lookahead_channels, shape.lookahead + 1)
        self.conv2 = nn.Conv1d(shape.lookahead_channels, shape.mel, self.BEHIND + 1)

    def forward(self, embedded: Tensor, *, finalize: bool) -> Tensor:
        """embedded [B, N, M] -> [B, N or N-3, M]; the last three are context only unless finalize."""
        x = F.pad(embedded.transpose(1, 2), (self.BEHIND, self.lookahead if finalize else 0))
        is_token = torch.arange(x.shape[2] - self.lookahead, device=x.device) >= self.BEHIND
        return self.windows(x, is_token)

    def windows(self, x: Tensor, is_token: Tensor) -> Tensor:
        """x [B, M, 2 + n + 3] with zeros where no token is -> [B, n, M], for the n tokens in the middle.

        is_token bool [B or 1, 2 + n]: the hidden layer is zero before a first token, not what it makes of zeros.
        """
        hidden = F.leaky_relu(self.conv1(x), 0.01) * is_token.view(-1, 1, is_token.shape[-1])
        return (self.conv2(hidden) + x[:, :, self.BEHIND : x.shape[2] - self.lookahead]).transpose(1, 2)


def widened(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer in x's dtype, not in its weights'."""
    return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))


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
        """t [B] in 0..1 -> [B, D], all of it in t's dtype: the angles go up to 1000."""
        angle = 1000 * t[:, None] * self.frequency.to(t.device, t.dtype)
        features = torch.cat((angle.sin(), angle.cos()), dim=-1)
        return widened(self.time_mlp[2], F.silu(widened(self.time_mlp[0], features)))


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
        """t [B] -> per block [depth, B, 6D] and for the last norm [B, 2D] (scale, shift), in t's dtype."""
        time = F.silu(self.time_embed(t))
        blocks = torch.stack([widened(block.attn_norm["linear"], time) for block in self.transformer_blocks])
        return blocks, widened(self.norm_out["linear"], time)

    def head(self, h: Tensor, modulation: Tensor) -> Tensor:
        """h [B, T, D], modulation [B or 1, 1, 2D] -> velocity [B, T, M]."""
        scale, shift = modulation.chunk(2, dim=-1)
        return self.proj_out(normed(h, shift, scale))


# --- packed ---


@dataclass(frozen=True, slots=True, eq=False)
class Modulations:
    """Shift, scale and gate of every norm at the ten times: they depend on nothing else."""

    blocks: Tensor  # [S, depth, 6, D]: shift, scale, gate of the attention, then of the feed-forward
    final: Tensor  # [S, 2, D]: shift, scale

    @classmethod
    def of(cls, net: Estimator, times: Tensor) -> Modulations:
        blocks, final = net.modulations(times)
        scale, shift = final.chunk(2, dim=-1)
        return cls(blocks.unflatten(-1, (6, -1)).transpose(0, 1).contiguous(), torch.stack((shift, scale), dim=1))


class Packed:
    """The network on [U, 2, w, D], each unit at its own Euler step; serving only, no gradients.

    Norms and modulations are computed in float32 at least. Made anew whenever the weights change.
    """

    def __init__(self, net: Estimator, modulations: Modulations) -> None:
        self.net, self.modulations = net, modulations
        self.blocks: list[Block] = list(net.transformer_blocks)  # type: ignore[arg-type]
        conv_pos = net.input_embed.conv_pos_embed
        self.convs: list[nn.Conv1d] = [conv_pos.conv1[0], conv_pos.conv2[0]]  # type: ignore[list-item]
        self.qkv = [fused_qkv(block.attn) for block in self.blocks]

    def velocity(self, h: Tensor, steps: Tensor, attend: AttendLayer) -> Tensor:
        """h [U, 2, w, D] behind the position convolutions, steps int64 [U] -> velocity of both branches [U, 2, w, M].

        attend takes a layer's number and its qkv [U, 2, w, 3, H, E], which it may overwrite, and gives [U, 2, w, H*E].
        """
        blocks, final = self.modulations.blocks[steps], self.modulations.final[steps]  # [U, depth, 6, D], [U, 2, D]
        after = [*blocks[:, 1:, :2].unbind(1), final]  # of each block: shift and scale of the norm that follows it
        a = self.normed(h, blocks[:, 0, 0], blocks[:, 0, 1])
        for layer, (block, qkv) in enumerate(zip(self.blocks, self.qkv, strict=True)):
            own = blocks[:, layer]
            mixed = attend(layer, F.linear(a, *qkv).unflatten(-1, (3, *block.attn.split)))
            h, a = self.gated(h, block.attn.to_out[0](mixed), own[:, 2], own[:, 3], own[:, 4])
            h, a = self.gated(h, block.ff["ff"][2](self.hidden(a, block)), own[:, 5], *after[layer].unbind(1))
        return self.net.proj_out(a)

    def entered(self, x: Tensor, base: Tensor, pages: Tensor) -> Tensor:
        """Input projection for both branches: of x [U, w, M], and of what no step changes, base [pages, W, D].

        -> [U, 2, w, D]; the second branch knows neither tokens nor speaker nor prompt.
        """
        h, bias = self.projected(x), self.net.input_embed.proj.bias
        return torch.stack((h + base[pages, : h.shape[1]], h + bias), dim=1)

    def projected(self, x: Tensor) -> Tensor:
        weight = self.net.input_embed.proj.weight
        return F.linear(x.to(weight.dtype), weight[:, : x.shape[-1]])

    def with_history(self, h: Tensor, units: Units, contexts: Tensor) -> Tensor:
        """h [U, 2, w, D] behind the frames before it: [U, 2, 30 + w, D].

        contexts [lanes, S, 2, 30, D] hold what stands before each row's first unit of the call, and then the last
        frames of its last one. A unit of fewer than 30 frames ends its row: what it leaves has no meaning.
        """
        context = contexts.shape[3]
        tails = contexts[units.lanes, units.steps]
        if units.count > 1:
            before = h[:, :, -context:].roll(1, dims=0)
            tails = torch.where((units.fresh == 0)[:, None, None, None], tails, before)
        x = torch.cat((tails, h), dim=2)
        last = units.frames[:, None] + torch.arange(context, device=x.device)  # [U, 30]
        each = torch.arange(units.count, device=x.device)[:, None]
        contexts[units.keeps, units.steps] = x.transpose(1, 2)[each, last].transpose(1, 2)
        return x

    def move(self, x: Tensor, velocity: Tensor, units: Units, spans: Tensor, guidance: float, health: Tensor) -> None:
        """Moves x [pages, W, M] of the units' pages by one step, and adds 0 to their lanes' health, or NaN.

        velocity [U, 2, w, M]; spans [S].
        """
        at = x[units.pages, : units.width]
        at = moved(at, velocity, spans[units.steps][:, None, None], guidance)
        x[units.pages, : units.width] = at
        health.index_add_(0, units.lanes, at.sum(dim=(1, 2)) * 0)

    def conv_mish(self, x: Tensor, index: int) -> Tensor:
        """Position convolution 0 or 1 over x [B, 30 + T, D] -> [B, T, D]."""
        return F.mish(self.convs[index](x.transpose(1, 2))).transpose(1, 2)

    def conv_mish_rows(self, h: Tensor, whole: Whole, index: int) -> Tensor:
        """The same over whole rows laid end to end, each behind zeros of its own: h [2, F, D] -> [2, F, D]."""
        context = self.convs[index].kernel_size[0] - 1
        gapped = h.new_zeros(2, h.shape[1] + context * whole.most_rows, h.shape[2])
        places = torch.arange(h.shape[1], device=h.device) + context * whole.rows
        gapped[:, places + context] = h
        return self.conv_mish(gapped, index)[:, places]

    def normed(self, h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """h [U, 2, w, D]; shift, scale [U, D]."""
        return normed(h.to(shift.dtype), spread(shift), spread(scale)).to(h.dtype)

    def gated(self, h: Tensor, y: Tensor, gate: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """h + gate * y, and its norm. h, y [U, 2, w, D]; gate, shift, scale [U, D]."""
        wide = torch.addcmul(h.to(gate.dtype), spread(gate), y.to(gate.dtype))
        return wide.to(h.dtype), normed(wide, spread(shift), spread(scale)).to(h.dtype)

    def hidden(self, a: Tensor, block: Block) -> Tensor:
        """First half of a feed-forward: [U, 2, w, D] -> [U, 2, w, ff]."""
        return block.ff["ff"][0](a)


def moved(x: Tensor, velocity: Tensor, span: Tensor, guidance: float) -> Tensor:
    """x [U, w, M] after a step of this span along the guided velocity, given for both branches [U, 2, w, M]."""
    given, free = velocity.to(x.dtype).unbind(1)
    return torch.addcmul(x, span, torch.lerp(free, given, guidance))


def spread(row: Tensor) -> Tensor:
    return row[:, None, None]


def fused_qkv(attention: Attention) -> tuple[Tensor, Tensor]:
    """One weight [3*H*E, D] and one bias for the three projections."""
    layers = (attention.to_q, attention.to_k, attention.to_v)
    return torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers])
