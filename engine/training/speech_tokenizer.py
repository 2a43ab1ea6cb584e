"""The small checkpoint's speech tokenizer: log-mel -> 25 ids a second, 8 dimensions of 3 levels (6561 codes).

    python -m engine.training.speech_tokenizer train    --data DIR --budget 240 [--device cuda] [--toy]
    python -m engine.training.speech_tokenizer tokenise --data DIR [--follow] [--idle 60]
    python -m engine.training.speech_tokenizer recover  --data DIR

Supervised by what the teacher knows: the phoneme every 20 ms, voicing, F0, and the mel itself through a decoder that is
told the speaker. ``train`` ends with ``speech_tokenizer.pt`` and ``speech_tokenizer_v3.onnx`` in DIR (the official
contract: float32 [1, 128, F] and int32 [1] -> ids); ``tokenise`` writes ``tokens-*.npz``; ``recover`` makes the first
file of the second, for a run that keeps an earlier tokenizer. B batch, F log-mel frames (100 a second), n tokens,
D width.
"""

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torchaudio.functional import resample  # type: ignore[import-untyped]

from engine.conditioning import whisper_logmel
from engine.training.data import (
    FIRST_HELD_OUT,
    FIRST_KOKORO,
    MEL_HOP,
    NUM_LABELS,
    UNIT_SAMPLES,
    Shard,
    Shards,
    is_held_out,
    read_shard,
    write_tokens,
)
from engine.training.onnx_export import compare, export_fp16

RATE_HZ = 16_000
UNIT_16K = RATE_HZ * UNIT_SAMPLES // 24_000
LEVELS, DIMENSIONS = 3, 8
NUM_SYMBOLS = 178
STRESS = (156, 157)
SPACE = 16
IGNORED = -100
WINDOW = 24
CROP_UNITS = 128
"""3.2 s: 80 tokens, 160 label frames of 20 ms, 320 log-mel frames."""
MODEL_FILE, ONNX_FILE = "speech_tokenizer.pt", "speech_tokenizer_v3.onnx"
ANCHOR_FILE = "anchor.pt"
"""An earlier tokenizer, if there: training starts from it and keeps hibari's codes near its own."""
ANCHOR_WEIGHT = 15.0
KOKORO_SHARE = 0.6


