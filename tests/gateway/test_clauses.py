from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.clauses import HARD, SOFT_FIRST, UNBROKEN, ClauseCutter, Stretch

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


def stretches(pieces: list[str], *, by_words: bool = True) -> list[Stretch]:
    cutter = ClauseCutter(by_words=by_words)
    return [*(stretch for piece in pieces for stretch in cutter.stretches(piece)), *cutter.rest()]


def clauses(pieces: list[str]) -> list[str]:
    return [stretch.text for stretch in stretches(pieces, by_words=False)]


@pytest.mark.parametrize("by_words", [False, True])
@given(text=TEXTS, data=st.data())
@settings(max_examples=200, deadline=None)
def test_cuts_depend_on_the_characters_alone(by_words: bool, text: str, data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[start:stop] for start, stop in zip([0, *places], [*places, len(text)], strict=True)]
    whole = stretches([text], by_words=by_words)
    assert stretches(pieces, by_words=by_words) == whole == stretches(list(text), by_words=by_words)
    assert "".join(part.text for part in whole) == text
    assert all(part.text and (part.is_last or by_words) for part in whole)
    assert not whole or whole[-1].is_last


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
    assert cutter.stretches("This is one sentence.") == []
    assert cutter.stretches(" ") == [Stretch("This is one sentence. ", True)]


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


# by words


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("The boat went down the river.", "The| boat| went| down| the river."),
        ("It is 3.5 km from here to there", "It| is 3.5 km| from| here| to there"),
        ("She came on May 5th, 2021 at 8 p.m. with him", "She| came| on| May 5th, 2021 at 8 p.m. with him"),
        ("They asked Dr. Smith of the U.S. team about that", "They| asked Dr. Smith| of| the U.S. team| about that"),
        ("open from Monday to Fri, every week of it", "open| from Monday to Fri, every| week| of it"),
        ("so **very much of it all** was left over", "so **very much of it all** was left over"),
        ("the word\nthe other word of them", "the word\nthe| other| word| of them"),
        ("我们 明天 去 北京 看看", "我们 明天 去 北京 看看"),
    ],
)
def test_what_the_next_words_could_change_is_held_back(text: str, cut: str) -> None:
    assert "|".join(part for part, _ in stretches([text])) == cut


def test_by_words_sentences_end_clauses_and_commas_only_of_very_long_ones() -> None:
    text = "One two, three four five. " + "and so on, " * 30
    ends = [len(clause) for clause in "".join(t + "|" * end for t, end in stretches([text])).split("|")]
    assert ends[0] == 26 and HARD < ends[1] < UNBROKEN


@pytest.mark.parametrize("text", ["9876543210987 " * 25, "ha" * 300, "7" * 1_000, "and so on " * 40])
def test_by_words_no_clause_is_too_long_for_the_talker(text: str) -> None:
    clauses = "".join(part + "|" * end for part, end in stretches([text])).split("|")
    assert "".join(clauses) == text
    assert all(len(clause) <= UNBROKEN and sum(map(str.isdecimal, clause)) <= 60 for clause in clauses)
