import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine import frontend
from engine.frontend import (
    END_OF_PROMPT,
    PROMPT_PREFIX,
    QWEN_SPECIALS,
    SPECIAL_TOKENS,
    Tokenizer,
    TokenizerError,
    assemble,
    choose_mode,
    escape_controls,
    has_speech,
    instruction,
    normalise,
    segments,
    split,
    year_words,
)

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r")]


def byte_letters() -> list[str]:
    """The 256 characters by which a byte-level vocabulary writes bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) for byte in shown] + [chr(256 + i) for i in range(len(hidden))]


def write_vocabulary(folder: Path, extra: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    words = byte_letters() + ["".join(pair) for pair in MERGES] + [f"\u4e00{i}" for i in range(extra)]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in MERGES), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_vocabulary(tmp_path_factory.mktemp("small")))


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


# what is there to say

SILENT = [
    "",
    " ",
    "\n",
    "...",
    "!!!",
    "🙂🙂",
    "***",
    "---",
    "```",
    "\u200d\u200b",
    "\u0301",
    "\u3164",
    "👩‍👩‍👧 👍🏽",
    "—",
    "、。",
    "<|",
]


@pytest.mark.parametrize("text", SILENT, ids=ascii)
def test_text_with_nothing_to_say_gives_no_segment(text: str, tokenizer: Tokenizer) -> None:
    assert not has_speech(text)
    assert segments(text, tokenizer) == []
    assert segments(text + " Hello there. " + text, tokenizer) != []


@pytest.mark.parametrize("text", ["a", "7", "嗯", "No", "½", "ß", "أ"])
def test_the_shortest_words_are_speech(text: str, tokenizer: Tokenizer) -> None:
    assert has_speech(text)
    assert len(segments(text, tokenizer)) == 1


# normalisation

READINGS = {
    "It costs $12.50.": "It costs twelve dollars and fifty cents.",
    "£1.01, $0.50 and $1": "one pound and one penny, fifty cents and one dollar",
    "$1.5 million or $5k": "one point five million dollars or five thousand dollars",
    "1,000 people": "one thousand people",
    "at 6:45": "at six forty five",
    "March 3rd, 2024": "March third, twenty twenty four",
    "the 1980s": "the nineteen eighties",
    "1990-1995": "nineteen ninety to nineteen ninety five",
    "Call 911 or 555-1234": "Call nine one one or five five five, one two three four",
    "+44 20 7946 0958": "plus four four, two zero, seven nine four six, zero nine five eight",
    "No. 5 and #7": "number five and number seven",
    "version 2.0.1": "version two point zero point one",
    "No. I sat down. Sun is out.": "No. I sat down. Sun is out.",
    "Sat. & Sun. or Mon 5 May": "Saturday and Sunday or Monday five May",
    "Dr. Smith, 50%": "doctor Smith, fifty percent",
    "5 m² and x²": "five square meters and x squared",
    'He said "go" 2 times': 'He said "go" two times',
    "a back\\slash 2": "a back\\slash two",
    "**bold** and *soft* `code`": "bold and soft code",
    "- one\n- two\n": "one. two",
    "# Title\nText": "Title. Text",
    "see [the page](https://x.org/a)": "see the page",
    "write to bob.smith@example.com": "write to bob dot smith at example dot com",
    "NASA and the FBI": "NASA and the FBI",
    "naïve café": "naïve café",
    "one 🙂 two": "one two",
    "zero\u200bwidth": "zerowidth",
    "ＡＢ １２": "AB twelve",
}


@pytest.mark.parametrize(("text", "spoken"), READINGS.items(), ids=ascii)
def test_english_is_read_as_people_read_it(text: str, spoken: str) -> None:
    assert normalise(text) == spoken


FOREIGN = ["Größe 3,5 €", "15:30 Uhr", "Привет, 25 рублей", "¿Cuánto es? 3 días", "مرحبا 5", "हिन्दी 5", "5 명이 왔다"]


@pytest.mark.parametrize("text", FOREIGN, ids=ascii)
def test_other_languages_are_neither_stripped_nor_read_in_english(text: str) -> None:
    assert normalise(text) == text


def test_a_named_language_settles_what_the_script_leaves_open() -> None:
    assert normalise("3 Tage", "de-DE") == "3 Tage"
    assert normalise("3 Tage", "en") == "three Tage"
    assert normalise("Müller 3", "en") == "Müller three"
    assert normalise("123", "zh") == "一百二十三"


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("今天是2024年3月3日。", "今天是二零二四年三月三日。"),
        ("你好 ，世界", "你好，世界"),
        ("我用 hello world 说", "我用hello world说"),
        ("（你好）【世界】", "你好世界"),
        ("好的，，", "好的。"),
        ("面积²", "面积平方"),
        ("第一\n第二", "第一第二"),
        ("好.", "好。"),
    ],
)
def test_chinese_follows_the_reference(text: str, spoken: str) -> None:
    assert normalise(text) == spoken


def test_japanese_is_not_read_in_chinese() -> None:
    assert normalise("テキスト 123 です") == "テキスト 百二十三 です"


def test_text_with_both_marks_is_the_callers_own_assembly() -> None:
    text = f"{PROMPT_PREFIX}{END_OF_PROMPT}Room 5,  as is."
    assert normalise(text) == text


def test_control_tokens_pass_through_normalisation() -> None:
    assert normalise("[breath] 5 [AA0] <strong>6</strong>") == "[breath] five [AA0] <strong>six</strong>"


@given(st.text(alphabet="a1 ,", max_size=400))
def test_the_grammar_is_given_parts_that_are_soon_read(text: str) -> None:
    parts = frontend._GRAMMAR_PART.findall(text)
    assert "".join(parts) == text
    assert all(len(part) <= 100 for part in parts)
    assert all(part[-1] == " " or len(part) == 100 for part in parts[:-1])


LONG_RUNS = {
    "marks": "a" + "\u0301\u0316" * 30_000,
    "spaces": "a" + " " * 60_000 + "b",
    "commas": "好" + "，" * 60_000 + "好",
    "openers": "**a " * 15_000,
}


@pytest.mark.parametrize("text", LONG_RUNS.values(), ids=LONG_RUNS)
def test_no_run_of_one_character_holds_up_the_others(text: str) -> None:
    start = time.process_time()
    normalise(text, "de")
    assert time.process_time() - start < 2.5


@pytest.mark.parametrize(
    ("year", "words"),
    [(1776, "seventeen seventy six"), (1905, "nineteen oh five"), (1900, "nineteen hundred"), (2000, "two thousand")],
)
def test_years_are_read_in_pairs(year: int, words: str) -> None:
    assert year_words(year) == words


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
@example("#5")
@example("a  b 1")
@example("\ud800 lone")
@example("9" * 400)
@example("²³¹½①٣")
def test_normalise_takes_any_text(text: str) -> None:
    spoken = normalise(text)
    assert has_speech(spoken) or not has_speech(frontend.clean(text)) or "`" in text or "~" in text


PLAIN_WORDS = ["No", "no", "sun", "sat", "May", "hello", "I", "don't", "Mary", "fine", "US", "may", "in", "am", "a"]
NOISE = ["5", "$3", "12:30", "&", "#", "-", "...", "(", ")", '"', "\\", "*", "7%", ",", "?", "1st", "@", "2024-05-06"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PLAIN_WORDS + NOISE), max_size=12))
def test_normalise_never_loses_a_plain_word(parts: list[str]) -> None:
    spoken = normalise(" ".join(parts), "en").lower().replace("’", "'")
    found = re.findall(r"[a-z']+", spoken)
    for word in parts:
        assert word not in PLAIN_WORDS or word.lower() in found


def test_digits_never_reach_an_english_voice() -> None:
    text = " ".join(f"{n}{sign}" for n in (0, 7, 12, 100, 1999, 10**6) for sign in ("", "%", "kg", "th", "x", "$"))
    assert not re.search("[0-9]", normalise(text, "en"))


# control tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a <|endofprompt|> b", "a endofprompt b"),
        ("x [breath] y", "x breath y"),
        ("<strong>so</strong>", "so"),
        ("[bre\u200bath]", "breath"),
        ("<<|||>>", "< | >"),
        ("[a\u0300]", "à"),
        ("[not a token]", "[not a token]"),
    ],
)
def test_controls_become_ordinary_words(text: str, expected: str) -> None:
    assert escape_controls(text).split() == expected.split()


PARTS = [
    "<|",
    "|>",
    "[",
    "]",
    "breath",
    "endofprompt",
    "<",
    ">",
    "/",
    "strong",
    "|",
    "AA0",
    "\u200b",
    " ",
    "à",
    "a\u0300",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=14).map("".join))
def test_escaped_text_never_holds_a_control_token(text: str) -> None:
    escaped = escape_controls(text)
    assert not any(token in escaped for token in (*SPECIAL_TOKENS, *QWEN_SPECIALS))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*PARTS, *SPECIAL_TOKENS[:40], *QWEN_SPECIALS]), max_size=8).map("".join))
def test_plain_encoding_never_gives_a_special_id(tokenizer: Tokenizer, text: str) -> None:
    assert not set(tokenizer.encode(text)) & set(tokenizer.specials.values())


# segments


def count_words(text: str) -> int:
    return len(text.split())


def test_short_text_is_one_segment_with_a_stop() -> None:
    assert split("hello there", count_words) == ["hello there."]
    assert split("hello there,", count_words) == ["hello there."]
    assert split("你好", count_words) == ["你好。"]
    assert split("Really?", count_words) == ["Really?"]


def test_sentences_are_packed_to_the_limits() -> None:
    sentence = "word " * 29 + "end."
    parts = split(" ".join([sentence] * 5), count_words)
    assert [count_words(part) for part in parts] == [90, 60]


def test_a_short_tail_joins_the_segment_before() -> None:
    sentence = "word " * 64 + "end."
    parts = split(f"{sentence} {sentence} Too short.", count_words)
    assert [count_words(part) for part in parts] == [65, 67]


def test_chinese_counts_characters() -> None:
    parts = split("今天天气很好。" * 30, count_words)
    assert [len(part) for part in parts] == [77, 77, 56]


@pytest.mark.parametrize("text", ['."Hi there."', '"', '?"', '."', "!”Yes.", '"Go." "Stop."'])
def test_a_quote_after_an_ender_never_raises(text: str) -> None:
    parts = split(text, count_words)
    assert words_of("".join(parts)) == words_of(text)


def test_a_closing_quote_stays_with_its_sentence() -> None:
    assert split('He said "go."', count_words) == ['He said "go."']
    long = "word " * 70
    assert split(f'"{long}end." {long}end.', count_words)[0].endswith('end."')


def test_marks_inside_numbers_and_names_end_nothing() -> None:
    text = "word " * 61 + "um 15:30 Uhr und 3.5 auf rill.example " + "word " * 30
    joined = " ".join(split(text, count_words))
    assert "15:30" in joined and "3.5" in joined and "rill.example" in joined


@pytest.mark.parametrize("text", ["word " * 2000, "字" * 2000, "ha" * 3000, "one, two, three, " * 300], ids=ascii)
def test_text_without_enders_is_cut_all_the_same(text: str, tokenizer: Tokenizer) -> None:
    parts = split(text, tokenizer.count)
    sizes = [len(part) if "字" in text else tokenizer.count(part) for part in parts]
    assert max(sizes) <= 140
    assert "".join(words_of("".join(parts))) == "".join(words_of(text))


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.one_of(st.sampled_from('ab .?!;:"”,，。字\n-'), st.characters()), max_size=300))
def test_split_takes_any_text_and_keeps_every_word(text: str) -> None:
    parts = split(text, count_words)
    assert all(has_speech(part) for part in parts)
    assert [c for c in "".join(parts) if has_speech(c)] == [c for c in text if has_speech(c)]


def test_every_segment_is_worth_saying(tokenizer: Tokenizer) -> None:
    parts = segments("Yes.\n\n***\n\n🙂\n\nNo.", tokenizer)
    assert words_of(" ".join(parts)) == ["yes", "no"]


# tokens


def test_special_ids_follow_the_official_vocabulary(tmp_path: Path) -> None:
    official = Tokenizer(write_vocabulary(tmp_path / "official", extra=151643 - 256 - len(MERGES)))
    expected = {
        "<|endoftext|>": 151643,
        "<|im_end|>": 151645,
        END_OF_PROMPT: 151646,
        "[breath]": 151647,
        "[mn]": 151662,
        "<|endofsystem|>": 151663,
        "[AA]": 151664,
        "[ZH]": 151747,
        "[a]": 151748,
        "[j]": 151797,
        "[zh]": 151849,
        "[à]": 151850,
        "[ǐ]": 151913,
        "[ǜ]": 151923,
    }
    assert {token: official.specials[token] for token in expected} == expected
    assert official.end_of_prompt == 151646
    assert official.size == 151924


def test_special_ids_follow_a_small_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.end_of_prompt == 256 + len(MERGES) + len(QWEN_SPECIALS)
    assert tokenizer.encode("[breath]", allow_controls=True) == [tokenizer.specials["[breath]"]]
    assert len(tokenizer.encode("[breath]")) == len("[breath]")


def test_encoding_merges_bytes_as_qwen2_does(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world")
    assert tokenizer.decode(ids) == "hello world"
    assert len(ids) == 5  # hello, Ġw, or, l, d
    assert len(tokenizer.encode("12")) == 2  # digits stand alone
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_a_tokenizer_json_gives_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from tokenizers import models

    vocabulary = write_vocabulary(tmp_path / "pair")
    model = models.BPE.from_file(str(vocabulary / "vocab.json"), str(vocabulary / "merges.txt"))
    whole = frontend.qwen2_pipeline(model)
    frontend.add_specials(whole)
    (tmp_path / "whole").mkdir()
    whole.save(str(tmp_path / "whole" / "tokenizer.json"))
    loaded = Tokenizer(tmp_path / "whole")
    text = f"hello [sigh]{END_OF_PROMPT} wörld"
    assert loaded.specials == tokenizer.specials
    assert loaded.encode(text, allow_controls=True) == tokenizer.encode(text, allow_controls=True)
    assert loaded.encode(text) == tokenizer.encode(text)


def test_a_folder_without_a_vocabulary_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="neither vocab.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "vocab", ["", "[" * 100_000, '{"a": -1}', '{"a": 0}'], ids=["empty", "deep", "signed", "small"]
)
def test_a_vocabulary_that_is_none_is_named(vocab: str, tmp_path: Path) -> None:
    (write_vocabulary(tmp_path) / "vocab.json").write_text(vocab)
    with pytest.raises(TokenizerError, match="can't be read"):
        Tokenizer(tmp_path)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_any_text_can_be_encoded(tokenizer: Tokenizer, text: str) -> None:
    assert all(0 <= i < tokenizer.size for i in tokenizer.encode(text))


# assembly


def encode_all(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, allow_controls=True))


def test_zero_shot_carries_prefix_and_transcript(tokenizer: Tokenizer) -> None:
    voice = tokenizer.prompt_ids("hello world")
    prompt = assemble("zero_shot", "hello", tokenizer, voice_prompt_text=voice)
    assert prompt.prompt_text == encode_all(tokenizer, f"{PROMPT_PREFIX}{END_OF_PROMPT}hello world")
    assert prompt.text == encode_all(tokenizer, "hello")
    assert prompt.has_prompt_speech
    assert prompt.num_target == 1


def test_a_stored_prompt_without_the_prefix_gets_it(tokenizer: Tokenizer) -> None:
    bare = tokenizer.encode("hello world")
    prompt = assemble("zero_shot", "hello", tokenizer, voice_prompt_text=bare)
    assert prompt.prompt_text == tuple(tokenizer.prompt_ids("hello world"))


@pytest.mark.parametrize("number", [-1, 10**9])
def test_a_prompt_made_with_another_tokenizer_is_refused(number: int, tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=f"has the id {number}"):
        assemble("zero_shot", "hello", tokenizer, voice_prompt_text=[number])


def test_a_transcript_may_bring_its_own_instruction(tokenizer: Tokenizer) -> None:
    ids = tokenizer.prompt_ids(f"Be calm.{END_OF_PROMPT}hello")
    assert tuple(ids) == encode_all(tokenizer, f"Be calm.{END_OF_PROMPT}hello")


def test_instruct2_drops_the_transcript_and_the_prompt_speech(tokenizer: Tokenizer) -> None:
    prompt = assemble("instruct2", "hello", tokenizer, instruct="Speak softly.", voice_prompt_text=[1, 2, 3])
    assert prompt.prompt_text == encode_all(tokenizer, f"{PROMPT_PREFIX} Speak softly.{END_OF_PROMPT}")
    assert not prompt.has_prompt_speech


@pytest.mark.parametrize("mode", ["cross_lingual", "sft"])
def test_without_a_transcript_the_prefix_stands_in_the_text(mode: frontend.Mode, tokenizer: Tokenizer) -> None:
    prompt = assemble(mode, "hello", tokenizer)
    assert prompt.prompt_text == ()
    assert prompt.text == encode_all(tokenizer, f"{PROMPT_PREFIX}{END_OF_PROMPT}hello")
    assert prompt.num_target == 1


@pytest.mark.parametrize("text", ["", "Be loud.", f"{PROMPT_PREFIX} Be loud.{END_OF_PROMPT}", "x<|endoftext|>[breath]"])
def test_an_instruction_holds_one_control_token(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(instruction(text), allow_controls=True)
    assert [i for i in ids if i in tokenizer.specials.values()] == [tokenizer.end_of_prompt]
    assert instruction(text).count(PROMPT_PREFIX) == 1


@pytest.mark.parametrize(
    ("instruct", "voice", "has_prompt", "mode"),
    [
        ("softly", [1], True, "instruct2"),
        (None, [1], True, "zero_shot"),
        (" ", [1], True, "zero_shot"),
        (None, [], True, "cross_lingual"),
        (None, [], False, "sft"),
    ],
)
def test_the_mode_follows_from_the_request(instruct: str | None, voice: list[int], has_prompt: bool, mode: str) -> None:
    assert choose_mode(instruct=instruct, voice_prompt_text=voice, has_prompt=has_prompt) == mode


def test_the_front_end_imports_without_torch() -> None:
    code = "import engine.frontend, sys; assert 'torch' not in sys.modules and 'wetext' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
