"""Text, arriving in pieces, cut into clauses that can be spoken one after the other.

Where a cut falls depends on the characters and on `flush` alone: each rule looks at the text up to one character and
never at how it came, so any cutting of the same text into pieces gives the same clauses. Clauses keep the text
verbatim; joined, they are the text.

Lengths are in letters; an ideograph or kana counts as three, being about a syllable's worth of speech.
"""

from __future__ import annotations

import unicodedata
from typing import Final

SENTENCE: Final = 16  # a sentence shorter than this goes with the next one: "No." alone is spoken badly
SOFT_FIRST: Final = 60  # from here on the first clause may end at a comma, so that speech starts early
SOFT: Final = 120
HARD: Final = 200  # from here on any space will do
UNBROKEN: Final = 300  # and here the cut comes even without one

ENDERS: Final = ".!?…"
WIDE_ENDERS: Final = "。！？；"
PAUSES: Final = ",;:—–"
WIDE_PAUSES: Final = "，、："
CLOSERS: Final = "\"'”’»)]}」』）】》"
_TITLES: Final = "mr mrs ms dr prof sr jr st mt gen col sgt capt lt rev hon gov sen rep pres hr fr"
_MONTHS: Final = "jan feb mar apr jun jul aug sep sept oct nov dec"
_OTHERS: Final = (
    "vs nos fig vol pp ed eds al cf approx dept est ext tel inc ltd co corp ave blvd rd e.g i.e etc "
    "bzw usw z.b d.h u.a ca nr str bspw evtl ggf"
)
ABBREVIATIONS: Final = frozenset(" ".join((_TITLES, _MONTHS, _OTHERS)).split())


class ClauseCutter:
    """Takes text by pieces, gives clauses."""

    def __init__(self) -> None:
        self._text = ""  # not yet cut
        self._seen = 0  # characters of it that the rules have passed
        self._weight = 0  # letters' worth of those
        self._last = ""  # of those, the last that closes no quotation or bracket
        self._is_first = True

    @property
    def num_buffered(self) -> int:
        """Characters that wait for the end of their clause."""
        return len(self._text)

    def push(self, piece: str) -> list[str]:
        """The clauses that this piece completes."""
        self._text += piece
        clauses: list[str] = []
        while (cut := self._next_cut()) is not None:
            clauses.append(self._take(cut))
        return clauses

    def flush(self) -> str:
        """All that is buffered, as one clause; empty if nothing is."""
        return self._take(len(self._text))

    def _take(self, cut: int) -> str:
        clause, self._text = self._text[:cut], self._text[cut:]
        self._seen = self._weight = 0
        self._last = ""
        self._is_first = self._is_first and not clause
        return clause

    def _next_cut(self) -> int | None:
        while self._seen < len(self._text):
            here = self._text[self._seen]
            if (cut := self._cut_at(self._seen, here)) is not None:
                return cut
            self._weight += 3 if _is_wide(here) else 1
            self._seen += 1
            if here not in CLOSERS:
                self._last = here
        return None

    def _cut_at(self, at: int, here: str) -> int | None:
        """Where to cut, judged by the characters up to and with `at` alone; None: not here."""
        if self._weight < SENTENCE:
            return None
        if self._weight >= UNBROKEN and not unicodedata.combining(here):
            return at
        if here.isspace() and self._may_end(self._text[:at], here):
            return at + 1
        is_over = self._last in WIDE_ENDERS or (self._last in WIDE_PAUSES and self._weight >= self._soft)
        return at if self._last and is_over and here not in CLOSERS + ENDERS + WIDE_ENDERS else None

    @property
    def _soft(self) -> int:
        return SOFT_FIRST if self._is_first else SOFT

    def _may_end(self, before: str, space: str) -> bool:
        if self._weight >= HARD:
            return True
        if space == "\n" and before.rstrip(" \t\r").endswith("\n"):
            return True  # a blank line
        body = before.rstrip(CLOSERS)
        return _ends_sentence(body) or (self._weight >= self._soft and body[-1:] != "" and body[-1] in PAUSES)


def _ends_sentence(body: str) -> bool:
    if not body or body[-1] not in ENDERS:
        return False
    return body[-1] != "." or not _is_abbreviation(body[:-1])


def _is_abbreviation(body: str) -> bool:
    """True if the full stop after `body` is its last word's own: "Mr", "e.g", "U.S", "J", ordinals such as "3"."""
    word = body.split()[-1].lstrip("(\"'“‘[") if body.strip() and not body[-1].isspace() else ""
    if word.isdecimal():
        return len(word) <= 2
    if len(word) == 1:
        return word.isalpha() and word != "I" and not _is_wide(word)
    return word.lower() in ABBREVIATIONS or _is_initials(word)


def _is_initials(word: str) -> bool:
    letters = word.split(".")
    return len(letters) > 1 and all(len(letter) == 1 and letter.isalpha() for letter in letters)


def _is_wide(character: str) -> bool:
    if character < "\u1100":  # the first wide one
        return False
    return unicodedata.east_asian_width(character) in "WF" and character.isalpha()
