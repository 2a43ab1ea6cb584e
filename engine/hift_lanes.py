"""The vocoder's stream for many lanes at once: state in slots, and one graph for each tier of lanes and of frames.

What a push must know of a lane is a row of whole numbers on the device, so a launch is two copies and a replay. Lanes
at their first, at a later and at their last push go through together: masks tell them apart. To make that so, a push
begins at the first frame that is not decoded yet (F0, phase and source of one frame more are computed again), and on
the finest stage it begins one step early: that step is the mirrored one before the first, or the last one of before.

Letters: L lanes, N frames of the tier, n frames of a lane (n <= N), C channels, K = 120 N + 1 steps of the last stage.
Activations are [L, T, C], channels last and padded to 32. The twins here, in plain PyTorch, are what runs where Triton
can't compile and what the kernels are tested against. Parity: tests/engine/test_hift_lanes.py.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, auto
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.graphs import Graphs
from engine.hift import (
    AUDIO_LIMIT,
    BINS,
    DOWN_SIZES,
    F0_LOOKAHEAD,
    FFT,
    FRAME_SAMPLES,
    HOP,
    NUM_HARMONICS,
    PRE_LOOKAHEAD,
    RES_KERNELS,
    SPECTRA_PER_FRAME,
    SPECTRUM_HISTORY,
    UP_RATES,
    Hift,
    HiftState,
    NoiseTooShort,
    ResBlock,
    Upsample,
    overlap_add,
)

logger = logging.getLogger(__name__)

LANE_TIERS = (1, 2, 4, 8, 16, 32, 64, 128)
FRAME_TIERS = (16, 64, 128, 256)
MOST_FRAMES = 8_192  # of one launch
SOURCE_HISTORY = 4 * SPECTRUM_HISTORY + FFT // 2  # samples before a frame that its spectra read
SLOTS_PER_LANE = 2  # one part of a clause may end while the next begins
WIDTH_STEP = 32  # channels come in whole multiples


class Field(IntEnum):
    """A lane's row of the plan."""

    SOURCE = 0  # row of state before the push
    TARGET = auto()  # and after
    FRAMES = auto()  # n; 0: padding
    HELD = auto()  # mel frames kept from before
    GIVEN = auto()  # mel frames that are new
    START = auto()  # where these begin in the packed mel
    IS_FIRST = auto()
    IS_FINAL = auto()
    DECODED = auto()  # frames before the push


class Act(IntEnum):
    LEAKY = 0
    SNAKE = auto()
    ELU = auto()


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A causal convolution as a product: a row of the result takes the `taps` rows that end at it, `dilation` apart.

    weight [taps I, O] and bias [O] in float32 at least; history [state rows, (taps - 1) dilation, I] in the weight's
    type, None where the input reaches back far enough on its own.
    """

    weight: Tensor
    bias: Tensor
    taps: int = 1
    dilation: int = 1
    history: Tensor | None = None
    is_pitch: bool = False  # whose rounding adds up: full float32


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Finish:
    """What becomes of a convolution's result: residual streams are added, it is scaled and, on demand, kept as it is
    (in `into`, if given); then it goes through an activation, once for each row of alpha where that is a snake."""

    adds: tuple[Tensor, ...] = ()
    scale: float = 1.0
    keeps: bool = False
    into: Tensor | None = None
    act: Act | None = None
    alpha: Tensor | None = None  # [operands, O]
    slope: float = 0.0

    @property
    def num_operands(self) -> int:
        if self.act is None:
            return 0
        return 1 if self.alpha is None else len(self.alpha)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The rows of the lanes of one launch, for kernels and for indexing."""

    table: Tensor  # int32 [L, fields]
    columns: tuple[Tensor, ...]  # int64 [L] each

    @classmethod
    def of(cls, table: Tensor) -> Plan:
        return cls(table, table.long().unbind(1))

    def __getitem__(self, name: Field) -> Tensor:
        return self.columns[name]

    @property
    def is_first(self) -> Tensor:
        return self[Field.IS_FIRST] > 0


