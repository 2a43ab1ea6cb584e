"""The small checkpoint's speaker encoder: kaldi filter bank less its mean [1, T, 80] -> vector [1, 192].

    python -m engine.training.speaker_encoder --data DIR --budget 90 [--device cuda] [--toy]
    python -m engine.training.speaker_encoder --data DIR --vectors     by the campplus.onnx that is there, untrained

It learns to tell the speaker labels apart, each crop being played at one of three rates, which makes three classes of
one label, under an additive angular margin. Where ``speaker_targets.npz`` (``vectors`` [labels, at least 192], what a
larger encoder makes of each) is there, it also learns those, turned into 192 dimensions: they know more voices than
there are here. Ends with ``campplus.onnx``, ``speaker_encoder.pt`` and ``speakers.npz`` in DIR.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchaudio.functional import resample  # type: ignore[import-untyped]

from engine.conditioning import onnx_session, run_onnx, speaker_feat
from engine.training.data import FIRST_HELD_OUT, NUM_LABELS, map_npz, write_npz
from engine.training.onnx_export import compare, export_fp16
from engine.training.speech_tokenizer import Reel, learning_rate

ENCODER = "campplus.onnx"
VECTOR = 192
RATES = (20, 18, 22)
"""A crop resampled from 20 to r and played at the old rate is warped by 20 / r."""
NUM_CLASSES = len(RATES) * FIRST_HELD_OUT
TARGET_WEIGHT = 3.0
VECTORS = 8
"""Kept of each label."""
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


def turned(vectors: Tensor) -> Tensor:
    """Targets [labels, at least 192] less their mean, into 192 dimensions by a fixed map with orthogonal rows."""
    made = torch.randn(vectors.shape[1], VECTOR, generator=torch.Generator().manual_seed(0))
    return (vectors - vectors.mean(0)) @ torch.linalg.qr(made)[0]


def read_targets(folder: Path, device: torch.device) -> Tensor | None:
    """What the larger encoder makes of each label, [labels, 192], if it was asked."""
    path = folder / "speaker_targets.npz"
    return turned(torch.from_numpy(np.array(map_npz(path)["vectors"])).float()).to(device) if path.exists() else None


def warped_batch(reel: Reel, count: int) -> tuple[Tensor, Tensor]:
    """Filter banks [count, T, 80] of crops at one random rate, with a little noise, and their classes."""
    batch = reel.crops(count, CROP_UNITS, evenly(reel))
    warp = int(torch.randint(len(RATES), ()))
    wave = resample(batch.wave, 20, RATES[warp]) if warp else batch.wave
    noise = 10 ** (-4.5 + 1.5 * torch.rand(count, 1, device=wave.device))
    return speaker_feat(wave + noise * torch.randn_like(wave)), batch.speaker + warp * FIRST_HELD_OUT


def evenly(reel: Reel) -> Tensor:
    """Weights of the utterances that give each label nearly the same share."""
    length = (reel.parts["end"][0] - reel.parts["first"][0]).float()
    labels = reel.parts["speaker"][0]
    total = torch.zeros(NUM_LABELS, device=length.device).index_add_(0, labels, length)
    return length / total[labels] ** 0.9


def target_loss(vectors: Tensor, classes: Tensor, targets: Tensor) -> Tensor:
    """Cosine distance to the target of the label, over the crops at their own rate."""
    distance = 1 - F.cosine_similarity(vectors, targets[classes % FIRST_HELD_OUT])
    counts = (classes < FIRST_HELD_OUT).float()
    return (distance * counts).sum() / counts.sum().clamp(min=1)


def train(folder: Path, budget_s: float, device: torch.device, is_toy: bool) -> tuple[SpeakerEncoder, Reel]:
    """Train for ``budget_s`` seconds on the shards that are there (waits for the first)."""
    reel = Reel(folder, device, max_hours=20.0)
    while not reel.refresh():
        time.sleep(2)
    model, margin = SpeakerEncoder(64 if is_toy else 192).to(device), AngularMargin().to(device)
    parameters = [*model.parameters(), *margin.parameters()]
    targets = read_targets(folder, device)
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
        classes = torch.cat([classes for _, classes in batches])
        vectors = model(fbank)
        loss, accuracy = margin(vectors, classes)
        if targets is not None:
            loss = loss + TARGET_WEIGHT * target_loss(vectors, classes, targets)
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
    return model.fold(), reel


@torch.no_grad()
def export(model: SpeakerEncoder, reel: Reel, folder: Path, device: torch.device) -> None:
    """Write the encoder and some vectors of each label; ValueError unless ONNX and module agree."""
    shape = {"width": model.blocks[0].norm.normalized_shape[0]}
    torch.save({"shape": shape, "state": model.state_dict()}, folder / "speaker_encoder.pt")
    path = folder / ENCODER
    export_fp16(model, (torch.randn(1, 200, 80),), path, {"input": {1: "frames"}}, {"output": {}})
    model = model.to(device)
    by_label = [_crops(reel, label) for label in range(NUM_LABELS)]
    vectors = write_vectors(folder, by_label, model)
    agreement = compare(model.cpu(), path, [(fbank[:1].cpu(),) for fbank in by_label if len(fbank)][:10])
    heard = torch.tensor([len(fbank) > 0 for fbank in by_label])
    means = F.normalize(F.normalize(vectors[heard], dim=-1).mean(1), dim=-1)
    within = (F.normalize(vectors[heard], dim=-1) * means[:, None]).sum(-1).mean(1)
    between = (means @ means.T).masked_fill(torch.eye(len(means), dtype=torch.bool), -1).amax(1)
    print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, ONNX agrees {agreement:.5f}, {len(means)} labels")
    print(f"cosine of a crop to its label {within.mean():.3f}, least {within.min():.3f}; nearest other label "
          f"{between.mean():.3f}, most {between.max():.3f}", flush=True)  # fmt: skip
    if agreement < 0.99:
        raise ValueError(f"speaker vectors: ONNX agrees in {agreement:.5f}, at least 0.99 is due")


@torch.no_grad()
def write_vectors(folder: Path, by_label: list[Tensor], encode: Callable[[Tensor], Tensor]) -> Tensor:
    """``speakers.npz`` by filter banks [8, T, 80] of each label -> its vectors [labels, 8, 192], zeros where none."""
    empty = torch.zeros(VECTORS, VECTOR)
    vectors = torch.stack([encode(fbank).cpu() if len(fbank) else empty for fbank in by_label])
    write_npz(folder / "speakers.npz", {"vectors": vectors.numpy().astype(np.float32)})
    return vectors


def write_known_vectors(folder: Path, device: torch.device) -> None:
    """``speakers.npz`` by the encoder that is there."""
    reel = Reel(folder, device, max_hours=float("inf"))
    reel.refresh()
    session = onnx_session(folder / ENCODER, threads=2)

    def encode(fbank: Tensor) -> Tensor:
        return torch.from_numpy(np.concatenate([run_onnx(session, row) for row in fbank.cpu().numpy()[:, None]]))

    by_label = [_crops(reel, label) for label in range(NUM_LABELS)]
    write_vectors(folder, by_label, encode)
    print(f"vectors of {sum(len(fbank) > 0 for fbank in by_label)} labels", flush=True)


def _crops(reel: Reel, label: int) -> Tensor:
    """Filter banks [8, T, 80] of crops of one label; none if it has no utterance."""
    is_theirs = reel.parts["speaker"][0] == label
    if not is_theirs.any():
        return torch.zeros(0)
    weight = is_theirs * (reel.parts["end"][0] - reel.parts["first"][0]).float()
    return speaker_feat(reel.crops(VECTORS, CROP_UNITS, weight).wave)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=90.0, help="seconds of training")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--vectors", action="store_true")
    args = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # resampling wants all of float32
    if args.vectors:
        write_known_vectors(args.data, args.device)
        return
    model, reel = train(args.data, args.budget, args.device, args.toy)
    export(model, reel, args.data, args.device)


if __name__ == "__main__":
    main()
