"""Discriminators of the vocoder: multi-period and multi-resolution, the former at a third of the usual width.

Sources: HiFi-GAN (multi-period), UnivNet (multi-resolution spectrograms), EnCodec (complex ones, so that phases count).
Each returns (score, features). B rows, S samples.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

PERIODS = (2, 3, 5, 7, 11)
RESOLUTIONS = ((512, 128), (1024, 256), (2048, 512))
WIDTHS = (16, 64, 192, 384, 384)  # of a period judge: all judges fit a file of 12 MiB, half as wide as the usual ones
SPECTRUM_WIDTH = 32
Judged = tuple[Tensor, list[Tensor]]


class PeriodJudge(nn.Module):
    """Reads the wave as a picture of `period` columns."""

    def __init__(self, period: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.period = period
        inputs = (1, *widths[:-1])
        strides = (3,) * (len(widths) - 1) + (1,)
        self.convs = nn.ModuleList(
            weight_norm(nn.Conv2d(i, o, (5, 1), (s, 1), (2, 0)))
            for i, o, s in zip(inputs, widths, strides, strict=True)
        )
        self.score = weight_norm(nn.Conv2d(widths[-1], 1, (3, 1), 1, (1, 0)))

    def forward(self, wave: Tensor) -> Judged:
        """wave [B, S] -> score [B, N], features."""
        short = -wave.shape[1] % self.period
        x = F.pad(wave, (0, short), mode="reflect").view(wave.shape[0], 1, -1, self.period)
        x = x.contiguous(memory_format=torch.channels_last)
        features = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            features.append(x)
        return self.score(x).flatten(1), features


class SpectrumJudge(nn.Module):
    """Reads the spectrogram of one resolution: logarithm of the magnitude, compressed real and imaginary part."""

    def __init__(self, n_fft: int, hop: int, width: int) -> None:
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)
        kernels = ((3, 9), (3, 9), (3, 9), (3, 9), (3, 3))
        strides = ((1, 1), (1, 2), (1, 2), (1, 2), (1, 1))
        inputs = (3, width, width, width, width)
        self.convs = nn.ModuleList(
            weight_norm(nn.Conv2d(i, width, k, s, (k[0] // 2, k[1] // 2)))
            for i, k, s in zip(inputs, kernels, strides, strict=True)
        )
        self.score = weight_norm(nn.Conv2d(width, 1, 3, 1, 1))

    def forward(self, wave: Tensor) -> Judged:
        """wave [B, S] -> score [B, N], features."""
        with torch.autocast(wave.device.type, enabled=False):
            x = compressed(wave, self.n_fft, self.hop, self.window)
        features = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            features.append(x)
        return self.score(x).flatten(1), features


class Adversaries(nn.Module):
    """All judges; `share` scales their widths."""

    def __init__(self, *, share: float = 1.0) -> None:
        super().__init__()
        widths = tuple(max(4, int(w * share)) for w in WIDTHS)
        spectra = max(4, int(SPECTRUM_WIDTH * share))
        judges: list[nn.Module] = [PeriodJudge(period, widths) for period in PERIODS]
        judges += [SpectrumJudge(n_fft, hop, spectra) for n_fft, hop in RESOLUTIONS]
        self.judges = nn.ModuleList(judges).to(memory_format=torch.channels_last)

    def forward(self, wave: Tensor) -> list[Judged]:
        return [judge(wave) for judge in self.judges]


def compressed(wave: Tensor, n_fft: int, hop: int, window: Tensor) -> Tensor:
    """STFT of wave [B, S] as a picture [B, 3, frames, bins]: log |X|, and X |X|^-0.7 in two parts."""
    spectrum = torch.view_as_real(torch.stft(wave.float(), n_fft, hop, window=window, return_complex=True))
    power = spectrum.square().sum(-1) + 1e-6
    picture = torch.cat((power.log()[..., None] / 2, spectrum * power[..., None] ** -0.35), dim=-1)
    return picture.permute(0, 3, 2, 1).contiguous(memory_format=torch.channels_last)


def magnitude(wave: Tensor, n_fft: int, hop: int, window: Tensor) -> Tensor:
    """|STFT| of wave [B, S] -> [B, n_fft/2+1, frames], float32 and safe to differentiate at zero."""
    with torch.autocast(wave.device.type, enabled=False):
        spectrum = torch.stft(wave.float(), n_fft, hop, window=window, return_complex=True)
        return torch.sqrt(spectrum.real.square() + spectrum.imag.square() + 1e-9)


def judge_loss(real: list[Judged], fake: list[Judged]) -> Tensor:
    """Least-squares loss of the judges: real to 1, fake to 0, summed over judges."""
    return torch.stack(
        [(1 - r[0].float()).square().mean() + f[0].float().square().mean() for r, f in zip(real, fake, strict=True)]
    ).sum()


def fooling_loss(fake: list[Judged]) -> Tensor:
    """Least-squares loss of the generator."""
    return torch.stack([(1 - score.float()).square().mean() for score, _ in fake]).sum()


def matching_loss(real: list[Judged], fake: list[Judged]) -> Tensor:
    """Mean absolute difference of the judges' features, summed over layers and judges."""
    terms = [
        (r.detach().float() - f.float()).abs().mean()
        for (_, reals), (_, fakes) in zip(real, fake, strict=True)
        for r, f in zip(reals, fakes, strict=True)
    ]
    return torch.stack(terms).sum()
