"""The next speech id of every lane at once: repetition-aware (RAS) or standard sampling, drawn without a generator.

A draw is a function of (seed, clause, step, draw, id) alone, used Gumbel-max fashion, so a lane sounds the same whoever
else is served and a cancel shifts nobody's draws. Uniforms come from integer arithmetic and are equal on CPU and CUDA.

Letters: B lanes, V speech ids (codes, then control ids), K candidates, C control ids, W window.
Source: CosyVoice3 reference, sections 3.4 and 3.5. Parity: tests/engine/test_sampler.py.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

NUM_CONTROLS = 200  # ids after the last code: sos, eos, task, fill, and 196 that only ever mean "stop"
SOS = 0  # its place among the control ids
WORD = 1 << 64
COLDEST = 1e-5  # scores over less would pass what float32 holds


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a lane draws. "ras" uses temperature, top_p, top_k, window and tau; "standard" all but the last two.

    A temperature below COLDEST takes the best id; top_k 0 and top_p 1 cut nothing; repetition_penalty > 1 lowers what
    was generated.
    """

    mode: Literal["ras", "standard"] = "ras"
    temperature: float = 1.0
    top_p: float = 0.8
    top_k: int = 25
    repetition_penalty: float = 1.0
    window: int = 10
    tau: float = 0.1

    def __post_init__(self) -> None:
        if self.mode not in ("ras", "standard"):
            raise ValueError(f"sampling mode {self.mode!r} is neither 'ras' nor 'standard'")
        bounds = {"temperature": (0, 5), "top_p": (0, 1), "top_k": (0, 6761), "repetition_penalty": (0.1, 10)}
        bounds |= {"window": (0, 1000), "tau": (0, 1)}
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} {getattr(self, name)} is outside {low}..{high}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < COLDEST


class Mask(IntEnum):
    """Which control ids a draw may not give."""

    NOTHING = 0
    SOS = 1  # what the original masks below its minimum length, to no effect
    CONTROLS = 2  # below the minimum length


@dataclass(frozen=True, slots=True)
class Draw:
    """One lane's part in a call. `history`: ids generated in this clause so far, prompt not included, oldest first."""

    sampling: Sampling
    history: Sequence[int]
    seed: int
    clause: int
    step: int
    mask: Mask = Mask.NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """ids [B]; is_faulty [B] where the logits held a NaN, +inf or nothing finite (such a lane's id means nothing)."""

    ids: Tensor
    is_faulty: Tensor

    def marked(self) -> Tensor:
        """The ids, -1 for a faulty lane."""
        return torch.where(self.is_faulty, -1, self.ids)

    def fetch(self) -> list[int | None]:
        """The ids on the host, None for a faulty lane; one transfer for all lanes."""
        return unmarked(self.marked().tolist())


def unmarked(ids: Sequence[int]) -> list[int | None]:
    return [None if i < 0 else i for i in ids]


def sample(logits: Tensor, draws: Sequence[Draw]) -> Draws:
    """logits [B, V] -> one id per lane."""
    return drawn(logits, Lanes.of(draws, logits.shape[1], logits.device))


def drawn(logits: Tensor, lanes: Lanes) -> Draws:
    """logits [B, V] -> one id per lane. No wait for the device inside; nothing crosses from lane to lane."""
    scores, is_faulty = masked(logits, lanes)
    scores = penalised(scores, lanes) / lanes.temperature
    first = candidates(scores, lanes)
    ids = pick(first.logp, first.ids, lanes.keys[:, 0:1])
    redraw = lanes.is_ras & triggers(ids[:, None], lanes)[:, 0]
    # On the CPU the look costs nothing and spares a pass over the vocabulary; on CUDA it would be a wait.
    if logits.is_cuda or bool(redraw.any()):
        rest = scores.scatter(1, ids[:, None], -torch.inf)
        second = pick(rest, torch.arange(scores.shape[1], device=scores.device), lanes.keys[:, 1:2])
        ids = torch.where(redraw & (rest.amax(1) > -torch.inf), second, ids)
    return Draws(ids, is_faulty)


