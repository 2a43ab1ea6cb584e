"""Train the vocoder: spectral losses at first, then adversarially, on true mels.

Crops begin with empty contexts, as serving does; the loss looks at the middle of a crop, but for those that begin or
end with their utterance. The excitation follows the teacher's F0 in ever fewer rows, the predicted one in the others.
A step is several thousand small kernels, so on CUDA it is captured once and replayed.

B rows, F mel frames of 20 ms, S = 480 F samples.
"""

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.conditioning import MEL_MARGIN, log_mel
from engine.hift import FRAME_SAMPLES, NUM_HARMONICS, Hift, HiftShape, Snake
from engine.training.adversaries import Adversaries, fooling_loss, judge_loss, magnitude, matching_loss
from engine.training.data import Shards
from engine.training.pace import (
    SAVE_EVERY_S,
    Ema,
    Stage,
    Ticker,
    guarded,
    resume,
    run_stage,
    save_half,
    stage_from_arguments,
)
from engine.training.resident import Crops, Waves

SHAPE = HiftShape(base=128, f0_channels=128, tone_steps=FRAME_SAMPLES)
FRAMES, JUDGED = 32, 24
ROWS = 32
MEL_WEIGHT, STFT_WEIGHT, MATCH_WEIGHT, PITCH_WEIGHT = 45.0, 2.0, 2.0, 1.0
PLAIN, PLAIN_STEPS = 0.1, 100  # share of the budget before the judges join; steps of an earlier vocoder before they do
TEACHER_PITCH = 0.3  # share of the budget in which some rows take their excitation from the teacher
PEAK_RATE, FLOOR_RATE = 4e-4, 1e-5
TONE_WEIGHT = 2.0
JUDGES = "judges.safetensors"
Losses = dict[str, Tensor]
RESOLUTIONS = ((512, 128), (1024, 256), (2048, 512))


def initialise(hift: Hift) -> None:
    """Quiet output, a loud excitation and an F0 near 120 Hz to begin with.

    The nine tones add up to a pulse that the tanh bends, which gives harmonics far above the ninth; from torch's own
    small weights it would take the longest to learn that. Their signs change so that the means of the noises cancel.
    """
    with torch.no_grad():
        merge = hift.m_source.l_linear
        merge.weight[0] = TONE_WEIGHT * (1 - 2 * (torch.arange(NUM_HARMONICS, device=merge.weight.device) % 2))
        merge.bias.zero_()
        hift.conv_post.weight.mul_(0.3)
        assert hift.conv_post.bias is not None
        hift.conv_post.bias[:9] = -2.0
        hift.f0_predictor.classifier.weight.mul_(20.0)
        hift.f0_predictor.classifier.bias.fill_(120.0)


def voice(hift: Hift, mel: Tensor, f0: Tensor) -> Tensor:
    """The wave [B, 480 F] of mels [B, 80, F] with the excitation of f0 [B, F] and fresh noise."""
    noise = torch.rand(len(mel), mel.shape[2] * FRAME_SAMPLES, 9, device=mel.device)
    return hift.decode(mel, hift.source(f0, noise))


class Spectra(nn.Module):
    """Mel and multi-resolution STFT distances between waves [B, S]."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.windows = [torch.hann_window(n_fft, device=device) for n_fft, _ in RESOLUTIONS]

    def mel(self, fake: Tensor, real: Tensor) -> Tensor:
        """Mean absolute difference of log-mels, in nat."""
        fakes, reals = (log_mel(F.pad(w, (MEL_MARGIN, MEL_MARGIN), mode="reflect")) for w in (fake, real))
        return (fakes - reals).abs().mean()

    def stft(self, fake: Tensor, real: Tensor) -> Tensor:
        """Spectral convergence plus log-magnitude distance, mean over three resolutions."""
        terms = []
        for (n_fft, hop), window in zip(RESOLUTIONS, self.windows, strict=True):
            a, b = (magnitude(w, n_fft, hop, window) for w in (fake, real))
            convergence = torch.linalg.vector_norm(b - a) / torch.linalg.vector_norm(b).clamp(min=1e-3)
            terms.append(convergence + (a.clamp(min=1e-4).log() - b.clamp(min=1e-4).log()).abs().mean())
        return torch.stack(terms).mean()


def noisy(mel: Tensor) -> Tensor:
    """Half of the rows get noise of 0..0.3 nat: the flow's mels are not perfect either."""
    amount = torch.rand(len(mel), 2, device=mel.device)
    scale = torch.where(amount[:, 0] < 0.5, amount[:, 1] * 0.3, 0.0)
    return mel + scale[:, None, None] * torch.randn_like(mel)


def pitch_loss(guess: Tensor, truth: Tensor) -> Tensor:
    """Mean absolute F0 difference in Hz, scaled so that 10 Hz count as 1."""
    return (guess - truth).abs().mean() / 10


def cut(wave: Tensor, first_frame: Tensor) -> Tensor:
    """The judged part of each row: [B, S] -> [B, 480 JUDGED]."""
    at = first_frame[:, None] * 480 + torch.arange(JUDGED * 480, device=wave.device)
    return wave.gather(1, at)


