"""From a caller's text to token ids: clean, escape, normalise, split, encode, assemble.

Needs neither torch nor the models, so the gateway, training workers and tests import it cheaply. L counts tokens.
Source: CosyVoice3 reference, front end. Where this differs from the reference on purpose, the function says so.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal

from anyascii import anyascii

END_OF_PROMPT = "<|endofprompt|>"
PROMPT_PREFIX = "You are a helpful assistant."

_EVENTS = (
    "[breath] <strong> </strong> [noise] [laughter] [cough] [clucking] [accent] [quick_breath] <laughter> </laughter> "
    "[hissing] [sigh] [vocalized-noise] [lipsmack] [mn]"
)
_CMU = (
    "AA AA0 AA1 AA2 AE AE0 AE1 AE2 AH AH0 AH1 AH2 AO AO0 AO1 AO2 AW AW0 AW1 AW2 AY AY0 AY1 AY2 B CH D DH EH EH0 EH1 "
    "EH2 ER ER0 ER1 ER2 EY EY0 EY1 EY2 F G HH IH IH0 IH1 IH2 IY IY0 IY1 IY2 JH K L M N NG OW OW0 OW1 OW2 OY OY0 OY1 "
    "OY2 P R S SH T TH UH UH0 UH1 UH2 UW UW0 UW1 UW2 V W Y Z ZH"
)
_PINYIN = (
    "a ai an ang ao b c ch d e ei en eng f g h i ian in ing iu ià iàn iàng iào iá ián iáng iáo iè ié iòng ióng iù iú "
    "iā iān iāng iāo iē iě iōng iū iǎ iǎn iǎng iǎo iǒng iǔ j k l m n o ong ou p q r s sh t u uang ue un uo uà uài uàn "
    "uàng uá uái uán uáng uè ué uì uí uò uó uā uāi uān uāng uē uě uī uō uǎ uǎi uǎn uǎng uǐ uǒ vè w x y z zh à ài àn "
    "àng ào á ái án áng áo è èi èn èng èr é éi én éng ér ì ìn ìng í ín íng ò òng òu ó óng óu ù ùn ú ún ā āi ān āng āo "
    "ē ēi ēn ēng ě ěi ěn ěng ěr ī īn īng ō ōng ōu ū ūn ǎ ǎi ǎn ǎng ǎo ǐ ǐn ǐng ǒ ǒng ǒu ǔ ǔn ǘ ǚ ǜ"
)

QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPECIAL_TOKENS: tuple[str, ...] = (
    END_OF_PROMPT,
    *_EVENTS.split(),
    "<|endofsystem|>",
    *(f"[{phoneme}]" for phoneme in _CMU.split()),
    *(f"[{sound}]" for sound in _PINYIN.split()),
)
"""What CosyVoice3 appends to the Qwen2 vocabulary, in the order of their ids (151646 to 151923 in the release)."""

Language = Literal["en", "zh", "ja", "other"]


# --- what is there to say --------------------------------------------------------------------------------------------

_SPOKEN_CATEGORIES = frozenset({"Lu", "Ll", "Lt", "Lo", "Nd", "Nl", "No"})
_BLANK_LETTERS = frozenset("\u115f\u1160\u3164\uffa0")  # Hangul fillers: letters by category, blank to everyone


def has_speech(text: str) -> bool:
    """Whether any letter or digit is there; blanks, punctuation, emoji, rules and lone combining marks are silent."""
    return any(unicodedata.category(c) in _SPOKEN_CATEGORIES and c not in _BLANK_LETTERS for c in text)


_JOINERS = "\u200c\u200d"
_MOST_MARKS = 30  # on one letter, as in Unicode's stream-safe text


def clean(text: str) -> str:
    """NFC, full-width letters and digits as ASCII, and nothing that can't be read aloud.

    Emoji, invisible format characters, controls, surrogates and private-use characters go. Joiners between letters
    stay, since Indic and Persian words need them. Of marks heaped on one letter the first thirty stay: NFC sorts them
    in quadratic time, and lets no other thread run meanwhile.
    """
    heaped = text if text.isascii() else _few_marks(text)
    kept = "".join(map(_readable, unicodedata.normalize("NFC", heaped)))
    joined = re.sub(rf"(?<!\w)[{_JOINERS}]+|[{_JOINERS}]+(?!\w)", "", kept)
    return unicodedata.normalize("NFC", joined)


def _few_marks(text: str) -> str:
    runs = groupby(text, lambda char: unicodedata.combining(char) > 0)
    return "".join(char for are_marks, run in runs for char in islice(run, _MOST_MARKS if are_marks else None))


def _readable(char: str) -> str:
    if "０" <= char <= "９" or "Ａ" <= char <= "Ｚ" or "ａ" <= char <= "ｚ":
        return chr(ord(char) - 0xFEE0)
    if char < "\x7f":
        return char if char >= " " or char == "\n" else " "
    category = unicodedata.category(char)
    if char in "\x85\u2028\u2029":
        return "\n"
    if category == "Zs" or category == "Cc":
        return " "
    is_emoji = (category == "So" and char >= "\u2190") or "\ufe00" <= char <= "\ufe0f" or "🏻" <= char <= "🏿"
    is_hidden = category in ("Cs", "Co", "Cn") or (category == "Cf" and char not in _JOINERS)
    return "" if is_emoji or is_hidden or char == "\u20e3" else char


_BRACKETED = re.compile("|".join(re.escape(t) for t in SPECIAL_TOKENS if t[0] == "["))
_TAGS = re.compile("|".join(re.escape(t) for t in SPECIAL_TOKENS if t[0] == "<" and t[1] != "|"))


def escape_controls(text: str) -> str:
    """Text of a caller who may not steer the model: no control token is left, and no word is lost.

    `<|im_start|>` is read as its name, `[breath]` as "breath", and the tags `<strong>`, `<laughter>` are dropped.
    Cleaned first, since an invisible character could hide a token. `Tokenizer.encode` is the second wall.
    """
    text = clean(text)
    text = text.replace("<|", " ").replace("|>", " ")
    text = _TAGS.sub(" ", text)
    return _BRACKETED.sub(lambda token: f" {token[0][1:-1]} ", text)


# --- normalisation ---------------------------------------------------------------------------------------------------

_HAN = re.compile("[\u4e00-\u9fff]")
_KANA = re.compile("[\u3041-\u3096\u30a1-\u30fa]")
_LOAN_LETTERS = frozenset("éïçñÉÏÇÑ’")
_COMMON = "the and of is are was you your it its with that this for have has be to my at we they"
_ENGLISH_WORDS = frozenset(_COMMON.split())
_FOREIGN = "uhr und ist nicht ich das ein eine mit für zu el los las por que con una les des est une pour avec il che"
_FOREIGN_WORDS = frozenset(_FOREIGN.split())


def language_of(text: str, lang: str = "") -> Language:
    """Which rules read the digits and signs of a text.

    The script decides first, then `lang` (a BCP 47 tag) if given. Without one, letters or words foreign to English and
    no common English word mean "other": its digits are left to the model rather than read in English.
    """
    tag = lang.lower().replace("_", "-").split("-")[0]
    if _KANA.search(text) or (tag == "ja" and _HAN.search(text)):
        return "ja"
    if _HAN.search(text) or tag in ("zh", "yue", "wuu", "cmn"):
        return "zh"
    if tag not in ("", "en"):
        return "other"
    return "other" if _reads_foreign(text, is_english_named=tag == "en") else "en"


def _reads_foreign(text: str, *, is_english_named: bool) -> bool:
    letters = [c for c in text if c.isalpha() and c not in _LOAN_LETTERS]
    foreign = [c for c in letters if c > "\x7f"]
    other_scripts = sum(c > "\u024f" for c in foreign)
    if is_english_named or not _ENGLISH_WORDS.isdisjoint(words := text.lower().split()):
        return 2 * other_scripts > len(letters)
    return bool(foreign) or not _FOREIGN_WORDS.isdisjoint(words)


def normalise(text: str, lang: str = "", *, before: str = "") -> str:
    """Write out what a speaker would say: numbers, dates, money, units, addresses; markup is dropped.

    Control tokens in `text` stay as they are. Never raises, never loses a word. A text with both `<|` and `|>` is the
    caller's own assembly and is returned unchanged, as in the reference. Text in other languages keeps its digits;
    which language it is, what stands before it helps to tell.
    """
    if "<|" in text and "|>" in text:
        return text
    text = clean(text)
    pieces = re.split(f"({_BRACKETED.pattern}|{_TAGS.pattern})", text)
    language = language_of(before + text, lang)
    pieces[::2] = [_normalise_piece(piece, language) for piece in pieces[::2]]
    return re.sub(r"[ \t]{2,}", " ", "".join(pieces)).strip()


def _normalise_piece(text: str, language: Language) -> str:
    if not has_speech(text):
        return text
    text = _strip_markup(text)
    if language == "zh":
        return _normalise_chinese(text)
    if language == "ja":
        return _rewrite(text, "ja")
    return _normalise_english(text) if language == "en" else text


_MARKUP: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r" {2,}"), " "),  # the other patterns would try each of a long run
    (re.compile(r"^[ \t]*(?:```|~~~)[ \t]*[\w+-]*[ \t]*\n", re.M), ""),
    (re.compile(r"^[ \t]*(?:[-*_][ \t]*){3,}$", re.M), ""),
    (re.compile(r"^[ \t]*#{1,6}[ \t]+([^\n]*\w)[ \t#]*$", re.M), r"\1."),
    (re.compile(r"^[ \t]*#{1,6}[ \t]+", re.M), ""),
    (re.compile(r"(?<=\w)[ \t]*(\n[ \t]*(?:[-*+•]|\d{1,2}[.)])[ \t])"), r".\1"),
    (re.compile(r"^[ \t]*(?:>[ \t]?)+", re.M), ""),
    (re.compile(r"^[ \t]*[-*+•][ \t]+", re.M), ""),
    (re.compile(r"!?\[([^\[\]\n]+)\]\((?:[^()\s]+)\)"), r"\1"),
    (re.compile(r"(\*\*|__|~~)(?=\S)(.{1,400}?)(?<=\S)\1", re.S), r"\2"),
    (re.compile(r"(?<![\w*])\*(?=[^\s*])([^*\n]+?)(?<=\S)\*(?![\w*])"), r"\1"),
    (re.compile(r"`+"), " "),
    (re.compile(r"(?<=[\w\"”’')\]])[ \t]*\n[ \t]*\n\s*"), ".\n"),
    (re.compile(r"\s*\n\s*"), "\n"),
)


def _strip_markup(text: str) -> str:
    """Markdown that a language model adds; a blank line ends a sentence."""
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return text


# Chinese


def _normalise_chinese(text: str) -> str:
    text = _rewrite(text, "zh").replace("\n", "")
    text = _drop_inner_spaces(text)
    for old, new in (("²", "平方"), ("³", "立方"), (".", "。"), (" - ", "，"), ("——", " ")):
        text = text.replace(old, new)
    text = re.sub("[（）【】`]", "", text)
    stem = text.rstrip("，,、")
    return text if stem == text else stem + "。"


def _drop_inner_spaces(text: str) -> str:
    """A space stays only between two ASCII characters that are no spaces: Chinese is written without."""

    def is_latin(char: str) -> bool:
        return "!" <= char <= "~"

    ends = len(text) - 1
    return "".join(
        c for i, c in enumerate(text) if c != " " or (0 < i < ends and is_latin(text[i - 1]) and is_latin(text[i + 1]))
    )


# English

_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_DECADES = (
    "hundreds",
    "tens",
    "twenties",
    "thirties",
    "forties",
    "fifties",
    "sixties",
    "seventies",
    "eighties",
    "nineties",
)
_SCALES = {"k": "thousand", "m": "million", "bn": "billion", "b": "billion", "tn": "trillion"}
_CURRENCIES = {"$": ("dollar", "cent"), "£": ("pound", "penny"), "€": ("euro", "cent"), "₹": ("rupee", "paisa")}
_PLURALS = {"penny": "pence", "paisa": "paise"}


@lru_cache(maxsize=1)
def _inflect() -> Any:
    import inflect

    return inflect.engine()


def number_words(number: int | str) -> str:
    """English words of a number below 10^15, of more digits one by one."""
    digits = str(number)
    if len(digits) > 15 or (len(digits) > 1 and digits[0] == "0"):
        return " ".join(number_words(digit) for digit in digits)
    return str(_inflect().number_to_words(digits)).replace("-", " ").replace(",", "")


def ordinal_words(number: int) -> str:
    return str(_inflect().number_to_words(_inflect().ordinal(number))).replace("-", " ")


def year_words(year: int) -> str:
    """1776 -> "seventeen seventy six", 1905 -> "nineteen oh five", 2007 -> "two thousand and seven"."""
    century, rest = divmod(year, 100)
    if century % 10 == 0 and rest < 10:
        return number_words(year)
    if rest == 0:
        return f"{number_words(century)} hundred"
    return f"{number_words(century)} {'oh ' if rest < 10 else ''}{number_words(rest)}"


def _count(number: str, unit: str) -> str:
    plural = _PLURALS.get(unit, unit + "s")
    return f"{number_words(int(number))} {unit if int(number) == 1 else plural}"


def _money(match: re.Match[str]) -> str:
    unit, small = _CURRENCIES[match["sign"]]
    major, minor = match["major"].replace(",", ""), match["minor"]
    if match["scale"]:
        scale = _SCALES.get(match["scale"].lower(), match["scale"].lower())
        point = f" point {' '.join(map(number_words, minor))}" if minor else ""
        return f"{number_words(major)}{point} {scale} {unit}s"
    if minor is None or len(minor) != 2:
        point = f" point {' '.join(map(number_words, minor))}" if minor else ""
        return f"{number_words(major)}{point} {unit}s" if point else _count(major, unit)
    parts = [_count(major, unit)] * (int(major) > 0) + [_count(minor, small)] * (int(minor) > 0)
    return " and ".join(parts) or _count("0", unit)


def _date(match: re.Match[str]) -> str:
    year = f", {year_words(int(match['year']))}" if match["year"] else ""
    return f"{match['month']} {ordinal_words(int(match['day']))}{year}"


def _decade(match: re.Match[str]) -> str:
    century = match["century"]
    if match["tens"] == "0" and century:
        return "two thousands" if century == "20" else f"{number_words(int(century))} hundreds"
    return f"{number_words(int(century))} {_DECADES[int(match['tens'])]}" if century else _DECADES[int(match["tens"])]


def _digit_by_digit(match: re.Match[str]) -> str:
    groups = re.findall(r"\d+", match[0])
    sign = "plus " if match[0].startswith("+") else ""
    return sign + ", ".join(" ".join(map(number_words, group)) for group in groups)


Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]
_WEEKDAYS = {
    "Mon": "Monday",
    "Tue": "Tuesday",
    "Tues": "Tuesday",
    "Wed": "Wednesday",
    "Thu": "Thursday",
    "Thurs": "Thursday",
    "Fri": "Friday",
    "Sat": "Saturday",
    "Sun": "Sunday",
}
_WEEKDAY = "|".join(_WEEKDAYS)
_YEAR = r"1[1-9]\d\d|20\d\d"
_ENGLISH_RULES: tuple[Rule, ...] = (
    (re.compile(r"\s+"), " "),
    (re.compile("−"), "-"),
    (re.compile(r"(?<=[A-Za-z])(?=\d+\.\d+\.\d)"), " "),
    (re.compile(r"\be\.g\.,?(?=\s)", re.I), "for example,"),
    (re.compile(r"\bi\.e\.,?(?=\s)", re.I), "that is,"),
    (re.compile(r"\betc\.(?=\s+[a-z]|,)"), "et cetera"),
    (re.compile(r"\betc\."), "et cetera."),
    (re.compile(r"\bvs\.?(?=\s)"), "versus"),
    (re.compile(r"\b[Nn]o\. ?(?=\d)|#(?=\d)"), "number "),
    (
        re.compile(rf"\b({_WEEKDAY})\b\.?(?=,? (?:\d|{_MONTHS})|,? ?(?:&|and|to|-|–|/) ?(?:{_WEEKDAY})\b)"),
        lambda m: _WEEKDAYS[m[1]],
    ),
    (re.compile(rf"(?<=day)( ?(?:&|and|to|-|–|/) ?)({_WEEKDAY})\b\.?"), lambda m: m[1] + _WEEKDAYS[m[2]]),
    (re.compile(r"(?<![\w.])\+\d[\d ()-]{6,18}\d(?![\w])"), _digit_by_digit),
    (re.compile(r"(?<![\w-])\d{3}-\d{4}(?![\w-])"), _digit_by_digit),
    (re.compile(r"(?<=\b[Cc]all )\d{3}\b|(?<=\b[Dd]ial )\d{3}\b"), _digit_by_digit),
    (re.compile(r"(?<![\d.])\d+(?:\.\d+){2,}(?![\d])"), lambda m: " point ".join(map(number_words, m[0].split(".")))),
    (
        re.compile(
            r"(?P<sign>[$£€₹]) ?(?P<major>\d{1,3}(?:,\d{3})+|\d{1,15})(?:\.(?P<minor>\d{1,4}))?(?![\d])"
            r"(?: ?(?P<scale>thousand|million|billion|trillion|[kKmM]|[bB][nN]?|tn)\b)?"
        ),
        _money,
    ),
    (re.compile(r"(?<!\d)(\d{1,3})¢"), lambda m: _count(m[1], "cent")),
    (re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3}){1,4}(?![\d,]|\.\d)"), lambda m: number_words(m[0].replace(",", ""))),
    (
        re.compile(rf"\b(?P<month>{_MONTHS}) (?P<day>[12]?\d|3[01])(?:st|nd|rd|th)?\b(?:,? (?P<year>{_YEAR})\b)?(?!:)"),
        _date,
    ),
    (re.compile(r"(?<![\w.])(?:(?P<century>1\d|20)|['’])(?P<tens>\d)0['’]?s\b"), _decade),
    (
        re.compile(rf"(?<![\w-])({_YEAR}) ?[-–] ?({_YEAR})(?![\w-])"),
        lambda m: f"{year_words(int(m[1]))} to {year_words(int(m[2]))}",
    ),
    (re.compile(r"(?<![\w–-])(\d{1,5}) ?– ?(\d{1,5})(?![\w–-])"), r"\1 to \2"),
    (re.compile(r"\b24/7\b"), "twenty four seven"),
    (re.compile(r"~ ?(?=\d)"), "about "),
)
_AFTER_GRAMMAR: tuple[Rule, ...] = (
    (re.compile(r"(?<=\w)²"), " squared"),
    (re.compile(r"(?<=\w)³"), " cubed"),
    (re.compile(r"(?<=[a-z])\.,"), ","),
    (re.compile(r"[0-9]+"), lambda m: f" {number_words(m[0])} "),
    (re.compile(r" {2,}"), " "),
    (re.compile(r" (?=[,.?!;:])"), ""),
)


def _normalise_english(text: str) -> str:
    """The reference's order (grammar, then digit runs by inflect) after rules of our own.

    The rules cover what the grammar reads oddly or fails on: cents, decades, versions, calls, month-first dates.
    """
    for pattern, replacement in _ENGLISH_RULES:
        text = pattern.sub(replacement, text)
    text = _rewrite(text, "en")
    for pattern, replacement in _AFTER_GRAMMAR:
        text = pattern.sub(replacement, text)
    return text


# The grammar of wetext

_GRAMMAR_FAULTS = (AssertionError, RuntimeError, ValueError, KeyError, IndexError)
# Joined, the parts are the text. No other thread runs while the grammar does: a third of the time with parts of 100.
_GRAMMAR_PART = re.compile(r".{1,100}(?:\Z|(?<=[,;!?] ))|.{1,100}(?<= )|.{1,100}", re.S)
_UNTOUCHED = re.compile(r'(["\\\n]+|\b(?:Mon|Wed|Fri|Sat|Sun|[Nn][oO])\b)')  # escaped, dropped, read as "number"
_NEEDS_GRAMMAR = re.compile(r"[^A-Za-z ,?!;:'’-]|\b(?:Mr|Mrs|Ms|Jr|Sr)\b")
_SENTENCE_END = re.compile(r"\b[a-z]+\.(?= |$)")  # the grammar's abbreviations are capitalised


@lru_cache(maxsize=3)
def _grammar(lang: str) -> Callable[[str], str]:
    import wetext  # type: ignore[import-untyped]

    normalizer = wetext.Normalizer(lang=lang, operator="tn", remove_erhua=False)
    return lambda text: str(normalizer.normalize(text))


def _rewrite(text: str, lang: str) -> str:
    """Text through the grammar, in the pieces between what it would spoil."""
    pieces = _UNTOUCHED.split(text)
    pieces[::2] = [_rewrite_piece(piece, lang) for piece in pieces[::2]]
    return "".join(pieces)


def _rewrite_piece(text: str, lang: str) -> str:
    if not _NEEDS_GRAMMAR.search(_SENTENCE_END.sub("", text)) or (
        lang != "en" and not any(c.isdecimal() for c in text)
    ):
        return text
    return "".join(_rewrite_words(part, lang) for part in _GRAMMAR_PART.findall(text))


def _rewrite_words(text: str, lang: str) -> str:
    """What the grammar can't read as a whole is tried word by word; a word that it can't read stays."""
    core = text.strip(" ")
    if not core:
        return text
    start = text.index(core)
    try:
        spoken = _grammar(lang)(core)
    except _GRAMMAR_FAULTS:
        words = core.split(" ")
        spoken = core if len(words) == 1 else " ".join(_rewrite_words(word, lang) for word in words)
    if has_speech(core) and not has_speech(spoken):
        spoken = core
    return text[:start] + spoken + text[start + len(core) :]


# --- segments --------------------------------------------------------------------------------------------------------

MAX_LENGTH, MIN_LENGTH, MERGE_LENGTH, HARD_LENGTH = 80, 60, 20, 120
_ENDERS = {"zh": "。？！；：、.?!;", "en": ".?!;:"}


def split(text: str, count_tokens: Callable[[str], int]) -> list[str]:
    """Cut a normalised text into segments that are synthesised one by one.

    Length is characters in Chinese, tokens (by `count_tokens`) elsewhere. At most about 80, merged below 20. Unlike
    the reference: a quote after a leading ender doesn't raise, `3.5` and `a.org` hold together, and a stretch of over
    120 without an ender is cut at a comma or a space. Segments with nothing to say are dropped.
    """
    text = text.strip()
    if not text:
        return []
    chinese = bool(_HAN.search(text))
    enders, length = (_ENDERS["zh"], len) if chinese else (_ENDERS["en"], count_tokens)
    pieces = [
        part
        for piece in _sentences(_ended(text, enders, "。" if chinese else "."), enders)
        for part in _cut(piece, length)
    ]
    return [segment.strip() for segment in _pack(pieces, length) if has_speech(segment)]


def _ended(text: str, enders: str, stop: str) -> str:
    if text[-1] in enders:
        return text
    return text.rstrip(",，、-–— ") + stop


def _sentences(text: str, enders: str) -> list[str]:
    """Pieces that end in an ender; an ender after an ender is discarded, a closing quote joins the piece before."""
    pieces: list[str] = []
    pending = ""
    was_ender = False
    for index, char in enumerate(text):
        if char in '"”' and was_ender and pieces:
            pieces[-1] += char
        elif char in enders and not _is_inside_word(text, index):
            if pending:
                pieces.append(pending + char)
            pending, was_ender = "", True
            continue
        else:
            pending += char
        was_ender = False
    return [*pieces, pending] if pending else pieces


def _is_inside_word(text: str, index: int) -> bool:
    """`3.5`, `15:30`, `rill.example`: a mark between ASCII letters or digits ends nothing."""
    around = text[index - 1 : index] + text[index + 1 : index + 2]
    return text[index] in ".:" and len(around) == 2 and around.isascii() and around.isalnum()


def _cut(piece: str, length: Callable[[str], int]) -> list[str]:
    """A piece that is far too long, cut after commas and, failing that, spaces or characters."""
    if length(piece) <= HARD_LENGTH:
        return [piece]
    return _gather(re.findall(r"[^,，、\s]*[,，、\s]+|[^,，、\s]+", piece), length)


def _gather(words: Iterable[str], length: Callable[[str], int]) -> list[str]:
    parts, current, size = [], "", 0
    for word in words:
        for bit in _bits(word):
            cost = length(bit)
            if current and (size + cost > MAX_LENGTH or (size > MIN_LENGTH and current.rstrip()[-1:] in ",，、")):
                parts.append(current)
                current, size = "", 0
            current, size = current + bit, size + cost
    return [*parts, current]


def _bits(word: str) -> list[str]:
    return [word[start : start + 40] for start in range(0, len(word), 40)]


def _pack(pieces: Sequence[str], length: Callable[[str], int]) -> list[str]:
    packed: list[str] = []
    current = ""
    for piece in pieces:
        if current and length(current) > MIN_LENGTH and length(current + piece) > MAX_LENGTH:
            packed.append(current)
            current = ""
        current += piece
    if packed and length(current) < MERGE_LENGTH:
        packed[-1] += current
        return packed
    return [*packed, current]


# --- tokens ----------------------------------------------------------------------------------------------------------

_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenizerError(Exception):
    """The tokenizer folder, or a prompt made with another, can't be used; the text names the file, token or id."""


