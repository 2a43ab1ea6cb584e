"""The supervisor over real gateway processes and a scripted engine's process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.admission import digest
from gateway.errors import ConfigError
from gateway.supervisor import SILENT, Supervisor, reserve
from tests.gateway.raw_client import RawClient, check_promises, raw_client, until
from tests.gateway.raw_socket import message, raw_socket
from tests.gateway.test_server import get, refusal, speech
from tests.soak.soak import rss, series

SENTENCE = "This is a sentence of some length to be spoken. "
ENGINE = "tests.scripted_engine"
PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def module_path(monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))


def profile(folder: Path, text: str = "") -> Path:
    path = folder / "profile.toml"
    path.write_text(f"[gateway]\ndrain_ms = 300\n{text}")
    return path


@contextlib.asynccontextmanager
async def served(path: Path, monkeypatch: pytest.MonkeyPatch, **script: Any) -> AsyncIterator[tuple[Supervisor, str]]:
    monkeypatch.setenv("SCRIPT", json.dumps({"step_s": 0.01, "lanes": 32, **script}))
    async with Supervisor(path, port=0, engine=ENGINE) as supervisor:
        async with asyncio.timeout(PATIENCE_S):
            address = await supervisor.address()
        yield supervisor, address


async def readiness(address: str) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((await get(address + "readyz"))[2])
    return table


async def is_ready_again(address: str) -> None:
    while not (await readiness(address))["ready"]:  # noqa: ASYNC110 - it is in another process
        await asyncio.sleep(0.02)


async def is_served(client: RawClient) -> None:
    while (await client.speak("well", "Hello there."))["t"] != "done":  # noqa: ASYNC110 - it is in another process
        await asyncio.sleep(0.02)


async def open_many(client: RawClient, count: int) -> None:
    for number in range(count):
        await client.say("open", c=f"c{number}")
        await client.say("text", c=f"c{number}", n=0, s=SENTENCE * 20)
    await client.hear_until("audio", f"c{count - 1}")


async def test_a_killed_engine_with_twenty_contexts_and_its_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G35: each context hears of it once, within a second; the sockets stay; readiness goes and comes back."""
    async with (
        served(profile(tmp_path), monkeypatch) as (supervisor, address),
        raw_client(address) as one,
        raw_client(address) as two,
    ):
        for client in (one, two):
            await open_many(client, 10)
        killed = time.perf_counter()
        os.kill(supervisor.pids("engine")[0], signal.SIGKILL)
        for client in (one, two):
            while sum(message["t"] == "error" for message in client.seen) < 10:
                await client.hear()
        assert time.perf_counter() - killed < 1.0
        assert (await readiness(address))["why"] == "engine gone"
        for client in (one, two):
            for number in range(10):
                check_promises(client.of(f"c{number}"))
            errors = [message for message in client.seen if message["t"] == "error"]
            assert {(error["code"], error["retry"]) for error in errors} == {("engine_restart", True)}
        await is_ready_again(address)
        for client in (one, two):
            assert (await client.speak("again", "Still here."))["t"] == "done"


