"""What a bench asks for: texts of given lengths, voices, cuts. All of it follows from one seed.

The lengths are those of Seed-TTS EN as CosyVoice3 speaks it, in speech tokens of 40 ms: 122 on average, nine in ten
between 77 and 181. How many speech tokens a text token gives is the checkpoint's own; a bench checkpoint fixes it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from gateway.errors import GatewayError

MEDIAN_TOKENS: Final = 118
SIGMA: Final = 0.26  # of the logarithm
SENTENCE_LETTERS: Final = 170  # the gateway cuts a longer one wherever there is a space
TRIES: Final = 60
_VOCABULARY: Final = (
    "the a one my our this that every old new small long dark early quiet warm river garden window letter road train "
    "morning evening winter summer kitchen table paper story song island harbour teacher doctor farmer sister brother "
    "child neighbour horse dog bird was is came went stood waited looked turned opened closed carried found kept lost "
    "made took gave left near under over behind before after with without and but while because when until again soon "
    "never often always there here home away back down up out"
)
WORDS: Final = tuple(_VOCABULARY.split())


class NoSuchVoice(GatewayError):
    """The server has no voice of that name."""


@dataclass(slots=True, kw_only=True)
class Request:
    """One context to come. `cut`: the share of its expected audio after which the listener cuts in; 0: before any."""

    voice: str
    text: str
    tokens: int  # speech tokens expected
    seed: int
    cut: float | None = None


def spread(count: int) -> list[int]:
    """So many lengths in speech tokens, ascending: the middles of as many equal shares of the distribution."""
    normal = NormalDist()
    return [round(MEDIAN_TOKENS * math.exp(SIGMA * normal.inv_cdf((i + 0.5) / count))) for i in range(count)]


class Writer:
    """Writes texts of a given number of text tokens, as `count` counts them: never the same one twice."""

    def __init__(self, count: Callable[[str], int], seed: int) -> None:
        self._count = count
        self._random = random.Random(seed)
        sample = " ".join(WORDS)
        self._letters_per_token = len(sample) / count(sample)

    def text(self, tokens: int) -> str:
        """Sentences that have so many tokens together, each counted alone, as the engine reads them."""
        num_sentences = max(1, math.ceil(tokens * self._letters_per_token / SENTENCE_LETTERS))
        share, rest = divmod(tokens, num_sentences)
        return " ".join(self._sentence(share + (i < rest)) for i in range(num_sentences))

    def _sentence(self, tokens: int) -> str:
        """Words and a full stop, which the engine would add; at least a word of few tokens."""
        words: list[str] = []
        for _ in range(TRIES * tokens):
            longer = [*words, self._random.choice(WORDS)]
            found = self._count(" ".join(longer) + ".")
            if found <= tokens:
                words = longer
            if found == tokens:
                break
        return " ".join(words or [min(WORDS, key=self._count)]) + "."


def deck(
    writer: Writer,
    *,
    lengths: Sequence[int],
    ratio: float,
    voices: Iterator[str],
    cancels: float,
    seed: int,
) -> list[Request]:
    """One request for each length, shuffled; a share of them, `cancels`, is cut. ratio: speech per text token."""
    chance = random.Random(seed)
    shuffled = chance.sample(lengths, len(lengths))
    num_cut = round(cancels * len(shuffled))
    cuts: list[float | None] = [max(0.0, chance.uniform(-0.2, 0.9)) for _ in range(num_cut)]
    cuts += [None] * (len(shuffled) - num_cut)
    chance.shuffle(cuts)
    requests = []
    for wanted, cut in zip(shuffled, cuts, strict=True):
        text_tokens = max(1, round(wanted / ratio))
        requests.append(
            Request(
                voice=next(voices),
                text=writer.text(text_tokens),
                tokens=round(text_tokens * ratio),
                seed=chance.getrandbits(32),
                cut=cut,
            )
        )
    return requests


def voice_order(kind: str, voices: Sequence[str], seed: int) -> Iterator[str]:
    """hot: the first one again and again; cold: each once; pooled: any of them, each time; or one of them by name."""
    match kind:
        case "hot":
            return itertools.repeat(voices[0])
        case "cold":
            return iter(voices)
        case "pooled":
            chance = random.Random(seed)
            return iter(lambda: chance.choice(voices), None)
        case _ if kind in voices:
            return itertools.repeat(kind)
        case _:
            raise NoSuchVoice(f"voices are hot, cold, pooled or one of {len(voices)} that are there, not {kind!r}")