def qwen2_pipeline(model: Any) -> Any:
    """A `tokenizers.Tokenizer` around a BPE model with Qwen2's steps (NFC, its word pattern, bytes), no specials."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def add_specials(tokenizer: Any) -> None:
    """Append what is missing of Qwen2's and CosyVoice3's special tokens, in the order of their ids."""
    from tokenizers import AddedToken

    tokens = [AddedToken(token, special=True, normalized=False) for token in (*QWEN_SPECIALS, *SPECIAL_TOKENS)]
    tokenizer.add_special_tokens(tokens)


def _load(folder: Path) -> Any:
    """Raises TokenizerError."""
    try:
        tokenizer = _read(folder)
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"the tokenizer in {folder} can't be read: {str(error)[:200]}") from error
    if tokenizer is None:
        raise TokenizerError(f"{folder} holds neither vocab.json with merges.txt nor tokenizer.json")
    return tokenizer


def _read(folder: Path) -> Any:
    from tokenizers import Tokenizer, models

    whole, vocab, merges = folder / "tokenizer.json", folder / "vocab.json", folder / "merges.txt"
    if vocab.is_file() and merges.is_file():
        words = json.loads(vocab.read_text(encoding="utf-8"))
        lines = merges.read_text(encoding="utf-8").split("\n")
        pairs = [(a, b) for a, _, b in (line.partition(" ") for line in lines if not line.startswith("#version")) if b]
        return qwen2_pipeline(models.BPE(vocab=words, merges=pairs))
    return Tokenizer.from_file(str(whole)) if whole.is_file() else None


class Tokenizer:
    """Text <-> ids of a Qwen2-style folder, official or small; special ids follow the vocabulary that is there.

    specials       token -> id          end_of_prompt  id of `<|endofprompt|>`, 151646 in the release
    reads_ascii    letters beyond ASCII are spelled within it ("é" as "e"), for a talker that has met no others
    """

    def __init__(self, folder: Path, *, reads_ascii: bool = False) -> None:
        self._reads_ascii = reads_ascii
        self._steered = _load(folder)
        add_specials(self._steered)
        self._plain = type(self._steered).from_str(self._steered.to_str())
        self._plain.encode_special_tokens = True  # special strings are read as ordinary characters
        self.specials = {token: self._id_of(token) for token in (*QWEN_SPECIALS, *SPECIAL_TOKENS)}
        self.end_of_prompt = self.specials[END_OF_PROMPT]
        self.size = int(self._steered.get_vocab_size())

    def _id_of(self, token: str) -> int:
        number = self._steered.token_to_id(token)
        if number is None:
            raise TokenizerError(f"the tokenizer has no id for {token}")
        return int(number)

    def encode(self, text: str, *, allow_controls: bool = False) -> list[int]:
        """Ids of a text, nothing added. Special ids come out only where `allow_controls` is set."""
        tokenizer = self._steered if allow_controls else self._plain
        readable = text.encode("utf-8", "ignore").decode()  # a lone surrogate has no bytes
        if self._reads_ascii:
            readable = anyascii(readable)
        return list(tokenizer.encode(readable, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._steered.decode(list(ids), skip_special_tokens=False))

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def prompt_ids(self, transcript: str, *, lang: str = "") -> list[int]:
        """Instruction prefix and transcript of a voice's recording, as zero_shot gives them to the talker."""
        prefix, _, words = transcript.rpartition(END_OF_PROMPT)
        text = (prefix or PROMPT_PREFIX) + END_OF_PROMPT
        spoken = escape_controls(words).strip()
        return self.encode(text, allow_controls=True) + self.encode(normalise(spoken, lang))


