"""HiFT vocoder: mel -> 24 kHz waveform, whole and exactly incremental (CosyVoice3 reference, section on the vocoder).

Letters: B lanes, M mel frames of 20 ms (480 samples), F frames with a known F0, D frames through conv_pre, C channels,
K frames of the short Fourier transform (hop 4, 120 per mel frame, plus one).

Look-ahead: F0 three mel frames, conv_pre four. All else is causal, so a lane is the tails of its convolutions, its
phase sum, and two overlap buffers. With M frames received the first 480*(M-4) - 3 samples are final.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.noise import MAX_SAMPLES, NUM_HARMONICS, vocoder_noise

if TYPE_CHECKING:
    from engine.graphs import Graphs
    from engine.hift_lanes import HiftLanes

SAMPLE_RATE_HZ = 24_000
FRAME_SAMPLES = 480
F0_LOOKAHEAD = 3
PRE_LOOKAHEAD = 4
UP_RATES, UP_KERNELS = (8, 5, 3), (16, 11, 7)
RES_KERNELS, SOURCE_RES_KERNELS = (3, 7, 11), (7, 7, 11)
DILATIONS = (1, 3, 5)
DOWN_SIZES = ((30, 15), (6, 3), (1, 1))  # kernel, stride of the source's way down to each stage
FFT, HOP = 16, 4
BINS = FFT // 2 + 1
SPECTRA_PER_FRAME = FRAME_SAMPLES // HOP
SPECTRUM_HISTORY = 14  # spectra before a mel frame that source_downs.0 reads
VOICED_ABOVE_HZ, SINE_GAIN, VOICED_NOISE = 10.0, 0.1, 0.003
WEIGHT_NORM_FORMS = (
    (".parametrizations.weight.original0", ".parametrizations.weight.original1"),  # gain, direction
    (".weight_g", ".weight_v"),
)
AUDIO_LIMIT, MAGNITUDE_LIMIT = 0.99, 100.0


class NoiseTooShort(ValueError):
    """A lane asks for more samples than its fixed noise has (300 s for the official one)."""


@dataclass(frozen=True, slots=True)
class HiftShape:
    """Sizes of a vocoder: width after conv_pre and width of the F0 predictor.

    tone_steps: how often a tone of the excitation moves in a mel frame. The official 1 makes a staircase at 50 Hz, of
    which a small vocoder makes a hoarse whisper; with 480 the tones are sines.
    """

    base: int
    f0_channels: int
    mel: int = 80
    tone_steps: int = 1

    def channels(self, stage: int) -> int:
        return self.base >> (stage + 1)

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> HiftShape:
        """Sizes of a folded state dict (see fold_weight_norm). Raises KeyError with the name of a missing tensor."""
        base, mel, _ = state["conv_pre.weight"].shape
        return cls(base=base, f0_channels=state["f0_predictor.classifier.weight"].shape[1], mel=mel)


def fold_weight_norm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An official state dict with plain weights: g * v / ||v|| per output channel.

    Takes both ways of saving the pair, and plain weights as they are; drops the prefix "generator." and the keys of
    a discriminator. The F0 predictor is folded in float64 and comes back in it: do not cast it down, a float32 fold
    alone shifts the phase by more than the parity bounds. Raises KeyError for a direction without its gain, ValueError
    for one that doesn't fit.
    """
    named = {key.replace("generator.", ""): value for key, value in state.items() if "discriminator." not in key}
    folded: dict[str, Tensor] = {}
    for key, value in named.items():
        form = next((form for form in WEIGHT_NORM_FORMS if key.endswith(form)), None)
        if form is None:
            folded[key] = value.double() if is_f0(key) else value
        elif key.endswith(form[1]):
            stem = key.removesuffix(form[1])
            gain, direction = named[stem + form[0]], value
            if direction.dim() != 3 or gain.shape != (len(direction), 1, 1):  # the fold would write past its memory
                raise ValueError(f"{stem} has gains {list(gain.shape)} for directions {list(direction.shape)}")
            if is_f0(key):
                gain, direction = gain.double(), direction.double()
            folded[stem + ".weight"] = torch._weight_norm(direction, gain, 0)
    return folded


def is_f0(key: str) -> bool:
    return key.startswith("f0_predictor.")


# --- history of the causal convolutions ---


