from __future__ import annotations

import asyncio
import io
import json
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from gateway import cli, evaluation, evaluation_ears
from gateway import evaluation_figures as figures
from gateway.errors import ConfigError
from gateway.evaluation import references_of, renewed
from gateway.evaluation_figures import Take, liken, report, word_errors
from gateway.evaluation_list import ListError, read_list
from tests.gateway.conftest import Stack

PATIENCE_S = 30.0
Array = np.ndarray[Any, Any]


def wav(seconds: float, hz: float = 200.0, rate_hz: int = 24_000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as target:
        target.setnchannels(1)
        target.setsampwidth(2)
        target.setframerate(rate_hz)
        times = np.arange(int(seconds * rate_hz)) / rate_hz
        target.writeframes((9_000 * np.sin(2 * np.pi * hz * times)).astype("<i2").tobytes())
    return file.getvalue()


# ---- the list


def test_a_list_is_read_with_paths_from_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(wav(0.1))
    path = tmp_path / "meta.lst"
    path.write_bytes("\ufeffa|Prompt.|a.wav|Größe?\r\n\nb|||Yes.\nc|||No.|a.wav\n".encode())
    a, b, c = read_list(path)
    assert (a.id, a.text, a.prompt_text, a.prompt) == ("a", "Größe?", "Prompt.", tmp_path / "a.wav")
    assert (b.text, b.prompt, b.recording) == ("Yes.", None, None)
    assert c.recording == tmp_path / "a.wav"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (b"a|||x\na|||y", "2: id 'a' is there before"),
        (b"a|b|c", "1: 3 fields, not 4 or 5: 'a|b|c'"),
        (b"\n|||x", "2: no id: '|||x'"),
        (b"a||| ", "1: no text: "),
        (b"a|words||x", "1: prompt text and prompt wav go together: 'words', ''"),
        (b"a|words|none.wav|x", "1: can't read 'none.wav': No such file"),
        (b"a|words|meta.lst|x", "1: 'meta.lst' is no WAV file"),
        (b"a|||x\nb|||\xff", "2: 'utf-8' codec can't decode byte 0xff"),
        (b" \n", " no line"),
    ],
    ids=range(9),
)
def test_a_bad_line_is_named_by_file_number_and_value(tmp_path: Path, row: bytes, why: str) -> None:
    path = tmp_path / "meta.lst"
    path.write_bytes(row)
    with pytest.raises(ListError) as caught:
        read_list(path)
    assert f"{path}:{why}" in str(caught.value)


# ---- the statistics


@pytest.mark.parametrize(
    ("reference", "heard", "errors"),
    [("a b c", "a b c", 0), ("a b c", "a x c d", 2), ("a b c", "", 3), ("", "a b", 2), ("a b c d", "b c d", 1)],
)
def test_words_are_counted_as_the_least_edits(reference: str, heard: str, errors: int) -> None:
    assert word_errors(reference.split(), heard.split()) == errors


@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8))
def test_word_errors_are_a_distance(one: list[str], other: list[str]) -> None:
    errors = word_errors(one, other)
    assert errors == word_errors(other, one) and (errors == 0) == (one == other)
    assert abs(len(one) - len(other)) <= errors <= max(len(one), len(other))


def takes_of(series: str, errors: list[int], **more: Any) -> list[Take]:
    return [
        Take(line=f"l{i}", text="t", series=series, voice="v", words=10, errors=count, audio_s=2.0, **more)
        for i, count in enumerate(errors)
    ]


def test_the_interval_holds_the_true_share_about_as_often_as_it_says() -> None:
    chance, held = np.random.default_rng(1), 0
    for _ in range(200):
        found = report(takes_of("full hot", chance.binomial(10, 0.2, 60).tolist()), rounds=400)
        span = found["series"]["full hot"]["wer"]
        held += span["low"] <= 0.2 <= span["high"]
    assert 0.88 <= held / 200 <= 0.99


def test_a_difference_is_paired_by_line_voice_and_seed() -> None:
    hard = [9, 0, 5, 1, 8, 2, 0, 7] * 5
    worse = takes_of("streaming hot", [count + 1 for count in hard])
    found = report([*worse, *reversed(takes_of("full hot", hard))])
    gap = found["differences"]["streaming hot - full hot"]["wer"]
    assert gap == {"value": 0.1, "low": 0.1, "high": 0.1}, "what all lines share has no spread"
    alone = found["series"]["full hot"]["wer"]
    assert alone["high"] - alone["low"] > 0.1
    assert report(worse[:1])["series"]["streaming hot"]["wer"] == {"value": 1.0}, "one line has no interval"
    apart = report([*worse, *takes_of("full hot", hard[:3])])
    assert apart["differences"]["streaming hot - full hot"]["takes"] == 3