def segments(text: str, tokenizer: Tokenizer, *, lang: str = "", allow_controls: bool = False) -> list[str]:
    """What is to be synthesised of one clause of a caller's text, in order; empty when there is nothing to say."""
    if not allow_controls:
        text = escape_controls(text)
    if not has_speech(text):
        return []
    spoken = normalise(text, lang)
    if "<|" in spoken and "|>" in spoken:
        return [spoken]
    return split(spoken, tokenizer.count)


def stretch(text: str, before: str, *, is_last: bool, lang: str = "", allow_controls: bool = False) -> str:
    """What is to be synthesised of the next words of a clause, to be encoded by itself; empty if there is nothing.

    before: what came of the clause so far. Stretches begin with the space between two words, which no rule joins.
    """
    if not allow_controls:
        text, before = escape_controls(text), escape_controls(before)
    spoken = normalise(text, lang, before=before)
    if not has_speech(before + text) or not spoken:
        return ""
    kind: Literal["zh", "en"] = "zh" if _HAN.search(before + text) else "en"
    if is_last:
        spoken = _ended(spoken, _ENDERS[kind], "。" if kind == "zh" else ".")
    return " " * has_speech(before) + "".join(_sentences(spoken, _ENDERS[kind]))


# --- assembly --------------------------------------------------------------------------------------------------------