class Trainer:
    """Generator, judges and their optimisers."""

    def __init__(self, stage: Stage, hift: Hift, spectra: Spectra) -> None:
        self.stage, self.hift, self.spectra = stage, hift, spectra
        self.judges = Adversaries(share=0.1 if stage.is_toy else 1.0).to(stage.device)
        self.by_teacher = torch.zeros((), device=stage.device)  # share of rows that take the teacher's F0
        slow = [p for n, p in hift.named_parameters() if not n.startswith("f0_predictor.")]
        pitch_body = [p for n, p in hift.named_parameters() if n.startswith("f0_predictor.condnet")]
        pitch_head = [p for n, p in hift.named_parameters() if n.startswith("f0_predictor.classifier")]
        self.making = self._optimiser({1.0: slow, 2.0: pitch_body, 10.0: pitch_head})
        self.judging = self._optimiser({1.0: list(self.judges.parameters())})

    def _optimiser(self, by_scale: dict[float, list[nn.Parameter]]) -> torch.optim.AdamW:
        """Rates are tensors: a captured step reads them anew."""
        is_cuda = self.stage.device.type == "cuda"
        groups = [
            {"params": params, "scale": scale, "lr": torch.tensor(0.0, device=self.stage.device)}
            for scale, params in by_scale.items()
        ]
        return torch.optim.AdamW(groups, betas=(0.8, 0.99), weight_decay=1e-3, fused=is_cuda, capturable=is_cuda)

    def pace(self, rate: float, by_teacher: float) -> None:
        """Learning rate and share of the teacher's F0 from the next step on."""
        self.by_teacher.fill_(by_teacher)
        for group in (*self.making.param_groups, *self.judging.param_groups):
            group["lr"].fill_(rate * group["scale"])

    def make(self, crops: Crops) -> tuple[Tensor, Tensor]:
        """Judged part of the generated wave [B, S'] and the pitch loss."""
        mel = noisy(crops.mel)
        guess = self.hift.f0(mel, dtype=torch.float32)
        away = crops.first_frame[:, None] + JUDGED  # the look-ahead of the last frames is not there unless the end is
        counted = torch.arange(FRAMES, device=mel.device) < away
        loss = pitch_loss(guess * counted, crops.f0 * counted)
        is_given = torch.rand(len(mel), 1, device=mel.device) < self.by_teacher
        f0 = torch.where(is_given, crops.f0, guess.detach())
        return cut(voice(self.hift, mel, f0), crops.first_frame), loss

    def step(self, crops: Crops, *, is_judged: bool) -> Losses:
        """One step of the generator and, with judges, of them too: both from one look of the judges at the waves."""
        real = cut(crops.wave, crops.first_frame)
        fake, pitch_term = self.make(crops)
        losses = {"pitch": pitch_term, "mel": self.spectra.mel(fake, real), "stft": self.spectra.stft(fake, real)}
        total = PITCH_WEIGHT * losses["pitch"] + MEL_WEIGHT * losses["mel"] + STFT_WEIGHT * losses["stft"]
        if is_judged:
            # A captured step must not keep casts of weights from an earlier one; their norms are taken once.
            with self.stage.autocast(), nn.utils.parametrize.cached():
                torch.set_autocast_cache_enabled(False)
                reals, fakes = self.judges(real), self.judges(fake)
            losses["judge"] = judge_loss(reals, fakes)
            losses["fool"], losses["match"] = fooling_loss(fakes), matching_loss(reals, fakes)
            total = total + losses["fool"] + MATCH_WEIGHT * losses["match"]
            self._learn(self.judging, losses["judge"], 50.0, more=True)
        losses["norm"] = self._learn(self.making, total, 500.0)
        return {name: loss.detach() for name, loss in losses.items()}

    def _learn(self, opt: torch.optim.AdamW, loss: Tensor, limit: float, *, more: bool = False) -> Tensor:
        """Gradients of an optimiser's own parameters, and their step -> the norm. `more`: another loss follows."""
        params = [p for group in opt.param_groups for p in group["params"]]
        opt.zero_grad(set_to_none=True)
        loss.backward(inputs=params, retain_graph=more)
        norm = nn.utils.clip_grad_norm_(params, limit)
        opt.step()
        return norm


def captured(trainer: Trainer, example: Crops, *, is_judged: bool) -> Callable[[Crops], Losses]:
    """The step as one graph over fixed crops. Three steps are taken on the way."""
    fixed = example.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            trainer.step(fixed, is_judged=is_judged)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        losses = trainer.step(fixed, is_judged=is_judged)

    def replay(crops: Crops) -> Losses:
        fixed.copy_(crops)
        graph.replay()
        return {name: loss.clone() for name, loss in losses.items()}

    return replay


def stepper(trainer: Trainer, example: Crops, *, is_judged: bool) -> Callable[[Crops], Losses]:
    """The captured step; on the CPU, or where capture fails, the step as it is."""

    def eager(crops: Crops) -> Losses:
        return trainer.step(crops, is_judged=is_judged)

    if trainer.stage.device.type != "cuda":
        return eager
    log, began = trainer.stage.log, time.perf_counter()
    made = guarded(lambda: captured(trainer, example, is_judged=is_judged), 90, log, "capturing the step")
    if made is None:
        return eager
    log.info("captured the step, is_judged %s, in %.1f s", is_judged, time.perf_counter() - began)
    return made  # type: ignore[return-value]


