"""The two fixed noises a CosyVoice3 process draws while its parts are built: flow first, then vocoder.

Neither is stored in a checkpoint. The draws follow the official construction order and the official sizes (80 mel
channels, 512 F0 channels) whatever the checkpoint at hand, so a small model hears the same realisation as the
released one. Source: CosyVoice3 reference, sections on the fixed noise of the flow and the vocoder.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

NUM_MEL = 80
MAX_FRAMES = 15_000  # 300 s of 20 ms frames, the prompt included
MAX_SAMPLES = 7_200_000  # 300 s at 24 kHz
NUM_HARMONICS = 9
F0_CHANNELS = 512
BLOCK_SAMPLES = 720_000  # 30 s, 26 MB

_lock = threading.RLock()
_flow: Tensor | None = None
_vocoder = torch.empty(0, NUM_HARMONICS)
_generator_state: Tensor | None = None


def _build_parts_before_vocoder() -> None:
    """Default initialisations that stand between the two noises and move the generator on."""
    nn.Embedding(6561, NUM_MEL)
    nn.Linear(192, NUM_MEL)
    nn.Conv1d(NUM_MEL, F0_CHANNELS, 4)
    for _ in range(4):
        nn.Conv1d(F0_CHANNELS, F0_CHANNELS, 3)
    nn.Linear(F0_CHANNELS, 1)
    torch.rand(1, NUM_HARMONICS)


def _replay() -> None:
    """Runs the recipe once up to the vocoder noise; the caller's generator and defaults are left as they were."""
    global _flow, _generator_state
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        _flow = torch.randn(1, NUM_MEL, MAX_FRAMES)[0]
        _build_parts_before_vocoder()
        _generator_state = torch.random.get_rng_state()


def flow_noise(frames: int) -> Tensor:
    """Start of the flow's fixed normal noise: float32 [80, frames] on CPU, column i for absolute frame i.

    The result is a view of the process-wide buffer; do not write to it. Raises ValueError past 15000 frames.
    """
    if not 0 <= frames <= MAX_FRAMES:
        raise ValueError(f"flow noise covers 0..{MAX_FRAMES} frames, asked for {frames}")
    with _lock, torch.inference_mode(False):
        if _flow is None:
            _replay()
        assert _flow is not None, "the replay leaves the flow noise behind"
        return _flow[:, :frames]


def vocoder_noise(samples: int) -> Tensor:
    """Start of the vocoder's fixed uniform [0, 1) noise: float32 [samples, 9] on CPU, row n for absolute sample n.

    Drawn in blocks of 30 s as they are asked for, bit-equal to one draw of all 300 s. The result is a view of the
    process-wide buffer; do not write to it. Raises ValueError past 7200000 samples.
    """
    global _vocoder
    if not 0 <= samples <= MAX_SAMPLES:
        raise ValueError(f"vocoder noise covers 0..{MAX_SAMPLES} samples, asked for {samples}")
    with _lock, torch.inference_mode(False):
        if samples > len(_vocoder):
            _vocoder = _grow(_vocoder, samples)
        return _vocoder[:samples]


def _grow(drawn: Tensor, samples: int) -> Tensor:
    global _generator_state
    if _generator_state is None:
        _replay()
    assert _generator_state is not None, "the replay leaves the generator state behind"
    generator = torch.Generator("cpu")
    generator.set_state(_generator_state)
    blocks = [drawn]
    while sum(map(len, blocks)) < samples:
        blocks.append(torch.rand(BLOCK_SAMPLES, NUM_HARMONICS, generator=generator, device="cpu"))
    _generator_state = generator.get_state()
    return torch.cat(blocks)
