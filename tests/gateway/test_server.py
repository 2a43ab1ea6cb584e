from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from engine.config import GatewayConfig, KeyConfig
from engine.messages import Gauges
from gateway.admission import digest
from gateway.errors import ConfigError
from gateway.server import _is_full, check_exposure
from tests.gateway.conftest import Stack, StackMaker
from tests.gateway.raw_client import check_promises, raw_client, until
from tests.scripted_engine import Script

SENTENCE = "This is a sentence of some length to be spoken. "


async def get(url: str, method: str = "GET", headers: dict[str, str] | None = None) -> tuple[int, str, bytes]:
    """Status, content type and body."""

    def fetch() -> tuple[int, str, bytes]:
        request = urllib.request.Request(url, method=method, headers=headers or {})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=5) as answer:
                return answer.status, answer.headers["Content-Type"], answer.read()
        except HTTPError as error:
            with error:
                return error.code, error.headers["Content-Type"], error.read()

    return await asyncio.to_thread(fetch)


def test_the_gateway_never_imports_torch() -> None:
    code = "import gateway.server, gateway.cli, gateway.client, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)


@pytest.mark.parametrize(
    ("path", "kind", "words"),
    [
        ("", "text/html; charset=utf-8", b"<textarea"),
        ("app.js", "text/javascript; charset=utf-8", b"import"),
        ("vendor/msgpack/decode.mjs", "text/javascript; charset=utf-8", b"decode"),
        ("style.css", "text/css; charset=utf-8", b"--accent"),
        ("icon.svg", "image/svg+xml", b"<svg"),
        ("livez", "text/plain; charset=utf-8", b"alive"),
    ],
)
async def test_the_page_and_its_files_are_on_the_same_port(stack: Stack, path: str, kind: str, words: bytes) -> None:
    status, got, body = await get(stack.address + path)
    assert (status, got) == (200, kind)
    assert words in body


@pytest.mark.parametrize("path", ["../pyproject.toml", "%2e%2e/pyproject.toml", "nothing", "vendor/", "//etc/passwd"])
async def test_nothing_outside_the_pages_folder_can_be_read(stack: Stack, path: str) -> None:
    assert (await get(stack.address + path))[0] == 404


async def test_other_methods_are_refused(stack: Stack) -> None:
    assert (await get(stack.address, method="POST"))[0] in (400, 405)


async def test_readiness_follows_the_engine(make_stack: StackMaker) -> None:
    async with make_stack() as stack:
        status, _, body = await get(stack.address + "readyz")
        assert (status, json.loads(body)["ready"], json.loads(body)["lanes"]) == (200, True, 8)
        stack.engine.script.is_ready = False
        stack.engine.kill()
        await until(lambda: stack.server.link.ready is None)
        assert (await get(stack.address + "readyz"))[0] == 503
        assert (await get(stack.address + "livez"))[0] == 200


async def test_readiness_says_that_the_engine_is_full_or_not_warm(make_stack: StackMaker) -> None:
    async def why(stack: Stack) -> str:
        return str(json.loads((await get(stack.address + "readyz"))[2])["why"])

    async with make_stack(Script(lanes=1)) as stack, raw_client(stack.address) as client:
        await client.say("open", c="a")
        await until(lambda: stack.server.link.gauges is not None and stack.server.link.gauges.lanes_used == 1)
        assert await why(stack) == "engine full"
        await client.say("cancel", c="a")
        await until(lambda: stack.server.link.gauges is not None and stack.server.link.gauges.lanes_used == 0)
        assert await why(stack) == "ready"
    async with make_stack(Script(is_ready=False)) as stack:
        assert await why(stack) == "engine not warm"


async def test_metrics_count_what_happened(stack: Stack) -> None:
    async with raw_client(stack.address) as client:
        await client.speak("a", SENTENCE)
        await client.speak("b", SENTENCE, voice="nobody")
    text = (await get(stack.address + "metrics"))[2].decode()
    for line in (
        'rill_contexts_ended_total{by="done"} 1.0',
        'rill_refusals_total{code="unknown_voice"} 1.0',
        "rill_engine_up 1.0",
        "rill_engine_lanes_used 0.0",
        "rill_first_audio_seconds_count 1.0",
        "rill_queue_seconds_count 1.0",
        "rill_underruns_total 0.0",
    ):
        assert line in text.splitlines()
    for name in ("gap", "lead", "cancel_ack", "engine_abort", "loop_lag"):
        assert f"rill_{name}_seconds_count" in text


