"""The whole engine on a tiny random checkpoint: alone or in a crowd, cancelled, faulty, starved, and full again."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import EngineFault, Launched
from engine.costs import FLOW, TALKER
from engine.messages import (
    Audio,
    Cancelled,
    ClauseDone,
    Done,
    Failed,
    Open,
    Opened,
    SamplingChoice,
)
from engine.scheduler import HiftRow, Part
from engine.streams import Flight
from engine.voice_store import VoiceStore
from engine.voices import Voice
from tests.engine.speaking import Speaking, never_waiting
from tests.random_checkpoint import SMALL, TINY, random_checkpoint

HOP = 25 * 960
Make = Callable[..., Speaking]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("tiny"), TINY, voices=("anna", "bert"))


@pytest.fixture(scope="module")
def short_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a talker that stops soon after its minimum."""
    return random_checkpoint(tmp_path_factory.mktemp("short"), TINY, voices=("anna", "bert", "carl"), stop_scale=1.0)


@pytest.fixture
def make(request: pytest.FixtureRequest, folder: Path) -> Make:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    return lambda **settings: Speaking(folder, **settings)


@pytest.fixture
def speaking(make: Make) -> Speaking:
    return make()


def assert_same_audio(one: bytes, other: bytes) -> None:
    """To the bit."""
    assert len(one) == len(other) > 0
    assert one == other


# Repeatable, alone or in a crowd


def test_the_same_seed_gives_the_same_samples_and_another_seed_others(speaking: Speaking) -> None:
    first, again, other = (speaking.speak(context, "Hi.", seed=seed) for context, seed in ((1, 7), (2, 7), (3, 8)))
    assert_same_audio(first, again)
    assert first != other
    speaking.assert_empty()


def test_a_retry_after_a_cancel_gives_the_same_samples(speaking: Speaking) -> None:
    whole = speaking.speak(1, "Hi, you.", seed=7)
    speaking.open(2, "Hi, you.", seed=7)
    speaking.until_audio(2)
    speaking.cancel(2)
    speaking.finish([2])
    assert whole.startswith(speaking.pcm(2))
    assert_same_audio(whole, speaking.speak(3, "Hi, you.", seed=7))


def test_ten_contexts_at_once_equal_each_alone(make: Make) -> None:
    texts = [
        ("Yes.",),
        ("No", "Hi."),
        ("a",),
        ("1",),
        ("Hello.",),
        ("Mm", "b", "c"),
        ("Good.",),
        ("Ha",),
        ("Oh.",),
        ("Z",),
    ]
    crowd, alone = make(), make()
    for context, text in enumerate(texts):
        crowd.open(context, *text, voice=("anna", "bert")[context % 2], seed=context)
        crowd.step(3)  # they join one by one, each at another point of the others' work
    crowd.finish(range(10))
    for context, text in enumerate(texts):
        own = alone.speak(context, *text, voice=("anna", "bert")[context % 2], seed=context)
        assert_same_audio(own, crowd.pcm(context))
    crowd.assert_empty()


def test_neighbours_that_join_and_cancel_change_nothing(make: Make) -> None:
    crowd, alone = make(), make()
    crowd.open(0, "Hi, you.", seed=3)
    for context in range(1, 6):
        crowd.open(context, "Go.", voice="bert", seed=context)
        crowd.step(11)
        if context % 2:
            crowd.cancel(context)
    crowd.finish(range(6))
    assert_same_audio(alone.speak(0, "Hi, you.", seed=3), crowd.pcm(0))
    crowd.assert_empty()


