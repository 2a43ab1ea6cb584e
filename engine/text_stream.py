"""Text that is still arriving, woven with speech for the talker: five text ids, up to fifteen speech ids, and so on.

After a block of speech the talker gives `fill`, which is never fed back, and reads five more text ids. When the text
has ended, what is left of it and `task` are fed, and the talker runs to its stop id. Plain Python: rows are named here
and turned into tensors by Talker.rows.
Source: CosyVoice3 reference, section 3.7. Parity: tests/engine/test_talker.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.sampler import Mask
from engine.talker import Limits, SpecialIds

TEXT_BLOCK, SPEECH_BLOCK = 5, 15


class Row(NamedTuple):
    kind: Literal["text", "speech"]
    id: int


@dataclass(frozen=True, slots=True)
class Call:
    """One model call: feed the rows, then take `forced` or draw under `mask`."""

    rows: list[Row]
    mask: Mask
    forced: int | None = None


Weave = Generator[Call | None, int | None, None]


class TextStream:
    """The life of one utterance whose text comes in pieces.

    `call` is what to do next (None: wait for text, or done). `take` gives it the id drawn and returns the id to speak,
    if it is one; `history` is what the sampler may look at. With reference_exact the weaving has the original's faults:
    rows fed twice after the last fill, an instruction answered before its text, prompt speech dropped when the text
    ends early, no maximum length, and an error (ValueError) on a stop id in mid-stream.
    """

    def __init__(
        self,
        special: SpecialIds,
        prompt_text: Sequence[int],
        prompt_speech: Sequence[int],
        end_of_prompt: int,
        *,
        mix: tuple[int, int] = (TEXT_BLOCK, SPEECH_BLOCK),
        reference_exact: bool = False,
    ) -> None:
        if end_of_prompt not in prompt_text:
            raise ValueError(f"the prompt text of {len(prompt_text)} ids lacks the end-of-prompt id {end_of_prompt}")
        cut = list(prompt_text).index(end_of_prompt) + 1
        self._special = special
        self._mix = mix
        self._opening = [Row("speech", special.sos), *as_text(prompt_text[:cut])]
        self._text = as_text(prompt_text[cut:])
        self._speech = as_speech(prompt_speech)
        self._pieces: deque[list[Row]] = deque()
        self._has_ended = False
        self._num_text = 0
        self._num_spoken = 0
        self.history: list[int] = []
        self.is_done = False
        self._keeps_fill = reference_exact
        self._weave: Weave = self._reference_weave() if reference_exact else self._mended_weave()
        self.call: Call | None = None
        self._advance(None)

    def push(self, text: Sequence[int]) -> None:
        """More text ids to speak."""
        assert not self._has_ended, "text after its end"
        self._pieces.append(as_text(text))
        self._num_text += len(text)
        if self.call is None:
            self._advance(None)

    def end(self) -> None:
        """No more text will come."""
        self._has_ended = True
        if self.call is None:
            self._advance(None)

    def take(self, drawn: int) -> int | None:
        assert self.call is not None, "an id without a call"
        is_code = drawn < self._special.sos
        if is_code or self._keeps_fill:
            self.history.append(drawn)
        self._num_spoken += is_code
        self._advance(drawn)
        return drawn if is_code else None

    def _advance(self, drawn: int | None) -> None:
        if self.is_done:
            return
        try:
            self.call = self._weave.send(drawn)
        except StopIteration:
            self.call, self.is_done = None, True

    def _block(self) -> list[Row]:
        """The next five pending text rows, no longer pending."""
        size = self._mix[0]
        block, self._text = self._text[:size], self._text[size:]
        return block

    def _has_block(self) -> bool:
        return len(self._text) >= self._mix[0]

    def _mended_weave(self) -> Weave:
        special, size = self._special, self._mix[1]
        rows = self._opening
        while (yield from self._wait_for_block()):
            rows, known = rows + self._block(), self._speech[:size]
            rows, self._speech = rows + known, self._speech[size:]
            room = size - len(known)
            while room:
                drawn = yield Call(rows, Mask.ALL_BUT_FILL)
                rows = []
                assert drawn is not None, "answered by take"
                if drawn >= special.sos:
                    break
                rows, room = [Row("speech", drawn)], room - 1
                if not room:
                    yield Call(rows, Mask.ALL_BUT_FILL, forced=special.fill)
                    rows = []
        if self._num_text:
            yield from self._finish(rows + self._text + [Row("speech", special.task)] + self._speech)

    def _wait_for_block(self) -> Generator[None, int | None, bool]:
        while True:
            while self._pieces:
                self._text += self._pieces.popleft()
            if self._has_block() or self._has_ended:
                return self._has_block()
            yield None

    def _finish(self, rows: list[Row]) -> Weave:
        limits = Limits.of(self._num_text)
        while not limits.is_over(self._num_spoken):
            drawn = yield Call(rows, limits.mask(self._num_spoken))
            if drawn is None or drawn >= self._special.sos:
                return
            rows = [Row("speech", drawn)]

    def _reference_weave(self) -> Weave:
        special, size = self._special, self._mix[1]
        rows = self._opening
        forced_at = (len(self._speech) // size + 1) * size - len(self._speech)
        last = None
        while (piece := (yield from self._next_piece())) is not None:
            self._text += piece
            while self._speech and self._has_block():
                rows = rows + self._block() + self._speech[:size]
                self._speech = self._speech[size:]
            if self._speech:
                continue
            if last == special.fill:
                if not self._has_block():
                    continue
                rows = self._block()
            while True:
                is_forced = len(self.history) == forced_at
                last = yield Call(rows, Mask.SOS, forced=special.fill if is_forced else None)
                assert last is not None, "answered by take"
                if last == special.fill:
                    forced_at = len(self.history) + size
                    break
                if last >= special.sos:
                    raise ValueError(f"stop id {last} before the text has ended")
                rows = [Row("speech", last)]
        rows = rows + self._text + [Row("speech", special.task)]
        while True:
            last = yield Call(rows, Mask.NOTHING)
            if last is None or last >= special.sos:
                return
            rows = [Row("speech", last)]

    def _next_piece(self) -> Generator[None, int | None, list[Row] | None]:
        while not self._pieces:
            if self._has_ended:
                return None
            yield None
        return self._pieces.popleft()


def as_text(ids: Sequence[int]) -> list[Row]:
    return [Row("text", i) for i in ids]


def as_speech(ids: Sequence[int]) -> list[Row]:
    return [Row("speech", i) for i in ids]
