"""Text that comes word by word: what is woven, and how it is spoken by the whole engine on a tiny random checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.frontend import Tokenizer, normalise, segments, stretch
from engine.messages import Clause, ClauseDone, ClauseTaken, Done, End, Failed, Open
from engine.talker import TalkerShape
from engine.text_stream import TextStream, Turn
from gateway.clauses import ClauseCutter
from tests.engine.speaking import Speaking, never_waiting
from tests.random_checkpoint import SMALL, TINY, random_checkpoint

END_OF_PROMPT = 90
SHAPE = TalkerShape(hidden=8, intermediate=8, layers=1, heads=1, kv_heads=1, head_dim=8, text_vocab=100)
SPECIAL, FIRST_TEXT = SHAPE.special, SHAPE.speech_vocab
TEXT = "He said that the boat went down the river at 8:20 on May 3rd, and nobody saw it again until Dr. Lee came"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("tiny"), TINY, voices=("anna", "bert"), stop_scale=1.0)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- the weave


def turns(stream: TextStream) -> list[Turn]:
    return list(iter(stream.next_turn, None))


@pytest.mark.parametrize("num_prompt_speech", [0, 1, 14, 15, 17, 30, 44])
@pytest.mark.parametrize("num_text", [1, 4, 5, 6, 23])
def test_every_row_is_fed_once_and_in_order_however_the_text_came(num_prompt_speech: int, num_text: int) -> None:
    prompt_text, prompt = [10, 11, END_OF_PROMPT, 12, 13, 14], list(range(100, 100 + num_prompt_speech))
    text = list(range(20, 20 + num_text))
    at_once, one_by_one = (TextStream(SHAPE, prompt_text, prompt, END_OF_PROMPT) for _ in range(2))
    at_once.push(text)
    at_once.end()
    seen = []
    for i in text:
        one_by_one.push([i])
        seen += turns(one_by_one)
    one_by_one.end()
    whole = turns(at_once)
    assert seen + turns(one_by_one) == whole
    rows = [row for turn in whole for row in turn.rows]
    assert [row - FIRST_TEXT for row in rows if row >= FIRST_TEXT] == prompt_text + text
    assert [row for row in rows if row < SPECIAL.sos] == prompt
    assert [row for row in rows if SPECIAL.sos <= row < FIRST_TEXT] == [SPECIAL.sos, SPECIAL.task]
    assert [turn.num_codes is None for turn in whole] == [False] * (len(whole) - 1) + [True]
    assert at_once.is_through and one_by_one.is_through


@pytest.mark.parametrize("num_prompt_speech", [0, 7, 15, 31])
def test_no_code_is_drawn_before_its_block_of_text(num_prompt_speech: int) -> None:
    stream = TextStream(SHAPE, [10, END_OF_PROMPT], [1] * num_prompt_speech, END_OF_PROMPT)
    num_speech = num_prompt_speech
    for num_text in range(1, 26):
        stream.push([5])
        for turn in turns(stream):
            assert turn.num_codes is not None
            num_speech += turn.num_codes
            assert num_speech == 15 * (num_text // 5)
    assert num_speech == 75


@pytest.mark.parametrize("num_prompt_speech", [1, 14, 17, 31, 44])
@pytest.mark.parametrize("num_text", [17, 20, 23])
def test_text_one_by_one_is_woven_as_in_the_original_but_for_the_row_fed_twice(
    num_prompt_speech: int, num_text: int
) -> None:
    streams = [
        TextStream(SHAPE, [10, END_OF_PROMPT, 12], [1] * num_prompt_speech, END_OF_PROMPT, reference_exact=is_exact)
        for is_exact in (True, False)
    ]
    fed: list[list[int]] = [[], []]
    for rows, stream in zip(fed, streams, strict=True):
        drawn: list[int] = []
        for i in range(num_text + 1):
            stream.push([i]) if i < num_text else stream.end()
            for turn in iter(lambda drawn=drawn, stream=stream: stream.next_turn(drawn), None):
                rows += turn.rows
                drawn = list(range(100, 100 + (turn.num_codes or 0)))
    exact, served = fed
    again = len(exact) - 1 - (num_text + 1) % 5 - 1
    assert exact[again] == exact[again - 1]
    assert exact[:again] + exact[again + 1 :] == served


def test_text_that_never_comes_says_nothing() -> None:
    stream = TextStream(SHAPE, [10, END_OF_PROMPT], [3] * 20, END_OF_PROMPT)
    assert stream.next_turn() is None and not stream.is_through
    stream.end()
    assert stream.next_turn() is None and stream.is_through


def test_prompt_without_its_end_is_refused() -> None:
    with pytest.raises(ValueError, match="90"):
        TextStream(SHAPE, [1, 2], [], END_OF_PROMPT)


# --- its words


LINES = [
    line.split("|")[-1]
    for name in ("", "_3")
    for line in (Path(__file__).parents[1] / "bench" / f"sentences{name}.lst").read_text().splitlines()
]
MORE = [
    TEXT,
    "Call 911 or 555-0199 before Monday to Fri, please, said Mr Smith of Acme Inc. yesterday",
    "In March 2021 they paid $4 million dollars, i.e. 5 % more, for No. 5 and the 3rd of May 1998 edition",
    "Wait... what?! The *very best thing of all* and [a link here](http://x.example) cost 3 pm",
]


@pytest.mark.parametrize("text", [*LINES, *MORE])
def test_words_one_by_one_are_read_like_their_clause(text: str, folder: Path) -> None:
    tokenizer = Tokenizer(folder / "CosyVoice-BlankEN")
    cutter = ClauseCutter(by_words=True)
    spoken, clause, whole = "", "", ""
    for piece in (*cutter.stretches(text), *cutter.rest()):
        spoken += stretch(piece.text, clause, is_last=piece.is_last)
        clause += piece.text
        if piece.is_last:
            whole += " ".join(segments(clause, tokenizer))
            clause = ""
    assert spoken == whole, normalise(text)


# --- spoken


def words(text: str) -> list[tuple[str, bool]]:
    cutter = ClauseCutter(by_words=True)
    return [(piece.text, piece.is_last) for piece in (*cutter.stretches(text), *cutter.rest())]


def begin(speaking: Speaking, context: int, *, seed: int = 1, **settings: Any) -> None:
    speaking.tell(Open(context=context, epoch=0, voice="", seed=seed, by_words=True, **settings))


def say(speaking: Speaking, context: int, pieces: list[tuple[str, bool]], index: int = 0) -> None:
    for text, is_last in pieces:
        speaking.tell(Clause(context=context, epoch=0, index=index, text=text, is_last=is_last))


def until_idle(speaking: Speaking) -> None:
    """Until the engine has nothing to do before more text comes."""
    speaking.step(5)  # what was said is heard, and its text worked on
    while not (speaking.runner.room.is_idle and speaking.engine.scheduler.plan(0.0).is_empty):
        speaking.step()


def end(speaking: Speaking, context: int) -> None:
    speaking.tell(End(context=context, epoch=0))
    speaking.finish([context])


def whole(speaking: Speaking, context: int, text: str, **settings: Any) -> bytes:
    begin(speaking, context, **settings)
    say(speaking, context, words(text))
    end(speaking, context)
    return speaking.pcm(context)


@pytest.mark.gpu
def test_on_a_gpu_words_in_graphs_are_spoken_however_they_come(tmp_path: Path) -> None:
    """Without a wait in a launch, though blocks of text are fed amid other contexts' steps."""
    folder = random_checkpoint(tmp_path, SMALL, voices=("anna", "bert"), stop_scale=1.0)
    speaking, dice = Speaking(folder, device="cuda", lanes=8, talker_pages=900), random.Random(1)
    speaking.engine.warm()
    speaking.runner.launch = never_waiting(speaking.runner.launch)  # type: ignore[method-assign]
    expected = whole(speaking, 0, TEXT, seed=4)
    for context in range(1, 8):
        begin(speaking, context, seed=4)
    for piece in words(TEXT):
        for context in range(1, 8):
            say(speaking, context, [piece])
            speaking.step(dice.choice([0, 1, 7]))
    for context in range(1, 8):
        end(speaking, context)
    lengths = [len(speaking.pcm(context)) for context in range(8)]
    print(f"\n{len(expected)} bytes alone, in a crowd {lengths}")
    assert expected and sum(length == len(expected) for length in lengths) >= 4  # a draw may fall otherwise in a crowd
    speaking.assert_empty()