class Field(IntEnum):
    """The columns of a lane's record. The reals lie there as the bits of their float64."""

    STEP = 0  # draws made
    LAST = 1  # the id drawn last
    MIN_LEN = 2
    KEY = 3  # hashed (seed, clause)
    TOP_K = 4
    STRIKES = 5  # occurrences within the window that make the repetition rule strike
    WINDOW = 6
    IS_RAS = 7
    TEMPERATURE = 8
    TOP_P = 9
    PENALTY = 10


REALS = slice(Field.TEMPERATURE, Field.PENALTY + 1)


def settings(sampling: Sampling) -> list[int]:
    """The columns TOP_K to PENALTY. Greedy is top_k 1 at temperature 1."""
    temperature = 1.0 if sampling.is_greedy else sampling.temperature
    reals = [temperature, sampling.top_p, sampling.repetition_penalty if is_penal(sampling) else 1.0]
    return [most_candidates(sampling), math.ceil(sampling.window * sampling.tau), sampling.window,
            sampling.mode == "ras", *struct.unpack("<3q", struct.pack("<3d", *reals))]  # fmt: skip


def most_candidates(sampling: Sampling) -> int:
    return 1 if sampling.is_greedy else sampling.top_k or 1 << 30


def is_penal(sampling: Sampling) -> bool:
    return sampling.mode == "standard" and sampling.repetition_penalty != 1.0


class LaneDraws:
    """What the draws of every lane depend on, on the device at fixed addresses. Nothing comes from the host but `seat`.

    record [lanes + 1, Field]     recent [lanes + 1, RING] the ids drawn, that of step s at s % RING
    seen [lanes + 1, V] bool, the ids drawn so far
    The last row is for padding: it may be drawn for at any time.
    """

    RING = 1024  # a power of two, no less than the widest window

    def __init__(self, lanes: int, vocab: int, *, device: torch.device | str) -> None:
        self.record = torch.zeros(lanes + 1, len(Field), dtype=torch.int64, device=device)
        self.recent = torch.zeros(lanes + 1, self.RING, dtype=torch.int64, device=device)
        self.seen = torch.zeros(lanes + 1, vocab, dtype=torch.bool, device=device)
        self._samplings = [Sampling()] * (lanes + 1)
        self.seat(lanes, Sampling(), seed=0, clause=0, min_len=0)

    def seat(self, lane: int, sampling: Sampling, *, seed: int, clause: int, min_len: int) -> None:
        """A new tenant, before its first draw."""
        self._samplings[lane] = sampling
        upload(self.record[lane], [0, 0, min_len, key(seed, clause), *settings(sampling)])
        self.seen[lane].zero_()

    def hold(self, lane: int, *, min_len: int) -> None:
        """Another minimum for the tenant that is there."""
        upload(self.record[lane, Field.MIN_LEN : Field.MIN_LEN + 1], [min_len])

    def lanes(self, index: Tensor, chosen: Sequence[int]) -> Lanes:
        """The lanes as `drawn` takes them: index [B] on the device, and the same on the host."""
        samplings = [self._samplings[lane] for lane in chosen]
        record = self.record.index_select(0, index)
        step, window = record[:, Field.STEP, None], max(1, *(s.window for s in samplings))
        at = step + torch.arange(-window, 0, device=step.device)
        recent = self.recent[index[:, None], at & self.RING - 1]
        is_within = at >= (step - record[:, Field.WINDOW, None]).clamp(min=0)
        seen = self.seen.index_select(0, index) if any(map(is_penal, samplings)) else None
        return Lanes.on(record, recent.where(is_within, -1), seen, samplings)

    def keep(self, index: Tensor, draws: Draws) -> None:
        """Takes up the ids drawn for the lanes `index` [B], each once (the padding row as often as you like)."""
        step = self.record[index, Field.STEP]
        self.recent[index, step % self.RING] = draws.ids
        self.seen[index, draws.ids] = True
        self.record[index, : Field.LAST + 1] = torch.stack([step + 1, draws.ids], 1)


