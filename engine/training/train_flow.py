"""Train the flow: conditional flow matching on true tokens and true mels.

Half of the batches see the 50-frame chunk mask, half see everything. Noise is fresh for every batch (serving keeps one
fixed draw). A row is a cut of one speaker's stream, so that prompt and continuation are usually different utterances.
Many rows with a prompt are disguised as a speaker that no vector names, some bear the vector of another, so that the
prompt is what a voice is taken from: a model of this size otherwise learns its speakers by heart and hears the nearest
of them in a stranger.

B rows, T mel frames, N = T / 2 tokens.
"""

import math
import sys
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.conditioning import MEL_RATE_HZ, slaney_filters
from engine.flow import Flow, FlowShape
from engine.training.data import Shards, read_speakers
from engine.training.pace import (
    SAVE_EVERY_S,
    Ema,
    Stage,
    Ticker,
    decayed,
    fuse_layers,
    optimiser,
    resume,
    run_stage,
    save_half,
    set_rate,
    stage_from_arguments,
)
from engine.training.resident import Spans, Streams

SHAPE = FlowShape(dim=192, depth=8, heads=3, head_dim=64, ff=384, lookahead_channels=256)
SIGMA_MIN = 1e-6
UNGUIDED = 0.2  # share of rows trained without mu, speaker and prompt, for classifier-free guidance
PROMPTED = 0.75
LONGEST_PROMPT = 0.55  # of a row
DISGUISED = 0.85  # share of the rows whose prompt is at least a third of the longest
WARPED = 0.6  # share of these whose frequencies are moved too
WARP = 0.17  # largest |log| of the ratio
COLOURS, COLOUR = 7, 0.45  # cosines over the mel bins, and the deviation in nat of the strongest
MISNAMED = 0.4  # share of the disguised rows that bear the vector of another row
VAGUE = 0.7  # most that a random vector adds to that of a disguised row, beside its own length of 1
FLOOR = math.log(1e-5)
TOKENS = (152, 152, 248, 248, 496)  # row lengths drawn from; frames are multiples of 16 for the attention kernels
FRAMES = {"cuda": 32_000, "cpu": 4_800}  # of a batch
PEAK = {"cuda": 1e-3, "cpu": 3e-4}  # learning rate; two cores with AMX make three steps a second


def initialise(flow: Flow) -> None:
    """Every block starts as the identity and the velocity as zero, as is usual for a DiT."""
    estimator = flow.estimator
    for block in estimator.transformer_blocks:
        nn.init.zeros_(block.attn_norm["linear"].weight)
        nn.init.zeros_(block.attn_norm["linear"].bias)
    for layer in (estimator.norm_out["linear"], estimator.proj_out):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


def densify(conv: nn.Conv1d) -> None:
    """Run a grouped convolution as a dense one over the block-diagonal weight: on GPUs grouped gradients are slow."""

    def forward(x: Tensor) -> Tensor:
        groups = conv.groups
        weight = conv.weight.view(groups, -1, *conv.weight.shape[1:])
        eye = torch.eye(groups, device=x.device, dtype=weight.dtype)
        dense = torch.einsum("goik,gh->gohik", weight, eye).reshape(conv.out_channels, conv.in_channels, -1)
        return F.conv1d(x, dense, conv.bias)

    conv.forward = forward  # type: ignore[method-assign]


@lru_cache
def mel_centres(device: torch.device) -> Tensor:
    """Hz of the 80 mel bins."""
    filters = torch.from_numpy(slaney_filters(MEL_RATE_HZ, 1920, SHAPE.mel)).to(device)
    return filters @ torch.linspace(0, MEL_RATE_HZ / 2, filters.shape[1], device=device) / filters.sum(1)


