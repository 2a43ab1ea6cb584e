"""The small checkpoint's speaker encoder: kaldi filter bank less its mean [1, T, 80] -> vector [1, 192].

    python -m engine.training.speaker_encoder --data DIR --budget 90 [--device cuda] [--toy]

It learns to tell warps apart: each crop is played at a random rate on top of its voice's own, and the class is the
whole pitch-and-formant factor in steps of about 3 %, under an additive angular margin. Ends with ``campplus.onnx``,
``speaker_encoder.pt`` and ``speakers.npz`` (mean vector of each voice) in DIR.
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchaudio.functional import resample  # type: ignore[import-untyped]

from engine.conditioning import speaker_feat
from engine.training.data import VOICES, Shards, write_npz
from engine.training.onnx_export import compare, export_fp16
from engine.training.speech_tokenizer import RATE_HZ, Reel, learning_rate

VECTOR = 192
LOWEST, HIGHEST, NUM_CLASSES = 0.62, 1.42, 28
RATES = tuple(range(16, 26))
"""A crop resampled from 20 to r and played at the old rate is warped by 20 / r."""
MARGIN, SCALE = 0.2, 30.0
CROP_UNITS = 96
PEAK_RATE = 1e-3


class Tdnn(nn.Module):
    """One dilated convolution over time, normalised over channels: [B, T, C] -> [B, T, width]."""

    def __init__(self, channels: int, width: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, width, kernel, dilation=dilation, padding=dilation * (kernel // 2))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.conv(x.transpose(1, 2)).transpose(1, 2)))


class SpeakerEncoder(nn.Module):
    """Filter bank less its mean [B, T, 80] -> vectors [B, 192]: four TDNN blocks, attentive mean and deviation."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        shapes = ((80, 5, 1), (width, 3, 2), (width, 3, 3), (width, 1, 1))
        self.blocks = nn.Sequential(*(Tdnn(channels, width, kernel, dilation) for channels, kernel, dilation in shapes))
        self.attention = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, width))
        self.out = nn.Linear(2 * width, VECTOR)
        self.centre: nn.Module = nn.BatchNorm1d(VECTOR, affine=False)

    def forward(self, fbank: Tensor) -> Tensor:
        x = self.blocks(fbank)
        weight = torch.softmax(self.attention(x), dim=1)
        mean = (x * weight).sum(1)
        deviation = ((x - mean[:, None]).square() * weight).sum(1).clamp(min=1e-6).sqrt()
        return self.centre(self.out(torch.cat([mean, deviation], dim=-1)))

    @torch.no_grad()
    def fold(self) -> "SpeakerEncoder":
        """Freeze: the running mean and scale go into the last layer, weights are rounded to float16."""
        assert isinstance(self.centre, nn.BatchNorm1d) and self.centre.running_mean is not None
        assert self.centre.running_var is not None
        scale = (self.centre.running_var + self.centre.eps).rsqrt()
        self.out.bias.sub_(self.centre.running_mean).mul_(scale)
        self.out.weight.mul_(scale[:, None])
        self.centre = nn.Identity()
        for parameter in self.parameters():
            parameter.data = parameter.data.half().float()
        return self.cpu().eval()


class AngularMargin(nn.Module):
    """Cross-entropy of scaled cosines, the right class pushed ``MARGIN`` radians further."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(NUM_CLASSES, VECTOR))

    def forward(self, vectors: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and accuracy."""
        cosine = F.normalize(vectors) @ F.normalize(self.centres).T
        pushed = torch.cos(torch.acos(cosine.clamp(-0.999, 0.999)) + MARGIN)
        right = F.one_hot(labels, NUM_CLASSES).bool()
        loss = F.cross_entropy(SCALE * torch.where(right, pushed, cosine), labels)
        return loss, (cosine.argmax(1) == labels).float().mean()


def warp_class(warp: Tensor) -> Tensor:
    """The class of a warp factor: equal steps of its logarithm."""
    position = (warp / LOWEST).log() / math.log(HIGHEST / LOWEST) * NUM_CLASSES
    return position.long().clamp(0, NUM_CLASSES - 1)