Conv = Callable[[Tensor, Layer, Plan, Finish, int, int], tuple[Tensor | None, Tensor]]


def plain_conv(
    x: Tensor, layer: Layer, plan: Plan, finish: Finish, rate: int, extra: int
) -> tuple[Tensor | None, Tensor]:
    """x [L, T, I], of which a lane has rate n + extra rows -> the result [L, T, O] if kept, and its activations
    [operands, L, T, O] in the input's type. What a lane has seen up to row rate n is its next history."""
    if layer.history is None:
        value = x @ layer.weight
    else:
        before = layer.history[plan[Field.SOURCE]].masked_fill_(plan.is_first[:, None, None], 0)
        wide = torch.cat((before, x), dim=1)
        after = rows_at(wide, plan[Field.FRAMES] * rate, before.shape[1])
        layer.history.index_copy_(0, plan[Field.TARGET], after)
        weight = layer.weight.unflatten(0, (layer.taps, -1)).permute(2, 1, 0)
        value = F.conv1d(wide.transpose(1, 2), weight, dilation=layer.dilation).transpose(1, 2)
    value = value.to(layer.bias.dtype) + layer.bias
    for add in finish.adds:
        value = value + add
    value = value * finish.scale
    if finish.into is not None:
        finish.into.copy_(value)
    return finish.into if finish.into is not None else value, activations(value, finish).to(x.dtype)


def activations(value: Tensor, finish: Finish) -> Tensor:
    if finish.act is None:
        return value.new_empty(0, *value.shape)
    if finish.act is Act.LEAKY:
        return F.leaky_relu(value, finish.slope)[None]
    if finish.act is Act.ELU:
        return F.elu(value)[None]
    assert finish.alpha is not None, "a snake has a frequency"
    alpha = finish.alpha[:, None, None]
    return value + torch.sin(value * alpha).square() / (alpha + 1e-9)


def rows_at(x: Tensor, start: Tensor, count: int) -> Tensor:
    """Of each lane its `count` rows from start on: x [L, T, C], start [L] -> [L, count, C]."""
    index = (start[:, None] + torch.arange(count, device=x.device)).clamp_(min=0)
    return x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))


def windows(x: Tensor, first: int, count: int, width: int, stride: int = 1) -> Tensor:
    """Rows first, first + stride, ... of x [L, T, C], each with width - 1 more -> a view [L, count, width C]."""
    lane, row, _ = x.stride()
    size = (x.shape[0], count, width * x.shape[2])
    return x.as_strided(size, (lane, stride * row, 1), x.storage_offset() + first * row)


# --- weights ---