class Block(nn.Module):
    """Depthwise convolution, windowed attention, feed-forward; each on a normalised copy, added back. [B, n, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.conv_norm, self.attention_norm, self.ff_norm = (nn.LayerNorm(width) for _ in range(3))
        self.depthwise = nn.Conv1d(width, width, 15, padding=7, groups=width)
        self.pointwise = nn.Linear(width, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, valid: Tensor, near: Tensor) -> Tensor:
        """valid [B, n, 1] float, near [B, 1, n, n] bool: who may look at whom."""
        local = (self.conv_norm(x) * valid).transpose(1, 2)
        x = x + self.pointwise(F.gelu(self.depthwise(local).transpose(1, 2)))
        x = x + self.attend(self.attention_norm(x), near)
        return x + self.ff(self.ff_norm(x))

    def attend(self, x: Tensor, near: Tensor) -> Tensor:
        query, key, value = (self.split_heads(part) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=near)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, x.shape[-1] // self.heads)).transpose(1, 2)


class SpeechTokenizer(nn.Module):
    """log-mel [B, 128, F] and lengths int32 [B] -> ids int64 [B, ceil(F / 4)]; those past ceil(length / 4) are void."""

    def __init__(self, width: int = 192, num_blocks: int = 5, heads: int = 3) -> None:
        super().__init__()
        self.stem = nn.ModuleList(nn.Conv1d(c, width, 3, stride=2, padding=1) for c in (128, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, DIMENSIONS)
        self.register_buffer("place", LEVELS ** torch.arange(DIMENSIONS), persistent=False)

    def forward(self, logmel: Tensor, lengths: Tensor) -> Tensor:
        levels = torch.round(self.squashed(logmel, lengths)) + 1
        return (levels.long() * self.place).sum(-1)

    def squashed(self, logmel: Tensor, lengths: Tensor) -> Tensor:
        """0.999 tanh of the eight dimensions, before rounding: [B, n, 8]."""
        x = logmel * (torch.arange(logmel.shape[2], device=logmel.device) < lengths[:, None]).to(logmel.dtype)[:, None]
        for conv in self.stem:
            lengths = (lengths + 1) // 2
            x = F.gelu(conv(x))
            position = torch.arange(x.shape[2], device=x.device)
            x = x * (position < lengths[:, None]).to(x.dtype)[:, None]
        x = x.transpose(1, 2)
        inside = position < lengths[:, None]
        near = (position[:, None] - position).abs() <= WINDOW
        near = (near & inside[:, None, :]) | (position[:, None] == position)
        for block in self.blocks:
            x = block(x, inside[..., None].to(x.dtype), near[:, None])
        return 0.999 * torch.tanh(self.project(self.norm(x)).float())


class Heads(nn.Module):
    """What the codes must tell, for training only: codes [B, n, 8] -> labels at 50 Hz.

    phoneme [B, 2n, symbols] from the codes alone; log F0 with voicing [B, 2n, 2] and log-mel [B, 2n, 128] with the
    speaker.
    """

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.embed = nn.Linear(DIMENSIONS, width)
        self.speaker = nn.Embedding(NUM_LABELS, width)
        self.phoneme = _conv_head(width, NUM_SYMBOLS, 3)
        self.pitch = _conv_head(width, 2, 5)
        self.mel = _conv_head(width, 128, 5)

    def forward(self, codes: Tensor, speakers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embed(codes).transpose(1, 2)
        told = x + self.speaker(speakers)[..., None]
        return _doubled(self.phoneme(x)), _doubled(self.pitch(told)), _doubled(self.mel(told))


def _conv_head(width: int, out: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.GELU(),
        nn.Conv1d(width, width, kernel, padding=kernel // 2),
        nn.GELU(),
        nn.Conv1d(width, 2 * out, 1),
    )


def _doubled(x: Tensor) -> Tensor:
    """[B, 2C, n] -> [B, 2n, C]: each token speaks for two 20 ms frames."""
    return x.transpose(1, 2).unflatten(-1, (2, -1)).flatten(1, 2)


def straight_through(squashed: Tensor) -> Tensor:
    """Rounded forward, identity backward."""
    return squashed + (torch.round(squashed) - squashed).detach()


class Reel:
    """Utterances end to end on the device at 16 kHz, in units of 25 ms, for random crops.

    wave int16 [U, 400]; phones int64 [U] (stress marks take the sound that follows, one-unit gaps are ignored);
    f0 float16 [U, 2]; per utterance its first unit, its end and its speaker.
    """

    def __init__(self, folder: Path, device: torch.device, max_hours: float) -> None:
        self.data, self.device, self.max_hours = Shards(folder), device, max_hours
        self.num_loaded, self.hours = 0, 0.0
        self.parts: dict[str, list[Tensor]] = {k: [] for k in ("wave", "phones", "f0", "first", "end", "speaker")}

    def refresh(self) -> bool:
        """Load the shards that have appeared; whether there were any."""
        self.data.refresh()
        fresh = self.data.shards[self.num_loaded :] if self.hours < self.max_hours else []
        for shard in fresh:
            self._load(shard)
        self.num_loaded += len(fresh)
        if fresh:
            self.parts = {name: [torch.cat(parts)] for name, parts in self.parts.items()}
        return bool(fresh)

    def _load(self, shard: Shard) -> None:
        base = sum(len(part) for part in self.parts["phones"])
        keep = torch.tensor([not is_held_out(text) for text in shard.text])
        keep &= torch.from_numpy(shard.speaker < FIRST_HELD_OUT)
        edges = torch.from_numpy(shard.units.astype(np.int64)) + base
        rows = {
            "wave": wave_16k(shard.wave, self.device),
            "phones": torch.from_numpy(phone_labels(np.asarray(shard.phones))),
            "f0": torch.from_numpy(np.array(shard.f0)).view(-1, 2),
            "first": edges[:-1][keep],
            "end": edges[1:][keep],
            "speaker": torch.from_numpy(shard.speaker.astype(np.int64))[keep],
        }
        for name, part in rows.items():
            self.parts[name].append(part.to(self.device))
        self.hours += len(shard.phones) / (40 * 3600)

    def crops(self, count: int, units: int, weight: Tensor | None = None) -> "Crops":
        """Random stretches of ``units``; a longer utterance is met more often, a shorter one is followed by silence."""
        part = {name: parts[0] for name, parts in self.parts.items()}
        chosen = torch.multinomial(self.mixed() if weight is None else weight, count, replacement=True)
        first, end = part["first"][chosen], part["end"][chosen]
        room = (end - first - units).clamp(min=0)
        start = first + (torch.rand(count, device=self.device) * (room + 1)).long().clamp(max=room)
        index = start[:, None] + torch.arange(units, device=self.device)
        inside = index < end[:, None]
        index = index.clamp(max=len(part["phones"]) - 1)
        wave = part["wave"][index].float().mul(1 / 32768) * inside[..., None]
        return Crops(
            wave=wave.flatten(1),
            num_units=inside.sum(1),
            phones=part["phones"][index].masked_fill(~inside, IGNORED),
            f0=part["f0"][index].flatten(1).float() * inside.repeat_interleave(2, 1),
            speaker=part["speaker"][chosen],
        )

    def mixed(self) -> Tensor:
        """A weight an utterance: its length, Kokoro's together ``KOKORO_SHARE`` of all if both teachers are there."""
        length = (self.parts["end"][0] - self.parts["first"][0]).float()
        is_kokoro = self.parts["speaker"][0] >= FIRST_KOKORO
        ours, others = (length * is_kokoro).sum(), (length * ~is_kokoro).sum()
        ratio = KOKORO_SHARE / (1 - KOKORO_SHARE) * others / ours.clamp(min=1)
        return torch.where(is_kokoro & (others > 0), length * ratio, length)


