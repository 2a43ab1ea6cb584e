from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.clauses import HARD, SOFT_FIRST, UNBROKEN, ClauseCutter

PARTS = [
    "Hello there",
    ". ",
    "! ",
    "? ",
    ", ",
    "Mr. ",
    "3.5",
    "e.g. ",
    "\n\n",
    "今天天气很好",
    "。",
    "，",
    " and ",
    "word ",
    '"',
    "…",
]
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=12), max_size=60).map("".join)


def clauses(pieces: list[str]) -> list[str]:
    cutter = ClauseCutter()
    cut = [clause for piece in pieces for clause in cutter.push(piece)]
    return [*cut, *filter(None, [cutter.flush()])]


@given(TEXTS, st.data())
@settings(max_examples=200, deadline=None)
def test_cuts_depend_on_the_characters_alone(text: str, data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[start:stop] for start, stop in zip([0, *places], [*places, len(text)], strict=True)]
    whole = clauses([text])
    assert clauses(pieces) == whole == clauses(list(text))
    assert "".join(whole) == text


@pytest.mark.parametrize(
    "text",
    [
        "Mr. Smith and Dr. Jones met at the station. ",
        "It weighs 3.5 kilograms and costs 4.99 in all. ",
        "Bring fruit, e.g. apples, i.e. the green ones. ",
        "The U.S. team and J. R. Tolkien were there too. ",
        "Wir sehen uns am 3. Mai um zehn Uhr in der Stadt. ",
        "No. Yes. Maybe. ",
        "what is rill.v1 and where is example.com/a.b?c ",
    ],
)
def test_a_full_stop_inside_a_sentence_does_not_cut(text: str) -> None:
    assert clauses([text]) == [text]


def test_a_sentence_is_cut_as_soon_as_it_has_ended() -> None:
    cutter = ClauseCutter()
    assert cutter.push("This is one sentence.") == []
    assert cutter.push(" ") == ["This is one sentence. "]


def test_closing_quotes_stay_with_their_sentence() -> None:
    assert clauses(['"This is what he said." Then he left.']) == ['"This is what he said." ', "Then he left."]


def test_wide_text_is_cut_without_spaces() -> None:
    assert clauses(["今天天气很好我们去公园。明天可能会下雨。"]) == ["今天天气很好我们去公园。", "明天可能会下雨。"]


def test_the_first_clause_may_end_at_a_comma_early() -> None:
    first = "When the evening came and all the lamps along the river had been lit, "
    assert len(first) > SOFT_FIRST
    assert clauses([first, "the boats went out."])[0] == first


def test_text_without_an_end_is_cut_all_the_same() -> None:
    assert all(len(clause) <= HARD + 6 for clause in clauses(["word " * 500]))
    assert all(len(clause) <= UNBROKEN for clause in clauses(["x" * 5000]))


def test_an_unbroken_cut_never_splits_a_letter_from_its_accent() -> None:
    assert all(clause[0] != "\u0301" for clause in clauses(["e\u0301" * 400]))