def rounded(channels: int) -> int:
    return -(-channels // WIDTH_STEP) * WIDTH_STEP


def as_product(weight: Tensor) -> Tensor:
    """A convolution's weight [O, I, taps] -> [taps I, O], channels padded with zeros."""
    out, inner, taps = weight.shape
    padded = weight.new_zeros(taps, rounded(inner), rounded(out))
    padded[:, :inner, :out] = weight.permute(2, 1, 0)
    return padded.flatten(0, 1)


def padded_to(values: Tensor, width: int, filler: float = 0.0) -> Tensor:
    return F.pad(values, (0, width - len(values)), value=filler)


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """One dilation of a residual block: two convolutions, a snake before each."""

    first: Layer
    second: Layer
    first_alpha: Tensor  # [1, C]
    second_alpha: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Stage:
    up: Layer
    down: Layer
    source: list[Unit]
    blocks: list[list[Unit]]
    alphas: Tensor  # [3, C] of the blocks' first snakes
    rate_in: int  # rows of a frame before and after
    rate: int
    is_last: bool

    @property
    def extra(self) -> int:
        return 1 if self.is_last else 0


class Builder:
    """A vocoder's weights as layers of one numeric type, each with its history."""

    def __init__(self, hift: Hift, dtype: torch.dtype, rows: int) -> None:
        self.hift, self.dtype, self.rows = hift, dtype, rows

    def layer(self, weight: Tensor, bias: Tensor | None, dilation: int = 1, *, has_history: bool = True) -> Layer:
        product = as_product(weight).to(self.dtype)
        assert bias is not None, "every convolution of the vocoder has one"
        bias = padded_to(bias, product.shape[1]).to(self.hift.dtype).contiguous()
        taps = weight.shape[2] if has_history else 1
        history = None
        if has_history:
            width = product.shape[0] // taps
            history = product.new_zeros(self.rows, (taps - 1) * dilation, width)
        return Layer(product, bias, taps, dilation, history)

    def conv(self, conv: nn.Conv1d, *, has_history: bool = True) -> Layer:
        return self.layer(conv.weight, conv.bias, conv.dilation[0], has_history=has_history)

    def up(self, up: Upsample) -> Layer:
        """Its folded taps, the outputs of one input step side by side."""
        assert up.bias is not None, "every convolution of the vocoder has one"
        out, width = up.out_channels, rounded(up.out_channels)
        folded = (up.weight @ up.fold).unflatten(2, (up.rate, up.taps))  # [O, I, rate, taps]
        padded = F.pad(folded.permute(2, 0, 1, 3), (0, 0, 0, 0, 0, width - out))  # [rate, O, I, taps]
        return self.layer(padded.flatten(0, 1), padded_to(up.bias, width).repeat(up.rate))

    def alpha(self, snake: nn.Module) -> Tensor:
        assert isinstance(snake.alpha, Tensor), "a snake's parameter"
        values = snake.alpha.to(self.hift.dtype)
        return padded_to(values, rounded(len(values)), 1.0)[None].contiguous()

    def units(self, block: nn.Module) -> list[Unit]:
        assert isinstance(block, ResBlock), "all blocks of the vocoder are"
        parts = (block.convs1, block.convs2, block.activations1, block.activations2)
        return [
            Unit(self.conv(first), self.conv(second), self.alpha(snake), self.alpha(next_snake))  # type: ignore[arg-type]
            for first, second, snake, next_snake in zip(*parts, strict=True)
        ]

    def stage(self, number: int) -> Stage:
        hift, rates = self.hift, (1, 8, 40, 120)
        blocks = [self.units(block) for block in hift.resblocks[3 * number : 3 * number + 3]]
        return Stage(
            up=self.up(hift.ups[number]),  # type: ignore[arg-type]
            down=self.conv(hift.source_downs[number], has_history=False),  # type: ignore[arg-type]
            source=self.units(hift.source_resblocks[number]),
            blocks=blocks,
            alphas=torch.cat([block[0].first_alpha for block in blocks]),
            rate_in=rates[number],
            rate=rates[number + 1],
            is_last=number == len(UP_RATES) - 1,
        )

    def pitch(self) -> list[Layer]:
        """The F0 predictor in the vocoder's own type, its first layer over windows of mel."""
        convs = [layer for layer in self.hift.f0_predictor.condnet if isinstance(layer, nn.Conv1d)]
        exact = Builder(self.hift, self.hift.dtype, self.rows)
        layers = [exact.conv(conv, has_history=number > 0) for number, conv in enumerate(convs)]
        return [replace(layer, is_pitch=True) for layer in layers]


# --- lanes ---


@dataclass(slots=True, eq=False, weakref_slot=True)
class SlotState(HiftState):
    """A lane whose state lies in a slot, from its first decoded frame to its last; mel waits here until then."""

    slot: int = -1
    turn: int = 0  # which of the slot's two rows is current
    give_back: Callable[[], object] | None = None


@dataclass(slots=True, eq=False)
class Job:
    """What one lane was given in a push, in parts that a launch can take."""

    state: SlotState
    mel: Tensor  # [80, m]
    is_final: bool
    taken: int = 0
    waves: list[Tensor] = field(default_factory=list)
    is_done: bool = False

    @property
    def held(self) -> int:
        return PRE_LOOKAHEAD if self.state.num_decoded else 0

    @property
    def frames(self) -> int:
        """That can be decoded now."""
        return self.held + self.mel.shape[1] - self.taken - (0 if self.is_final else PRE_LOOKAHEAD)

    def part(self, most: int) -> tuple[Tensor, int, bool]:
        """-> new mel, the frames that it completes, whether it is the lane's last."""
        is_rest = self.frames <= most
        frames = self.frames if is_rest else most
        stop = self.mel.shape[1] if is_rest else self.taken + frames + PRE_LOOKAHEAD - self.held
        mel, self.taken, self.is_done = self.mel[:, self.taken : stop], stop, is_rest
        return mel, frames, is_rest and self.is_final


class HiftLanes:
    """Slots, buffers and graphs for so many lanes. Only push() writes them, on one stream.

    dtype  of the operands of the decoder's products; by default the vocoder's own
    """

    def __init__(
        self,
        hift: Hift,
        *,
        lanes: int,
        conv: Conv = plain_conv,
        dtype: torch.dtype | None = None,
        lane_tiers: Sequence[int] = LANE_TIERS,
        frame_tiers: Sequence[int] = FRAME_TIERS,
    ) -> None:
        self.hift, self.conv = hift, conv
        self._lay_out(dtype or hift.dtype, lanes)
        self.lane_tiers = [tier for tier in lane_tiers if tier < 2 * lanes]
        tiers = [(lanes, frames) for lanes in self.lane_tiers for frames in frame_tiers]
        self.tiers = sorted((tier for tier in tiers if work_of(tier) <= MOST_FRAMES), key=work_of, reverse=True)
        self._make_buffers()
        self._run: dict[tuple[int, int], Callable[[], None]] = {}

    def capture(self, graphs: Graphs) -> None:
        """To be called once, before the first push."""
        for tier in self.tiers:
            self._run[tier] = graphs.capture(f"hift {tier[0]} x {tier[1]}", partial(self._body, *tier))

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Runs the largest body and the smallest: between them they call for every kernel that there is."""
        for tier in (self.tiers[0], self.tiers[-1]):
            self._body(*tier)

    def _lay_out(self, dtype: torch.dtype, lanes: int) -> None:
        """Weights and state; the last slot is nobody's and stands in for the lanes that a tier lacks."""
        hift, slots = self.hift, lanes * SLOTS_PER_LANE
        self.free, self.nobody = list(range(slots))[::-1], slots
        build = Builder(hift, dtype, 2 * (slots + 1))
        self.mel_width = rounded(hift.shape.mel)
        self.pitch = build.pitch()
        self.pre = build.conv(hift.conv_pre, has_history=False)
        self.stages = [build.stage(number) for number in range(len(UP_RATES))]
        self.post = build.conv(hift.conv_post)
        self.classifier = hift.f0_predictor.classifier.weight[0].to(hift.dtype)
        self.classifier = padded_to(self.classifier, self.pitch[-1].weight.shape[1])
        self.analysis = F.pad(hift.analysis, (0, WIDTH_STEP - 2 * BINS))
        self.held = self._state(build, PRE_LOOKAHEAD, self.mel_width)
        self.phase = self._state(build, NUM_HARMONICS, dtype=torch.float64)
        self.tone = self._state(build, hift.shape.tone_steps + 1)
        self.seam = self._state(build, self.stages[-1].alphas.shape[1])
        self.overlap = self._state(build, FFT - HOP)
        self.hiss = hift.hiss()
        self.squares = (hift.window**2).unflatten(0, (FFT // HOP, HOP))

    def _state(self, build: Builder, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(build.rows, *size, device=self.hift.device, dtype=dtype or self.hift.dtype)

    def _make_buffers(self) -> None:
        device, dtype = self.hift.device, self.hift.dtype
        lanes, frames = self.lane_tiers[-1], work_of(self.tiers[0])
        self.table = torch.zeros(lanes, len(Field), dtype=torch.int32, device=device)
        self.table[:, Field.SOURCE] = self.table[:, Field.TARGET] = 2 * self.nobody
        self.packed = torch.zeros(frames + PRE_LOOKAHEAD * lanes, self.mel_width, device=device, dtype=dtype)
        self.waves = torch.zeros(frames * FRAME_SAMPLES + FFT * lanes, device=device, dtype=dtype)

    def wave(self, lanes: int, frames: int) -> Tensor:
        """Where a tier's samples are: [lanes, 480 frames + 16]."""
        width = frames * FRAME_SAMPLES + FFT
        return self.waves[: lanes * width].view(lanes, width)

    # The host's side of a push.

    def begin(self) -> SlotState:
        return SlotState()

    def push(self, states: Sequence[HiftState], mels: Sequence[Tensor], finals: Sequence[bool]) -> list[Tensor]:
        """See Hift.push; the samples are fresh tensors, there once the current stream comes to them."""
        given = zip(states, mels, finals, strict=True)
        jobs = [self._job(state, mel, is_final) for state, mel, is_final in given]
        waiting = [job for job in jobs if job.frames > 0]
        for job in waiting:
            self._seat(job.state)
        while waiting:
            for start in range(0, len(waiting), self.lane_tiers[-1]):
                self._launch(waiting[start : start + self.lane_tiers[-1]])
            waiting = [job for job in waiting if not job.is_done]
        return [self._end(job) for job in jobs]

    def _job(self, state: HiftState, mel: Tensor, is_final: bool) -> Job:
        assert isinstance(state, SlotState), "a lane that began before warm()"
        assert not state.is_ended, "a lane that has had its final push takes no more mel"
        if state.mel is not None:
            mel = torch.cat((state.mel, mel), dim=1)
        job = Job(state, mel, is_final)
        state.mel = mel.clone() if job.frames <= 0 and not job.held else None
        samples = (state.num_decoded + max(0, job.frames) + (0 if is_final else 1)) * FRAME_SAMPLES
        if samples > len(self.hiss):
            raise NoiseTooShort(f"the fixed noise has {len(self.hiss)} samples, {samples} are needed")
        return job

    def _seat(self, state: SlotState) -> None:
        if state.slot < 0:
            assert self.free, f"more than {self.nobody} vocoder states are alive"
            state.slot = self.free.pop()
            state.give_back = weakref.finalize(state, self.free.append, state.slot)

    def _end(self, job: Job) -> Tensor:
        if job.is_final:
            job.state.is_ended = True
            if job.state.give_back is not None:
                job.state.give_back()
        if len(job.waves) == 1:
            return job.waves[0]
        return torch.cat(job.waves) if job.waves else self.waves.new_empty(0)

    def _tier(self, jobs: Sequence[Job]) -> tuple[int, int]:
        """The least padding that takes them at once, or most of the frames of them."""
        lanes = next(tier for tier in self.lane_tiers if tier >= len(jobs))
        fitting = sorted(tier for tier in self.tiers if tier[0] == lanes)
        wanted = max(job.frames for job in jobs)
        return next((tier for tier in fitting if tier[1] >= wanted), fitting[-1])

    def _launch(self, jobs: Sequence[Job]) -> None:
        tier = self._tier(jobs)
        rows, mels, num_given = [], [], 0
        for job in jobs:
            held, decoded = job.held, job.state.num_decoded
            mel, frames, is_final = job.part(tier[1])
            here = 2 * job.state.slot + job.state.turn
            there = here ^ 1
            rows.append((here, there, frames, held, mel.shape[1], num_given, decoded == 0, is_final, decoded))
            mels.append(mel)
            num_given += mel.shape[1]
            job.state.turn ^= 1
            job.state.num_decoded += frames
        rows += [self._padding()] * (tier[0] - len(jobs))
        self._stage(rows, mels, num_given)
        self._run[tier]()
        wave = self.wave(*tier)[: len(jobs)].clone()
        for lane, (job, row) in enumerate(zip(jobs, rows, strict=False)):
            job.waves.append(wave[lane, first_sample(row) : last_sample(row)])

    def _padding(self) -> tuple[int, ...]:
        return (2 * self.nobody, 2 * self.nobody + 1, *[0] * (len(Field) - 2))

    def _stage(self, rows: Sequence[tuple[int, ...]], mels: Sequence[Tensor], num_given: int) -> None:
        table = torch.tensor(rows, dtype=torch.int32)
        if self.table.is_cuda:
            table = table.pin_memory()  # its memory is not given out again before the copy has ended
        self.table[: len(rows)].copy_(table, non_blocking=True)
        if num_given:
            self.packed[:num_given, : self.hift.shape.mel].copy_(torch.cat(list(mels), dim=1).T)

    # The device's side: bodies of graphs.

    def _body(self, lanes: int, frames: int) -> None:
        plan = Plan.of(self.table[:lanes])
        mel = self._take_mel(plan, frames)
        spectra = self._spectra(plan, self._pitch(plan, mel))
        coded = self._decode(plan, mel.to(self.pre.weight.dtype), spectra)
        self.wave(lanes, frames).copy_(self._sound(plan, coded))

    def _take_mel(self, plan: Plan, frames: int) -> Tensor:
        """Held frames, new ones, zeros: [L, N + 4, mel], frame 0 the first that is not decoded yet."""
        held = plan[Field.HELD]
        place = torch.arange(frames + PRE_LOOKAHEAD, device=held.device)
        index = ((plan[Field.START] - held)[:, None] + place).clamp_(0, len(self.packed) - 1)
        mel = self.packed[index]
        start = mel[:, :PRE_LOOKAHEAD]
        start.copy_(torch.where(held[:, None, None] > 0, self.held[plan[Field.SOURCE]], start))
        mel.masked_fill_((place >= (held + plan[Field.GIVEN])[:, None])[:, :, None], 0)
        self.held.index_copy_(0, plan[Field.TARGET], rows_at(mel, plan[Field.FRAMES], PRE_LOOKAHEAD))
        return mel

    def _pitch(self, plan: Plan, mel: Tensor) -> Tensor:
        """F0 of n + 1 frames, in Hz: [L, N + 1]."""
        x = windows(mel, 0, mel.shape[1] - F0_LOOKAHEAD, F0_LOOKAHEAD + 1)
        for layer in self.pitch:
            _, (x,) = self.conv(x, layer, plan, Finish(act=Act.ELU), 1, 1)
        return (x @ self.classifier + self.hift.f0_predictor.classifier.bias.to(x.dtype)).abs()

    def _spectra(self, plan: Plan, f0: Tensor) -> Tensor:
        """Of the excitation, from 14 before the first frame on: [L, 120 N + 15, 32]."""
        source, target, frames = plan[Field.SOURCE], plan[Field.TARGET], plan[Field.FRAMES]
        phase = self.phase[source].masked_fill_(plan.is_first[:, None], 0)
        tones, gain, sums = self.hift.tones(f0, phase)
        self.phase.index_copy_(0, target, rows_at(sums, frames - 1, 1)[:, 0])
        merged = torch.cat((self.hift.m_source.l_linear(tones)[..., 0], gain[:, :, None]), dim=2)
        merged = torch.cat((self.tone[source][:, None], merged), dim=1)  # [L, N + 2, P + 1], from the frame before on
        self.tone.index_copy_(0, target, rows_at(merged, frames, 1)[:, 0])
        spectra = self._excitation(plan, merged).unfold(-1, FFT, HOP) @ self.analysis
        is_before = torch.arange(spectra.shape[1], device=f0.device) < SPECTRUM_HISTORY
        mask = plan.is_first[:, None] & is_before
        return spectra.masked_fill_(mask[:, :, None], 0).to(self.pre.weight.dtype)

    def _excitation(self, plan: Plan, merged: Tensor) -> Tensor:
        """Samples from 64 before the first frame to 8 after the last, mirrored at both ends of a wave.

        merged [L, N + 2, P + 1]: of each frame the P steps of its tones, and the gain of its noise.
        """
        place = torch.arange((merged.shape[1] - 2) * FRAME_SAMPLES + SOURCE_HISTORY + FFT // 2, device=merged.device)
        end = (plan[Field.FRAMES] * FRAME_SAMPLES + SOURCE_HISTORY)[:, None]
        is_before = plan.is_first[:, None] & (place < SOURCE_HISTORY)
        is_after = (plan[Field.IS_FINAL] > 0)[:, None] & (place >= end)
        index = torch.where(is_before, 2 * SOURCE_HISTORY - place, place)
        index = torch.where(is_after, 2 * end - 2 - place, index).clamp_(min=0)
        sample = index + FRAME_SAMPLES - SOURCE_HISTORY
        frame = sample // FRAME_SAMPLES
        width = merged.shape[2]
        step = sample % FRAME_SAMPLES * (width - 1) // FRAME_SAMPLES
        tone, gain = (merged.flatten(1).gather(1, frame * width + part) for part in (step, width - 1))
        start = plan[Field.DECODED] * FRAME_SAMPLES - SOURCE_HISTORY
        hiss = self.hiss[(index + start[:, None]).clamp_(0, len(self.hiss) - 1)]
        return torch.tanh(torch.addcmul(tone, gain, hiss))

    def _decode(self, plan: Plan, mel: Tensor, spectra: Tensor) -> Tensor:
        """-> [L, K, 32]: magnitudes and phases before their activations."""
        taps = PRE_LOOKAHEAD + 1
        finish = Finish(act=Act.LEAKY, slope=0.1)
        _, (x,) = self.conv(windows(mel, 0, mel.shape[1] - taps + 1, taps), self.pre, plan, finish, 1, 0)
        for number, stage in enumerate(self.stages):
            x = self._stage_up(plan, number, stage, x, spectra)
        coded, _ = self.conv(x, self.post, plan, Finish(keeps=True), self.stages[-1].rate, 1)
        return coded

    def _stage_up(self, plan: Plan, number: int, stage: Stage, x: Tensor, spectra: Tensor) -> Tensor:
        up = self._upsampled(plan, stage, x)
        kernel, stride = DOWN_SIZES[number]
        first = SPECTRUM_HISTORY if stage.is_last else SPECTRUM_HISTORY + 1 - kernel + stride
        seen = windows(spectra, first, up.shape[1], kernel, stride)
        finish = Finish(keeps=True, act=Act.SNAKE, alpha=stage.source[0].first_alpha)
        source, (start,) = self.conv(seen, stage.down, plan, finish, stage.rate, stage.extra)
        finish = Finish(adds=(up,), keeps=True, act=Act.SNAKE, alpha=stage.alphas)
        x, starts = self._block(plan, stage, stage.source, source, start, finish)
        others = [
            self._block(plan, stage, units, x, start, Finish(keeps=True))[0]
            for units, start in zip(stage.blocks[:-1], starts[:-1], strict=True)
        ]
        slope = 0.01 if stage.is_last else 0.1
        finish = Finish(adds=tuple(others), scale=1 / len(RES_KERNELS), act=Act.LEAKY, slope=slope)
        return self._block(plan, stage, stage.blocks[-1], x, starts[-1], finish)[1][0]

    def _upsampled(self, plan: Plan, stage: Stage, x: Tensor) -> Tensor:
        """x [L, T, I] -> [L, rate T, C]; on the last stage one step more, before the others."""
        lanes, steps, width = x.shape[0], x.shape[1] * stage.rate // stage.rate_in, stage.alphas.shape[1]
        up = torch.empty(lanes, steps + stage.extra, width, device=x.device, dtype=self.hift.dtype)
        into = up[:, stage.extra :].view(lanes, x.shape[1], -1)
        self.conv(x, stage.up, plan, Finish(into=into), stage.rate_in, 0)
        if stage.is_last:
            before = self.seam[plan[Field.SOURCE]]
            up[:, 0] = torch.where(plan.is_first[:, None], up[:, 2], before)
            last = rows_at(up, plan[Field.FRAMES] * stage.rate, 1)
            self.seam.index_copy_(0, plan[Field.TARGET], last[:, 0])
        return up

    def _block(
        self, plan: Plan, stage: Stage, units: Sequence[Unit], x: Tensor, start: Tensor, finish: Finish
    ) -> tuple[Tensor | None, Tensor]:
        """A residual block of x and its first snake's output; finish is what becomes of its sum."""
        for unit, after in zip(units, [*units[1:], None], strict=True):
            inner = Finish(act=Act.SNAKE, alpha=unit.second_alpha)
            _, (start,) = self.conv(start, unit.first, plan, inner, stage.rate, stage.extra)
            if after is None:
                last = replace(finish, adds=(x, *finish.adds))
                return self.conv(start, unit.second, plan, last, stage.rate, stage.extra)
            outer = Finish(adds=(x,), keeps=True, act=Act.SNAKE, alpha=after.first_alpha)
            x, (start,) = self.conv(start, unit.second, plan, outer, stage.rate, stage.extra)
        raise AssertionError("a block has units")

    def _sound(self, plan: Plan, coded: Tensor) -> Tensor:
        """coded [L, K, 32] -> samples [L, 4 K + 12]; place 8 is the first sample of a stream, 5 of a later push."""
        steps, frames = coded.shape[1], plan[Field.FRAMES]
        is_there = torch.arange(steps, device=coded.device) <= (frames * SPECTRA_PER_FRAME)[:, None]
        pieces = self.hift.pieces(coded[:, :, : 2 * BINS].transpose(1, 2))
        pieces.masked_fill_(~is_there[:, :, None], 0)
        wave = overlap_add(pieces)
        reach = FFT // HOP - 1
        before = self.overlap[plan[Field.SOURCE]].masked_fill_(plan.is_first[:, None], 0)
        wave[:, : FFT - HOP] += before
        last = rows_at(pieces, frames * SPECTRA_PER_FRAME - reach, reach)  # without the step that comes again
        self.overlap.index_copy_(0, plan[Field.TARGET], overlap_add(last)[:, FFT - HOP :])
        there = torch.cat((~plan.is_first[:, None].expand(-1, reach), is_there), dim=1).to(wave.dtype)
        there = F.pad(there, (0, reach))[:, :, None]
        parts = [there[:, reach - i : reach - i + steps + reach] * self.squares[i] for i in range(reach + 1)]
        envelope = (parts[0] + parts[1] + parts[2] + parts[3]).flatten(1)
        return (wave / envelope).clamp_(-AUDIO_LIMIT, AUDIO_LIMIT)


def on_device(hift: Hift, graphs: Graphs, *, lanes: int) -> HiftLanes:
    """Lanes with the fused kernel, or in plain PyTorch where Triton can't compile or the type is not float32."""
    made = fused(hift, lanes) if hift.dtype == torch.float32 else None
    made = made or HiftLanes(hift, lanes=lanes)
    made.capture(graphs)
    return made


def fused(hift: Hift, lanes: int) -> HiftLanes | None:
    """None, with a warning, where Triton can't compile."""
    try:
        from engine.hift_kernels import FusedConv  # there is no Triton without CUDA

        conv = FusedConv()
        dtype = torch.float32 if hift.is_exact else torch.float16
        made = HiftLanes(hift, lanes=lanes, conv=conv, dtype=dtype)
        with conv.rehearsing():
            made.rehearse()
        return made
    except (ImportError, RuntimeError) as error:
        logger.warning("the vocoder runs without its kernel: %s", error)
        return None


def work_of(tier: tuple[int, int]) -> int:
    return tier[0] * tier[1]


def first_sample(row: Sequence[int]) -> int:
    return FFT // 2 if row[Field.IS_FIRST] else FFT // 2 - 3


def last_sample(row: Sequence[int]) -> int:
    return row[Field.FRAMES] * FRAME_SAMPLES + (FFT // 2 if row[Field.IS_FINAL] else FFT // 2 - 3)