async def test_a_context_that_kills_the_engine_twice_is_refused_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever gateway process it comes to."""
    path = profile(tmp_path, "processes = 3\n")
    async with served(path, monkeypatch) as (_, address), contextlib.AsyncExitStack() as on:
        clients = [await on.enter_async_context(raw_client(address)) for _ in range(6)]
        for client in clients[:2]:
            end = await client.speak("killer", "Now KILL it all. ")
            assert (end["code"], end["retry"]) == ("engine_restart", True)
            for one in clients:
                await is_served(one)
        for client in clients:
            end = await client.speak("killer", "Now KILL it all. ")
            assert (end["code"], end["retry"]) == ("engine_error", False)
            assert (await client.speak("other", "Hello there."))["t"] == "done"


async def test_a_killed_gateway_comes_back_at_its_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(profile(tmp_path), monkeypatch) as (supervisor, address):
        async with raw_client(address) as client:
            await open_many(client, 5)
            os.kill(supervisor.pids("gateway")[0], signal.SIGKILL)
            assert await client.close_code() == 1006
        while True:
            with contextlib.suppress(OSError):
                if (await readiness(address))["ready"]:
                    break
            await asyncio.sleep(0.05)
        async with raw_client(address) as client:
            assert (await client.speak("a", SENTENCE))["t"] == "done"
        assert (await series(address))["rill_engine_contexts"] == 0  # its orphans ended with its link


async def test_an_engine_that_is_killed_while_it_starts_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPT", json.dumps({"start_s": 0.5}))
    async with asyncio.timeout(PATIENCE_S), Supervisor(profile(tmp_path), port=0, engine=ENGINE) as supervisor:
        first = supervisor.pids("engine")[0]
        os.kill(first, signal.SIGKILL)
        async with raw_client(await supervisor.address()) as client:
            assert (await client.speak("a", SENTENCE))["t"] == "done"
        assert supervisor.pids("engine")[0] != first


async def test_an_engine_that_never_starts_is_given_up(tmp_path: Path) -> None:
    async with asyncio.timeout(PATIENCE_S), Supervisor(profile(tmp_path), port=0, engine="tests.nothing") as supervisor:
        assert "the engine ended with code 1 before it was ready" in await supervisor.failure()


async def test_several_gateways_share_one_engine_one_port_and_their_tickets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = f'processes = 3\n[gateway.keys.ada]\nsha256 = "{digest("k")}"\n'
    bearer = {"Authorization": "Bearer k"}
    async with served(profile(tmp_path, keys), monkeypatch) as (supervisor, address), contextlib.AsyncExitStack() as on:
        assert len(set(supervisor.pids("gateway"))) == 3
        clients = [
            await on.enter_async_context(raw_client(address, additional_headers=bearer, open_timeout=5))
            for _ in range(12)
        ]  # right after the address was told, at whichever process: all of them must be ready
        ends = await asyncio.gather(*(client.speak("same", SENTENCE, seed=n) for n, client in enumerate(clients)))
        assert {end["t"] for end in ends} == {"done"}
        audio = [client.audio("same") for client in clients]
        assert len(set(audio)) == len(audio)  # nobody heard another's
        text = (await get(address + "metrics"))[2].decode()
        assert 'rill_contexts_ended_total{by="done"} 12.0' in text.splitlines()  # whichever process answers
        for _ in range(6):
            ticket = json.loads((await get(address + "ticket", headers=bearer))[2])["ticket"]
            async with raw_client(address, path=f"v1/speech?ticket={ticket}"):
                pass
            assert await refusal(f"{speech(address)}?ticket={ticket}") == 401


async def test_new_keys_are_read_on_a_signal_and_old_ones_are_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = profile(tmp_path, f'[gateway.keys.ada]\nsha256 = "{digest("old")}"\n')
    async with served(path, monkeypatch) as (supervisor, address):
        old, new = ({"Authorization": f"Bearer {key}"} for key in ("old", "new"))
        async with raw_client(address, additional_headers=old) as client:
            profile(tmp_path, f'[gateway.keys.ada]\nsha256 = "{digest("new")}"\n')
            supervisor.reload()
            assert await client.close_code() == 4401
        assert await refusal(speech(address), additional_headers=old) == 401
        async with raw_client(address, additional_headers=new):
            pass


async def test_a_rolling_restart_under_load_cuts_nobody_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G39: SIGTERM to a gateway: each context finishes or gets one retryable error, and each socket a 1001."""
    async with served(profile(tmp_path), monkeypatch) as (supervisor, address), contextlib.AsyncExitStack() as on:
        clients = [await on.enter_async_context(raw_client(address)) for _ in range(8)]
        for number, client in enumerate(clients):
            await client.say("open", c="a")
            await client.say("text", c="a", n=0, s=SENTENCE * (1 if number % 2 else 50))
            await client.say("end", c="a")
            await client.hear_until("opened")
        gone = supervisor.pids("gateway")[0]
        os.kill(gone, signal.SIGTERM)
        for client in clients:
            assert await client.close_code() == 1001
            check_promises(client.of("a"))
            end = client.of("a")[-1]
            assert end["t"] == "done" or (end["code"], end["retry"]) == ("draining", True)
        await until(lambda: supervisor.pids("gateway") != [gone])


async def test_the_end_of_all_tells_callers_and_lets_short_ones_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = profile(tmp_path, "")
    path.write_text("[gateway]\ndrain_ms = 1500\n")
    async with contextlib.AsyncExitStack() as server:
        _, address = await server.enter_async_context(served(path, monkeypatch, step_s=0.05))
        async with raw_client(address) as short, raw_client(address) as endless:
            for client, text in ((short, "Short. "), (endless, SENTENCE * 50)):
                await client.say("open", c="a")
                await client.say("text", c="a", n=0, s=text)
                await client.say("end", c="a")
                await client.hear_until("opened")
            ending = asyncio.create_task(server.aclose())
            assert (await short.hear_end("a"))["t"] == "done"
            assert (await endless.hear_end("a"))["code"] == "draining"
            for client in (short, endless):
                assert await client.close_code() == 1001
                assert "goaway" in [heard["t"] for heard in client.seen]
                check_promises(client.of("a"))
            await ending


def test_a_port_that_is_taken_is_not_shared_by_accident() -> None:
    with contextlib.closing(reserve("127.0.0.1", 0)) as mine:
        mine.listen()
        with pytest.raises(ConfigError, match="can't listen at 127.0.0.1"):
            reserve("127.0.0.1", mine.getsockname()[1])


async def test_an_engine_that_hangs_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.supervisor.HUNG_S", 0.0)
    async with served(profile(tmp_path), monkeypatch) as (supervisor, address):
        hung = supervisor.pids("engine")[0]
        supervisor.heard(supervisor.gateways[0], SILENT)
        await until(lambda: supervisor.pids("engine") != [hung])
        await is_ready_again(address)


@pytest.mark.slow
async def test_two_thousand_connections_dropped_with_full_buffers_leave_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G38, without TLS, which is left to a proxy."""

    async def drop_many(address: str, count: int) -> None:
        for _ in range(count // 50):
            async with contextlib.AsyncExitStack() as on:
                for _ in range(50):
                    deaf = await on.enter_async_context(raw_socket(address, receive_bytes=4_096))
                    deaf.send(message("open", c="a", pace="none") + message("text", c="a", n=0, s=SENTENCE))
                await asyncio.sleep(0.1)

    async with asyncio.timeout(120), contextlib.AsyncExitStack() as on:
        path = profile(tmp_path, "address_handshakes_minute = 100000\n")
        supervisor, address = await on.enter_async_context(served(path, monkeypatch, lanes=100, step_s=0.02))
        (gateway,) = supervisor.pids("gateway")
        await drop_many(address, 500)
        before = rss(gateway)
        await drop_many(address, 2_000)
        async with raw_client(address) as client:
            assert (await client.speak("a", SENTENCE))["t"] == "done"
        assert rss(gateway) <= before * 1.1, f"{before >> 20} MiB, then {rss(gateway) >> 20}"