def test_waiting_for_credit_changes_no_sample(speaking: Speaking) -> None:
    whole = speaking.speak(1, "Hi, you.", seed=3)
    speaking.open(2, "Hi, you.", seed=3)
    for position in range(0, len(whole) // 4 + HOP, 7_000):
        speaking.credit(2, position)
        speaking.step(40)
    speaking.finish([2])
    assert_same_audio(whole, speaking.pcm(2))


# Against the models called directly


@pytest.mark.parametrize("streaming", [True, False])
def test_what_is_spoken_is_what_the_models_give_offline(
    make: Make, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    speaking = make(dtype="float64", prompt_remainder=12)  # float32 leaves a few frames of a random net 1e-2 apart
    models, spoken, mels = speaking.runner.models, [], []
    sound = speaking.runner._sound

    def sounded(rows: Sequence[HiftRow], done: Launched) -> None:
        for segment in map(speaking.runner._segment, rows):
            assert segment.mel is not None
            mels.append(segment.mel.clone())
            spoken[:] = [list(segment.tokens)]
        sound(rows, done)

    monkeypatch.setattr(speaking.runner, "_sound", sounded)
    pcm = speaking.speak(1, "Hi.", streaming=streaming)
    prefixes, anna = speaking.runner.prefixes, speaking.engine.reader.voices.get("anna")
    voice = prefixes.voice(anna) if streaming else prefixes.whole(anna)
    assert len(voice.tokens) == (37 if streaming else 40)
    prompt = (voice.tokens[None].to(models.device), voice.mel[None], voice.embedding[None])
    tokens = torch.tensor(spoken, device=models.device)
    with torch.inference_mode():
        mel = models.flow.offline(tokens, *prompt, streaming=streaming, finalize=True)
        wave = models.hift.offline(mel)[0].float().cpu()
    torch.testing.assert_close(torch.cat(mels, dim=1), mel[0], atol=1e-8, rtol=0)
    heard = torch.frombuffer(bytearray(pcm), dtype=torch.float32)
    assert len(heard) == 960 * tokens.shape[1]
    torch.testing.assert_close(heard, wave, atol=1e-6, rtol=0)


def test_full_responses_go_to_the_flow_as_many_as_it_solves_at_once(make: Make, monkeypatch: Any) -> None:
    speaking, crowds = make(mode="full", rows_per_launch=12), list[int]()
    offline_all = speaking.runner.models.flow.offline_all

    def solved(requests: Sequence[Any]) -> list[torch.Tensor]:
        crowds.append(len(requests))
        return offline_all(requests)

    monkeypatch.setattr(speaking.runner.models.flow, "offline_all", solved)
    monkeypatch.setattr("engine.batch.WHOLE_FRAMES", 500)  # of two rows of 40 + 80 tokens
    for context in range(5):
        speaking.open(context, "Hi.", seed=context)
    speaking.finish(range(5))
    assert all(isinstance(speaking.end(context), Done) for context in range(5))
    assert sum(crowds) == 5 and max(crowds) == 2
    speaking.assert_empty()


def test_a_last_hop_that_looks_both_ways_ends_as_a_full_response_does(make: Make, monkeypatch: Any) -> None:
    """The hops before it are played already; what it gives is what the offline flow gives, looking both ways."""
    speaking = make(dtype="float64", last_hop="both_ways")
    mels: list[torch.Tensor] = []
    sound = speaking.runner._sound

    def sounded(rows: Sequence[HiftRow], done: Launched) -> None:
        mels.extend(segment.mel.clone() for segment in map(speaking.runner._segment, rows) if segment.mel is not None)
        sound(rows, done)

    monkeypatch.setattr(speaking.runner, "_sound", sounded)
    streamed = speaking.speak(1, "Hi.")
    last, hops = mels[-1], torch.cat(mels[:-1], dim=1)
    mels.clear()
    assert len(streamed) == len(speaking.speak(2, "Hi.", streaming=False))
    (whole,) = mels
    torch.testing.assert_close(last, whole[:, hops.shape[1] :], atol=1e-8, rtol=0)
    assert not torch.allclose(hops, whole[:, : hops.shape[1]], atol=1e-3)
    speaking.assert_empty()


# What a context hears


def test_the_order_of_a_context_is_opened_taken_audio_done(speaking: Speaking) -> None:
    speaking.speak(1, "Hi.", "Yes.")
    names = [type(message).__name__ for message in speaking.said[1] if not isinstance(message, Audio)]
    assert names[0] == "Opened"
    assert names[-1] == "Done"
    assert sorted(names[1:-1]) == ["ClauseDone", "ClauseDone", "ClauseTaken", "ClauseTaken"]
    done = speaking.end(1)
    assert isinstance(done, Done)
    assert done.samples == len(speaking.pcm(1)) // 4
    assert [m.samples for m in speaking.said[1] if isinstance(m, ClauseDone)][-1] == done.samples


@pytest.mark.parametrize(
    "text", ["", " ", "\n", "...", "!!!", "\U0001f642\U0001f642", "***", "---", "```", "\u200d", "\u0301"]
)
def test_text_with_nothing_to_say_is_done_without_a_sample(speaking: Speaking, text: str) -> None:
    speaking.open(1, text, text)
    speaking.finish([1])
    assert isinstance(speaking.end(1), Done)
    assert speaking.pcm(1) == b""


def test_silent_clauses_between_others_add_nothing(speaking: Speaking) -> None:
    plain = speaking.speak(1, "Hi.")
    assert_same_audio(plain, speaking.speak(2, "Hi.", "...", "\U0001f642"))


def test_a_long_clause_is_spoken_in_parts_and_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speaking = Speaking(random_checkpoint(tmp_path, TINY, stop_scale=1.0))  # stops soon after its minimum
    parts, seat = [], speaking.runner.seat
    monkeypatch.setattr(
        speaking.runner, "seat", lambda lane, part, utterance: (parts.append(part), seat(lane, part, utterance))
    )
    speaking.speak(1, 2 * "One little word and then another one, and so on and on it goes. ")
    assert parts == [Part(0, 0), Part(0, 1)]
    assert sum(isinstance(message, ClauseDone) for message in speaking.said[1]) == 1
    done = speaking.end(1)
    assert isinstance(done, Done)
    assert done.samples == len(speaking.pcm(1)) // 4 > 4 * HOP
    speaking.assert_empty()


@pytest.mark.parametrize("rows_per_launch", [1, 4])
def test_a_checkpoint_says_how_many_steps_solve_a_hop(tmp_path: Path, rows_per_launch: int) -> None:
    folder = random_checkpoint(tmp_path, TINY, stop_scale=1.0)
    (folder / "cosyvoice3.yaml").write_text("flow: {n_timesteps: 3}\n")
    speaking = Speaking(folder, rows_per_launch=rows_per_launch)
    flow, hops = speaking.runner.models.flow, list[int]()
    step, finish = flow.step, flow.finish_all
    flow.step = lambda rows, store: (hops.append(len(rows)), step(rows, store))[1]  # type: ignore[method-assign]
    ends: list[int] = []
    flow.finish_all = lambda rows, *rest: (ends.append(len(rows)), finish(rows, *rest))[1]  # type: ignore[method-assign]
    for context, streaming in enumerate((True, False)):
        assert len(speaking.speak(context, "One little word and then another one.", streaming=streaming)) > 4 * HOP
        assert isinstance(speaking.end(context), Done)
    assert sum(hops) == 3 * sum(ends) > 3
    speaking.assert_empty()


def test_an_instruction_and_a_sampling_choice_change_what_is_heard(speaking: Speaking) -> None:
    standard = SamplingChoice(mode="standard", temperature=0.5, top_k=5)
    plain = speaking.speak(1, "Hi.")
    assert plain != speaking.speak(2, "Hi.", instruct="softly")
    assert plain != speaking.speak(3, "Hi.", sampling=standard)


# Refusals


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"voice": "nobody"}, "unknown_voice"),
        ({"sampling": SamplingChoice(mode="best")}, "unsupported"),
        ({"sampling": SamplingChoice(temperature=99.0)}, "unsupported"),
        ({"sampling": SamplingChoice(top_p=float("nan"))}, "unsupported"),
    ],
    ids=str,
)
def test_an_impossible_open_is_refused_and_holds_nothing(speaking: Speaking, settings: Any, code: str) -> None:
    speaking.open(1, "Hi.", **settings)
    speaking.step()
    failed = speaking.end(1)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.retry) == (code, False)
    assert [type(message) for message in speaking.said[1]] == [Failed]
    speaking.assert_empty()


