"""The page's client module against the real protocol, in Node where there is one."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from engine import messages as engine
from gateway import wire
from tests.gateway.conftest import Stack, StackMaker
from tests.gateway.test_wire import SERVER_MESSAGES
from tests.scripted_engine import Script

WEB = Path(__file__).parents[2] / "web"
NODE = shutil.which("node")
PATIENCE_S = 20.0

pytestmark = pytest.mark.skipif(NODE is None, reason="no Node here")


async def node(script: str, *arguments: str) -> dict[str, object]:
    """Runs a module; what it prints last is one JSON map."""
    assert NODE is not None
    process = await asyncio.create_subprocess_exec(
        NODE,
        "--no-warnings",
        "--experimental-websocket",
        "--input-type=module",
        "-e",
        script,
        *arguments,
        cwd=WEB,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    table: dict[str, object] = json.loads(out.decode().splitlines()[-1])
    return table


async def test_the_page_reads_the_servers_sample_bytes_as_python_does() -> None:
    script = """
      const { decode } = await import(process.cwd() + "/vendor/msgpack/decode.mjs");
      const read = (hex) => decode(Buffer.from(hex, "hex"));
      const kinds = JSON.parse(process.argv[1]).map((hex) => read(hex).t);
      const audio = read(process.argv[2]);
      console.log(JSON.stringify({ kinds, q: audio.q, bytes: [...audio.d] }));
    """
    samples = json.dumps([wire.pack(message).hex() for message in SERVER_MESSAGES])
    audio = wire.pack(wire.Audio(c="a", q=3, pos=9600, d=b"\x00\xff\x01")).hex()
    read = await node(script, samples, audio)
    assert read == {"kinds": [message.t for message in SERVER_MESSAGES], "q": 3, "bytes": [0, 255, 1]}


SPEAK = """
  const { Rill } = await import(process.cwd() + "/rill.js");
  const rill = await Rill.connect(process.argv[1]);
  const hear = async (options, pieces) => {
    const utterance = await rill.open(options);
    const heard = [];
    utterance.onaudio = (samples, pos) => heard.push({ pos, samples: [...samples] });
    for (const piece of pieces) utterance.send(piece);
    utterance.end();
    const result = await utterance.finished;
    return { result, heard, settings: utterance.settings };
  };
"""


async def test_the_pages_client_hears_what_was_sent(stack: Stack) -> None:
    script = (
        SPEAK
        + """
      const { result, heard, settings } = await hear({ voice: "bert", seed: 7 }, ["Hello ", "there, 🙂 you."]);
      let error = null;
      try { await rill.open({ voice: "nobody" }); } catch (caught) { error = [caught.code, caught.retry]; }
      const voices = (await rill.voices()).map((voice) => voice.id);
      const peak = Math.max(...heard.flatMap((part) => part.samples));
      const length = heard.reduce((sum, part) => sum + part.samples.length, 0);
      const { t, samples } = result;
      console.log(JSON.stringify({ t, samples, length, peak, seed: settings.seed, error, voices }));
      process.exit(0);
    """
    )
    url = stack.address.replace("http", "ws", 1) + "v1/speech"
    heard = await node(script, url)
    assert heard["t"] == "done"
    assert heard["samples"] == heard["length"] == 13 * 1_200
    assert abs(float(np.float64(heard["peak"])) - 0.5) < 1e-3  # type: ignore[arg-type]
    assert (heard["seed"], heard["error"]) == (7, ["unknown_voice", False])
    assert heard["voices"] == ["ada", "bert"]


async def test_the_pages_client_cancels_and_notices_a_lost_connection(make_stack: StackMaker) -> None:
    script = (
        SPEAK
        + """
      const first = await rill.open({});
      first.onaudio = () => first.cancel();
      first.send("This is a rather long sentence to be spoken. ".repeat(10));
      const cancelled = (await first.finished).t;
      const second = await rill.open({});
      rill.close();
      let code = null;
      try { await second.finished; } catch (caught) { code = caught.code; }
      console.log(JSON.stringify({ cancelled, code }));
      process.exit(0);
    """
    )
    async with make_stack(Script(step_s=0.01)) as stack:
        url = stack.address.replace("http", "ws", 1) + "v1/speech"
        assert await node(script, url) == {"cancelled": "cancelled", "code": "disconnected"}


async def test_the_clients_own_voices_go_up_in_parts_speak_and_go(stack: Stack) -> None:
    script = (
        SPEAK
        + """
      const recording = Uint8Array.from({ length: 150_000 }, (_, i) => i % 251);
      const before = (await rill.voices()).length;
      const mia = await rill.putVoice(recording, "The words.", { name: "Mia", lang: "en" });
      const listed = (await rill.voices()).find((voice) => voice.id === mia.voice);
      const { result } = await hear({ voice: mia.voice }, ["Hello."]);
      const errors = [];
      for (const words of ["FAULT", "BUSY"])
        await rill.putVoice(recording, words, { name: "Mia" }).catch((error) => errors.push([error.code, error.retry]));
      const left = (await rill.dropVoice(mia.voice)).length;
      await rill.dropVoice("ada").catch((error) => errors.push([error.code, error.retry]));
      await rill.ping();
      const { voice, ...rest } = mia;
      const kept = [listed.name, listed.lang];
      console.log(JSON.stringify({ rest, kept, samples: result.samples, errors, before, left }));
      process.exit(0);
    """
    )
    url = stack.address.replace("http", "ws", 1) + "v1/speech"
    heard = await node(script, url)
    assert heard == {
        "rest": {"t": "voice", "v": "v0", "name": "Mia", "ms": 5_000},
        "kept": ["Mia", "en"],
        "samples": 5 * 1_200,
        "errors": [["bad_voice", False], ["overloaded", True], ["unknown_voice", False]],
        "before": 2,
        "left": 2,
    }
    put = next(message for message in stack.engine.received if isinstance(message, engine.VoicePut))
    assert put.audio == bytes(i % 251 for i in range(150_000))
    assert (put.name, put.transcript, put.lang) == ("Mia", "The words.", "en")


async def test_what_the_client_waits_for_is_rejected_when_the_connection_goes(stack: Stack) -> None:
    script = (
        SPEAK
        + """
      const closed = new Promise((resolve) => (rill.onclose = resolve));
      const utterance = rill.begin({});
      utterance.send("STALL");
      await utterance.opened;
      const waiting = [utterance.finished, rill.putVoice(new Uint8Array(8), "STALL", { name: "Mia" })];
      await rill.voices();
      rill.abandon();
      await closed;
      const codes = await Promise.all(waiting.map((one) => one.catch((error) => error.code)));
      let late = null;
      try { utterance.send("more"); } catch (error) { late = error.code; }
      console.log(JSON.stringify({ codes, late, isOpen: rill.isOpen }));
      process.exit(0);
    """
    )
    url = stack.address.replace("http", "ws", 1) + "v1/speech"
    assert await node(script, url) == {
        "codes": ["disconnected", "disconnected"],
        "late": "disconnected",
        "isOpen": False,
    }


def test_the_document_names_all_that_the_module_offers() -> None:
    source, document = ((WEB / name).read_text(encoding="utf-8") for name in ("rill.js", "README.md"))
    offered = set(re.findall(r"^  (?:static |get )?([a-z]\w*)\(.*\) \{$", source, re.M)) - {"constructor", "switch"}
    offered |= set(re.findall(r"this\.(on[a-z]+) = \(", source))
    missing = {name for name in offered if not re.search(rf"`(Rill\.)?{name}\b", document)}
    assert offered >= {"connect", "begin", "putVoice", "cancel", "onaudio"} and not missing
