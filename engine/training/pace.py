"""What every training stage shares: the clock that sets its learning rate, its averaged weights, its log and its files.

A stage never counts on a number of steps: it is given an absolute deadline and follows its schedule by the clock.
"""

import argparse
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SAVE_EVERY_S = 75.0
LOG_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Budget:
    """The time a stage has: from `start` to `deadline`, both in seconds since the epoch."""

    start: float
    deadline: float
    clock: Callable[[], float] = time.time

    @property
    def spent(self) -> float:
        """Share of the budget that has passed, 0..1."""
        return min(1.0, max(0.0, (self.clock() - self.start) / max(1e-9, self.deadline - self.start)))

    @property
    def is_over(self) -> bool:
        return self.clock() >= self.deadline

    def rate(self, step: int, *, peak: float, floor: float, warm_steps: int = 200) -> float:
        """Learning rate: a linear warm-up by steps since the (re)start, then a cosine of elapsed time to `floor`."""
        cosine = floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * self.spent))
        return cosine * min(1.0, (step + 1) / max(1, warm_steps))


class Ema:
    """Exponential average of a module's parameters, in float32 on its device."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self._steps = 0
        self._live = dict(module.named_parameters())
        self.shadow = {name: p.detach().clone() for name, p in self._live.items()}

    @torch.no_grad()
    def update(self) -> None:
        self._steps += 1
        decay = min(self.decay, (1 + self._steps) / (10 + self._steps))
        torch._foreach_lerp_(list(self.shadow.values()), [p.detach() for p in self._live.values()], 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The module carries the averaged weights inside the block."""
        kept = {name: p.detach().clone() for name, p in self._live.items()}
        self._write(self.shadow)
        try:
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        for name, p in self._live.items():
            p.copy_(values[name])


def save_half(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write float16 safetensors so that a reader sees the old file or the new one, never a part."""
    half = {k: v.detach().to("cpu", torch.float16).contiguous().clone() for k, v in tensors.items()}
    if bad := [k for k, v in half.items() if not torch.isfinite(v).all()]:
        raise FloatingPointError(f"{path.name}: {len(bad)} tensors are not finite in float16, first {bad[0]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file(half, str(part))
    part.replace(path)


def resume(module: nn.Module, path: Path, log: logging.Logger) -> bool:
    """Load an earlier average into the module if there is one of the same shape."""
    if not path.exists():
        return False
    state = {k: v.float() for k, v in load_file(str(path)).items()}
    own = module.state_dict()
    if any(k not in own or own[k].shape != v.shape for k, v in state.items()):
        log.info("weights of %s have another shape; starting afresh", path.name)
        return False
    module.load_state_dict(state, strict=False)
    log.info("resumed from %s", path.name)
    return True


class Ticker:
    """Logs a stage's means every ten seconds without waiting for the device on the steps between."""

    def __init__(self, log: logging.Logger, budget: Budget) -> None:
        self._log, self._budget = log, budget
        self._since = time.time()
        self._steps = 0
        self._sums: dict[str, Tensor] = {}
        self.total_steps = 0

    def add(self, **losses: Tensor) -> bool:
        """Add one step's losses; true when a line was logged (and the device therefore waited for)."""
        for name, value in losses.items():
            held = self._sums.get(name)
            self._sums[name] = value.detach().float() if held is None else held + value.detach().float()
        self._steps += 1
        self.total_steps += 1
        now = time.time()
        if now - self._since < LOG_EVERY_S:
            return False
        means = {name: float(total) / self._steps for name, total in self._sums.items()}
        now = time.time()
        text = " ".join(f"{name} {mean:.4g}" for name, mean in means.items())
        memory = f" mem {torch.cuda.max_memory_allocated() / 2**30:.1f}G" if torch.cuda.is_available() else ""
        self._log.info(
            "step %d spent %.3f %.2f it/s %s%s",
            self.total_steps, self._budget.spent, self._steps / (now - self._since), text, memory,
        )  # fmt: skip
        if not all(math.isfinite(mean) for mean in means.values()):
            raise FloatingPointError(f"a loss is not finite: {means}")
        self._since, self._steps, self._sums = now, 0, {}
        return True


class Alarm(Exception):
    """A guarded piece of work took longer than it may."""


def guarded(work: Callable[[], object], seconds: int, log: logging.Logger, name: str) -> object | None:
    """Run `work` for at most `seconds` (main thread only); its result, or None after a failure, which is logged."""

    def ring(_signal: int, _frame: object) -> None:
        raise Alarm(f"{name} took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        return work()
    except Exception as failure:  # a compiler may fail in any way; the stage goes on without it
        log.info("%s: %s: %s", name, type(failure).__name__, str(failure)[:300])
        return None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True, slots=True)
class Stage:
    """The arguments a stage runs under."""

    data: Path
    device: torch.device
    budget: Budget
    is_toy: bool
    log: logging.Logger
    seed: int = 0
    compile: bool = True
    awaited: Path | None = None  # a file that is there once there are data to train on

    def wait(self) -> None:
        """Until the awaited file is there or the time is up: what can be compiled before is compiled."""
        while self.awaited is not None and not self.awaited.exists() and not self.budget.is_over:
            time.sleep(0.5)

    @property
    def out(self) -> Path:
        return self.data / "out"

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=not self.is_toy)


