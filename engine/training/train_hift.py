"""Train the vocoder: spectral losses at first, then adversarially, on true mels.

Crops begin with empty contexts, as serving does; the loss looks at the middle of a crop, but for those that begin or
end with their utterance. The excitation follows the teacher's F0 for the first minutes and the predicted F0 after.

B rows, F mel frames of 20 ms, S = 480 F samples.
"""

import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.conditioning import MEL_MARGIN, log_mel
from engine.hift import FRAME_SAMPLES, Hift, HiftShape, Snake
from engine.training.adversaries import Adversaries, fooling_loss, judge_loss, magnitude, matching_loss
from engine.training.data import Shards
from engine.training.pace import (
    SAVE_EVERY_S,
    Ema,
    Stage,
    Ticker,
    guarded,
    optimiser,
    resume,
    run_stage,
    save_half,
    set_rate,
    stage_from_arguments,
)
from engine.training.resident import Crops, Waves

SHAPE = HiftShape(base=128, f0_channels=128)
FRAMES, JUDGED = 60, 50
MEL_WEIGHT, STFT_WEIGHT, MATCH_WEIGHT, PITCH_WEIGHT = 45.0, 2.0, 2.0, 1.0
PLAIN = 0.1  # share of the budget before the judges join
TEACHER_PITCH = 0.06  # share of the budget that takes its excitation from the teacher
RESOLUTIONS = ((512, 128), (1024, 256), (2048, 512))


def initialise(hift: Hift) -> None:
    """Quiet output and an F0 near 120 Hz to begin with."""
    with torch.no_grad():
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
        self.judges = Adversaries(share=0.05 if stage.is_toy else 0.5).to(stage.device)
        slow = [p for n, p in hift.named_parameters() if not n.startswith("f0_predictor.")]
        pitch_body = [p for n, p in hift.named_parameters() if n.startswith("f0_predictor.condnet")]
        pitch_head = [p for n, p in hift.named_parameters() if n.startswith("f0_predictor.classifier")]
        groups: list[dict[str, object]] = [
            {"params": slow, "scale": 1.0},
            {"params": pitch_body, "scale": 2.0},
            {"params": pitch_head, "scale": 10.0},
        ]
        self.making = optimiser(groups, (0.8, 0.99), 1e-3, stage.device)
        self.judging = optimiser(list(self.judges.parameters()), (0.8, 0.99), 1e-3, stage.device)

    def make(self, crops: Crops, *, by_teacher: bool) -> tuple[Tensor, Tensor]:
        """Judged part of the generated wave [B, S'] and the pitch loss."""
        mel = noisy(crops.mel)
        guess = self.hift.f0(mel, dtype=torch.float32)
        away = crops.first_frame[:, None] + JUDGED  # the look-ahead of the last frames is not there unless the end is
        counted = torch.arange(FRAMES, device=mel.device) < away
        loss = pitch_loss(guess * counted, crops.f0 * counted)
        f0 = crops.f0 if by_teacher else guess.detach()
        return cut(voice(self.hift, mel, f0), crops.first_frame), loss

    def step(self, crops: Crops, *, by_teacher: bool, is_judged: bool) -> dict[str, Tensor]:
        real = cut(crops.wave, crops.first_frame)
        fake, pitch_term = self.make(crops, by_teacher=by_teacher)
        losses = {"pitch": pitch_term, "mel": self.spectra.mel(fake, real), "stft": self.spectra.stft(fake, real)}
        total = PITCH_WEIGHT * losses["pitch"] + MEL_WEIGHT * losses["mel"] + STFT_WEIGHT * losses["stft"]
        if is_judged:
            losses["judge"] = self._judge(real, fake.detach())
            self.judges.requires_grad_(False)
            with self.stage.autocast():
                with torch.no_grad():
                    reals = self.judges(real)
                fakes = self.judges(fake)
            self.judges.requires_grad_(True)
            losses["fool"], losses["match"] = fooling_loss(fakes), matching_loss(reals, fakes)
            total = total + losses["fool"] + MATCH_WEIGHT * losses["match"]
        self.making.zero_grad(set_to_none=True)
        total.backward()
        losses["norm"] = nn.utils.clip_grad_norm_(self.hift.parameters(), 500.0)
        self.making.step()
        return losses

    def _judge(self, real: Tensor, fake: Tensor) -> Tensor:
        with self.stage.autocast():
            both = self.judges(torch.cat([real, fake]))
        half = len(real)
        reals = [(score[:half], []) for score, _ in both]
        fakes = [(score[half:], []) for score, _ in both]
        loss = judge_loss(reals, fakes)  # type: ignore[arg-type]
        self.judging.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.judges.parameters(), 50.0)
        self.judging.step()
        return loss


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
    """Train until the deadline; EMA to out/hift.safetensors."""
    torch.backends.cuda.matmul.allow_tf32 = False  # the small transforms end in the wave; the convolutions may
    hift = Hift(SHAPE).to(stage.device)
    initialise(hift)
    resumed = resume(hift, stage.out / "hift.safetensors", stage.log)
    waves = Waves(stage.device, frames=FRAMES, judged=JUDGED, hours=0.2 if stage.is_toy else 60.0)
    shards = wait_for_shards(stage, waves, 8 if stage.is_toy else 1000)
    if stage.compile:
        fuse(hift, stage)
    trainer = Trainer(stage, hift, Spectra(stage.device))
    ema = Ema(hift, 0.999)
    ticker = Ticker(stage.log, stage.budget)
    saved = refreshed = stage.budget.clock()
    rows = 2 if stage.is_toy else 32
    while not stage.budget.is_over:
        spent = stage.budget.spent
        rate = stage.budget.rate(ticker.total_steps, peak=4e-4, floor=1e-5)
        set_rate(trainer.making, rate)
        set_rate(trainer.judging, rate)
        is_judged = spent > PLAIN and (not resumed or ticker.total_steps > 100)
        losses = trainer.step(waves.crops(rows), by_teacher=spent < TEACHER_PITCH, is_judged=is_judged)
        ema.update()
        logged = ticker.add(**losses)
        if logged and stage.budget.clock() - saved > SAVE_EVERY_S:
            save(hift, ema, stage)
            saved = stage.budget.clock()
        if logged and stage.budget.clock() - refreshed > 30:
            refreshed = stage.budget.clock()
            if shards.refresh():
                waves.take(shards)
                stage.log.info("now %d utterances", len(waves))
    save(hift, ema, stage)


def save(hift: Hift, ema: Ema, stage: Stage) -> None:
    with ema.applied():
        save_half(stage.out / "hift.safetensors", hift.state_dict())


if __name__ == "__main__":
    stage = stage_from_arguments("train_hift")
    sys.exit(run_stage(stage, train))