def speech(address: str) -> str:
    return address.replace("http", "ws", 1) + "v1/speech"


async def refusal(url: str, **options: object) -> int:
    settings = {"subprotocols": ["rill.v1"], "proxy": None, "compression": None, **options}
    with pytest.raises(InvalidStatus) as caught:
        async with connect(url, **settings):  # type: ignore[arg-type]
            pass
    return caught.value.response.status_code


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://evil.example:80", "https://127.0.0.1"])
async def test_other_origins_are_refused_before_the_upgrade(stack: Stack, origin: str) -> None:
    assert await refusal(speech(stack.address), origin=origin) == 403


async def test_a_rebound_name_gains_nothing(stack: Stack) -> None:
    port = stack.address.rstrip("/").rsplit(":", 1)[1]
    origin = f"http://evil.example:{port}"
    assert await refusal(speech(origin + "/"), origin=origin, host="127.0.0.1", port=int(port)) == 403


async def test_a_repeated_host_is_refused(stack: Stack) -> None:
    assert await refusal(speech(stack.address), origin="http://x", additional_headers={"Host": "x"}) == 400


async def test_our_own_page_and_listed_origins_may_connect(make_stack: StackMaker) -> None:
    async with make_stack() as stack, raw_client(stack.address, origin=stack.address.rstrip("/")) as client:
        assert client.seen[0]["proto"] == "rill.v1"
    async with make_stack(origins=("https://app.example",)) as stack:
        async with raw_client(stack.address, origin="https://app.example"):
            pass
        assert await refusal(speech(stack.address), origin=stack.address.rstrip("/")) == 403


async def test_the_subprotocol_must_be_offered(stack: Stack) -> None:
    assert await refusal(speech(stack.address), subprotocols=["rill.v9"]) == 400
    assert await refusal(speech(stack.address), subprotocols=None) == 400


async def test_more_connections_than_allowed_are_told_to_come_back(make_stack: StackMaker) -> None:
    async with make_stack(connections=1) as stack, raw_client(stack.address):
        assert await refusal(speech(stack.address)) == 503


async def test_a_plain_get_of_the_speech_path_is_told_to_upgrade(stack: Stack) -> None:
    assert (await get(stack.address + "v1/speech"))[0] == 426


async def test_a_drain_lets_open_contexts_finish_and_ends_the_rest(make_stack: StackMaker) -> None:
    async with (
        make_stack(Script(step_s=0.01)) as stack,
        raw_client(stack.address) as short,
        raw_client(stack.address) as endless,
    ):
        await short.say("open", c="a")
        await short.say("text", c="a", n=0, s="Short.")
        await short.say("end", c="a")
        await endless.say("open", c="b")
        await endless.say("text", c="b", n=0, s=SENTENCE * 100)
        await endless.hear_until("audio", "b")
        stopping = asyncio.create_task(stack.server.stop())
        assert (await short.hear_end("a"))["t"] == "done"
        assert any(message["t"] == "goaway" for message in short.seen)
        error = await endless.hear_end("b")
        assert (error["code"], error["retry"]) == ("draining", True)
        check_promises(endless.of("b"))
        assert await short.close_code() == 1001
        assert await endless.close_code() == 1001
        await stopping


async def test_an_idle_connection_is_closed_with_its_own_code(make_stack: StackMaker) -> None:
    async with make_stack(idle_ms=200) as stack, raw_client(stack.address) as client:
        started = time.monotonic()
        assert await client.close_code() == 4408
        assert time.monotonic() - started >= 0.15


@pytest.mark.parametrize(("used", "places", "full"), [(3, 0, False), (4, 0, True), (2, 3, False), (3, 3, True)])
def test_full_is_when_the_places_that_can_be_played_are_taken(used: int, places: int, full: bool) -> None:
    assert _is_full(Gauges(lanes_used=used, lanes=4, talker_pages=0, flow_pages=0, places=places)) is full


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "rill.example"])
def test_hosts_that_others_can_reach_need_a_word_from_the_operator(host: str) -> None:
    config = GatewayConfig(host=host)
    with pytest.raises(ConfigError, match="--without-keys"):
        check_exposure(config, without_keys=False)
    check_exposure(config, without_keys=True)
    check_exposure(replace(config, keys={"a": KeyConfig(sha256=digest("k"))}), without_keys=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.9.1"])
def test_loopback_needs_none(host: str) -> None:
    check_exposure(GatewayConfig(host=host), without_keys=False)
