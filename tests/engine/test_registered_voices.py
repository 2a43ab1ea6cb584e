"""Callers' voices in the running engine: spoken with, dropped in mid-speech, never mixed, and in every mode."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from engine.batch import Utterance
from engine.config import Config, ModelConfig
from engine.loop import VoiceMade, are_foreign
from engine.messages import Done, Failed, Open
from engine.scheduler import Lane, Preparation
from engine.server import voice_store
from engine.voices import Voice, read_voices
from tests.engine.speaking import Speaking
from tests.random_checkpoint import random_checkpoint

TEXT = "Hi, you."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("registered"), stop_scale=1.0)


@pytest.fixture(scope="module")
def others(checkpoint: Path) -> tuple[Voice, Voice]:
    """Two voices whose recordings hold the same words."""
    generator = torch.Generator().manual_seed(5)
    anna = read_voices(checkpoint / "spk2info.pt")["anna"]
    first, second = (
        dataclasses.replace(
            anna,
            id=key,
            lang="en",
            tokens=torch.randint(6561, anna.tokens.shape, generator=generator),
            mel=torch.randn(anna.mel.shape, generator=generator) - 5,
            embedding=torch.randn(192, generator=generator),
        )
        for key in ("first", "second")
    )
    return first, second


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Speaking:
    return Speaking(checkpoint)


@pytest.fixture
def speaking(engine: Speaking, others: tuple[Voice, Voice]) -> Speaking:
    """With both voices registered, and nothing said yet."""
    engine.said.clear()
    for voice in others:
        engine.engine.reader.voices.add(voice, "key", voice.id.title())
    return engine


def test_the_same_words_in_two_voices_never_mix(speaking: Speaking) -> None:
    assert len({tuple(speaking.engine.reader.voices.get(key).prompt_text) for key in ("first", "second")}) == 1
    alone = [speaking.speak(number, TEXT, voice=key, seed=3) for number, key in enumerate(("first", "second"))]
    assert alone[0] != alone[1] and all(alone)
    for number, key in enumerate(("first", "second", "first", "second")):
        speaking.open(10 + number, TEXT, voice=key, seed=3)
    speaking.finish(range(10, 14))
    assert [speaking.pcm(10 + number) for number in range(4)] == alone * 2
    speaking.assert_empty()


def test_a_context_goes_on_with_a_voice_that_is_dropped_and_the_next_one_is_refused(speaking: Speaking) -> None:
    whole = speaking.speak(1, TEXT, "And more.", voice="first", seed=3)
    speaking.open(2, TEXT, voice="first", seed=3, end=False)
    speaking.until_audio(2)
    assert speaking.engine.reader.voices.drop("first", "key")
    speaking.open(3, TEXT, voice="first")
    speaking.finish([3])
    refused = speaking.end(3)
    assert isinstance(refused, Failed) and refused.code == "unknown_voice"
    speaking.more(2, "And more.", index=1)
    speaking.finish([2])
    assert isinstance(speaking.end(2), Done)
    assert speaking.pcm(2) == whole
    assert [voice.id for voice in speaking.engine.ready().voices] == ["anna", "second"]
    speaking.assert_empty()


def test_a_new_voices_prompt_is_solved_before_anybody_speaks_with_it(
    speaking: Speaking, others: tuple[Voice, Voice]
) -> None:
    fresh = dataclasses.replace(others[0], id="fresh")
    speaking.engine.reader.voices.add(fresh, "key", "Fresh")
    cold = speaking.runner.prefixes.num_pages
    speaking.engine.inbox.put(VoiceMade(fresh))
    speaking.step()
    while not speaking.runner.room.is_idle:
        speaking.step()
    warm = speaking.runner.prefixes.num_pages
    assert warm > cold
    assert speaking.speak(1, TEXT, voice="fresh", seed=3) == speaking.speak(2, TEXT, voice="first", seed=3)
    assert speaking.runner.prefixes.num_pages - warm <= warm - cold, "only the other one's was solved since"
    assert speaking.engine.reader.voices.drop("fresh", "key")
    speaking.assert_empty()


def test_the_profiles_default_voice_is_listed_first(checkpoint: Path, others: tuple[Voice, Voice]) -> None:
    config = Config(model=ModelConfig(checkpoint=str(checkpoint), voice="second", voices=""))
    store = voice_store({voice.id: voice for voice in others}, config)
    assert [info.id for info in store.infos()] == ["second", "first"]


def utterance(speaking: Speaking, **asked: str) -> Utterance:
    opened = speaking.engine.reader.settled(Open(context=1, epoch=0, voice="first", seed=1, **asked))
    (made,) = speaking.engine.reader.utterances(Preparation(Lane(0, 1), opened, 0, TEXT))
    return made


@pytest.mark.parametrize("lang", ["", "en", "en-GB", "EN_us"])
def test_a_text_in_the_voices_language_leans_on_its_transcript(lang: str, speaking: Speaking) -> None:
    prompt = utterance(speaking, lang=lang).prompt
    assert prompt.has_prompt_speech and prompt.prompt_text == speaking.engine.reader.voices.get("first").prompt_text


def test_a_text_in_another_language_is_spoken_without_the_transcript(speaking: Speaking) -> None:
    made = utterance(speaking, lang="de")
    assert not made.prompt.has_prompt_speech and made.prompt.prompt_text == ()
    assert made.voice.id == "first", "the flow still has the recording"


def test_an_instruction_stands_where_the_transcript_would(speaking: Speaking) -> None:
    made, tokenizer = utterance(speaking, instruct="Whisper."), speaking.engine.reader.tokenizer
    assert not made.prompt.has_prompt_speech
    assert "Whisper." in tokenizer.decode(made.prompt.prompt_text)


@pytest.mark.parametrize("asked", [{"lang": "de"}, {"instruct": "Whisper."}], ids=str)
def test_every_mode_speaks_and_sounds_unlike_the_plain_one(asked: dict[str, str], speaking: Speaking) -> None:
    plain = speaking.speak(1, TEXT, voice="first", seed=3)
    assert speaking.speak(2, TEXT, voice="first", seed=3, **asked) not in (plain, b"")
    speaking.assert_empty()


@pytest.mark.parametrize(
    ("lang", "other", "verdict"),
    [("en", "de", True), ("en-GB", "en", False), ("pt_BR", "pt-PT", False), ("", "de", False), ("zh", "", False)],
)
def test_languages_differ_by_their_first_tag(lang: str, other: str, verdict: bool) -> None:
    assert are_foreign(lang, other) is verdict