def test_a_clause_that_is_too_long_names_value_and_limit(make: Make) -> None:
    speaking = make(clause_tokens=10)
    speaking.open(1, "This is longer than that.")
    speaking.open(2, "Short.")
    speaking.finish([1, 2])
    failed = speaking.end(1)
    assert isinstance(failed, Failed)
    assert failed.code == "text_too_long"
    assert "the limit is 10" in failed.message
    assert "longer" not in failed.message  # no user text
    assert isinstance(speaking.end(2), Done)


def test_text_that_the_talker_cache_can_never_hold_is_refused(make: Make) -> None:
    speaking = make(talker_pages=4)
    speaking.open(1, "This will be far too long for four pages.")
    speaking.finish([1])
    failed = speaking.end(1)
    assert isinstance(failed, Failed)
    assert failed.code == "text_too_long"
    assert "holds 128" in failed.message


# Cancel


@pytest.mark.parametrize("steps", [0, 1, 5, 40, 80, 120])
def test_cancel_frees_everything_within_one_step(speaking: Speaking, steps: int) -> None:
    speaking.open(1, "Hi, you.", "And you.")
    speaking.step(steps)
    speaking.cancel(1)
    speaking.step()
    assert isinstance(speaking.said[1][-1], Cancelled)
    speaking.assert_empty()
    speaking.step(3)
    assert isinstance(speaking.said[1][-1], Cancelled)


def test_after_two_hundred_cancels_at_random_nothing_is_left(speaking: Speaking) -> None:
    dice = random.Random(1)
    living: list[int] = []
    for context in range(200):
        speaking.open(context, "Hi, you.", "Yes.", voice=dice.choice(["anna", "bert"]), seed=context)
        living.append(context)
        speaking.step(dice.randrange(12))
        while len(living) > dice.randrange(1, 10):
            speaking.cancel(living.pop(dice.randrange(len(living))))
    for context in living:
        speaking.cancel(context)
    speaking.finish(range(200))
    speaking.assert_empty()
    assert sum(isinstance(speaking.end(context), Cancelled) for context in range(200)) > 150