class Past(Protocol):
    """Where a causal convolution finds the steps before its input."""

    def extend(self, x: Tensor, steps: int) -> Tensor:
        """x [B, C, n] -> [B, C, steps + n]."""
        ...

    def grow(self, factor: int, extra: int = 0) -> None:
        """From here on every lane has factor times as many steps, and extra ones."""
        ...


class NoPast:
    """Sequence start: zeros."""

    def extend(self, x: Tensor, steps: int) -> Tensor:
        return F.pad(x, (steps, 0))

    def grow(self, factor: int, extra: int = 0) -> None:
        pass


class LanePast:
    """Tails kept per lane, in the order in which one pass asks for them."""

    def __init__(self, tails: list[list[Tensor]], lengths: list[int]) -> None:
        self.tails, self.lengths, self.turn = tails, lengths, 0

    def extend(self, x: Tensor, steps: int) -> Tensor:
        for tails in self.tails:
            if len(tails) == self.turn:
                tails.append(x.new_zeros(x.shape[1], steps))
        before = [tails[self.turn] for tails in self.tails]
        wide = torch.cat((before[0][None] if len(before) == 1 else torch.stack(before), x), dim=2)
        after = [wide[lane, :, length : length + steps] for lane, length in enumerate(self.lengths)]
        torch._foreach_copy_(before, after)  # one launch for all lanes
        self.turn += 1
        return wide

    def grow(self, factor: int, extra: int = 0) -> None:
        self.lengths = [length * factor + extra for length in self.lengths]


# --- the network ---


