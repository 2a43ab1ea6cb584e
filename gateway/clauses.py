"""Text, arriving in pieces, cut into clauses that can be spoken one after the other.

Where a cut falls depends on the characters and on `flush` alone: each rule looks at the text up to one character and
never at how it came, so any cutting of the same text into pieces gives the same clauses. Clauses keep the text
verbatim; joined, they are the text.

A cutter may also give a clause bit by bit, as its words come. It holds back what the words to come could still change:
a stretch ends between two plain words, which are read the same apart, and figures, abbreviations, names of days and
markup stay with their neighbours.

Lengths are in letters; an ideograph or kana counts as three, being about a syllable's worth of speech.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final, NamedTuple

SENTENCE: Final = 16  # a sentence shorter than this goes with the next one: "No." alone is spoken badly
SOFT_FIRST: Final = 60  # from here on the first clause may end at a comma, so that speech starts early
SOFT: Final = 120
HARD: Final = 200  # from here on any space will do
FIGURE: Final = 5  # letters' worth of a digit, by words: then no clause is too long for the talker, whatever is in it
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
_PLAIN: Final = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*[,;]?")
_JOINED: Final = ABBREVIATIONS | frozenset(["mon", "tue", "tues", "wed", "thu", "thurs", "fri", "sat", "sun", "no"])
_MARKUP: Final = "*_~`[<|"  # a clause that holds any of it comes whole from there on


class Stretch(NamedTuple):
    """Text of a clause, verbatim, from where the last one ended."""

    text: str
    is_last: bool


class ClauseCutter:
    """Takes text by pieces, gives clauses; `by_words`, their stretches. Then only the ends of sentences cut, as far as
    they are of a length to be spoken in one go."""

    def __init__(self, *, by_words: bool = False) -> None:
        self._by_words = by_words
        self._soft_first, self._soft_later, self._hard, self._unbroken = (
            (HARD, HARD, HARD + 50, UNBROKEN) if by_words else (SOFT_FIRST, SOFT, HARD, UNBROKEN)
        )
        self._given = 0  # characters that were passed on before the clause's end
        self._word = 0  # where the current word begins
        self._was_plain = False  # the word before it
        self._has_markup = False
        self._text = ""  # not yet cut
        self._seen = 0  # characters of it that the rules have passed
        self._weight = 0  # letters' worth of those
        self._last = ""  # of those, the last that closes no quotation or bracket
        self._is_first = True

    def stretches(self, piece: str) -> list[Stretch]:
        """The stretches that are certain with this piece: clauses or, by words, what is left of them too."""
        self._text += piece
        found: list[Stretch] = []
        while self._seen < len(self._text):
            here = self._text[self._seen]
            if (cut := self._cut_at(self._seen, here)) is not None:
                found.append(Stretch(self._take(cut), True))
            else:
                if self._by_words and here.isspace() and (gap := self._gap_at(self._seen, here)) is not None:
                    found.append(Stretch(self._text[self._given : gap], False))
                    self._given = gap
                self._pass(here)
        return found

    def rest(self) -> list[Stretch]:
        """All that is buffered, as the end of its clause; nothing if nothing is."""
        return [Stretch(text, True)] if (text := self._take(len(self._text))) else []

    def _take(self, cut: int) -> str:
        clause, self._text = self._text[self._given : cut], self._text[cut:]
        self._seen = self._weight = self._given = self._word = 0
        self._last = ""
        self._was_plain = self._has_markup = False
        self._is_first = self._is_first and not clause
        return clause

    def _pass(self, here: str) -> None:
        self._weight += 3 if _is_wide(here) else FIGURE if self._by_words and here.isdecimal() else 1
        self._seen += 1
        if here not in CLOSERS:
            self._last = here
        self._has_markup = self._has_markup or here in _MARKUP

    def _gap_at(self, at: int, here: str) -> int | None:
        """Where a stretch ends before the word that this space ends; None: no stretch does."""
        start, word = self._word, self._text[self._word : at]
        is_plain = here == " " and _is_plain(word)
        joins = not (is_plain and self._was_plain) or self._has_markup
        self._word, self._was_plain = at + 1, is_plain
        return None if joins else start - 1

    def _cut_at(self, at: int, here: str) -> int | None:
        """Where to cut, judged by the characters up to and with `at` alone; None: not here."""
        if self._weight < SENTENCE:
            return None
        if self._weight >= self._unbroken and not unicodedata.combining(here):
            return at
        if here.isspace() and self._may_end(self._text[:at], here):
            return at + 1
        is_over = self._last in WIDE_ENDERS or (self._last in WIDE_PAUSES and self._weight >= self._soft)
        return at if self._last and is_over and here not in CLOSERS + ENDERS + WIDE_ENDERS else None

    @property
    def _soft(self) -> int:
        return self._soft_first if self._is_first else self._soft_later

    def _may_end(self, before: str, space: str) -> bool:
        if self._weight >= self._hard:
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


def _is_plain(word: str) -> bool:
    """Is it read the same whatever plain words stand beside it?"""
    if not _PLAIN.fullmatch(word) or any(map(_is_wide, word)):
        return False
    bare = word.rstrip(",;")
    if len(bare) == 1:
        return bare in "aI"
    return bare[1:].islower() and not bare.endswith("day") and bare.lower() not in _JOINED


def _is_initials(word: str) -> bool:
    letters = word.split(".")
    return len(letters) > 1 and all(len(letter) == 1 and letter.isalpha() for letter in letters)


def _is_wide(character: str) -> bool:
    if character < "\u1100":  # the first wide one
        return False
    return unicodedata.east_asian_width(character) in "WF" and character.isalpha()