@dataclass
class Crops:
    """A batch: wave [B, 400u], num_units [B], phones [B, u] (-100 where unlabelled), f0 [B, 2u], speaker [B]."""

    wave: Tensor
    num_units: Tensor
    phones: Tensor
    f0: Tensor
    speaker: Tensor


def wave_16k(wave: NDArray[np.int16], device: torch.device) -> Tensor:
    """A shard's samples at 16 kHz as int16 [units, 400]."""
    whole = torch.from_numpy(np.array(wave)).to(device).float()[None]
    return resample(whole, 24_000, RATE_HZ)[0].round().clamp(-32768, 32767).to(torch.int16).view(-1, UNIT_16K)


def phone_labels(phones: NDArray[np.int16]) -> NDArray[np.int64]:
    """Teacher symbols -> labels: a stress mark is the sound after it, a one-unit gap between words has none."""
    labels = phones.astype(np.int64)
    for _ in range(8):
        marks = np.flatnonzero(np.isin(labels[:-1], STRESS))
        if not len(marks):
            break
        labels[marks] = labels[marks + 1]
    gap = labels == SPACE
    is_longer = np.zeros(len(labels), bool)
    is_longer[1:] |= gap[:-1]
    is_longer[:-1] |= gap[1:]
    labels[gap & ~is_longer] = IGNORED
    return labels


def at_50_hz(values: Tensor, rate_hz: int, frames: int) -> Tensor:
    """Labels [B, t] at ``rate_hz`` picked at the middle of each 20 ms frame."""
    index = ((torch.arange(frames, device=values.device) + 0.5) * rate_hz / 50).long()
    return values[:, index.clamp(max=values.shape[1] - 1)]