class Snake(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """x + sin(alpha x)^2 / alpha; x [B, C, T]."""
        alpha = self.alpha[:, None]
        wave = torch.sin(x * alpha)
        return torch.addcmul(x, wave * (1 / (alpha + 1e-9)), wave)


class ResBlock(nn.Module):
    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList([nn.Conv1d(channels, channels, kernel, dilation=d) for d in DILATIONS])
        self.convs2 = nn.ModuleList([nn.Conv1d(channels, channels, kernel) for _ in DILATIONS])
        self.activations1 = nn.ModuleList([Snake(channels) for _ in DILATIONS])
        self.activations2 = nn.ModuleList([Snake(channels) for _ in DILATIONS])

    def forward(self, x: Tensor, past: Past) -> Tensor:
        for conv1, conv2, snake1, snake2 in zip(
            self.convs1, self.convs2, self.activations1, self.activations2, strict=True
        ):
            x = x + causal(conv2, snake2(causal(conv1, snake1(x), past)), past)
        return x


def causal(conv: nn.Module, x: Tensor, past: Past) -> Tensor:
    assert isinstance(conv, nn.Conv1d)
    return conv(past.extend(x, (conv.kernel_size[0] - 1) * conv.dilation[0]))


class Upsample(nn.Conv1d):
    """Nearest-neighbour repeat, then a causal convolution: folded into one convolution before the repeat.

    The rate outputs of one input step see that step and the two before it, so the kernel becomes three taps for each
    of them.
    """

    fold: Tensor

    def __init__(self, channels: int, out: int, kernel: int, rate: int) -> None:
        super().__init__(channels, out, kernel)
        self.rate = rate
        taps = 1 - math.floor((1 - kernel) / rate)
        fold = torch.zeros(kernel, rate, taps)
        for phase in range(rate):
            for tap in range(kernel):
                fold[tap, phase, taps - 1 + (phase - kernel + 1 + tap) // rate] = 1
        self.register_buffer("fold", fold.flatten(1), persistent=False)
        self.taps = taps

    def upsampled(self, x: Tensor, past: Past) -> Tensor:
        """x [B, C, T] -> [B, out, T * rate]."""
        weight = (self.weight @ self.fold).unflatten(2, (self.rate, self.taps)).transpose(1, 2).flatten(0, 1)
        assert self.bias is not None
        y = F.conv1d(past.extend(x, self.taps - 1), weight, self.bias.repeat_interleave(self.rate))
        return y.unflatten(1, (-1, self.rate)).transpose(2, 3).flatten(2)


class F0Predictor(nn.Module):
    """Stays in float64 whatever the vocoder around it is cast to: an F0 error adds up in the phase.

    So a parameter's dtype is float64 in training and in a state dict too; forward() casts to the dtype of its input.
    """

    def __init__(self, shape: HiftShape) -> None:
        super().__init__()
        channels = shape.f0_channels
        layers: list[nn.Module] = [nn.Conv1d(shape.mel, channels, F0_LOOKAHEAD + 1), nn.ELU()]
        for _ in range(4):
            layers += [nn.Conv1d(channels, channels, 3), nn.ELU()]
        self.condnet = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, 1)
        self.double()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> F0Predictor:
        return super()._apply(lambda x: x.to(fn(x).device, torch.float64), recurse)

    def forward(self, mel: Tensor, past: Past) -> Tensor:
        """mel [B, 80, n + 3] -> Hz [B, n], computed in mel's dtype."""
        weights = [parameter.to(mel.dtype) for parameter in self.parameters()]
        x = F.elu(F.conv1d(mel, weights[0], weights[1]))
        for layer in range(1, 5):
            x = F.elu(F.conv1d(past.extend(x, 2), weights[2 * layer], weights[2 * layer + 1]))
        return F.linear(x.transpose(1, 2), weights[10], weights[11])[:, :, 0].abs()


class HarmonicSource(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l_linear = nn.Linear(NUM_HARMONICS, 1)


@dataclass(slots=True, eq=False)
class HiftState:
    """One lane between two pushes; only the vocoder writes it."""

    mel: Tensor | None = None  # [80, frames from num_decoded on]
    num_pitched: int = 0  # F
    num_decoded: int = 0  # D
    samples: int = 0  # given out
    is_ended: bool = False
    f0_tails: list[Tensor] = field(default_factory=list)
    tails: list[Tensor] = field(default_factory=list)
    phase: Tensor | None = None  # float64 [9], cycles summed so far
    excitation: Tensor | None = None  # last 12 samples that the next spectrum starts with
    spectra: Tensor | None = None  # [18, spectra from 120 D - 14 on]
    overlap: Tensor | None = None  # [12] numerator still open


class Hift(nn.Module):
    """CosyVoice3's vocoder with folded weights: load_state_dict(fold_weight_norm(official state dict)).

    noise replaces the official vocoder noise: [samples, 9], uniform in [0, 1), row n for absolute sample n.
    """

    window: Tensor
    analysis: Tensor
    synthesis: Tensor

    def __init__(self, shape: HiftShape, noise: Tensor | None = None) -> None:
        super().__init__()
        self.shape = shape
        stages = range(len(UP_RATES))
        width = [shape.base] + [shape.channels(i) for i in stages]
        self.f0_predictor = F0Predictor(shape)
        self.m_source = HarmonicSource()
        self.conv_pre = nn.Conv1d(shape.mel, shape.base, PRE_LOOKAHEAD + 1)
        self.ups = nn.ModuleList([Upsample(width[i], width[i + 1], UP_KERNELS[i], UP_RATES[i]) for i in stages])
        self.source_downs = nn.ModuleList(
            [nn.Conv1d(2 * BINS, width[i + 1], kernel, stride) for i, (kernel, stride) in enumerate(DOWN_SIZES)]
        )
        self.source_resblocks = nn.ModuleList([ResBlock(width[i + 1], SOURCE_RES_KERNELS[i]) for i in stages])
        self.resblocks = nn.ModuleList([ResBlock(width[i + 1], k) for i in stages for k in RES_KERNELS])
        self.conv_post = nn.Conv1d(width[-1], 2 * BINS, 7)
        self._make_fourier()
        self.given_noise = noise
        self._noise: Tensor | None = None
        self.is_exact = True  # False: warm() may round the decoder's products to ten bits, as TF32 does
        self._lanes: HiftLanes | None = None

    def _make_fourier(self) -> None:
        """Real transform of 16 windowed samples, and its windowed inverse, as matrices [16, 18] and [18, 16]."""
        n = torch.arange(FFT, dtype=torch.float64)
        window = 0.5 - 0.5 * torch.cos(2 * math.pi * n / FFT)
        turn = (torch.arange(BINS)[:, None] * torch.arange(FFT)) % FFT  # whole sixteenths, so zeros are exact
        cos = torch.cos(2 * math.pi * turn.double() / FFT)
        sin = torch.where(turn % (FFT // 2) == 0, 0.0, torch.sin(2 * math.pi * turn.double() / FFT))
        share = torch.full((BINS, 1), 2.0 / FFT, dtype=torch.float64)
        share[0] = share[-1] = 1.0 / FFT
        self.register_buffer("window", window.float(), persistent=False)
        self.register_buffer("analysis", (torch.cat((cos, -sin)) * window).T.contiguous().float(), persistent=False)
        self.register_buffer("synthesis", (torch.cat((cos * share, -sin * share)) * window).float(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Hift:
        self._noise = self._lanes = None  # of the old device and dtype
        return super()._apply(fn, recurse)

    @property
    def dtype(self) -> torch.dtype:
        return self.conv_pre.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.conv_pre.weight.device

    # F0 and excitation.

    def f0(self, mel: Tensor, finalize: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
        """mel [B, 80, M] log-mel -> Hz [B, M], or [B, M-3] unless finalize; computed in dtype, given in the module's.

        A float32 F0 moves the phase audibly late in an utterance; training may ask for it all the same.
        """
        if finalize:
            mel = F.pad(mel, (0, F0_LOOKAHEAD))
        return self.f0_predictor(mel.to(dtype), NoPast()).to(self.dtype)

    def noise(self, start: int, samples: int) -> Tensor:
        """Rows start .. start + samples of the fixed noise, [samples, 9], on the module's device.

        Raises NoiseTooShort past its end.
        """
        end = start + samples
        if self._noise is None or len(self._noise) < end:
            with torch.inference_mode(False):  # a later training step may save it for backward
                self._noise = self._load_noise(end).to(self.device, self.dtype)
        return self._noise[start:end]

    def _load_noise(self, samples: int) -> Tensor:
        if self.given_noise is None:
            try:
                return vocoder_noise(-(-samples // SAMPLE_RATE_HZ) * SAMPLE_RATE_HZ)
            except ValueError as error:
                raise NoiseTooShort(str(error)) from error
        if samples > len(self.given_noise):
            raise NoiseTooShort(f"the given noise has {len(self.given_noise)} samples, {samples} are needed")
        return self.given_noise

    def hiss(self) -> Tensor:
        """The whole noise, merged as the excitation merges it: [samples]."""
        samples = MAX_SAMPLES if self.given_noise is None else len(self.given_noise)
        return self._load_noise(samples).to(self.device, self.dtype) @ self.m_source.l_linear.weight[0]

    def tones(self, f0: Tensor, phase: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Harmonic part of the excitation.

        f0 [B, M] Hz, phase float64 [B, 9] cycles before the first frame, over 480 -> tones [B, M, P, 9] with P steps
        a frame, noise gain [B, M], phase sums float64 [B, M, 9]. The sums are float64, rounded to the module's dtype
        before the sine, which is what the reference does on CPU.
        """
        rank = torch.arange(1, NUM_HARMONICS + 1, device=f0.device, dtype=f0.dtype)
        cycles = ((f0[:, :, None] * rank / SAMPLE_RATE_HZ) % 1).double()
        if phase is not None:
            cycles = torch.cat((phase[:, None], cycles), dim=1)
        sums = cycles.cumsum(dim=1)[:, 0 if phase is None else 1 :]
        if self.shape.tone_steps == 1:
            angle = (sums.to(f0.dtype) * 2 * math.pi * FRAME_SAMPLES)[:, :, None]
        else:  # back from the end of the frame, at the frame's own frequency
            end = ((sums * FRAME_SAMPLES) % 1).to(f0.dtype)
            back = torch.arange(FRAME_SAMPLES - 1, -1, -1, device=f0.device, dtype=f0.dtype)
            angle = (
                2 * math.pi * (end[:, :, None] - back[:, None] * (f0[:, :, None] * rank / SAMPLE_RATE_HZ)[:, :, None])
            )
        voiced = (f0 > VOICED_ABOVE_HZ).to(f0.dtype)
        gain = voiced * VOICED_NOISE + (1 - voiced) * SINE_GAIN / 3
        return torch.sin(angle) * SINE_GAIN * voiced[:, :, None, None], gain, sums

    def source(self, f0: Tensor, noise: Tensor | None = None) -> Tensor:
        """Excitation of whole utterances: f0 [B, M] Hz -> [B, 480 M] in (-1, 1).

        noise [B or 1, 480 M, 9] replaces the fixed noise from sample 0 on.
        """
        tones, gain, _ = self.tones(f0)
        if noise is None:
            noise = self.noise(0, f0.shape[1] * FRAME_SAMPLES)[None]
        return self._excite(tones, gain, noise)

    def _excite(self, tones: Tensor, gain: Tensor, noise: Tensor) -> Tensor:
        """The merge is linear, so tones are merged once per step and noise once per sample. -> [B, 480 M]."""
        merge = self.m_source.l_linear
        hiss = (noise @ merge.weight[0]).unflatten(1, (-1, FRAME_SAMPLES))  # [B or 1, M, 480]
        return torch.tanh(torch.addcmul(merge(tones)[..., 0], gain[:, :, None], hiss)).flatten(1)

    # The decoder.

    def spectra(self, samples: Tensor) -> Tensor:
        """samples [..., 4 K + 12], padding included -> real then imaginary rows [..., 18, K]."""
        return (samples.unfold(-1, FFT, HOP) @ self.analysis).transpose(-1, -2)

    def _decode_spectra(self, x: Tensor, spectra: Tensor, past: Past, *, is_first: bool) -> Tensor:
        """x [B, base, n] after conv_pre, spectra [B, 18, 120 n + 15] from 14 before -> [B, 18, 120 n (+ 1)]."""
        for stage, up in enumerate(self.ups):
            x = up.upsampled(F.leaky_relu(x, 0.1), past)
            is_last = stage == len(self.ups) - 1
            past.grow(UP_RATES[stage], extra=1 if is_last and is_first else 0)
            if is_last and is_first:
                x = torch.cat((x[:, :, 1:2], x), dim=2)
            x = x + self.source_resblocks[stage](self._source_down(stage, spectra, x.shape[2]), past)
            a, b, c = (block(x, past) for block in self.resblocks[3 * stage : 3 * stage + 3])
            x = (a + b + c) / 3
        return causal(self.conv_post, F.leaky_relu(x, 0.01), past)

    def _source_down(self, stage: int, spectra: Tensor, steps: int) -> Tensor:
        """The window of stage outputs ends with spectrum 120 D for every stage."""
        kernel, stride = DOWN_SIZES[stage]
        return self.source_downs[stage](spectra[:, :, spectra.shape[2] - (steps - 1) * stride - kernel :])

    def pieces(self, coded: Tensor) -> Tensor:
        """conv_post's [B, 18, K] -> windowed pieces of 16 samples [B, K, 16]."""
        magnitude = torch.exp(coded[:, :BINS]).clamp(max=MAGNITUDE_LIMIT)
        phase = torch.sin(coded[:, BINS:])
        parts = torch.cat((magnitude * torch.cos(phase), magnitude * torch.sin(phase)), dim=1)
        return parts.transpose(1, 2) @ self.synthesis

    def decode(self, mel: Tensor, source: Tensor, finalize: bool = True) -> Tensor:
        """mel [B, 80, M], source [B, 480 M] -> wave [B, 480 M] in +-0.99; differentiable.

        Unless finalize, source is [B, 480 (M-3)] and the wave [B, 480 (M-8)], as the reference gives it (M >= 8).
        """
        mel = F.pad(mel, (0, PRE_LOOKAHEAD)) if finalize else mel[:, :, : mel.shape[2] - F0_LOOKAHEAD]
        x = self.conv_pre(mel)
        frames = x.shape[2]
        samples = F.pad(source[:, None], (FFT // 2, FFT // 2), mode="reflect")[:, 0]
        spectra = self.spectra(samples)[:, :, : frames * SPECTRA_PER_FRAME + 1]
        coded = self._decode_spectra(x, F.pad(spectra, (SPECTRUM_HISTORY, 0)), NoPast(), is_first=True)
        pieces = self.pieces(coded)
        kept = FRAME_SAMPLES * (frames if finalize else frames - 1)
        inner = slice(FFT // 2, FFT // 2 + kept)  # cut before the division: the first sample's envelope is 0
        envelope = overlap_add((self.window**2).expand(1, pieces.shape[1], FFT))[:, inner]
        return (overlap_add(pieces)[:, inner] / envelope).clamp(-AUDIO_LIMIT, AUDIO_LIMIT)

    def offline(self, mel: Tensor, finalize: bool = True) -> Tensor:
        """mel [B, 80, M] -> wave [B, 480 M], or [B, 480 (M-8)] unless finalize (M >= 8). Raises NoiseTooShort."""
        return self.decode(mel, self.source(self.f0(mel, finalize)), finalize)

    # The stream.

    def warm(self, graphs: Graphs, *, lanes: int) -> None:
        """On CUDA: lays out slots, buffers and graphs for so many lanes, for good. Lanes begun before are lost.

        A CPU has nothing to warm: push() there takes the lanes as they are.
        """
        if self.device.type != "cpu":
            from engine.hift_lanes import on_device

            self._lanes = on_device(self, graphs, lanes=lanes)

    def begin(self) -> HiftState:
        """A lane that has heard nothing."""
        return HiftState() if self._lanes is None else self._lanes.begin()

    @torch.inference_mode()
    def push(self, states: Sequence[HiftState], mels: Sequence[Tensor], finals: Sequence[bool]) -> list[Tensor]:
        """New mel frames of several lanes -> the samples that have become final, 1-D each.

        mels [80, m] each, m >= 0 and different. A lane that has received M frames has given out 480 (M-4) - 3
        samples, and 480 M once its final push is done; it takes nothing after that. The samples are those of
        offline() on all its mel, whatever the cuts and the neighbours, up to the rounding of the kernels.
        Raises NoiseTooShort and leaves the lanes unusable.
        """
        if self._lanes is not None:
            return self._lanes.push(states, mels, finals)
        for state, mel in zip(states, mels, strict=True):
            assert not state.is_ended, "a lane that has had its final push takes no more mel"
            mel = mel.to(self.device, self.dtype)
            state.mel = mel if state.mel is None else torch.cat((state.mel, mel), dim=1)
        lanes = list(zip(states, finals, strict=True))
        self._push_pitch(lanes)
        ready = [lane for lane in lanes if ready_frames(*lane) > 0]
        waves: dict[int, Tensor] = {}
        for is_first, group in split_first(ready):
            waves.update(self._push_decoder(group, is_first=is_first))
        for state, is_final in lanes:
            state.is_ended = is_final
        empty = torch.empty(0, device=self.device, dtype=self.dtype)
        return [waves.get(id(state), empty) for state in states]

    def _push_pitch(self, lanes: list[tuple[HiftState, bool]]) -> None:
        """F0, excitation and spectra of every frame that has its three frames of look-ahead."""
        inputs, group = [], []
        for state, is_final in lanes:
            assert state.mel is not None, "push() has just put it there"
            mel = state.mel[:, state.num_pitched - state.num_decoded :]
            if is_final:
                mel = F.pad(mel, (0, F0_LOOKAHEAD))
            if mel.shape[1] > F0_LOOKAHEAD and state.num_decoded + state.mel.shape[1] > 0:
                inputs.append(mel)
                group.append((state, is_final))
        if group:
            counts = [mel.shape[1] - F0_LOOKAHEAD for mel in inputs]
            past = LanePast([state.f0_tails for state, _ in group], counts)
            wide = side_by_side(inputs).to(torch.float64)
            f0 = self.f0_predictor(wide, past).to(self.dtype)
            self._push_source(f0, group, counts)

    def _push_source(self, f0: Tensor, group: list[tuple[HiftState, bool]], counts: list[int]) -> None:
        zero = torch.zeros(NUM_HARMONICS, device=self.device, dtype=torch.float64)
        phase = torch.stack([zero if state.phase is None else state.phase for state, _ in group])
        tones, gain, sums = self.tones(f0, phase)
        for lane, ((state, is_final), count) in enumerate(zip(group, counts, strict=True)):
            rows = self.noise(state.num_pitched * FRAME_SAMPLES, count * FRAME_SAMPLES)
            samples = self._excite(tones[lane : lane + 1, :count], gain[lane : lane + 1, :count], rows[None])[0]
            state.phase = sums[lane, count - 1].clone()
            state.num_pitched += count
            self._push_spectra(state, samples, is_final)

    def _push_spectra(self, state: HiftState, samples: Tensor, is_final: bool) -> None:
        if state.excitation is None:
            assert state.spectra is None, "both begin with the first frame"
            state.spectra = samples.new_zeros(2 * BINS, SPECTRUM_HISTORY)
            state.excitation = samples[1 : FFT // 2 + 1].flip(0)
        assert state.spectra is not None, "both begin with the first frame"
        end = [samples[-FFT // 2 - 1 : -1].flip(0)] if is_final else []
        samples = torch.cat([state.excitation, samples, *end])
        state.spectra = torch.cat((state.spectra, self.spectra(samples)), dim=1)
        state.excitation = samples[HOP - FFT :].clone()

    def _push_decoder(self, group: list[tuple[HiftState, bool]], *, is_first: bool) -> dict[int, Tensor]:
        """conv_pre to samples for lanes that have at least one frame ready."""
        counts = [ready_frames(*lane) for lane in group]
        mels, spectra = [], []
        for (state, is_final), count in zip(group, counts, strict=True):
            assert state.mel is not None and state.spectra is not None, "a ready lane has both"
            mel = F.pad(state.mel, (0, PRE_LOOKAHEAD)) if is_final else state.mel
            mels.append(mel[:, : count + PRE_LOOKAHEAD])
            spectra.append(state.spectra[:, : count * SPECTRA_PER_FRAME + SPECTRUM_HISTORY + 1])
            state.mel = state.mel[:, count:].clone()
            state.spectra = state.spectra[:, count * SPECTRA_PER_FRAME :].clone()
        past = LanePast([state.tails for state, _ in group], counts)
        coded = self._decode_spectra(self.conv_pre(side_by_side(mels)), side_by_side(spectra), past, is_first=is_first)
        return self._push_samples(self.pieces(coded), group, counts, past.lengths)

    def _push_samples(
        self, pieces: Tensor, group: list[tuple[HiftState, bool]], counts: list[int], lengths: list[int]
    ) -> dict[int, Tensor]:
        """Overlap-add behind each lane's open samples. Position p of a lane is sample p - 8 of its wave."""
        waves = {}
        for lane, ((state, is_final), count, length) in enumerate(zip(group, counts, lengths, strict=True)):
            num_before = state.num_decoded * SPECTRA_PER_FRAME + 1 if state.num_decoded else 0
            total = overlap_add(pieces[lane : lane + 1, :length])[0]
            if state.overlap is not None:
                total[: FFT - HOP] += state.overlap
            state.overlap = total[-(FFT - HOP) :].clone()
            state.num_decoded += count
            frames = state.num_decoded
            begin = state.samples + FFT // 2 - num_before * HOP
            state.samples = frames * FRAME_SAMPLES if is_final else frames * FRAME_SAMPLES - 3
            stop = state.samples + FFT // 2 - num_before * HOP
            weight = self._envelope(num_before, length)[begin:stop]
            waves[id(state)] = (total[begin:stop] / weight).clamp_(-AUDIO_LIMIT, AUDIO_LIMIT)
        return waves

    def _envelope(self, num_before: int, length: int) -> Tensor:
        """Overlap-added squared window over `length` pieces that follow num_before others: [4 length + 12]."""
        lead = min(num_before, FFT // HOP - 1)
        squares = (self.window**2).expand(1, lead + length, FFT)
        return overlap_add(squares)[0, lead * HOP :]


def ready_frames(state: HiftState, is_final: bool) -> int:
    """Frames that conv_pre can take now."""
    assert state.mel is not None, "push() has just put it there"
    return max(0, state.mel.shape[1] - (0 if is_final else PRE_LOOKAHEAD))


def split_first(lanes: list[tuple[HiftState, bool]]) -> list[tuple[bool, list[tuple[HiftState, bool]]]]:
    """Lanes at their very first frame have one spectrum more than the others and go through on their own."""
    groups = [
        (is_first, [lane for lane in lanes if (lane[0].num_decoded == 0) == is_first]) for is_first in (True, False)
    ]
    return [(is_first, group) for is_first, group in groups if group]


def overlap_add(pieces: Tensor) -> Tensor:
    """pieces [B, K, 16] each 4 samples after the one before -> [B, 4 K + 12]."""
    quarters = pieces.unflatten(2, (FFT // HOP, HOP))  # [B, K, 4, 4]
    late = FFT // HOP - 1
    parts = [F.pad(quarters[:, :, i], (0, 0, i, late - i)) for i in range(FFT // HOP)]
    return (parts[0] + parts[1] + parts[2] + parts[3]).flatten(1)


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """[C, n] each -> [B, C, longest], zeros behind the shorter ones."""
    longest = max(part.shape[1] for part in parts)
    return torch.stack([F.pad(part, (0, longest - part.shape[1])) for part in parts])