# Faults


def test_a_lane_whose_flow_gives_nan_ends_alone(make: Make) -> None:
    speaking, alone = make(), make()
    reader = speaking.engine.reader
    broken = dataclasses.replace(reader.voices.get("bert"), id="broken", embedding=torch.ones(192))
    broken.embedding.fill_(torch.nan)  # a voice is checked when it is made
    reader.voices = VoiceStore({**reader.voices.builtin, "broken": broken})
    speaking.open(1, "Hi, you.", seed=5)
    speaking.open(2, "Hi, you.", voice="broken")
    speaking.finish([1, 2])
    failed = speaking.end(2)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.retry) == ("engine_error", False)
    assert_same_audio(alone.speak(1, "Hi, you.", seed=5), speaking.pcm(1))
    speaking.assert_empty()


POISON = 530  # a text id that no text gives


def poison(speaking: Speaking) -> None:
    """The transcript of bert's prompt begins with POISON, which is not a number to the talker."""
    talker = speaking.runner.models.talker
    with torch.no_grad():
        talker.decoder.embed_tokens.weight[POISON] = torch.nan
    voices = speaking.engine.reader.voices
    bert = voices.get("bert")
    voices.builtin["bert"] = dataclasses.replace(bert, prompt_text=(POISON, *bert.prompt_text))


def refuse_poison(speaking: Speaking) -> None:
    """A launch with bert's prompt raises."""
    poison(speaking)
    talkers = speaking.runner.talkers
    seat = talkers.seat

    def refusing(lane: int, prompt: list[int], **settings: Any) -> int:
        if speaking.runner.models.talker.shape.speech_vocab + POISON in prompt:
            raise IndexError("an index out of range")
        return seat(lane, prompt, **settings)

    talkers.seat = refusing  # type: ignore[method-assign]


def test_a_lane_whose_talker_gives_nan_ends_alone(make: Make) -> None:
    speaking, alone = make(), make()
    poison(speaking)
    for context, voice in ((1, "anna"), (2, "bert"), (3, "anna")):
        speaking.open(context, "Hi, you.", voice=voice, seed=context)
    speaking.finish([1, 2, 3])
    assert isinstance(speaking.end(2), Failed)
    for context in (1, 3):
        assert_same_audio(alone.speak(context, "Hi, you.", seed=context), speaking.pcm(context))
    speaking.assert_empty()


def test_an_exception_in_one_lane_ends_it_alone_on_the_cpu(folder: Path) -> None:
    speaking = Speaking(folder)
    refuse_poison(speaking)
    speaking.open(1, "Hi.")
    speaking.open(2, "Hi.", voice="bert")
    speaking.finish([1, 2])
    assert isinstance(speaking.end(1), Done)
    failed = speaking.end(2)
    assert isinstance(failed, Failed)
    assert "range" not in failed.message  # no exception text
    speaking.assert_empty()


def test_an_exception_in_a_shared_launch_is_the_engines_end(folder: Path) -> None:
    speaking = Speaking(folder, rows_per_launch=12)
    refuse_poison(speaking)
    speaking.open(1, "Hi.")
    speaking.open(2, "Hi.", voice="bert")
    with pytest.raises(EngineFault):
        speaking.finish([1, 2])
    speaking.engine.abandon()
    for context in (1, 2):
        failed = speaking.end(context)
        assert isinstance(failed, Failed)
        assert (failed.code, failed.retry) == ("engine_restart", True)


def test_broken_text_work_ends_its_context_only(speaking: Speaking, monkeypatch: pytest.MonkeyPatch) -> None:
    utterances = speaking.engine.reader.utterances
    monkeypatch.setattr(
        speaking.engine.reader, "utterances", lambda job: 1 / 0 if "bad" in job.text else utterances(job)
    )
    speaking.open(1, "bad")
    speaking.open(2, "Hi.")
    speaking.finish([1, 2])
    assert isinstance(speaking.end(1), Failed)
    assert isinstance(speaking.end(2), Done)
    speaking.assert_empty()


def test_rows_that_share_a_launch_sound_like_rows_alone(folder: Path) -> None:
    """Packed talker, flow and vocoder calls: tokens are equal here, samples to rounding."""
    packed, alone = Speaking(folder, rows_per_launch=12), Speaking(folder)
    for context in range(4):
        packed.open(context, "Hi, you.", voice=("anna", "bert")[context % 2], seed=context)
        packed.step(2)
    packed.finish(range(4))
    for context in range(4):
        own = alone.speak(context, "Hi, you.", voice=("anna", "bert")[context % 2], seed=context)
        one, other = (torch.frombuffer(bytearray(pcm), dtype=torch.float32) for pcm in (own, packed.pcm(context)))
        torch.testing.assert_close(one, other, atol=2e-3, rtol=0)
    packed.assert_empty()