def disturbed(wave: Tensor) -> Tensor:
    """Random gain within 10 dB, and white noise in half of the rows."""
    rows = len(wave)
    gain = 10 ** (torch.rand(rows, 1, device=wave.device) - 0.5)
    noise = 10 ** (-4.5 + 2.2 * torch.rand(rows, 1, device=wave.device))
    noise = noise * (torch.rand(rows, 1, device=wave.device) < 0.5)
    return wave * gain + torch.randn_like(wave) * noise


@dataclass
class Scores:
    """Losses of a batch, and what they come from; ``total`` carries the gradient."""

    total: Tensor
    accuracy: Tensor
    f0_error: Tensor
    mel_error: Tensor


def drift(squashed: Tensor, batch: Crops, anchor: SpeechTokenizer) -> Tensor:
    """Mean squared distance from what the ``anchor`` makes of hibari's clean rows, 0 if there are none."""
    lengths = (batch.num_units * 5 // 2).to(torch.int32)
    with torch.no_grad():
        due = anchor.squashed(whisper_logmel(batch.wave), lengths)
    inside = torch.arange(due.shape[1], device=due.device) < ((lengths + 3) // 4)[:, None]
    counts = (inside & (batch.speaker < FIRST_KOKORO)[:, None]).float()
    return ((squashed - due).square().mean(-1) * counts).sum() / counts.sum().clamp(min=1)


def scores(
    model: SpeechTokenizer, heads: Heads, batch: Crops, heard: Tensor, anchor: SpeechTokenizer | None = None
) -> Scores:
    """Phoneme cross-entropy 1, voicing 0.3, log F0 1, log-mel 0.3 (natural log) on the sound as ``heard``; the anchor.

    Under gradients on a GPU the networks run in bfloat16; the features never do.
    """
    lengths = (batch.num_units * 5 // 2).to(torch.int32)
    logmel = whisper_logmel(heard)
    is_half = heard.is_cuda and torch.is_grad_enabled()
    with torch.autocast(heard.device.type, torch.bfloat16, enabled=is_half):
        squashed = model.squashed(logmel, lengths)
        outputs = heads(straight_through(squashed), batch.speaker)
        held = drift(squashed.float(), batch, anchor) if anchor else 0.0
    phoneme, pitch, mel = (out.float() for out in outputs)
    frames = phoneme.shape[1]
    labels = at_50_hz(batch.phones, 40, frames)
    f0 = at_50_hz(batch.f0, 80, frames)
    inside = (torch.arange(frames, device=f0.device) < (batch.num_units * 5 // 4)[:, None]).float()
    voiced = (f0 > 0).float()
    clean = F.avg_pool1d(whisper_logmel(batch.wave), 2)[..., :frames].transpose(1, 2)
    f0_error = ((pitch[..., 0] - (f0.clamp(min=40) / 200).log()).abs() * voiced).sum() / voiced.sum().clamp(min=1)
    mel_error = 4 * math.log(10) * ((mel - clean).abs().mean(-1) * inside).sum() / inside.sum()
    voicing = F.binary_cross_entropy_with_logits(pitch[..., 1], voiced, weight=inside)
    cross_entropy = F.cross_entropy(phoneme.transpose(1, 2), labels, ignore_index=IGNORED)
    known = labels != IGNORED
    return Scores(
        total=cross_entropy + 0.3 * voicing + f0_error + 0.3 * mel_error + ANCHOR_WEIGHT * held,
        accuracy=((phoneme.argmax(-1) == labels) & known).sum() / known.sum().clamp(min=1),
        f0_error=f0_error.detach(),
        mel_error=mel_error.detach(),
    )


def learning_rate(progress: float, peak: float) -> float:
    """Warm-up over the first 3 % of the time, then a cosine to 2 % of the peak."""
    if progress < 0.03:
        return peak * (0.05 + progress / 0.03 * 0.95)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


@dataclass(frozen=True)
class Plan:
    """Sizes of a training run."""

    batch: int = 256
    units: int = CROP_UNITS
    width: int = 192
    num_blocks: int = 5
    max_hours: float = 60.0
    first_hours: float = 1.5
    peak_rate: float = 1.5e-3


TOY = Plan(batch=4, units=64, width=48, num_blocks=2, max_hours=0.1, first_hours=0.0, peak_rate=3e-3)


def train(folder: Path, budget_s: float, device: torch.device, plan: Plan) -> SpeechTokenizer:
    """Train for ``budget_s`` seconds; waits first until ``plan.first_hours`` of speech are there."""
    reel = Reel(folder, device, plan.max_hours)
    while not reel.refresh() or reel.hours < plan.first_hours:
        time.sleep(2)
    anchor = read_model(folder, device, ANCHOR_FILE) if (folder / ANCHOR_FILE).exists() else None
    model = read_model(folder, device, ANCHOR_FILE) if anchor else SpeechTokenizer(plan.width, plan.num_blocks)
    model = model.to(device).train()
    heads = Heads().to(device)
    parameters = [*model.parameters(), *heads.parameters()]
    groups = [{"params": [*model.parameters()], "scale": 0.5 if anchor else 1.0}, {"params": [*heads.parameters()]}]
    optimiser = torch.optim.AdamW(groups, plan.peak_rate, betas=(0.9, 0.98), weight_decay=0.01)
    start = shown = refreshed = time.monotonic()
    step = 0
    print(f"speech tokenizer: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {reel.hours:.1f} h")
    while (elapsed := time.monotonic() - start) < budget_s:
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(elapsed / budget_s, plan.peak_rate) * group.get("scale", 1.0)
        batch = reel.crops(plan.batch, plan.units)
        score = scores(model, heads, batch, disturbed(batch.wave), anchor)
        optimiser.zero_grad(set_to_none=True)
        score.total.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        step += 1
        if time.monotonic() - shown > 15:
            shown = time.monotonic()
            pace = f"{elapsed:.0f} s, {step / elapsed:.1f} steps/s, {reel.hours:.1f} h"
            print(f"speech tokenizer: {pace}, {_line(score)}", flush=True)
        if time.monotonic() - refreshed > 20:
            reel.refresh()
            refreshed = time.monotonic()
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    save(model.eval(), folder)
    report(model, heads.eval(), reel, anchor)
    return model


def save(model: SpeechTokenizer, folder: Path) -> None:
    """Write the weights; the tokenising may begin the moment they are there."""
    shape = {"width": model.norm.normalized_shape[0], "num_blocks": len(model.blocks)}
    part = folder / f"{MODEL_FILE}.part"
    torch.save({"shape": shape, "state": {k: v.cpu() for k, v in model.state_dict().items()}}, part)
    part.replace(folder / MODEL_FILE)


def _line(score: Scores) -> str:
    return (
        f"loss {float(score.total.detach()):.3f}, phonemes {100 * float(score.accuracy):.1f} %, "
        f"log F0 {float(score.f0_error):.3f}, mel {float(score.mel_error):.3f}"
    )


@torch.no_grad()
def report(model: SpeechTokenizer, heads: Heads, reel: Reel, anchor: SpeechTokenizer | None) -> None:
    """Print the scores on held-out utterances, apart for each kind of speaker, and how the codes are used."""
    held_out = [(i, reel.data.utterance(i).speaker) for i in reel.data.held_out]
    groups = {
        "hibari": (0, FIRST_KOKORO),
        "Kokoro": (FIRST_KOKORO, FIRST_HELD_OUT),
        "new voices": (FIRST_HELD_OUT, NUM_LABELS),
    }
    for name, (low, high) in groups.items():
        chosen = [i for i, speaker in held_out if low <= speaker < high][:60]
        _report_group(name, model, heads, reel, chosen)
        if anchor and chosen:
            _report_group(f"{name}, anchor's codes", anchor, heads, reel, chosen)
    batch = reel.crops(64, 128)
    lengths = (batch.num_units * 5 // 2).to(torch.int32)
    ids = model(whisper_logmel(batch.wave), lengths)
    if anchor:
        rows = batch.speaker < FIRST_KOKORO
        same = ids[rows] == anchor(whisper_logmel(batch.wave), lengths)[rows]
        print(f"{100 * float(same.float().mean()):.1f} % of hibari's ids are the anchor's")
    counts = torch.bincount(ids.flatten(), minlength=LEVELS**DIMENSIONS).float()
    share = counts[counts > 0] / counts.sum()
    repeats = float((ids[:, 1:] == ids[:, :-1]).float().mean())
    entropy = float(-(share * share.log2()).sum())
    print(f"codes used {len(share)}, entropy {entropy:.1f} bit, {100 * repeats:.1f} % repeat the last", flush=True)


def _report_group(name: str, model: SpeechTokenizer, heads: Heads, reel: Reel, chosen: list[int]) -> None:
    totals = []
    for utterance in reel.data.utterances(chosen):
        units = len(utterance.phones) // 8 * 8
        batch = Crops(
            wave=wave_16k(utterance.wave, reel.device)[:units].float().div(32768).flatten()[None],
            num_units=torch.tensor([units], device=reel.device),
            phones=torch.from_numpy(phone_labels(utterance.phones)[None, :units]).to(reel.device),
            f0=torch.from_numpy(np.array(utterance.f0, np.float32)[None, : 2 * units]).to(reel.device),
            speaker=torch.tensor([utterance.speaker], device=reel.device),
        )
        totals.append(scores(model, heads, batch, batch.wave))
    if totals:
        means = (torch.stack([getattr(t, name) for t in totals]).mean() for name in Scores.__dataclass_fields__)
        print(f"speech tokenizer held out, {name} ({len(totals)} utterances): {_line(Scores(*means))}", flush=True)


def export(model: SpeechTokenizer, folder: Path, data: Shards) -> None:
    """Write the ONNX file; ValueError unless both give the same ids on 50 utterances, padded or not."""
    model = model.cpu().eval()
    example = (torch.randn(1, 128, 300), torch.tensor([300], dtype=torch.int32))
    path = folder / ONNX_FILE
    inputs, outputs = {"feats": {2: "frames"}, "feats_length": {}}, {"indices": {1: "tokens"}}
    export_fp16(model, example, path, inputs, outputs)
    chosen = (data.held_out + data.train)[:50]
    cases = [_example(np.asarray(utterance.wave)) for utterance in data.utterances(chosen)]
    agreement = compare(model, path, cases)
    padded = _padded_agreement(model, cases)
    print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, ONNX agrees {agreement:.5f}, padded agrees {padded:.5f}")
    if min(agreement, padded) < 0.999:
        raise ValueError(f"ids differ: ONNX agrees in {agreement:.5f}, padded in {padded:.5f}, at least 0.999 is due")


def _example(wave: NDArray[np.int16]) -> tuple[Tensor, Tensor]:
    logmel = whisper_logmel(resample(torch.from_numpy(wave.astype(np.float32) / 32768)[None], 24_000, RATE_HZ))
    return logmel, torch.tensor([logmel.shape[2]], dtype=torch.int32)


@torch.no_grad()
def _padded_agreement(model: SpeechTokenizer, cases: list[tuple[Tensor, Tensor]]) -> float:
    longest = max(int(length) for _, length in cases)
    logmels = torch.cat([F.pad(logmel, (0, longest - logmel.shape[2]), value=0.3) for logmel, _ in cases])
    ids = model(logmels, torch.cat([length for _, length in cases]))
    same = [(model(*case)[0] == row[: (int(case[1]) + 3) // 4]).float() for case, row in zip(cases, ids, strict=True)]
    return float(torch.cat(same).mean())


def read_model(folder: Path, device: torch.device, name: str = MODEL_FILE) -> SpeechTokenizer:
    """The frozen model of a data folder."""
    saved = torch.load(folder / name, weights_only=True)
    model = SpeechTokenizer(**saved["shape"])
    model.load_state_dict(saved["state"])
    return model.to(device).eval()


def recovered(path: Path) -> SpeechTokenizer:
    """The module that an ONNX file was exported from; RuntimeError if it holds other weights."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(path)).graph
    held = {entry.name.removesuffix(".half"): numpy_helper.to_array(entry) for entry in graph.initializer}
    state = {name: torch.from_numpy(value.astype(np.float32)) for name, value in held.items()}
    for node in graph.node:  # a linear layer's matrix has lost its name to the product, which is named for the layer
        if node.op_type == "MatMul" and node.input[1] in held:
            layer = ".".join(part.split(".")[-1] if "ff." in part else part for part in node.name.split("/")[1:-1])
            state[f"{layer}.weight"] = state.pop(node.input[1]).T.contiguous()
    num_blocks = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    model = SpeechTokenizer(len(state["norm.weight"]), num_blocks)
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def tokenise_shard(model: SpeechTokenizer, shard: Shard, device: torch.device) -> list[NDArray[np.int16]]:
    """Ids of every utterance of a shard, in float32, in batches of like lengths."""
    wave = wave_16k(shard.wave, device)
    num_units = np.diff(shard.units)
    order = np.argsort(num_units, kind="stable")
    tokens: list[NDArray[np.int16]] = [np.zeros(0, np.int16)] * len(shard)
    for rows in np.array_split(order, max(1, len(order) // 128)):
        longest = int(num_units[rows].max())
        block = torch.zeros(len(rows), longest, UNIT_16K, device=device)
        for place, row in enumerate(rows):
            block[place, : num_units[row]] = wave[shard.units_of(int(row))].float() / 32768
        lengths = torch.from_numpy(num_units[rows] * 5 // 2).to(device, torch.int32)
        ids = model(whisper_logmel(block.flatten(1)), lengths).to(torch.int16).cpu().numpy()
        for place, row in enumerate(rows):
            tokens[row] = ids[place, : num_tokens(int(num_units[row]))]
    return tokens


def num_tokens(units: int) -> int:
    """Tokens kept for an utterance: no more than there are pairs of prompt-mel frames."""
    return min(units * UNIT_SAMPLES // MEL_HOP // 2, (units * 5 // 2 + 3) // 4)


def tokenise(folder: Path, device: torch.device, follow: bool, idle_s: float) -> None:
    """Tokenise the shards that have no tokens yet; with ``follow``, go on until none has come for ``idle_s``."""
    while not (folder / MODEL_FILE).exists():
        time.sleep(1)
    model = read_model(folder, device)
    last = start = time.monotonic()
    num_done, num_ids = 0, 0
    while True:
        shards = sorted(folder.glob("shard-*.npz"), reverse=True)  # Kokoro's first: training waits for them
        waiting = [path for path in shards if not path.with_name(path.name.replace("shard", "tokens")).exists()]
        for path in waiting:
            shard = read_shard(path)
            tokens = tokenise_shard(model, shard, device)
            write_tokens(folder, shard.number, tokens)
            num_done, num_ids, last = num_done + 1, num_ids + sum(map(len, tokens)), time.monotonic()
        if waiting:
            print(f"tokenised {num_done} shards, {num_ids} ids, {last - start:.0f} s", flush=True)
        if not follow or time.monotonic() - last > idle_s:
            return
        time.sleep(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=("train", "tokenise", "recover"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds of training")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds without a new shard that end --follow")
    args = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # resampling and the ids want all of float32
    if args.stage == "tokenise":
        tokenise(args.data, args.device, args.follow, args.idle)
        return
    if args.stage == "recover":
        save(recovered(args.data / ONNX_FILE), args.data)
        return
    model = train(args.data, args.budget, args.device, TOY if args.toy else Plan())
    export(model, args.data, Shards(args.data))


if __name__ == "__main__":
    main()