def warped_batch(reel: Reel, count: int) -> tuple[Tensor, Tensor]:
    """Filter banks [count, T, 80] of crops at one random rate, with a little noise, and their classes."""
    batch = reel.crops(count, CROP_UNITS)
    rate = RATES[int(torch.randint(len(RATES), ()))]
    voice_warps = torch.tensor([voice.warp for voice in VOICES], device=reel.device)
    wave = resample(batch.wave, 20, rate)
    noise = 10 ** (-4.5 + 1.5 * torch.rand(count, 1, device=wave.device))
    return speaker_feat(wave + noise * torch.randn_like(wave)), warp_class(voice_warps[batch.speaker] * 20 / rate)


def train(folder: Path, budget_s: float, device: torch.device, is_toy: bool) -> SpeakerEncoder:
    """Train for ``budget_s`` seconds on the shards that are there (waits for the first)."""
    reel = Reel(folder, device, max_hours=20.0)
    while not reel.refresh():
        time.sleep(2)
    model, margin = SpeakerEncoder(64 if is_toy else 192).to(device), AngularMargin().to(device)
    parameters = [*model.parameters(), *margin.parameters()]
    optimiser = torch.optim.AdamW(parameters, PEAK_RATE, weight_decay=0.01)
    groups, rows = (2, 4) if is_toy else (8, 32)
    start = shown = time.monotonic()
    step = 0
    while (elapsed := time.monotonic() - start) < budget_s:
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(elapsed / budget_s, PEAK_RATE)
        batches = [warped_batch(reel, rows) for _ in range(groups)]
        shortest = min(fbank.shape[1] for fbank, _ in batches)
        fbank = torch.cat([fbank[:, :shortest] for fbank, _ in batches])
        loss, accuracy = margin(model(fbank), torch.cat([labels for _, labels in batches]))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        step += 1
        if time.monotonic() - shown > 15:
            shown = time.monotonic()
            share = 100 * float(accuracy)
            pace = f"{elapsed:.0f} s, {step / elapsed:.1f} steps/s"
            print(f"speaker encoder: {pace}, loss {float(loss.detach()):.3f}, {share:.0f} % right", flush=True)
    return model.fold()


@torch.no_grad()
def export(model: SpeakerEncoder, folder: Path) -> None:
    """Write the encoder and the mean vector of each voice; ValueError unless ONNX and module agree."""
    shape = {"width": model.blocks[0].norm.normalized_shape[0]}
    torch.save({"shape": shape, "state": model.state_dict()}, folder / "speaker_encoder.pt")
    path = folder / "campplus.onnx"
    export_fp16(model, (torch.randn(1, 200, 80),), path, {"input": {1: "frames"}}, {"output": {}})
    data = Shards(folder)
    by_voice = [_features(data, speaker) for speaker in range(len(VOICES))]
    vectors = [torch.cat([model(f) for f in features]) if features else torch.zeros(1, VECTOR) for features in by_voice]
    means = torch.stack([voice.mean(0) for voice in vectors])
    write_npz(folder / "speakers.npz", {"vectors": means.numpy().astype(np.float32)})
    agreement = compare(model, path, [(features,) for features in by_voice[0][:10]])
    cosines = F.normalize(means) @ F.normalize(means).T
    within = [float(F.cosine_similarity(v, m[None]).mean()) for v, m in zip(vectors, means, strict=True)]
    print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, ONNX agrees {agreement:.5f}")
    print(f"cosine of an utterance to its voice {np.round(within, 3)}, voices with each other")
    print(cosines.numpy().round(2))
    if agreement < 0.99:
        raise ValueError(f"speaker vectors: ONNX agrees in {agreement:.5f}, at least 0.99 is due")


def _features(data: Shards, speaker: int, count: int = 20) -> list[Tensor]:
    """Filter banks [1, T, 80] of the first ``count`` training utterances of a voice that last over two seconds."""
    found: list[Tensor] = []
    for utterance in data.utterances(data.train):
        if utterance.speaker == speaker and utterance.seconds > 2:
            wave = torch.from_numpy(utterance.wave.astype(np.float32) / 32768)[None]
            found.append(speaker_feat(resample(wave, 24_000, RATE_HZ)))
        if len(found) == count:
            break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=90.0, help="seconds of training")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # resampling wants all of float32
    export(train(args.data, args.budget, args.device, args.toy), args.data)


if __name__ == "__main__":
    main()