@pytest.mark.parametrize("settings", [{}, {"rows_per_launch": 4, "talker_pages": 200}], ids=["alone", "shared"])
def test_the_same_text_gives_the_same_audio_however_it_comes(folder: Path, settings: dict[str, Any]) -> None:
    speaking, dice = Speaking(folder, lanes=4, **settings), random.Random(1)
    expected = whole(speaking, 0, TEXT, seed=4)
    assert expected
    for context in (1, 2):
        begin(speaking, context, seed=4)
        for piece in words(TEXT):
            say(speaking, context, [piece])
            speaking.step(dice.choice([0, 0, 1, 7, 60]))
        end(speaking, context)
        assert speaking.pcm(context) == expected
    speaking.assert_empty()


def test_audio_comes_before_the_end_of_the_text_and_a_pause_costs_nothing(folder: Path) -> None:
    speaking = Speaking(folder, lanes=2, talker_pages=200)
    begin(speaking, 0)
    *most, last = words(TEXT)
    say(speaking, 0, most)
    speaking.until_audio(0)
    until_idle(speaking)
    steps = speaking.engine.num_steps
    speaking.step(5)
    assert speaking.engine.num_steps == steps and not speaking.engine._has_launched
    other = speaking.speak(1, "Hi.", seed=7)  # whom the pause doesn't keep waiting
    assert other and not any(isinstance(message, ClauseTaken) for message in speaking.said[0])
    say(speaking, 0, [last])
    end(speaking, 0)
    kinds = [type(message) for message in speaking.said[0]]
    assert kinds.count(ClauseTaken) == kinds.count(ClauseDone) == 1 and kinds[-1] is Done
    assert speaking.pcm(0) == whole(speaking, 2, TEXT)
    speaking.assert_empty()