def upload(to: Tensor, values: Sequence[int]) -> None:
    """Writes host integers to a tensor of the device, behind the work in flight and without a wait."""
    host = torch.tensor(values, dtype=to.dtype)
    to.copy_(host.pin_memory() if to.is_cuda else host, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """The lanes' settings as tensors [B, 1] (is_ras [B]), so that no step of the maths loops over lanes."""

    temperature: Tensor
    top_p: Tensor
    penalty: Tensor
    top_k: Tensor
    threshold: Tensor  # Field.STRIKES
    mask: Tensor  # Mask
    is_ras: Tensor
    keys: Tensor  # [B, 2] int64, hashed (seed, clause, step, draw) for draws 0 and 1
    window: Tensor  # [B, W] the last ids, -1 where there are none
    seen: Tensor | None  # [B, V] bool, the ids under the penalty; None if no lane asks for one
    most: int  # the largest top_k
    has_standard: bool

    @classmethod
    def of(cls, draws: Sequence[Draw], vocab: int, device: torch.device) -> Self:
        modes = [d.sampling for d in draws]
        record = [[d.step, 0, 0, key(d.seed, d.clause), *settings(d.sampling)] for d in draws]
        tails = [d.history[-s.window :] if s.window else () for d, s in zip(draws, modes, strict=True)]
        seen = None
        if any(map(is_penal, modes)):
            seen = torch.zeros(len(draws), vocab, dtype=torch.bool)
            for row, d in zip(seen, draws, strict=True):
                row[list(d.history)] = True
            seen = seen.to(device)
        lanes = cls.on(torch.tensor(record).to(device), padded(tails, device), seen, modes)
        return replace(lanes, mask=torch.tensor([[int(d.mask)] for d in draws]).to(device))

    @classmethod
    def on(cls, record: Tensor, window: Tensor, seen: Tensor | None, modes: Sequence[Sampling]) -> Self:
        """record [B, Field]; below a lane's minimum length its control ids are masked."""
        temperature, top_p, penalty = record[:, REALS].view(torch.float64).float().split(1, 1)
        step, _, min_len, key, top_k, strikes, _, is_ras = record[:, : Field.IS_RAS + 1].split(1, 1)
        return cls(
            temperature, top_p, penalty, top_k, strikes, (step < min_len) * int(Mask.CONTROLS),
            is_ras[:, 0] > 0, draw_keys(key, step), window, seen,
            max(map(most_candidates, modes)), any(s.mode == "standard" for s in modes),
        )  # fmt: skip


def draw_keys(lane_keys: Tensor, step: Tensor) -> Tensor:
    """Hashed (seed, clause) [B, 1] and the step [B, 1] -> the keys of draws 0 and 1, [B, 2]."""
    return stirred(stirred(lane_keys, step), torch.arange(2, device=step.device))


def stirred(state: Tensor, word: Tensor) -> Tensor:
    """One round of `key` on tensors."""
    return mixed((state ^ word) + GOLDEN)


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    width = max(1, max(map(len, rows)))
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows]).to(device)


def masked(logits: Tensor, lanes: Lanes) -> tuple[Tensor, Tensor]:
    """A float32 (or float64) copy with masked control ids at -inf, and [B] whether a lane can draw nothing."""
    scores = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)
    best = scores.amax(1, keepdim=True)  # which hands a NaN on
    place = torch.arange(NUM_CONTROLS, device=scores.device)
    is_cut = (lanes.mask == Mask.CONTROLS) | (lanes.mask == Mask.SOS) & (place == SOS)
    scores[:, -NUM_CONTROLS:].masked_fill_(is_cut, -torch.inf)
    is_faulty = ~(best.isfinite() & scores.amax(1, keepdim=True).isfinite())
    return scores.masked_fill_(is_faulty, 0.0), is_faulty[:, 0]


def penalised(scores: Tensor, lanes: Lanes) -> Tensor:
    """The repetition penalty over codes already generated; control ids keep their logits."""
    if lanes.seen is None:
        return scores
    lowered = torch.where(scores > 0, scores / lanes.penalty, scores * lanes.penalty)
    is_code = torch.arange(scores.shape[1], device=scores.device) < scores.shape[1] - NUM_CONTROLS
    return torch.where(lanes.seen & is_code, lowered, scores)


class Candidates(NamedTuple):
    ids: Tensor  # [B, K] best first (then, for standard lanes, the control ids)
    logp: Tensor  # [B, K] log of unnormalised probability, -inf where cut away


