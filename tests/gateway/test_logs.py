from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway import logs
from tests.gateway.conftest import StackMaker
from tests.gateway.raw_client import raw_client

SECRET = "Swordfish is the word that nobody may read. "


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Everything that any logger says, as JSON lines."""
    written, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(written), root.level
    handler.setFormatter(logs.JsonLines())
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    logging.getLogger("websockets").setLevel(logging.CRITICAL)
    yield written
    root.setLevel(level)
    root.removeHandler(handler)
    logging.getLogger("websockets").setLevel(logging.NOTSET)


async def test_logs_hold_ids_and_sizes_but_no_text_and_no_key(make_stack: StackMaker, lines: io.StringIO) -> None:
    async with make_stack() as stack, raw_client(stack.address) as client:
        await client.speak("a", SECRET, instruct="swordfish softly")
        await client.speak("b", SECRET + "FAULT")
        await client.say("open", c="c", voice="swordfish")
        await client.say("text", c="c", n=5, s=SECRET)
        await client.socket.send(b"\xc1" + SECRET.encode())
        await client.close_code()
    said = lines.getvalue()
    assert "wordfish" not in said
    events = [json.loads(line) for line in said.splitlines()]
    ended = [event for event in events if event["event"] == "context ended"]
    assert [event["outcome"] for event in ended] == ["done", "engine_error"]
    assert all(event["session"] and event["samples"] >= 0 for event in ended)
    assert {"session begins", "session ends"} <= {event["event"] for event in events}


def test_both_styles_show_the_fields_and_leave_out_what_is_none() -> None:
    record = logging.LogRecord("gateway", logging.INFO, "", 0, "it happened", (), None)
    record.__dict__["fields"] = {"session": "s1", "samples": 5, "why": None}
    assert logs.TextLines().format(record).endswith("gateway INFO it happened session=s1 samples=5")
    line = json.loads(logs.JsonLines().format(record))
    assert (line["event"], line["session"], line["samples"], line["level"]) == ("it happened", "s1", 5, "info")
    assert "why" not in line


def test_a_reader_that_stalls_costs_lines_and_never_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "WAITING", 3)
    behind = logs.Behind()  # with nobody who writes
    for number in range(5):
        behind.emit(logging.makeLogRecord({"msg": str(number)}))
    assert (behind.queue.qsize(), behind.num_dropped) == (3, 2)


def test_what_was_logged_is_written_before_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    code = """if True:
        import logging
        from gateway import logs
        with logs.writing("json"):
            logs.event(logging.getLogger("x"), "it happened", id=5)
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)
    assert json.loads(capfd.readouterr().err)["id"] == 5