def wait_for_shards(stage: Stage, waves: Waves, least: int) -> Shards:
    """The shards, once there are enough utterances to begin."""
    shards = Shards(stage.data)
    waves.take(shards)
    while len(waves) < least and not stage.budget.is_over:
        stage.log.info("waiting for shards: %d utterances", len(waves))
        time.sleep(2.0)
        shards.refresh()
        waves.take(shards)
    return shards


def snake(x: Tensor, alpha: Tensor) -> Tensor:
    """What engine.hift.Snake computes, as a function that a compiler can fuse."""
    wave = torch.sin(x * alpha[:, None])
    return x + wave * wave * (1 / (alpha[:, None] + 1e-9))


def fuse(hift: Hift, stage: Stage) -> None:
    """Compile the snake activations, the bulk of the memory traffic; if that fails or is slow they stay as they are."""
    compiled = torch.compile(snake, dynamic=True)

    def attempt() -> bool:
        for module in hift.modules():
            if isinstance(module, Snake):
                x = torch.randn(2, module.alpha.numel(), 480, device=stage.device, requires_grad=True)
                compiled(x, module.alpha).sum().backward()
        return True

    if guarded(attempt, 45, stage.log, "compiling the activations"):
        Snake.forward = lambda self, x: compiled(x, self.alpha)  # type: ignore[method-assign]
        stage.log.info("compiled the activations")
    hift.zero_grad(set_to_none=True)


def train(stage: Stage) -> None:
    """Train until the deadline; EMA to out/hift.safetensors, the judges beside it for the next time."""
    torch.backends.cuda.matmul.allow_tf32 = False  # the small transforms end in the wave; the convolutions may
    hift = Hift(SHAPE).to(stage.device)
    initialise(hift)
    is_resumed = resume(hift, stage.out / "hift.safetensors", stage.log)
    waves = Waves(stage.device, frames=FRAMES, judged=JUDGED, hours=0.2 if stage.is_toy else 60.0)
    shards = wait_for_shards(stage, waves, 8 if stage.is_toy else 1000)
    held_out = Waves(stage.device, frames=FRAMES, judged=JUDGED, hours=0.2 if stage.is_toy else 2.0, are_held_out=True)
    held_out.take(shards)
    if stage.compile:
        fuse(hift, stage)
    trainer = Trainer(stage, hift, Spectra(stage.device))
    is_met = resume(trainer.judges, stage.out / JUDGES, stage.log)
    ema = Ema(hift, 0.999)
    ticker = Ticker(stage.log, stage.budget)
    saved = refreshed = stage.budget.clock()
    rows = 2 if stage.is_toy else ROWS
    step, was_judged = None, False
    while not stage.budget.is_over:
        spent, num_steps = stage.budget.spent, ticker.total_steps
        rate = stage.budget.rate(num_steps, peak=PEAK_RATE, floor=FLOOR_RATE)
        trainer.pace(rate, max(0.0, 1 - spent / TEACHER_PITCH))
        crops = waves.crops(rows)
        is_judged = is_met or (num_steps > PLAIN_STEPS if is_resumed else spent > PLAIN)
        if step is None or is_judged != was_judged:
            step, was_judged = stepper(trainer, crops, is_judged=is_judged), is_judged
        losses = step(crops)
        ema.update()
        logged = ticker.add(**losses)
        if logged and stage.budget.clock() - saved > SAVE_EVERY_S:
            save(trainer, ema)
            saved = stage.budget.clock()
        if logged and stage.budget.clock() - refreshed > 30:
            refreshed = stage.budget.clock()
            if shards.refresh():
                waves.take(shards)
                stage.log.info("now %d utterances", len(waves))
            tell_held_out(trainer, ema, held_out)
    tell_held_out(trainer, ema, held_out)
    save(trainer, ema)


def tell_held_out(trainer: Trainer, ema: Ema, waves: Waves) -> None:
    """Logs the average's mel distance on the same crops of `waves` each time."""
    if not len(waves):
        return
    stage = trainer.stage
    with torch.no_grad(), torch.random.fork_rng(devices=[stage.device] if stage.device.type == "cuda" else []):
        torch.manual_seed(0)
        crops = waves.crops(2 if stage.is_toy else ROWS)
        with ema.applied():
            fake, _ = trainer.make(crops)
        mel = trainer.spectra.mel(fake, cut(crops.wave, crops.first_frame))
    stage.log.info("held out: mel %.4g", float(mel))


def save(trainer: Trainer, ema: Ema) -> None:
    out = trainer.stage.out
    with ema.applied():
        save_half(out / "hift.safetensors", trainer.hift.state_dict())
    save_half(out / JUDGES, trainer.judges.state_dict())


if __name__ == "__main__":
    stage = stage_from_arguments("train_hift")
    sys.exit(run_stage(stage, train))
