"""Train the flow: conditional flow matching on true tokens and true mels.

Half of the batches see the 50-frame chunk mask, half see everything. Noise is fresh for every batch (serving keeps one
fixed draw). A row is a cut of one speaker's stream, so that prompt and continuation are usually different utterances.

B rows, T mel frames, N = T / 2 tokens.
"""

import math
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
TOKENS = (152, 248, 248, 496)  # row lengths drawn from; frames are multiples of 16 for the attention kernels


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


def loss_of(flow: Flow, batch: Spans, speakers: Tensor, *, causal: bool, to_end: bool) -> Tensor:
    """Squared error of the velocity at a random time, in nat^2. speakers [labels, several, 192]: one is drawn a row."""
    rows, frames = batch.mel.shape[:2]
    device = batch.mel.device
    target = batch.mel.transpose(1, 2)  # [B, 80, T]
    which = torch.randint(speakers.shape[1], (rows,), device=device)
    embedding = F.normalize(speakers[batch.speaker, which], dim=1)
    embedding = embedding + torch.randn_like(embedding) * (0.15 / embedding.shape[1] ** 0.5)
    mu, spk = flow.conditioning(batch.tokens, embedding, finalize=to_end)
    share = torch.rand(rows, 4, device=device)
    prompt = torch.where(share[:, 0] < PROMPTED, share[:, 1] * 0.45 * frames, 0.0)
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
    for rows, num_tokens in ((105, 152), (64, 248)) if stage.compile else ():
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
    frames_a_batch = 1200 if stage.is_toy else 32000
    while not stage.budget.is_over:
        set_rate(opt, stage.budget.rate(ticker.total_steps, peak=1e-3, floor=1e-5))
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
