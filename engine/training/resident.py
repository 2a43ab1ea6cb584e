"""The training set on the device: whole, as integers, so that a batch is a gather and no step waits for the host.

B rows, F mel frames of 20 ms, S samples at 24 kHz, N speech tokens of 40 ms.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.conditioning import MEL_MARGIN, log_mel
from engine.training.data import FIRST_KOKORO, MEL_HOP, SHIPPED, UNIT_SAMPLES, Shards

SHARES = (0.20, 0.15, 0.65)
"""Of hibari's voices, Kokoro's that ship, and all others: there is least of what is needed most."""
EDGES = (FIRST_KOKORO, FIRST_KOKORO + len(SHIPPED))


def drawn(sizes: Sequence[int], draws: Tensor) -> Tensor:
    """Rows for uniform ``draws`` [B, 2] of a table that holds the three groups one after the other."""
    weights = torch.tensor([share * (size > 0) for share, size in zip(SHARES, sizes, strict=True)])
    ends = (weights.cumsum(0) / weights.sum()).tolist()
    starts = np.cumsum([0, *sizes]).tolist()
    rows = starts[0] + draws[:, 1] * sizes[0]
    for group in (1, 2):
        rows = torch.where(draws[:, 0] >= ends[group - 1], starts[group] + draws[:, 1] * sizes[group], rows)
    return rows.long().clamp(max=starts[-1] - 1)


def group_sizes(labels: NDArray[np.int64]) -> tuple[int, int, int]:
    """How many of the speaker ``labels`` are of each group."""
    first, second = (int((labels < edge).sum()) for edge in EDGES)
    return first, second - first, len(labels) - second


class Growing:
    """A 1-D or 2-D device array that is appended to in place; doubles when it is full."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, *, width: int | None = None, rows: int = 1 << 16
    ) -> None:
        self._tail = () if width is None else (width,)
        self._held = torch.empty((rows, *self._tail), dtype=dtype, device=device)
        self.size = 0

    def append(self, values: Tensor) -> None:
        end = self.size + len(values)
        if end > len(self._held):
            larger = self._held.new_empty((max(end, 2 * len(self._held)), *self._tail))
            larger[: self.size] = self._held[: self.size]
            self._held = larger
        self._held[self.size : end] = values.to(self._held.device, self._held.dtype)
        self.size = end

    @property
    def values(self) -> Tensor:
        return self._held[: self.size]


PITCH_WINDOW, PITCH_FFT = 1200, 8192
PITCH_REACH, PITCH_STEPS, PITCH_HARMONICS = 0.08, 65, 8
PITCH_CLEAR = 1.0  # nat between a harmonic and the valleys beside it


def heard_pitch(heard: Tensor, f0: Tensor) -> Tensor:
    """The pitch near `f0` [B, F] Hz that a wave [B, 480 F + 1440], 720 samples before the first frame on, really has.

    A teacher's wave strays from the F0 that it was asked for by 1 to 2 %, its tenth harmonic by that of the tenth. Kept
    as it is where no comb of harmonics stands out.
    """
    start = MEL_MARGIN + MEL_HOP // 2 - PITCH_WINDOW // 2
    frames = heard[:, start:].unfold(1, PITCH_WINDOW, MEL_HOP)[:, : f0.shape[1]]
    window = torch.hann_window(PITCH_WINDOW, device=heard.device)
    magnitude = torch.fft.rfft(frames * window, n=PITCH_FFT).abs()  # [B, F, 4097]
    level = (magnitude + 1e-3 * magnitude.amax(2, keepdim=True) + 1e-6).log()
    stray = torch.linspace(-PITCH_REACH, PITCH_REACH, PITCH_STEPS, device=heard.device)
    rank = torch.arange(1, PITCH_HARMONICS + 1, device=heard.device)
    bins = (f0[:, :, None] * (1 + stray))[..., None] * rank * (PITCH_FFT / 24_000)  # [B, F, steps, harmonics]
    valleys = bins * ((rank - 0.5) / rank)
    score = (level_at(level, bins) - level_at(level, valleys)).mean(3)
    best = score.argmax(2, keepdim=True)
    is_clear = (score.gather(2, best)[..., 0] > PITCH_CLEAR) & (f0 > 0)
    return torch.where(is_clear, f0 * (1 + stray[best[..., 0]]), f0)