def test_a_launch_that_fails_when_it_lands_is_the_engines_end(speaking: Speaking, monkeypatch: Any) -> None:
    monkeypatch.setattr(speaking.runner, "_land_pcm", lambda *given: 1 / 0)
    speaking.open(1, "Hi.")
    with pytest.raises(EngineFault, match="on the device"):
        speaking.finish([1])


# Results that land late, as on a GPU


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow), 4], ids=lambda looks: f"{looks} looks late")
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A launch has landed after so many looks at it; two of a stage may be in flight meanwhile."""
    looked = Counter[int]()

    def has_landed(flight: Flight[Any]) -> bool:
        looked[id(flight)] += 1
        return looked[id(flight)] > request.param and bool(looked.pop(id(flight)))

    monkeypatch.setattr(Flight, "has_landed", has_landed)
    return int(request.param)


@pytest.mark.parametrize("rows_per_launch", [1, 12])
def test_what_lands_late_sounds_the_same(
    short_folder: Path, late: int, rows_per_launch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    speaking = Speaking(short_folder, rows_per_launch=rows_per_launch)
    texts = [("Hi, you.",), ("Yes.", "No."), ("One and two and so on.",)]
    for context, text in enumerate(texts):
        speaking.open(context, *text, voice=("anna", "bert")[context % 2], seed=context)
        speaking.step(5)
    speaking.finish(range(3))
    while not speaking.runner.room.is_idle:
        speaking.step()
    speaking.assert_empty()
    monkeypatch.undo()
    prompt = Speaking(short_folder, rows_per_launch=rows_per_launch)
    for context, text in enumerate(texts):
        own = prompt.speak(context, *text, voice=("anna", "bert")[context % 2], seed=context)
        if rows_per_launch == 1:
            assert_same_audio(own, speaking.pcm(context))
        assert len(own) == len(speaking.pcm(context)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("rows_per_launch", [1, 12])
def test_cancels_overtake_what_lands_late_and_leave_nothing(
    short_folder: Path, late: int, rows_per_launch: int
) -> None:
    speaking, dice = Speaking(short_folder, lanes=3, rows_per_launch=rows_per_launch), random.Random(late)
    living: list[int] = []
    for context in range(60):
        speaking.open(context, "Hi, you.", "Yes.", voice=dice.choice(["anna", "bert", "carl"]), seed=context)
        living.append(context)
        speaking.step(dice.randrange(30))
        while len(living) > dice.randrange(1, 5):
            cancelled = living.pop(dice.randrange(len(living)))
            speaking.cancel(cancelled)
            speaking.step()
            assert isinstance(speaking.said[cancelled][-1], Cancelled)
    speaking.finish(living)
    while not speaking.runner.room.is_idle:
        speaking.step()
    speaking.assert_empty()
    assert all(sum(isinstance(m, Done | Failed) for m in speaking.said[context]) <= 1 for context in range(60))
    assert not any(isinstance(speaking.end(context), Failed) for context in range(60))


# Memory and order


def test_a_context_that_used_its_credit_rests(speaking: Speaking) -> None:
    speaking.open(1, "Hello there, you.")
    speaking.credit(1, HOP)
    speaking.until_audio(1, HOP)
    speaking.step(200)
    steps = speaking.engine.num_steps
    assert HOP <= len(speaking.pcm(1)) // 4 < 2 * HOP
    speaking.step(3)
    assert speaking.engine.num_steps == steps
    speaking.credit(1, 10**9)
    speaking.finish([1])
    assert isinstance(speaking.end(1), Done)


def test_few_flow_pages_make_contexts_wait_or_be_refused_but_never_hang(make: Make) -> None:
    speaking = make(flow_pages=8)
    for context in range(4):
        speaking.open(context, "Hi, you.", seed=context)
    speaking.finish(range(4))
    ends = [speaking.end(context) for context in range(4)]
    assert any(isinstance(end, Done) for end in ends)
    assert all(end.code == "overloaded" and end.retry for end in ends if isinstance(end, Failed))
    speaking.assert_empty()


def test_a_row_begins_when_the_pages_will_last_for_all(make: Make) -> None:
    """Two rows of five pages each fit in nine with the shared prompt's; the third waits instead of stopping one."""
    speaking = make(flow_pages=9)
    for context in range(3):
        speaking.open(context, "Hi.", seed=context)
    speaking.finish(range(3))
    assert all(isinstance(speaking.end(context), Done) for context in range(3))
    speaking.assert_empty()