def test_speeds_and_shares_are_of_what_is_known() -> None:
    takes = takes_of("streaming hot", [0, 6, 5], wall_s=1.0)
    for take, first_s in zip(takes, (0.3, None, 0.1), strict=True):
        take.first_s = first_s
    takes[1].wall_s, takes[1].audio_s, takes[1].failure = None, 0.0, "engine_error"
    found = report(takes)["series"]["streaming hot"]
    assert (found["failed"], found["words"]) == (1, 30)
    assert (found["rtf"]["value"], found["first_p50"]["value"], found["first_p99"]["value"]) == (0.5, 0.1, 0.3)
    assert found["lost"]["value"] == pytest.approx(1 / 3, abs=1e-4) and "mos" not in found


def test_likeness_is_to_the_reference_or_to_the_voice_s_other_takes() -> None:
    north, east = np.array([1.0, 0.0]), np.array([0.0, 3.0])
    takes = takes_of("full hot", [0] * 4)
    for take, voice, vector in zip(takes, "nnxx", (north, [0.6, 0.8], east, north + east), strict=True):
        take.voice, take.embedding = voice, np.asarray(vector)
    liken(takes, {"n": 5 * north, "e": east})
    assert [take.likeness for take in takes] == pytest.approx([1.0, 0.6, 10**-0.5 * 3, 10**-0.5 * 3])
    assert [take.is_nearest for take in takes] == [True, False, None, None]
    alone = takes_of("cold", [0])
    alone[0].embedding = north
    liken(alone, {})
    assert alone[0].likeness is None


# ---- recordings


def test_a_renewed_recording_has_other_bytes_and_the_same_sound() -> None:
    recording = wav(0.25)
    one, other = renewed(recording), renewed(recording)
    assert len({recording, one, other}) == 3
    for changed in (one, other, renewed(recording + b"x")):
        sound, rate_hz = soundfile.read(io.BytesIO(changed), dtype="int16")
        assert rate_hz == 24_000
        np.testing.assert_array_equal(sound, soundfile.read(io.BytesIO(recording), dtype="int16")[0])
        assert int.from_bytes(changed[4:8], "little") == len(changed) - 8


def test_references_are_files_or_folders(tmp_path: Path) -> None:
    for name in ("1.wav", "2.wav"):
        (tmp_path / name).write_bytes(wav(0.1))
    found = references_of([], [("heart", tmp_path), ("low", tmp_path / "1.wav")])
    assert [len(found[voice]) for voice in ("heart", "low")] == [2, 1]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="--reference low=.*empty: no WAV file"):
        references_of([], [("low", tmp_path / "empty")])


# ---- the command, with a scripted listener


class Letters:
    """Hears as many letters as the scripted engine spoke, and knows a voice by its pitch. It mishears five letters."""

    def __init__(self, folder: Path, **settings: Any) -> None: ...

    def transcribe(self, sound: Array) -> str:
        count = round(len(sound) / 16_000 / 0.05)
        return " ".join("x" * (count + (count == 5)))

    def spell(self, text: str) -> str:
        return " ".join("x" for letter in text if letter.isalnum())

    def embed(self, sound: Array) -> Array:
        return np.eye(3)[np.argmax(np.abs(np.fft.rfft(sound, 16_000))) % 3]

    def rate(self, sound: Array) -> float:
        return 3.0


Evaluate = Callable[..., Any]


