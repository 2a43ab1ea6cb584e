"""Cases that need a voice, with what the embedded one gives. Who can judge words is `rill eval`."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt
import pytest

from tests.e2e.conftest import Rill
from tests.e2e.test_speech import SENTENCE, all_free, hear, hear_until
from tests.gateway.raw_client import raw_client

RATE_HZ = 24_000
TOKEN_S = 0.04
TOKENS_PER_TEXT_TOKEN = 20  # the reference's limit; a text token is a character at least
SLACK_S = 2.0
FRAME = 480  # 20 ms


async def wave(rill: Rill, text: str, seed: int) -> npt.NDArray[np.float64]:
    return np.frombuffer(await hear(rill, text, seed=seed), dtype="<i2").astype(np.float64) / 32_768


def loudness(samples: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """RMS of each 20 ms."""
    whole = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)
    return np.sqrt((whole**2).mean(axis=1))


@pytest.mark.parametrize("text", ["a", "hm", "1", "Yes.", "No", "嗯", "7", "!?a", "Größe 3,5 €", "15:30 Uhr 🙂"])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_g20_g21_short_texts_are_neither_endless_nor_empty(rill: Rill, text: str, seed: int) -> None:
    samples = await wave(rill, text, seed)
    seconds = len(samples) / RATE_HZ
    assert 0.1 <= seconds <= len(text) * TOKENS_PER_TEXT_TOKEN * TOKEN_S + SLACK_S
    assert loudness(samples).max() > 1e-3


@pytest.mark.slow
async def test_g20_a_text_that_invites_a_loop_ends(rill: Rill) -> None:
    text = "ha " * 300
    seconds = len(await wave(rill, text, 1)) / RATE_HZ
    assert seconds <= 300 * TOKENS_PER_TEXT_TOKEN * TOKEN_S


async def test_g23_twelve_pieces_sound_like_one(rill: Rill) -> None:
    """Clauses depend on the characters alone, so a piece's edge is no join; on the CPU, to the bit."""
    text = SENTENCE * 2 + "Then it came to a bridge, and nobody was there."
    size = -(-len(text) // 12)
    async with raw_client(rill.address) as client:
        await client.say("open", c="a", seed=3)
        for n in range(12):
            await client.say("text", c="a", n=n, s=text[n * size : (n + 1) * size])
            await asyncio.sleep(0.01)
        await client.say("end", c="a")
        await hear_until(client, "done", "a")
        assert client.audio("a") == await hear(rill, text, seed=3)


async def test_g24_the_tail_fades_and_no_edge_pops(rill: Rill) -> None:
    for seed in (1, 2, 3):
        samples = await wave(rill, SENTENCE * 2, seed)
        frames = loudness(samples)
        assert frames[-2:].max() < 0.5 * frames.max(), "the last 40 ms are as loud as speech"
        jumps = np.abs(np.diff(samples))
        assert jumps.max() < 0.7, "a click"
    await all_free(rill)