@pytest.mark.parametrize("num_words", [0, 2, 20])
def test_a_cancel_in_a_pause_frees_all(folder: Path, num_words: int) -> None:
    speaking = Speaking(folder, lanes=2)
    begin(speaking, 0)
    say(speaking, 0, words(TEXT)[:num_words])
    speaking.step(100)
    speaking.cancel(0)
    speaking.finish([0])
    speaking.assert_empty()
    assert whole(speaking, 1, "Hi")


@pytest.mark.parametrize("text", ["Hi", "No.", "The cat sat there"])
def test_text_shorter_than_a_block_is_spoken_at_its_end(folder: Path, text: str) -> None:
    speaking = Speaking(folder, lanes=2)
    assert whole(speaking, 0, text)
    speaking.assert_empty()


def test_clauses_follow_each_other_and_silent_ones_say_nothing(folder: Path) -> None:
    speaking = Speaking(folder, lanes=2)
    begin(speaking, 0)
    say(speaking, 0, [("Hello there", False), (" all of you.", True)], 0)
    say(speaking, 0, [("...", False), (" \N{WAVING HAND SIGN}", True)], 1)
    say(speaking, 0, [("Bye now, my", False), (" good old friends.", True)], 2)
    end(speaking, 0)
    assert [message.index for message in speaking.said[0] if isinstance(message, ClauseDone)] == [0, 1, 2]
    speaking.assert_empty()


@pytest.mark.parametrize(
    ("settings", "message", "said"),
    [
        ({"mode": "full"}, {}, "full response"),
        ({}, {"streaming": False}, "full response"),
        ({"clause_tokens": 9}, {}, "limit is 9"),
    ],
)
def test_what_cannot_be_spoken_by_words_is_refused(
    folder: Path, settings: dict[str, Any], message: dict[str, Any], said: str
) -> None:
    speaking = Speaking(folder, lanes=2, **settings)
    whole(speaking, 0, TEXT, **message)
    failed = speaking.said[0][-1]
    assert isinstance(failed, Failed) and said in failed.message
    speaking.assert_empty()


def test_an_untrained_talker_is_refused(folder: Path) -> None:
    speaking = Speaking(folder, lanes=2)
    speaking.engine.reader.mix = None
    whole(speaking, 0, TEXT)
    failed = speaking.said[0][-1]
    assert isinstance(failed, Failed) and failed.code == "unsupported" and "not trained" in failed.message


def test_an_end_amid_a_clause_is_an_error(folder: Path) -> None:
    speaking = Speaking(folder, lanes=2)
    begin(speaking, 0)
    say(speaking, 0, [("Hello there", False)])
    end(speaking, 0)
    assert isinstance(speaking.said[0][-1], Failed)
    speaking.assert_empty()


def test_talkers_without_pages_wait_and_go_on(folder: Path) -> None:
    speaking = Speaking(folder, lanes=2, talker_pages=100)
    for context in range(2):
        begin(speaking, context, seed=context)
        say(speaking, context, words(TEXT)[:12])
    speaking.step(150)
    for context in range(2):
        say(speaking, context, words(TEXT)[12:])
        speaking.tell(End(context=context, epoch=0))
    speaking.finish(range(2))
    assert all(isinstance(speaking.said[context][-1], Done) for context in range(2))
    alone = Speaking(folder, lanes=1, talker_pages=100)
    assert [speaking.pcm(c) for c in range(2)] == [whole(alone, c, TEXT, seed=c) for c in range(2)]
    speaking.assert_empty()


def test_who_finds_no_pages_waits_for_one_that_waits_for_words(folder: Path) -> None:
    speaking = Speaking(folder, lanes=2, talker_pages=84)
    begin(speaking, 0)
    say(speaking, 0, words(TEXT)[:12])
    until_idle(speaking)
    speaking.tell(
        Open(context=1, epoch=0, voice="", seed=1),
        Clause(context=1, epoch=0, index=0, text=TEXT),
        End(context=1, epoch=0),
    )
    until_idle(speaking)
    assert [type(message).__name__ for message in speaking.said[1]] == ["Opened"]
    say(speaking, 0, words(TEXT)[12:])
    speaking.tell(End(context=0, epoch=0))
    speaking.finish([0, 1])
    assert [type(speaking.said[context][-1]) for context in (0, 1)] == [Done, Done]
    speaking.assert_empty()