def warped_mel(mel: Tensor, ratio: Tensor) -> Tensor:
    """Log-mels [B, 80, T] with their frequencies times ratio [B], which moves pitch and formants."""
    centres = mel_centres(mel.device)
    wanted = centres / ratio[:, None]
    high = torch.bucketize(wanted, centres).clamp(1, len(centres) - 1)
    part = ((wanted - centres[high - 1]) / (centres[high] - centres[high - 1])).clamp(0, 1)
    below, above = (mel.gather(1, index[:, :, None].expand_as(mel)) for index in (high - 1, high))
    return torch.lerp(below, above, part[:, :, None])


def colour(rows: int, bins: int, device: torch.device) -> Tensor:
    """Random smooth equalisers in nat, [rows, bins]."""
    order = torch.arange(1, COLOURS + 1, device=device)
    place = (torch.arange(bins, device=device) + 0.5) / bins
    phase = torch.rand(rows, COLOURS, 1, device=device) * math.pi
    weight = torch.randn(rows, COLOURS, 1, device=device) * COLOUR
    return (weight * torch.cos(math.pi * order[:, None] * place + phase)).sum(1)


def disguised(mel: Tensor, embedding: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen rows [B] of mel [B, 80, T] in voices of their own, of embedding [B, 192] named vaguely or wrongly."""
    rows = len(mel)
    device = mel.device
    ratio = torch.exp((2 * torch.rand(rows, device=device) - 1) * WARP)
    ratio = torch.where(chosen & (torch.rand(rows, device=device) < WARPED), ratio, 1.0)
    tint = colour(rows, mel.shape[1], device) * (torch.rand(rows, device=device) * chosen)[:, None]
    is_misnamed = chosen & (torch.rand(rows, device=device) < MISNAMED)
    name = torch.where(is_misnamed[:, None], embedding.roll(1, 0), embedding)
    vagueness = VAGUE * torch.rand(rows, 1, device=device) * chosen[:, None]
    other = F.normalize(torch.randn_like(embedding), dim=1)
    return (warped_mel(mel, ratio) + tint[:, :, None]).clamp(min=FLOOR), name + vagueness * other


def loss_of(flow: Flow, batch: Spans, speakers: Tensor, *, causal: bool, to_end: bool) -> Tensor:
    """Squared error of the velocity at a random time, in nat^2. speakers [labels, several, 192]: one is drawn a row."""
    rows, frames = batch.mel.shape[:2]
    device = batch.mel.device
    target = batch.mel.transpose(1, 2)  # [B, 80, T]
    which = torch.randint(speakers.shape[1], (rows,), device=device)
    embedding = F.normalize(speakers[batch.speaker, which], dim=1)
    embedding = embedding + torch.randn_like(embedding) * (0.15 / embedding.shape[1] ** 0.5)
    share = torch.rand(rows, 5, device=device)
    prompt = torch.where(share[:, 0] < PROMPTED, share[:, 1] * LONGEST_PROMPT * frames, 0.0)
    chosen = (prompt > LONGEST_PROMPT / 3 * frames) & (share[:, 4] < DISGUISED)
    target, embedding = disguised(target, embedding, chosen)
    mu, spk = flow.conditioning(batch.tokens, embedding, finalize=to_end)
    shown = torch.arange(frames, device=device) < prompt[:, None]
    cond = target * shown[:, None]
    keep = (share[:, 2] >= UNGUIDED).float()[:, None, None]
    t = 1 - torch.cos(share[:, 3] * 0.5 * math.pi)
    noise = torch.randn_like(target)
    when = t[:, None, None]
    x = (1 - (1 - SIGMA_MIN) * when) * noise + when * target
    velocity = target - (1 - SIGMA_MIN) * noise
    mask = flow.chunk_mask(frames) if causal else None
    guess = flow.estimate(x, mu * keep, spk * keep[:, :, 0], cond * keep, t, mask)
    return F.mse_loss(guess.float(), velocity)


def rehearse(flow: Flow, stage: Stage) -> None:
    """Compile before the data are there: a step each on noise, of two shapes, with and without the chunk mask."""
    speakers = torch.randn(1, 1, SHAPE.speaker, device=stage.device)
    for rows, num_tokens in ((105, 152), (64, 248)) if stage.compile and stage.device.type == "cuda" else ():
        for causal, to_end in ((True, False), (False, True)):
            made = Spans(
                tokens=torch.randint(
                    6561, (rows, num_tokens + (0 if to_end else SHAPE.lookahead)), device=stage.device
                ),
                mel=torch.randn(rows, 2 * num_tokens, SHAPE.mel, device=stage.device),
                speaker=torch.zeros(rows, dtype=torch.long, device=stage.device),
            )
            with stage.autocast():
                loss = loss_of(flow, made, speakers, causal=causal, to_end=to_end)
            loss.backward()
            flow.zero_grad(set_to_none=True)
        stage.log.info("rehearsed %d rows of %d tokens", rows, num_tokens)


def trained_vectors(stage: Stage) -> Tensor:
    return torch.from_numpy(read_speakers(stage.data)).to(stage.device)


def train(stage: Stage) -> None:
    """Train until the deadline; EMA to out/flow.safetensors."""
    flow = Flow(SHAPE).to(stage.device)
    initialise(flow)
    if stage.device.type == "cuda":
        for conv in (
            flow.estimator.input_embed.conv_pos_embed.conv1[0],
            flow.estimator.input_embed.conv_pos_embed.conv2[0],
        ):
            densify(conv)  # type: ignore[arg-type]
    fuse_layers(stage, flow.estimator.transformer_blocks)
    rehearse(flow, stage)
    stage.wait()
    resume(flow, stage.out / "flow.safetensors", stage.log)
    speakers = trained_vectors(stage)
    shards = Shards(stage.data)
    streams = Streams(stage.device, len(speakers))
    stage.log.info("took %d shards, %.2f h", streams.take(shards), streams.num_tokens / 90000)
    ema = Ema(flow, 0.9995)
    opt = optimiser(decayed(flow, 0.01), (0.9, 0.99), 0.01, stage.device)  # type: ignore[arg-type]
    dice = torch.Generator().manual_seed(stage.seed)
    ticker = Ticker(stage.log, stage.budget)
    saved = refreshed = stage.budget.clock()
    frames_a_batch = 1200 if stage.is_toy else FRAMES[stage.device.type]
    while not stage.budget.is_over:
        set_rate(opt, stage.budget.rate(ticker.total_steps, peak=PEAK[stage.device.type], floor=1e-5))
        length, causal, end = torch.rand(3, generator=dice).tolist()
        num_tokens = 40 if stage.is_toy else TOKENS[int(length * len(TOKENS))]
        to_end = end < 0.1
        rows = max(1, frames_a_batch // (2 * num_tokens))
        batch = streams.spans(rows, num_tokens, lookahead=0 if to_end else SHAPE.lookahead, to_end=to_end)
        with stage.autocast():
            loss = loss_of(flow, batch, speakers, causal=causal < 0.5, to_end=to_end)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(flow.parameters(), 1.0)
        opt.step()
        ema.update()
        logged = ticker.add(loss=loss, norm=norm)
        if logged and stage.budget.clock() - saved > SAVE_EVERY_S:
            save(flow, ema, stage)
            saved = stage.budget.clock()
        if logged and stage.budget.clock() - refreshed > 60 and stage.budget.spent < 0.75:
            refreshed = stage.budget.clock()
            shards.refresh()
            if more := streams.take(shards):
                stage.log.info("took %d more shards, %.2f h", more, streams.num_tokens / 90000)
    save(flow, ema, stage)


def save(flow: Flow, ema: Ema, stage: Stage) -> None:
    with ema.applied():
        # float16 would round the rotary frequencies; the loader computes them
        state = {name: value for name, value in flow.state_dict().items() if not name.endswith("inv_freq")}
        save_half(stage.out / "flow.safetensors", state)


if __name__ == "__main__":
    stage = stage_from_arguments("train_flow")
    sys.exit(run_stage(stage, train))