def logger(name: str, data: Path) -> logging.Logger:
    log = logging.getLogger(name)
    log.setLevel(logging.INFO)
    folder = data / "log"
    folder.mkdir(parents=True, exist_ok=True)
    form = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
    for handler in (logging.FileHandler(folder / f"{name}.log"), logging.StreamHandler(sys.stdout)):
        handler.setFormatter(form)
        log.addHandler(handler)
    return log


def stage_from_arguments(name: str, arguments: list[str] | None = None) -> Stage:
    """Parse the command line every stage has; sets the device's global switches."""
    parser = argparse.ArgumentParser(prog=f"python -m engine.training.{name}")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--deadline", type=float, help="seconds since the epoch")
    parser.add_argument("--start", type=float, help="when the schedule began; earlier than now after a restart")
    parser.add_argument("--seconds", type=float, default=60.0, help="budget when no deadline is given")
    parser.add_argument("--toy", action="store_true", help="small batches and models, for a rehearsal on the CPU")
    parser.add_argument("--await", dest="awaited", type=Path, help="a file whose appearance says that data are there")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    start = given.start or time.time()
    deadline = given.deadline or start + given.seconds
    torch.manual_seed(given.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    device = torch.device(given.device)
    stage = Stage(
        data=given.data, device=device, budget=Budget(start, deadline), is_toy=given.toy,
        log=logger(name, given.data), seed=given.seed, compile=not given.no_compile and not given.toy,
        awaited=given.awaited,
    )  # fmt: skip
    stage.log.info("%s on %s for %.0f s, spent %.3f", name, device, deadline - time.time(), stage.budget.spent)
    return stage


def run_stage(stage: Stage, body: Callable[[Stage], None]) -> int:
    """Run a stage; a failure goes to its log with the traceback and becomes the exit status."""
    try:
        body(stage)
    except Exception:
        stage.log.exception("stage failed")
        return 1
    stage.log.info("stage ended")
    return 0


def optimiser(groups: Iterable[dict[str, object]] | list[nn.Parameter], betas: tuple[float, float], decay: float,
              device: torch.device) -> torch.optim.AdamW:  # fmt: skip
    return torch.optim.AdamW(groups, lr=1e-4, betas=betas, weight_decay=decay, fused=device.type == "cuda")


def decayed(module: nn.Module, decay: float) -> list[dict[str, object]]:
    """Parameter groups: matrices decay, vectors do not."""
    matrices = [p for p in module.parameters() if p.requires_grad and p.dim() > 1]
    vectors = [p for p in module.parameters() if p.requires_grad and p.dim() <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def fuse_layers(stage: Stage, layers: Iterable[nn.Module]) -> None:
    """Compile like layers as one graph: an eager step is thousands of small kernels. A failure leaves them eager."""
    if stage.compile:
        torch._dynamo.config.suppress_errors = True
        for layer in layers:
            layer.compile(dynamic=True)


def set_rate(opt: torch.optim.Optimizer, rate: float) -> None:
    for group in opt.param_groups:
        group["lr"] = rate * group.get("scale", 1.0)
