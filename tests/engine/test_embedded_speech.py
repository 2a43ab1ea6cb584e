"""What the embedded voice says, by its sound alone: joins, level, tails, length, silence. `rill eval` judges words.

The bounds follow from how the model works, not from what some weights gave: a streamed take is held against the full
response of the same tokens, lengths against the codes that a text token may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from engine.batch import Segment
from engine.hift import HiftState
from engine.messages import Audio, Done
from gateway.clauses import ClauseCutter
from gateway.evaluation_list import read_list
from tests.engine.speaking import Speaking

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = ROOT / "engine" / "voices" / "embedded"
RATE_HZ, TOKEN, FRAME = 24_000, 960, 480  # samples
REACH = 48  # samples around an edge where a click would be
NEAR_MS = (5, 8, 11, 14, 17, 20, 23, 26, 29)
CLICK = 10  # times as rough as its surroundings, and as the same place of the full response
STEADY_DB, SAME_DB, TAIL_DB = 6.0, 2.0, -40.0
QUIET_DB, LONGEST_SILENCE_S = -35.0, 1.5  # below the loud parts; between two sentences a reader may breathe
pytestmark = pytest.mark.skipif(not (EMBEDDED / "llm.safetensors").exists(), reason="no embedded voice")
Array = npt.NDArray[np.float64]


@dataclass
class Spoken:
    """One take: float [S], its parts, and where a hop's samples or frames end, but for the parts' own ends."""

    wave: Array
    parts: list[Segment]
    edges: list[int]
    mels: list[Tensor]  # [M, T] of each part, in the order of their first hops

    @property
    def tokens(self) -> list[list[int]]:
        return [part.tokens for part in self.parts]

    @property
    def clauses(self) -> list[Array]:
        ends = list(accumulate(TOKEN * len(part.tokens) for part in self.parts))
        return np.split(self.wave, ends[:-1])


class Voice:
    """The engine over the embedded checkpoint, told what a gateway would tell it."""

    def __init__(self) -> None:
        self._speaking, self._contexts = Speaking(EMBEDDED, lanes=2, rows_per_launch=1), count()
        self.hift = self._speaking.runner.models.hift
        self._push, self._mels = self.hift.push, dict[int, tuple[HiftState, list[Tensor]]]()
        self.hift.push = self._noting  # type: ignore[method-assign]

    def _noting(self, states: Sequence[HiftState], mels: Sequence[Tensor], finals: Sequence[bool]) -> list[Tensor]:
        for state, mel in zip(states, mels, strict=True):
            self._mels.setdefault(id(state), (state, []))[1].append(mel.clone())
        return self._push(states, mels, finals)

    def say(self, text: str, voice: str = "", *, seed: int = 1, streaming: bool = True) -> Spoken:
        cutter, context, speaking = ClauseCutter(), next(self._contexts), self._speaking
        clauses = [stretch.text for stretch in (*cutter.stretches(text), *cutter.rest())]
        speaking.open(context, *clauses, voice=voice, seed=seed, streaming=streaming)
        self._mels.clear()
        parts: dict[int, Segment] = {}
        frames: dict[int, set[int]] = {}
        while speaking.end(context) is None:
            speaking.step()
            for part in speaking.runner.segments():
                parts[id(part)] = part
                frames.setdefault(id(part), set()).add(part.num_frames)
        assert isinstance(speaking.end(context), Done)
        wave = np.frombuffer(speaking.pcm(context), "<f4").astype(np.float64)
        sizes = [len(one.pcm) // 4 for one in speaking.said[context] if isinstance(one, Audio)]
        ordered = sorted(parts.values(), key=lambda part: (part.part.clause, part.part.number))
        starts = list(accumulate((TOKEN * len(part.tokens) for part in ordered), initial=0))
        assert starts[-1] == len(wave)
        mel = [start + FRAME * n for part, start in zip(ordered, starts, strict=False) for n in frames[id(part)]]
        mels = [torch.cat(some, dim=1) for _, some in self._mels.values()]
        return Spoken(wave, ordered, sorted({*accumulate(sizes), *mel} - set(starts)), mels)


@pytest.fixture(scope="module")
def embedded() -> Voice:
    return Voice()


# ---- measures


def roughness(wave: Array) -> Array:
    """Energy of the second difference in 3 ms around each sample, over its median 5 to 29 ms away."""
    bend = np.pad(np.diff(wave, 2) ** 2, 1)
    energy = np.convolve(bend, np.ones(73) / 73, "same") + 1e-9
    near = [np.roll(energy, side * ms * RATE_HZ // 1000) for ms in NEAR_MS for side in (-1, 1)]
    found: Array = energy / np.median(near, axis=0)
    return found


def clicks(streamed: Array, full: Array, edges: Sequence[int]) -> list[int]:
    """Edges where the streamed sound is far rougher than around them, and than the full response there."""

    def most(rough: Array, edge: int) -> float:
        return float(rough[max(edge - REACH, 0) : edge + REACH].max())

    ours, theirs = roughness(streamed), roughness(full)
    return [edge for edge in edges if most(ours, edge) > CLICK * max(most(theirs, edge), 1.0)]


def frame_levels(wave: Array) -> Array:
    """dB of full scale of each 20 ms."""
    frames = wave[: len(wave) // FRAME * FRAME].reshape(-1, FRAME)
    found: Array = 10 * np.log10((frames**2).mean(axis=1) + 1e-12)
    return found


def level(wave: Array) -> float:
    """dB of full scale while it speaks."""
    levels = frame_levels(wave)
    return float(10 * np.log10(np.mean(10 ** (levels[levels > levels.max() + QUIET_DB] / 10))))


def unsteady(streamed: Sequence[Array], full: Sequence[Array]) -> list[str]:
    """What is wrong with the levels of the clauses."""
    ours, theirs = [level(one) for one in streamed], [level(one) for one in full]
    found = [f"clause {i}: {a:.1f} and {b:.1f} dB" for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    found = [text for text, a, b in zip(found, ours, theirs, strict=True) if abs(a - b) > SAME_DB]
    return found + ([f"from {min(ours):.1f} to {max(ours):.1f} dB"] if max(ours) - min(ours) > STEADY_DB else [])


def is_tail_noisy(streamed: Array, full: Array) -> bool:
    """The last 40 ms are louder than they should be, or there is a click in them."""
    tail = slice(-2 * FRAME, None)
    loudest = max(level(full[tail]) + 3 * SAME_DB, level(full) + TAIL_DB)
    return level(streamed[tail]) > loudest or bool(clicks(streamed, full, range(len(full) - 2 * FRAME, len(full) - 1)))


def longest_silence_s(wave: Array) -> float:
    levels = frame_levels(wave)
    longest = run = 0
    for is_quiet in levels < np.quantile(levels, 0.95) + QUIET_DB:
        run = run + 1 if is_quiet else 0
        longest = max(longest, run)
    return longest * FRAME / RATE_HZ


# ---- joins


TWO_CLAUSES = "The boat went down the river. Then it came to a bridge."
THREE_CLAUSES = (
    "Please bring the umbrella with you. Our train leaves at half past nine. I will wait for you by the door."
)


@pytest.mark.parametrize(
    ("text", "voice", "seed"),
    [
        pytest.param(TWO_CLAUSES, "", 2, id="two clauses"),
        *(
            pytest.param(THREE_CLAUSES, voice, seed, id=f"{voice}, {seed}", marks=pytest.mark.slow)
            for voice in ("heart", "low")
            for seed in (1, 2)
        ),
    ],
)
def test_a_stream_sounds_as_whole_and_as_steady_as_a_full_response(
    embedded: Voice, text: str, voice: str, seed: int
) -> None:
    ours, theirs = (embedded.say(text, voice, seed=seed, streaming=streaming) for streaming in (True, False))
    streamed, full, edges = ours.wave, theirs.wave, ours.edges
    assert ours.tokens == theirs.tokens and len(edges) >= 4
    with torch.inference_mode():
        whole = torch.cat([embedded.hift.offline(mel[None])[0] for mel in ours.mels]).numpy()
    np.testing.assert_allclose(streamed, whole, atol=1e-3, err_msg="the vocoder's hops are not one sound")
    assert clicks(streamed, full, edges) == []
    assert unsteady(ours.clauses, theirs.clauses) == []
    assert not is_tail_noisy(streamed, full)

    for at in (edges, [len(full) - FRAME]):  # and each fault is found where it is planted
        steps = np.zeros(len(full))
        for edge in at:
            steps[edge:] += 0.4 * np.abs(full).max() * 0.995 ** np.arange(len(full) - edge)
        assert clicks(streamed + steps, full, at)
    assert is_tail_noisy(streamed + steps, full)
    hiss = np.random.default_rng(1).normal(size=2 * FRAME) * 0.1 * np.abs(full).max()
    assert is_tail_noisy(np.concatenate((streamed[: -2 * FRAME], hiss)), full)
    quieter, as_quiet = ([0.25 * one.clauses[0], *one.clauses[1:]] for one in (ours, theirs))
    assert unsteady(quieter, theirs.clauses) and unsteady(quieter, as_quiet)


# ---- lengths and silence


def flaws(take: Spoken) -> list[str]:
    """A part ends by its stop token, not by its limit of codes for each text token; it is heard; no long silence."""
    found = [
        f"{part.num_drawn} codes for {part.utterance.prompt.num_target} text tokens"
        for part in take.parts
        if not part.utterance.limits.min_len <= part.num_drawn < part.utterance.limits.max_len
    ]
    if (silence_s := longest_silence_s(take.wave)) > LONGEST_SILENCE_S:
        found.append(f"{silence_s:.2f} s of silence")
    if not take.parts or frame_levels(take.wave).max() < -40:
        found.append("nothing is heard")
    return found


def paragraph(words: int) -> str:
    lines = [line.text for line in read_list(ROOT / "tests" / "bench" / "sentences_3.lst")]
    return " ".join(" ".join(lines).split()[:words]) + "."


RAMBLES = {
    "300 x ha": "ha " * 300,
    "a paragraph": paragraph(200),
    "capitals": "PLEASE DO NOT LEAVE YOUR BAGS HERE. THE NEXT TRAIN IS LATE.",
    "addresses": "Write to anna.smith@example.com or see https://www.example.com/help/index.html for more.",
    "one long word": "a" * 60,
    "ones": "1 " * 20,
}


@pytest.mark.slow
@pytest.mark.parametrize("text", RAMBLES.values(), ids=list(RAMBLES))
def test_a_text_that_invites_rambling_ends_by_itself(embedded: Voice, text: str) -> None:
    assert flaws(embedded.say(text)) == []


@pytest.mark.parametrize("text", ["a", "hm", "1"])
def test_a_syllable_is_neither_endless_nor_silent(embedded: Voice, text: str) -> None:
    assert flaws(embedded.say(text)) == []


def test_flaws_are_found(embedded: Voice) -> None:
    take = embedded.say("Yes.")
    assert flaws(take) == []
    pause = np.zeros(int((LONGEST_SILENCE_S + 0.1) * RATE_HZ))
    assert "s of silence" in flaws(Spoken(np.concatenate((take.wave, pause, take.wave)), take.parts, [], []))[0]
    assert flaws(Spoken(take.wave * 1e-4, take.parts, [], [])) == ["nothing is heard"]
    take.parts[0].num_drawn = take.parts[0].utterance.limits.max_len
    assert "codes for" in flaws(take)[0]