def test_few_talker_pages_make_contexts_take_turns(make: Make) -> None:
    speaking = make(talker_pages=9)
    for context in range(3):
        speaking.open(context, "Hi, you.", seed=context)
    speaking.finish(range(3))
    assert all(isinstance(speaking.end(context), Done) for context in range(3))
    speaking.assert_empty()


def test_a_voices_prompt_is_solved_once_and_its_pages_are_shared(speaking: Speaking) -> None:
    solved = []
    flow = speaking.runner.models.flow
    keep = flow.prefix
    flow.prefix = lambda row, store: (solved.append(row), keep(row, store))[1]  # type: ignore[method-assign]
    for context in range(4):
        speaking.open(context, "Hi.", seed=context)
    speaking.finish(range(4))
    assert len(solved) == 1
    assert speaking.runner.prefixes.num_pages == 1  # 40 tokens: one whole chunk
    speaking.assert_empty()


def test_an_unused_voice_gives_its_pages_up_when_they_are_needed(make: Make) -> None:
    speaking = make(flow_pages=6)
    for context, voice in enumerate(("anna", "bert", "anna")):
        speaking.open(context, "Hi.", voice=voice)  # 40 + 80 tokens: five pages
        speaking.finish([context])
        assert isinstance(speaking.end(context), Done)
    speaking.assert_empty()


def test_gauges_follow_every_end_and_tell_that_all_is_free(speaking: Speaking) -> None:
    speaking.speak(1, "Hi.")
    speaking.step()
    last = speaking.gauges[-1]
    assert (last.lanes_used, last.talker_pages, last.flow_pages, last.hift_states, last.contexts) == (0, 0, 0, 0, 0)
    assert last.steps > 0


def test_one_lane_serves_a_queue_in_order(make: Make) -> None:
    speaking = make(lanes=1, waiting=2)
    for context in range(4):
        speaking.open(context, "a")
    speaking.finish(range(4))
    assert [type(speaking.end(context)) for context in range(4)] == [Done, Done, Done, Failed]
    assert isinstance(speaking.said[1][0], Opened)


def test_the_warm_up_leaves_nothing_behind_and_says_nothing(short_folder: Path) -> None:
    speaking, names = Speaking(short_folder), list[str]()
    speaking.engine.warm(on_progress=names.append)
    assert names == ["speak as anna", "speak as bert"]  # there are no more
    assert not speaking.said
    assert speaking.runner.prefixes.num_pages == 2
    speaking.assert_empty()


def test_the_warm_up_begins_with_the_default_voice(short_folder: Path) -> None:
    speaking, names = Speaking(short_folder), list[str]()
    speaking.engine.reader.default_voice = "bert"
    speaking.engine.warm(on_progress=names.append)
    assert names == ["speak as bert", "speak as anna"]


def test_where_rows_share_launches_the_warm_up_measures_crowds(short_folder: Path) -> None:
    speaking, names = Speaking(short_folder, rows_per_launch=4, lanes=4, share=0.5), list[str]()
    speaking.engine.warm(on_progress=names.append)
    assert names[2:] == ["speak with 2 voices", "speak with 4 voices"]
    table = speaking.runner.costs.table()
    assert set(table) >= {"talker", "prefill", "flow", "hift"}
    assert max(table["talker"]) == 4
    assert not speaking.said
    speaking.assert_empty()
    speaking.step()
    assert speaking.gauges[-1].places == speaking.engine.scheduler.places <= 4


# The ends of what may be asked for


def test_one_token_of_text_sounds(speaking: Speaking) -> None:
    """It and its full stop may have 4 to 40 codes."""
    pcm = speaking.speak(1, "a")
    assert 4 * 960 <= len(pcm) // 4 <= 40 * 960
    speaking.assert_empty()


def test_a_prompt_of_thirty_seconds_and_the_longest_one_without_a_whole_chunk(tmp_path: Path) -> None:
    for tokens, pages in ((750, 29), (24, 0)):  # the last chunk of 750 looks ahead at what is spoken
        speaking = Speaking(random_checkpoint(tmp_path / str(tokens), TINY, prompt_tokens=tokens, stop_scale=1.0))
        whole = speaking.speak(1, "Hi.", streaming=False)
        assert len(speaking.speak(2, "Hi.")) == len(whole) > 0
        assert speaking.runner.prefixes.num_pages == pages
        speaking.assert_empty()