@pytest.fixture
def evaluate(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Evaluate:
    monkeypatch.setattr(evaluation, "Ears", Letters)
    path = tmp_path / "meta.lst"

    async def run(rows: str, *words: str) -> tuple[int, dict[str, Any], str]:
        path.write_text(rows)
        async with asyncio.timeout(PATIENCE_S):
            code = await asyncio.to_thread(cli.main, ["eval", str(path), "--url", stack.address, *words])
        out = capsys.readouterr().out
        return code, json.loads(out.splitlines()[-1]), out

    return run


async def test_both_modes_are_spoken_and_compared(evaluate: Evaluate, stack: Stack, tmp_path: Path) -> None:
    result = tmp_path / "out.json"
    words = ["--full-url", stack.address, "--voices", "ada,bert", "--repeat", "2", "--json", str(result)]
    code, found, out = await evaluate("a|||Good\nb|||Seven\n", *words)
    assert code == 0 and list(found["series"]) == ["streaming hot", "full hot"]
    hot = found["series"]["streaming hot"]
    assert (hot["takes"], hot["wer"]["value"], hot["right"]["value"]) == (8, round(1 / 9, 5), 0.5)
    assert (hot["mos"]["value"], hot["failed"]) == (3.0, 0)
    assert found["differences"]["streaming hot - full hot"]["wer"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert found["texts"]["Seven"] == {"takes": 8, "right": 0, "wrong": {"x x x x x x": 8}}
    assert set(found["voices"]) == {"ada", "bert"}
    assert "words wrong, %" in out and "read back right, %" in out
    assert len(json.loads(result.read_text())["all"]) == 16


async def test_a_recording_s_voice_is_spoken_cold_and_hot_and_forgotten(
    evaluate: Evaluate, stack: Stack, tmp_path: Path
) -> None:
    (tmp_path / "a.wav").write_bytes(wav(4))
    (tmp_path / "keep").mkdir()
    row = "a|Prompt.|a.wav|Hello there|a.wav\n"
    code, found, _ = await evaluate(row, "--at-once", "2", "--keep", str(tmp_path / "keep"))
    assert code == 0 and list(found["series"]) == ["recorded", "streaming cold", "streaming hot"]
    assert found["series"]["recorded"]["wer"]["value"] == 7.0 and "rtf" not in found["series"]["recorded"]
    cold, hot = (found["series"][f"streaming {state}"] for state in ("cold", "hot"))
    assert cold["wer"] == hot["wer"] == {"value": 0.0}
    assert "streaming cold - streaming hot" in found["differences"]
    assert len(list((tmp_path / "keep").glob("*.wav"))) == 2 and not stack.engine.kept


async def test_what_is_not_spoken_counts_as_wrong_and_is_named(evaluate: Evaluate, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(wav(4))
    code, found, out = await evaluate("a|FAULT|a.wav|Hello\nb|||FAULT\n", "--voices", "ada")
    assert code == 1 and found["series"]["streaming cold"]["wer"]["value"] == 1.0
    assert found["series"]["streaming hot"]["failed"] == 2
    assert "not spoken, streaming hot: b: engine_error" in out and "a: bad_voice" in out


def test_wrong_use_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "meta.lst"
    path.write_text("a|||x\n")
    assert cli.main(["eval", str(path), "--keep", str(tmp_path / "none")]) == 2
    assert cli.main(["eval", str(tmp_path / "none.lst")]) == 1
    for words in (["--repeat", "0"], ["--modes", "half"], ["--reference", "ada"]):
        with pytest.raises(SystemExit):
            cli.main(["eval", str(path), *words])
    said = capsys.readouterr().err
    for part in ("none: no such folder", "none.lst", "'0' is no whole number", "['half']", "'ada' is not VOICE=WAV"):
        assert part in said


@pytest.mark.parametrize(
    ("heard", "text"),
    [
        ("At 6.45, not 645.", "At 6:45, not 645."),
        ("It costs $72, and $0.90.", "It costs $72.90."),
        ("It costs $72 and $0.90 more.", "It costs $72.90 more."),
        ("From $72 and 10.90 on.", "From $72 and 10:90 on."),
    ],
)
def test_figures_count_as_one_spelling(heard: str, text: str) -> None:
    assert evaluation_ears.with_plain_figures(heard) == evaluation_ears.with_plain_figures(text)


def test_other_figures_stay_apart() -> None:
    for heard, text in (("$72, and $1.90", "$72.90"), ("$72 or $0.90", "$72.90")):
        assert evaluation_ears.with_plain_figures(heard) != evaluation_ears.with_plain_figures(text)


def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matplotlib", "faster_whisper", evaluation_ears.WHISPER[0]):
        monkeypatch.setitem(sys.modules, name, None)
    for recogniser in (None, tmp_path):
        with pytest.raises(ConfigError, match=r"pip install 'rill\[eval\]'"):
            evaluation_ears.Ears(tmp_path, lang="en", threads=1, recogniser=recogniser, words_only=True)
    (tmp_path / "meta.lst").write_text("a|||x\n")
    assert cli.main(["eval", str(tmp_path / "meta.lst"), "--plot", "a.png"]) == 2
    assert "no matplotlib: `rill eval` needs" in capsys.readouterr().err


def test_the_picture_shows_every_series(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures.plot(report(takes_of("full hot", [1, 2]) + takes_of("streaming hot", [2, 2])), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
