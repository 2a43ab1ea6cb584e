"""Text that is still arriving, woven with speech for the talker: five text ids, fifteen speech ids, and so on.

The voice's prompt is woven with what is to be said, then the talker answers each block of text with its codes and
waits for the next. When the text has ended, what is left of it and `task` are fed, and the talker runs to its stop id.
What is fed and drawn depends on how many ids there are, never on when they came. Plain Python.

Source: CosyVoice3 reference, section 3.7. Parity: tests/engine/test_talker.py. A block ends by count, where the
original forces `fill`; that is never fed, and talkers are taught to draw it there and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.talker import TalkerShape

MIX = 5, 15


class Turn(NamedTuple):
    """Feed the rows (ids as Talker.rows_of takes them), then draw so many codes, feeding each but the last.

    The rows begin with the codes of the turn before, of which all but the last are fed already.
    """

    rows: list[int]
    num_codes: int | None  # None: until the stop id


class TextStream:
    """What the talker is fed of one utterance.

    With reference_exact it has the original's faults: the last row before the text's end is fed twice, codes are drawn
    without text where the prompt's speech ends with a block or there is none, prompt speech is dropped if the text ends
    early, and only as much is woven as there were turns for before the end came.
    """

    def __init__(
        self, shape: TalkerShape, prompt_text: Sequence[int], prompt_speech: Sequence[int], end_of_prompt: int,
        *, mix: tuple[int, int] = MIX, reference_exact: bool = False,
    ) -> None:  # fmt: skip
        """Raises ValueError if the end of the instruction isn't in the prompt's text."""
        if end_of_prompt not in prompt_text:
            raise ValueError(f"the prompt text of {len(prompt_text)} ids lacks the end-of-prompt id {end_of_prompt}")
        head = list(prompt_text).index(end_of_prompt) + 1
        self._special, self._first_text, self._mix = shape.special, shape.speech_vocab, mix
        self._rows = [self._special.sos, *self._as_rows(prompt_text[:head])]  # woven, not given out
        self._text = self._as_rows(prompt_text[head:])
        self._speech = list(prompt_speech)
        self._is_exact, self._has_ended = reference_exact, False
        self.num_text = 0
        self.is_through = False  # no turn will come any more

    def push(self, text: Sequence[int]) -> None:
        """More text ids to speak."""
        assert not self._has_ended, "text after its end"
        self._text += self._as_rows(text)
        self.num_text += len(text)

    def end(self) -> None:
        """No more text will come."""
        self._has_ended = True

    def next_turn(self, drawn: Sequence[int] = ()) -> Turn | None:
        """The turn after the one that has drawn these codes. None: it lacks text, or there is no more."""
        num_text, num_speech = self._mix
        if self._is_exact and self._rows and not (self._speech or self._has_ended):
            return self._turn(drawn, num_speech)
        while len(self._text) >= num_text and not (self._is_exact and self._has_ended):
            known = self._speech[:num_speech]
            self._rows += [*self._text[:num_text], *known]
            self._text, self._speech = self._text[num_text:], self._speech[num_speech:]
            if len(known) < num_speech or self._is_exact and not self._speech:
                return self._turn(drawn, num_speech - len(known) % num_speech)
        if not self._has_ended or self.is_through:
            return None
        self.is_through = True
        again, speech = (drawn[-1:], ()) if self._is_exact else ((), self._speech)
        self._rows = [*again, *self._rows, *self._text, self._special.task, *speech]
        return self._turn(drawn, None) if self.num_text else None

    def _turn(self, drawn: Sequence[int], num_codes: int | None) -> Turn:
        rows, self._rows = [*drawn, *self._rows], []
        return Turn(rows, num_codes)

    def _as_rows(self, text: Sequence[int]) -> list[int]:
        return [self._first_text + i for i in text]