def test_many_voices_at_once_are_each_their_own(tmp_path: Path) -> None:
    names = tuple(f"voice-{number}" for number in range(16))
    folder = random_checkpoint(tmp_path, TINY, voices=names, stop_scale=1.0)
    crowd, alone = Speaking(folder, lanes=16, flow_pages=24), Speaking(folder, lanes=16)
    for context, voice in enumerate(names):
        crowd.open(context, "Hi.", voice=voice, seed=7)
    crowd.finish(range(16))
    heard = {crowd.pcm(context) for context in range(16)}
    assert len(heard) == 16
    for context, voice in list(enumerate(names))[::5]:
        assert_same_audio(alone.speak(context, "Hi.", voice=voice, seed=7), crowd.pcm(context))
    crowd.assert_empty()


def test_a_warm_up_that_fails_is_the_engines_fault(speaking: Speaking) -> None:
    voices: dict[str, Voice] = dict(speaking.engine.reader.voices.builtin)
    voices["anna"] = dataclasses.replace(voices["anna"], embedding=torch.ones(192))
    voices["anna"].embedding.fill_(torch.nan)  # a voice is checked when it is made
    speaking.engine.reader.voices = VoiceStore(voices)
    with pytest.raises(EngineFault, match="warm-up"):
        speaking.engine.warm()


def test_an_open_of_full_response_is_what_a_full_profile_gives_everyone(make: Make) -> None:
    by_wish = make().speak(1, "Hi.", streaming=False)
    full = make(mode="full")
    assert_same_audio(by_wish, full.speak(1, "Hi."))
    full.tell(Open(context=2, epoch=0, voice="", seed=1))