def candidates(scores: Tensor, lanes: Lanes) -> Candidates:
    """The nucleus: ids from the top while what was taken sums to less than top_p and numbers less than top_k.

    Equal scores: the lower id first. RAS sums over the whole vocabulary's softmax, "standard" over the top_k's, as
    top-p after top-k does elsewhere; a standard lane's control ids stay candidates whatever the cuts.
    """
    ids, logp = best(scores, min(lanes.most, scores.shape[1]))
    rank = torch.arange(ids.shape[1], device=ids.device)
    is_top = rank < lanes.top_k
    whole = scores.logsumexp(1, True)
    if lanes.has_standard:
        whole = torch.where(lanes.is_ras[:, None], whole, logp.where(is_top, -torch.inf).logsumexp(1, True))
    p = (logp - whole).exp()
    before = torch.cat([torch.zeros_like(p[:, :1]), p.cumsum(1)[:, :-1]], 1)
    is_kept = is_top & ((before < lanes.top_p) | (lanes.top_p >= 1) | (rank == 0))
    logp = logp.where(is_kept, -torch.inf)
    return with_controls(scores, lanes, ids, logp) if lanes.has_standard else Candidates(ids, logp)


def best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and scores [B, count], best first, the lower id first among equals (plain topk leaves that open)."""
    if not scores.is_cuda and count < scores.shape[1]:  # no equals among the first: the quick way, but for this look
        values, places = scores.topk(count + 1, 1)
        if bool((values[:, :-1] > values[:, 1:]).all()):
            return places[:, :-1], values[:, :-1]
    if count > 256 or scores.shape[1] > 8192:
        logp, ids = scores.sort(dim=1, descending=True, stable=True)
        return ids[:, :count], logp[:, :count]
    bits = scores.float().contiguous().view(torch.int32).long()
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # as integers, float32 sorts by its bits once negatives flip
    ranked = order * 8192 + (8191 - torch.arange(scores.shape[1], device=scores.device))
    ids = 8191 - (ranked.topk(count, 1).values & 8191)
    return ids, scores.gather(1, ids)


def with_controls(scores: Tensor, lanes: Lanes, ids: Tensor, logp: Tensor) -> Candidates:
    """For standard lanes that draw at all (top_k > 1) the control ids join the candidates, each once."""
    num_codes = scores.shape[1] - NUM_CONTROLS
    joins = (~lanes.is_ras)[:, None] & (lanes.top_k > 1)
    logp = logp.masked_fill(joins & (ids >= num_codes), -torch.inf)
    controls = torch.arange(num_codes, scores.shape[1], device=ids.device).expand(len(ids), -1)
    return Candidates(
        torch.cat([ids, controls], 1), torch.cat([logp, scores[:, num_codes:].where(joins, -torch.inf)], 1)
    )


def triggers(ids: Tensor, lanes: Lanes) -> Tensor:
    """Whether drawing each of ids [B, K] would strike the repetition rule, [B, K]."""
    return (lanes.window[:, None, :] == ids[:, :, None]).sum(-1) >= lanes.threshold


def pick(logp: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """One of ids [B, K] or [K] per lane, in proportion to exp(logp [B, K]); keys [B, 1]. -> [B]"""
    gumbel = -torch.log(-torch.log(uniform(keys, ids)))
    best_place = (logp + gumbel).argmax(1, keepdim=True)
    return ids.expand(len(logp), -1).gather(1, best_place)[:, 0]


def uniform(keys: Tensor, ids: Tensor) -> Tensor:
    """float32 in (0, 1) for each key and id, on a grid of 2^-23 offset by half: exact, so equal on every device."""
    bits = shifted(mixed(keys + ids * GOLDEN), 41)
    return (bits.float() + 0.5) * 2.0**-23


def signed(word: int) -> int:
    return (word + (WORD >> 1)) % WORD - (WORD >> 1)


GOLDEN = signed(0x9E3779B97F4A7C15)
MIX_1, MIX_2 = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


def shifted(x: Tensor, count: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def mixed(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64, whose products wrap."""
    x = (x ^ shifted(x, 30)) * MIX_1
    x = (x ^ shifted(x, 27)) * MIX_2
    return x ^ shifted(x, 31)


def key(*words: int) -> int:
    """(seed, clause, step, draw) -> a signed 64-bit key: each word is mixed into what came before it."""
    state = 0
    for word in words:
        state = (state ^ word) + 0x9E3779B97F4A7C15 & WORD - 1
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & WORD - 1
        state = (state ^ state >> 27) * 0x94D049BB133111EB & WORD - 1
        state ^= state >> 31
    return signed(state)