Mode = Literal["zero_shot", "cross_lingual", "instruct2", "sft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the talker is given for one segment.

    prompt_text, text   ids              has_prompt_speech  whether the voice's speech tokens follow
    num_target          ids of the caller's own words: lengths are limited by these, not by a prefix inside `text`
    """

    prompt_text: tuple[int, ...]
    text: tuple[int, ...]
    has_prompt_speech: bool
    num_target: int


def choose_mode(
    *, instruct: str | None, voice_prompt_text: Sequence[int], has_prompt: bool, is_foreign: bool = False
) -> Mode:
    """The mode that a request asks for without naming it. is_foreign: the text is in another language than the voice's
    transcript, which would lead the talker astray then."""
    if instruct and instruct.strip():
        return "instruct2"
    if not has_prompt:
        return "sft"
    return "zero_shot" if voice_prompt_text and not is_foreign else "cross_lingual"


def assemble(
    mode: Mode,
    text: str,
    tokenizer: Tokenizer,
    *,
    voice_prompt_text: Sequence[int] = (),
    instruct: str = "",
    allow_controls: bool = False,
) -> Prompt:
    """The prompt of one segment. The prefix with `<|endofprompt|>`, which the model fails without, is always there."""
    target = tuple(tokenizer.encode(text, allow_controls=allow_controls))
    prefix = tuple(tokenizer.encode(PROMPT_PREFIX + END_OF_PROMPT, allow_controls=True))
    if mode == "instruct2":
        head = tuple(tokenizer.encode(instruction(instruct), allow_controls=True))
        return Prompt(prompt_text=head, text=target, has_prompt_speech=False, num_target=len(target))
    if mode == "zero_shot":
        head = tuple(voice_prompt_text)
        if wrong := [number for number in head if not 0 <= number < tokenizer.size]:
            raise TokenizerError(
                f"the voice's prompt has the id {wrong[0]}; the tokenizer's are 0 to {tokenizer.size - 1}"
            )
        head = head if tokenizer.end_of_prompt in head else prefix + head
        return Prompt(prompt_text=head, text=target, has_prompt_speech=True, num_target=len(target))
    whole = target if tokenizer.end_of_prompt in target else prefix + target
    return Prompt(prompt_text=(), text=whole, has_prompt_speech=False, num_target=len(target))


def instruction(text: str) -> str:
    """A caller's instruction in the form the model was trained on; it is not normalised."""
    words = escape_controls(text.replace(END_OF_PROMPT, " ")).strip().removeprefix(PROMPT_PREFIX).strip()
    return f"{PROMPT_PREFIX} {words}{END_OF_PROMPT}" if words else PROMPT_PREFIX + END_OF_PROMPT
