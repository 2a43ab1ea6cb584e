from __future__ import annotations

import asyncio
import wave
from pathlib import Path

import pytest
from websockets.datastructures import Headers

from engine import config as profiles
from gateway import cli
from gateway.admission import Admission, Tickets, digest
from tests.gateway.conftest import Stack, StackMaker
from tests.scripted_engine import tone

PATIENCE_S = 20.0


async def rill(*arguments: str) -> int:
    """The command, on a thread of its own, since it runs its own loop."""
    async with asyncio.timeout(PATIENCE_S):
        return await asyncio.to_thread(cli.main, list(arguments))


async def test_say_writes_a_wav_and_tells_the_figures(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.wav"
    assert await rill("say", "Hello", "-o", str(path), "--url", stack.address, "--seed", "3", "--voice", "bert") == 0
    with wave.open(str(path), "rb") as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24_000)
        assert file.getnframes() == 5 * 1_200 == len(tone("bert", 3, 0, 0, 6_000)) // 4
    said = capsys.readouterr().err
    for words in ("first audio", "real-time factor", "seed 3", "voice bert"):
        assert words in said


async def test_say_reads_the_standard_input(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "in.txt"
    text.write_text("Hello there.\nGood morning.\n")
    with text.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        await say_what_is_read(stack, tmp_path)


async def say_what_is_read(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    assert await rill("say", "-", "-o", str(path), "--url", stack.address) == 0
    with wave.open(str(path), "rb") as file:
        assert file.getnframes() == 21 * 1_200


async def test_nothing_to_say_is_no_failure(stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await rill("say", "...", "-o", str(tmp_path / "out.wav"), "--url", stack.address) == 0
    assert "nothing to say" in capsys.readouterr().err


async def test_without_a_player_a_file_is_written(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "PLAYERS", ())
    monkeypatch.chdir(tmp_path)
    assert await rill("say", "Hello", "--url", stack.address) == 0
    assert (tmp_path / "rill.wav").stat().st_size > 1_000
    assert "rill.wav" in capsys.readouterr().err


async def test_voices_lists_them(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert await rill("voices", "--url", stack.address) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["ada", "bert"]


async def test_failures_are_one_line_and_an_exit_code(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out.wav")
    assert await rill("say", "Hi", "-o", out, "--url", stack.address, "--voice", "nobody") == 1
    assert await rill("say", "Hi", "-o", out, "--url", "http://127.0.0.1:9") == 1
    assert await rill("say", "Hi", "-o", str(tmp_path / "no" / "out.wav"), "--url", stack.address) == 1
    assert await rill("serve", "--config", str(tmp_path / "none.toml")) == 2
    assert await rill("serve", "--host", "0.0.0.0") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and all(line.startswith("rill: ") for line in lines)


def test_a_key_is_printed_once_and_its_table_lets_its_holder_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["key", "ada's phone"]) == 0
    printed = capsys.readouterr().out
    key = printed.split()[-1]
    (tmp_path / "profile.toml").write_text(printed)
    config = profiles.load(tmp_path / "profile.toml").gateway
    admission = Admission(config, Tickets(tmp_path, 1, lambda: 0.0), lambda: 0.0)
    assert admission.enter("1.2.3.4", Headers(Authorization=f"Bearer {key}"), "").name == "ada's phone"
    assert printed.count(key) == 1 and len(key) > 40


async def test_say_and_voices_come_in_with_a_key(make_stack: StackMaker, tmp_path: Path) -> None:
    async with make_stack(keys={"ada": profiles.KeyConfig(sha256=digest("k"))}) as stack:
        out = ["-o", str(tmp_path / "out.wav"), "--url", stack.address]
        assert await rill("say", "Hello", *out, "--key", "k") == 0
        assert await rill("voices", "--url", stack.address, "--key", "k") == 0
        assert await rill("say", "Hello", *out, "--key", "wrong") == 1