# On a GPU: two streams, graphs, many rows in a launch


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that the kernels take; a talker that stops soon after its minimum."""
    return random_checkpoint(tmp_path_factory.mktemp("small"), SMALL, voices=("anna", "bert"), stop_scale=1.0)


@pytest.fixture(scope="module")
def warm_gpu(small_folder: Path) -> Speaking:
    started = time.perf_counter()
    speaking = Speaking(small_folder, device="cuda", lanes=16)
    names: list[str] = []
    speaking.engine.warm(on_progress=names.append)
    print(
        f"\nwarm after {time.perf_counter() - started:.1f} s, {len(names)} steps; costs {speaking.runner.costs.table()}"
    )
    return speaking


@pytest.fixture
def gpu(warm_gpu: Speaking) -> Iterator[Speaking]:
    yield warm_gpu
    warm_gpu.said.clear()


GPU_TEXTS = [
    "Yes, it is.",
    "No.",
    "Hello to you.",
    "One and two.",
    "So it goes on and on.",
    "Ha.",
    "Good day.",
    "Oh, no.",
]


def speak_at_once(speaking: Speaking, **settings: Any) -> list[bytes]:
    for context, text in enumerate(GPU_TEXTS):
        speaking.open(context, text, voice=("anna", "bert")[context % 2], seed=context, **settings)
    speaking.finish(range(len(GPU_TEXTS)), most=2_000_000)
    pcm = [speaking.pcm(context) for context in range(len(GPU_TEXTS))]
    speaking.said.clear()
    return pcm


def speak_one_by_one(speaking: Speaking, **settings: Any) -> list[bytes]:
    pcm = []
    for context, text in enumerate(GPU_TEXTS):
        speaking.open(context, text, voice=("anna", "bert")[context % 2], seed=context, **settings)
        speaking.finish([context], most=2_000_000)
        pcm.append(speaking.pcm(context))
    speaking.said.clear()
    return pcm


def difference(one: bytes, other: bytes) -> float:
    """Root mean square of what differs, relative to the first; the samples' numbers have to agree."""
    a, b = (torch.frombuffer(bytearray(pcm), dtype=torch.float32).double() for pcm in (one, other))
    assert len(a) == len(b) > 0, f"{len(a)} samples and {len(b)}"
    return float((a - b).norm() / a.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("streaming", [True, False])
def test_on_a_gpu_contexts_at_once_equal_each_alone(gpu: Speaking, streaming: bool) -> None:
    """Token for token; samples within what differently shaped kernels round."""
    alone = speak_one_by_one(gpu, streaming=streaming)
    crowd = speak_at_once(gpu, streaming=streaming)
    differences = [difference(one, other) for one, other in zip(alone, crowd, strict=True)]
    print(f"\nrelative difference to each alone: {[f'{d:.1e}' for d in differences]}")
    assert max(differences) < 0.1
    gpu.assert_empty()


@pytest.mark.gpu
def test_on_a_gpu_graphs_say_what_eager_kernels_say(gpu: Speaking, small_folder: Path) -> None:
    eager = Speaking(small_folder, device="cuda", lanes=16)  # never warmed: nothing is captured
    plain, captured = speak_at_once(eager), speak_at_once(gpu)
    differences = [difference(one, other) for one, other in zip(plain, captured, strict=True)]
    print(f"\nrelative difference to eager: {[f'{d:.1e}' for d in differences]}")
    assert max(differences) < 0.1
    eager.assert_empty()


@pytest.mark.gpu
def test_on_a_gpu_a_launch_never_waits_for_the_device(gpu: Speaking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.runner, "launch", never_waiting(gpu.runner.launch))
    assert all(speak_at_once(gpu))
    gpu.assert_empty()


@pytest.mark.gpu
def test_on_a_gpu_two_launches_are_in_flight_and_never_three(gpu: Speaking) -> None:
    """On a device that is kept slower than the host by work of no use."""
    talking, sounding = gpu.runner._talking, gpu.runner._sounding
    most = dict.fromkeys((TALKER, FLOW), 0)
    host = gpu.engine.host_s
    before = dict(gpu.runner.seconds)
    started = time.perf_counter()
    for context, text in enumerate(GPU_TEXTS):
        gpu.open(context, text, voice=("anna", "bert")[context % 2], seed=context)
    while any(gpu.end(context) is None for context in range(len(GPU_TEXTS))):
        steps = gpu.engine.num_steps
        gpu.step()
        for stream in (talking, sounding) if gpu.engine.num_steps > steps else ():
            with stream.current():
                torch.cuda._sleep(4_000_000)  # clock cycles: two milliseconds behind every launch
        most[TALKER] = max(most[TALKER], talking.in_flight(TALKER))
        most[FLOW] = max(most[FLOW], sounding.in_flight(FLOW))
    wall = time.perf_counter() - started
    audio = sum(len(gpu.pcm(context)) for context in range(len(GPU_TEXTS))) / 4 / 24_000
    spent = {stage: round(gpu.runner.seconds[stage] - before[stage], 4) for stage in before}
    print(f"\n{audio:.1f} s of audio in {wall:.3f} s; host {gpu.engine.host_s - host:.3f} s, device {spent}; {most=}")
    assert most == {TALKER: 2, FLOW: 2}


@pytest.mark.gpu
def test_on_a_gpu_cancels_at_random_leave_nothing(gpu: Speaking) -> None:
    dice = random.Random(1)
    living: list[int] = []
    for context in range(200):
        gpu.open(context, "Hi, you and you.", "Yes.", voice=dice.choice(["anna", "bert"]), seed=context)
        living.append(context)
        gpu.step(dice.randrange(12))
        while len(living) > dice.randrange(1, 20):
            gpu.cancel(living.pop(dice.randrange(len(living))))
    for context in living:
        gpu.cancel(context)
    gpu.finish(range(200))
    while not gpu.runner.room.is_idle:
        gpu.step()
    gpu.assert_empty()
    again = difference(*(gpu.speak(context, "Hello to you.", seed=2) for context in (300, 301)))
    assert again < 0.1, "a lane was left in disorder"


@pytest.mark.gpu
def test_on_a_gpu_a_lane_that_gives_nan_ends_alone(gpu: Speaking) -> None:
    reader, store = gpu.engine.reader, gpu.engine.reader.voices
    broken = dataclasses.replace(store.get("bert"), id="broken", embedding=torch.ones(192))
    broken.embedding.fill_(torch.nan)  # a voice is checked when it is made
    reader.voices = VoiceStore({**store.builtin, "broken": broken})
    try:
        alone = gpu.speak(1, "Hello to you.", seed=5)
        gpu.open(2, "Hello to you.", seed=5)
        gpu.open(3, "Hello to you.", voice="broken")
        gpu.finish([2, 3], most=2_000_000)
    finally:
        reader.voices = store
    failed = gpu.end(3)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.retry) == ("engine_error", False)
    assert difference(alone, gpu.pcm(2)) < 0.1
    gpu.assert_empty()


def test_a_kept_voice_whose_file_is_broken_fails_its_context_and_no_other(make: Make, tmp_path: Path) -> None:
    speaking = make()
    reader = speaking.engine.reader
    store = VoiceStore(reader.voices.builtin, tmp_path)
    store.add(dataclasses.replace(reader.voices.get("bert"), id="kept"), "key", "Kept")
    (tmp_path / "kept.pt").write_bytes(b"half of")
    reader.voices = VoiceStore(reader.voices.builtin, tmp_path)
    speaking.open(1, "Hi, you.", seed=5)
    speaking.open(2, "Hi, you.", voice="kept")
    speaking.finish([1, 2])
    failed = speaking.end(2)
    assert isinstance(failed, Failed) and (failed.code, failed.retry) == ("unknown_voice", False)
    assert speaking.pcm(1)
    speaking.assert_empty()