def level_at(level: Tensor, bins: Tensor) -> Tensor:
    """Between the bins of level [B, F, N]: bins [B, F, ...] -> the same shape."""
    whole = bins.long().clamp(max=level.shape[2] - 2)
    flat = whole.flatten(2)
    low, high = (level.gather(2, flat + step).view(bins.shape) for step in (0, 1))
    return low + (high - low) * (bins - whole)


@dataclass(frozen=True, slots=True)
class Crops:
    """A batch of the vocoder: mel [B, 80, F] of true audio, wave [B, 480 F], f0 [B, F] Hz, first judged frame [B]."""

    mel: Tensor
    wave: Tensor
    f0: Tensor
    first_frame: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """The very tensors; dataclasses.astuple would copy them."""
        return self.mel, self.wave, self.f0, self.first_frame

    def clone(self) -> "Crops":
        return Crops(*(value.clone() for value in self.tensors()))

    def copy_(self, crops: "Crops") -> None:
        """Take the values of crops of the same shapes, in place."""
        for held, value in zip(self.tensors(), crops.tensors(), strict=True):
            held.copy_(value)


class Waves:
    """Waves and F0 of the utterances, cropped at random on the device."""

    def __init__(
        self, device: torch.device, *, frames: int, judged: int, hours: float, are_held_out: bool = False
    ) -> None:
        """are_held_out: of the utterances that no training sees, instead of the others."""
        self.device, self.frames, self.judged, self._are_held_out = device, frames, judged, are_held_out
        self._wave = Growing(torch.int16, device, rows=int(hours * 3600 * 24000))
        self._f0 = Growing(torch.float16, device, rows=int(hours * 3600 * 80))
        self._limit = int(hours * 3600 * 24000)
        self._labels: list[int] = []
        self._sizes = (0, 0, 0)
        self._starts: list[int] = []
        self._lengths: list[int] = []
        self._shards_taken = 0
        self._table = torch.zeros(0, 2, dtype=torch.long, device=device)

    def __len__(self) -> int:
        return len(self._table)

    def take(self, shards: Shards) -> None:
        """Copy the shards that are new, while they fit."""
        chosen = _rows_by_shard(shards, shards.held_out if self._are_held_out else shards.train)
        for number in range(self._shards_taken, len(shards.shards)):
            shard = shards.shards[number]
            if self._wave.size + len(shard.wave) > self._limit and len(self._table):
                break
            base = self._wave.size
            self._wave.append(torch.from_numpy(np.array(shard.wave)))
            self._f0.append(torch.from_numpy(np.array(shard.f0)))
            for row in chosen[number]:
                span = shard.units_of(row)
                length = (span.stop - span.start) * UNIT_SAMPLES
                if length // MEL_HOP >= self.frames + 2:
                    self._starts.append(base + span.start * UNIT_SAMPLES)
                    self._lengths.append(length)
                    self._labels.append(int(shard.speaker[row]))
            self._shards_taken = number + 1
        table = torch.tensor([self._starts, self._lengths], dtype=torch.long).T.reshape(-1, 2)
        labels = np.array(self._labels, np.int64)
        self._sizes = group_sizes(labels)
        self._table = table[torch.from_numpy(labels).argsort(stable=True)].contiguous().to(self.device)

    def crops(self, rows: int) -> Crops:
        """Random crops; an eighth of them begins with its utterance, an eighth ends with it, as served audio does."""
        pick = drawn(self._sizes, torch.rand(rows, 2, device=self.device))
        start, length = self._table[pick].unbind(1)
        room = length // MEL_HOP - self.frames
        chance = torch.rand(rows, device=self.device)
        frame = (torch.rand(rows, device=self.device) * (room + 1)).long().clamp(max=room)
        at_start, at_end = chance < 0.125, chance > 0.875
        frame = torch.where(at_start, 0, torch.where(at_end, room, frame))
        slack = self.frames - self.judged
        first = torch.where(at_start, 0, torch.where(at_end, slack, slack // 2))
        reach = torch.arange(-MEL_MARGIN, self.frames * MEL_HOP + MEL_MARGIN, device=self.device)
        index = (frame[:, None] * MEL_HOP + reach).abs()
        last = length[:, None] - 1
        index = last - (last - index).abs() + start[:, None]
        heard = self._wave.values[index].float() / 32768
        return Crops(
            mel=log_mel(heard),
            wave=heard[:, MEL_MARGIN : MEL_MARGIN + self.frames * MEL_HOP],
            f0=heard_pitch(heard, self._pitch(start, length, frame)),
            first_frame=first,
        )

    def _pitch(self, start: Tensor, length: Tensor, frame: Tensor) -> Tensor:
        """The teacher's F0 at the centre of each mel frame: 80 Hz values, nearest, so that voicing edges stay sharp."""
        centre = frame[:, None] + torch.arange(self.frames, device=self.device) + 0.5
        index = torch.minimum((centre * 1.6).long(), length[:, None] // 300 - 1)
        return self._f0.values[start[:, None] // 300 + index].float()


@dataclass(frozen=True, slots=True)
class Spans:
    """A batch of the flow: tokens [B, N + look-ahead], mel [B, 2N, 80], speaker label [B]."""

    tokens: Tensor
    mel: Tensor
    speaker: Tensor


class Streams:
    """Tokens and mels of the tokenised utterances, joined into one stream a speaker; a batch is cut anywhere in one.

    A cut usually spans several utterances of its speaker, which is what serving makes of a prompt and a reply, and
    needs no padding.
    """

    def __init__(self, device: torch.device, num_speakers: int) -> None:
        self.device, self.num_speakers = device, num_speakers
        self._tokens: list[list[Tensor]] = [[] for _ in range(num_speakers)]
        self._mel: list[list[Tensor]] = [[] for _ in range(num_speakers)]
        self._lengths: list[list[int]] = [[] for _ in range(num_speakers)]
        self._taken: set[int] = set()
        self._fits: dict[int, tuple[Tensor, tuple[int, int, int]]] = {}
        self.num_tokens = 0

    def take(self, shards: Shards) -> int:
        """Add the shards that have been tokenised since; returns how many."""
        train = _rows_by_shard(shards, shards.train)
        first = np.cumsum([0, *(len(shard) for shard in shards.shards)])
        fresh = [
            number
            for number in range(len(shards.shards))
            if number not in self._taken and train[number] and shards.is_tokenised(int(first[number]))
        ]
        for number in fresh:
            self._taken.add(number)
            self._add(shards, number, int(first[number]), train[number])
        if fresh:
            self._join()
        return len(fresh)

    def _add(self, shards: Shards, number: int, first: int, rows: list[int]) -> None:
        """One shard: its mels in batches of 64, tokens and mel cut to the length that both have."""
        shard = shards.shards[number]
        wave = torch.from_numpy(np.array(shard.wave)).to(self.device)
        for part in (rows[i : i + 64] for i in range(0, len(rows), 64)):
            spans = [shard.units_of(row) for row in part]
            start = torch.tensor([s.start * UNIT_SAMPLES for s in spans], device=self.device)
            length = torch.tensor([(s.stop - s.start) * UNIT_SAMPLES for s in spans], device=self.device)
            mel = self._mels(wave, start, length)
            for position, row in enumerate(part):
                tokens = shards.utterance(first + row).tokens
                assert tokens is not None, "is_tokenised was asked"
                num_tokens = min(
                    len(tokens), (spans[position].stop - spans[position].start) * UNIT_SAMPLES // MEL_HOP // 2
                )
                if num_tokens < 5:
                    continue
                speaker = int(shard.speaker[row])
                self._tokens[speaker].append(torch.from_numpy(np.array(tokens[:num_tokens])))
                self._mel[speaker].append(mel[position, : 2 * num_tokens].half())
                self._lengths[speaker].append(num_tokens)
                self.num_tokens += num_tokens

    def _mels(self, wave: Tensor, start: Tensor, length: Tensor) -> Tensor:
        """Log-mels of utterances of any length: -> [B, F of the longest, 80], right only as far as each one goes."""
        frames = int(length.max()) // MEL_HOP
        reach = torch.arange(-MEL_MARGIN, frames * MEL_HOP + MEL_MARGIN, device=self.device)
        last = length[:, None] - 1
        index = (last - (last - reach.abs()).abs()).clamp(min=0) + start[:, None]
        return log_mel(wave[index].float() / 32768).transpose(1, 2)

    def _join(self) -> None:
        """One pool for all speakers, and a table of utterances: start, end, their stream's start and end, speaker."""
        self._tokens = [[torch.cat(parts)] if parts else [] for parts in self._tokens]
        self._mel = [[torch.cat(parts)] if parts else [] for parts in self._mel]
        self._pool = (
            torch.cat([part for parts in self._tokens for part in parts]).to(self.device).long(),
            torch.cat([part for parts in self._mel for part in parts]),
        )
        ends = [np.cumsum(lengths, dtype=np.int64) for lengths in self._lengths]
        bases = np.cumsum([0, *(int(e[-1]) if len(e) else 0 for e in ends)])
        tables = [
            np.stack([bases[k] + e - n, bases[k] + e, *(np.full_like(e, x) for x in (bases[k], bases[k + 1], k))], 1)
            for k, (e, n) in enumerate(zip(ends, map(np.array, self._lengths), strict=True))
            if len(e)
        ]  # fmt: skip
        self._table = torch.from_numpy(np.concatenate(tables)).to(self.device)
        self._fits = {}

    def spans(self, rows: int, num_tokens: int, *, lookahead: int, to_end: bool) -> Spans:
        """Random cuts of `num_tokens`: half begin with an utterance; with `to_end` all end with one, no look-ahead."""
        tokens, mel = self._pool
        size = num_tokens + lookahead
        if size not in self._fits:  # boolean indexing waits for the device: once a size, not once a step
            fits = self._table[(self._table[:, 3] - self._table[:, 2]) > size]
            self._fits[size] = fits, group_sizes(fits[:, 4].cpu().numpy())
        fits, sizes = self._fits[size]
        pick = drawn(sizes, torch.rand(rows, 2, device=self.device))
        start, end, low, high, speaker = fits[pick].unbind(1)
        if to_end:
            first = end - num_tokens
        else:
            chance = torch.rand(rows, 2, device=self.device)
            inside = start + (chance[:, 0] * (end - start)).long()
            first = torch.where(chance[:, 1] < 0.5, start, inside)
        first = torch.minimum(torch.maximum(first, low), high - size)
        at = first[:, None] + torch.arange(size, device=self.device)
        frames = 2 * first[:, None] + torch.arange(2 * num_tokens, device=self.device)
        return Spans(tokens=tokens[at], mel=mel[frames].float(), speaker=speaker)


def _rows_by_shard(shards: Shards, indices: Sequence[int]) -> list[list[int]]:
    """Utterance indices as rows of each shard; indices of a shard are consecutive."""
    bounds = np.cumsum([0, *(len(shard) for shard in shards.shards)])
    rows: list[list[int]] = [[] for _ in shards.shards]
    for index in indices:
        number = int(np.searchsorted(bounds, index, side="right")) - 1
        rows[number].append(index - int(bounds[number]))
    return rows
