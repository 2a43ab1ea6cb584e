from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from websockets.datastructures import Headers

from engine.config import GatewayConfig, KeyConfig
from gateway.admission import Admission, Bucket, Tickets, digest, make_key
from gateway.errors import Denied, Refusal

KEY, OTHER = make_key(), make_key()


class Door:
    """An admission with a clock that the test turns."""

    def __init__(self, folder: Path, *, keys: dict[str, KeyConfig] | None = None, **settings: Any) -> None:
        self.now = 1000.0
        config = GatewayConfig(keys=keys or {}, **settings)
        self.tickets = Tickets(folder / "tickets", config.ticket_ms / 1000, lambda: self.now)
        self.admission = Admission(config, self.tickets, lambda: self.now)

    def enter(self, key: str | None = None, query: str = "", address: str = "1.2.3.4") -> Any:
        return self.admission.enter(address, bearer(key), query)


def bearer(key: str | None) -> Headers:
    return Headers() if key is None else Headers(Authorization=f"Bearer {key}")


def known(**settings: Any) -> dict[str, KeyConfig]:
    return {"ada": KeyConfig(sha256=digest(KEY), **settings), "bert": KeyConfig(sha256=digest(OTHER))}


def refused(door: Door, status: HTTPStatus, *arguments: Any, **options: Any) -> Denied:
    with pytest.raises(Denied) as caught:
        door.enter(*arguments, **options)
    assert caught.value.status is status
    return caught.value


def test_a_bucket_gives_a_minutes_worth_and_says_when_there_is_more() -> None:
    bucket = Bucket(60, 0.0)
    assert [bucket.take(20, 0.0) for _ in range(3)] == [0, 0, 0]
    assert bucket.take(20, 10.0) == pytest.approx(10)
    assert bucket.take(20, 20.0) == 0
    assert Bucket(0, 0.0).take(10**9, 0.0) == 0


def test_more_than_a_minutes_worth_at_once_is_let_through_and_paid_off() -> None:
    bucket = Bucket(60, 0.0)
    assert bucket.take(120, 0.0) == 0
    assert bucket.take(1, 0.0) == pytest.approx(61)


def test_without_keys_everybody_may_come_in(tmp_path: Path) -> None:
    assert Door(tmp_path).enter().name == ""


@pytest.mark.parametrize("given", [None, "", "x", KEY[:-1], KEY + "x", KEY.upper()], ids=range(6))
def test_a_wrong_key_is_a_401(tmp_path: Path, given: str | None) -> None:
    assert KEY not in str(refused(Door(tmp_path, keys=known()), HTTPStatus.UNAUTHORIZED, given))


def test_the_right_key_says_whose_it_is_and_what_they_may(tmp_path: Path) -> None:
    door = Door(tmp_path, keys=known(unpaced=False, controls=True))
    caller = door.enter(KEY)
    assert (caller.name, caller.rights.unpaced, caller.rights.controls) == ("ada", False, True)
    assert door.enter(OTHER).name == "bert"


def test_another_scheme_and_two_headers_are_refused(tmp_path: Path) -> None:
    door = Door(tmp_path, keys=known())
    twice = bearer(KEY)
    twice["Authorization"] = f"Bearer {KEY}"
    for headers in (Headers(Authorization=f"Basic {KEY}"), Headers(Authorization=KEY), twice):
        with pytest.raises(Denied):
            door.admission.enter("1.2.3.4", headers, "")


def test_a_ticket_opens_one_door_once(tmp_path: Path) -> None:
    door = Door(tmp_path, keys=known())
    ticket = door.admission.ticket("1.2.3.4", bearer(KEY))
    assert door.enter(query=f"ticket={ticket}").name == "ada"
    refused(door, HTTPStatus.UNAUTHORIZED, query=f"ticket={ticket}")


def test_a_ticket_is_good_in_another_process_of_the_same_engine(tmp_path: Path) -> None:
    one, two = Door(tmp_path, keys=known()), Door(tmp_path, keys=known())
    ticket = one.admission.ticket("1.2.3.4", bearer(OTHER))
    assert two.enter(query=f"ticket={ticket}").name == "bert"
    refused(one, HTTPStatus.UNAUTHORIZED, query=f"ticket={ticket}")


def test_of_many_who_try_a_ticket_at_once_one_gets_in(tmp_path: Path) -> None:
    tickets = Tickets(tmp_path, 60, time.time)
    ticket = tickets.issue("ada")
    with ThreadPoolExecutor(8) as threads:
        names = list(threads.map(lambda _: tickets.redeem(ticket), range(64)))
    assert [name for name in names if name] == ["ada"]


def test_a_ticket_expires_and_ends_with_its_key(tmp_path: Path) -> None:
    door = Door(tmp_path, keys=known(), ticket_ms=30_000)
    late, orphan = (door.admission.ticket("1.2.3.4", bearer(KEY)) for _ in range(2))
    door.now += 31
    refused(door, HTTPStatus.UNAUTHORIZED, query=f"ticket={late}")
    door.now -= 31
    door.admission.reload({"bert": known()["bert"]})
    refused(door, HTTPStatus.UNAUTHORIZED, query=f"ticket={orphan}")


@pytest.mark.parametrize("query", ["ticket=", "ticket=../../etc/passwd", "ticket=a&ticket=b", "tickets=x"])
def test_made_up_tickets_open_nothing(tmp_path: Path, query: str) -> None:
    refused(Door(tmp_path, keys=known()), HTTPStatus.UNAUTHORIZED, query=query)


def test_tickets_are_for_bearers_of_keys_where_there_are_keys(tmp_path: Path) -> None:
    for door, status in ((Door(tmp_path), 404), (Door(tmp_path, keys=known()), 401)):
        with pytest.raises(Denied) as caught:
            door.admission.ticket("1.2.3.4", bearer(None))
        assert caught.value.status == status


def test_outstanding_tickets_are_bounded_and_expired_ones_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.admission.TICKETS", 3)
    door = Door(tmp_path, keys=known())
    for _ in range(3):
        door.tickets.issue("ada")
    with pytest.raises(Denied, match="outstanding"):
        door.tickets.issue("ada")
    door.now += 61
    assert door.tickets.redeem(door.tickets.issue("ada")) == "ada"


def test_sockets_are_counted_per_address_and_given_back(tmp_path: Path) -> None:
    door = Door(tmp_path, address_sockets=2)
    first, _ = door.enter(), door.enter()
    assert refused(door, HTTPStatus.TOO_MANY_REQUESTS).retry_after_s is not None
    door.enter(address="5.6.7.8")
    first.leave()
    first.leave()
    door.enter()
    refused(door, HTTPStatus.TOO_MANY_REQUESTS)


def test_sockets_and_contexts_are_counted_per_key_over_all_its_connections(tmp_path: Path) -> None:
    door = Door(tmp_path, keys=known(sockets=2, contexts=3))
    one, two = door.enter(KEY), door.enter(KEY, address="5.6.7.8")
    refused(door, HTTPStatus.TOO_MANY_REQUESTS, KEY)
    door.enter(OTHER)
    for caller in (one, one, two):
        caller.take_context()
    with pytest.raises(Refusal) as caught:
        two.take_context()
    assert (caught.value.code, caught.value.retry) == ("context_limit", True)
    one.leave()  # with its contexts
    one.give_context()
    two.take_context()
    two.take_context()
    with pytest.raises(Refusal):
        two.take_context()


def test_handshakes_are_counted_whether_or_not_the_key_is_right(tmp_path: Path) -> None:
    door = Door(tmp_path, keys=known(), address_handshakes_minute=3)
    for _ in range(3):
        refused(door, HTTPStatus.UNAUTHORIZED, "guess")
    assert refused(door, HTTPStatus.TOO_MANY_REQUESTS, KEY).retry_after_s == 21
    door.enter(KEY, address="5.6.7.8")
    door.now += 21
    door.enter(KEY)


@pytest.mark.parametrize(
    "limit", [{"address_text_minute": 1_000}, {"keys": known(text_minute=1_000)}], ids=["address", "key"]
)
def test_text_is_counted_by_the_minute(tmp_path: Path, limit: dict[str, Any]) -> None:
    door = Door(tmp_path, **limit)
    one, two = door.enter(KEY), door.enter(KEY)
    one.take_text(600)
    with pytest.raises(Refusal) as caught:
        two.take_text(600)
    assert (caught.value.code, caught.value.retry, caught.value.after_ms) == ("quota", True, 12_001)
    door.now += 13
    two.take_text(600)


@pytest.mark.parametrize(
    "limit", [{"address_voices_minute": 2}, {"keys": known(voices_minute=2)}], ids=["address", "key"]
)
def test_recordings_are_counted_by_the_minute(tmp_path: Path, limit: dict[str, Any]) -> None:
    door = Door(tmp_path, **limit)
    one, two = door.enter(KEY), door.enter(KEY)
    one.take_voice()
    two.take_voice()
    with pytest.raises(Refusal) as caught:
        one.take_voice()
    assert (caught.value.code, caught.value.retry, caught.value.after_ms) == ("quota", True, 30_001)
    door.now += 31
    two.take_voice()


def test_pending_handshakes_are_bounded_per_address(tmp_path: Path) -> None:
    door = Door(tmp_path, address_pending=2).admission
    assert [door.knock("a") for _ in range(3)] == [True, True, False]
    assert door.knock("b")
    door.settle("a")
    assert door.knock("a")


def test_addresses_are_forgotten_when_idle_and_never_more_than_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.admission.ACCOUNTS", 2)
    door = Door(tmp_path)
    kept = door.enter(address="a")
    assert door.admission.knock("b")
    assert not door.admission.knock("c")
    door.admission.settle("b")
    assert door.admission.knock("c")
    kept.leave()


def test_an_ipv6_caller_is_its_network_and_a_known_proxy_names_its_caller(tmp_path: Path) -> None:
    door = Door(tmp_path, proxies=("10.0.0.1",)).admission
    assert door.address("2001:db8::1") == door.address("2001:db8::2") != door.address("2001:db8:0:1::1")
    named = Headers({"X-Forwarded-For": "6.6.6.6, 7.7.7.7, 10.0.0.1"})
    assert door.address("10.0.0.1", named) == "7.7.7.7"  # what the caller wrote before it counts for nothing
    assert door.address("9.9.9.9", named) == "9.9.9.9"


def test_a_key_that_goes_or_changes_is_revoked(tmp_path: Path) -> None:
    door = Door(tmp_path, keys=known())
    ada, bert = door.enter(KEY), door.enter(OTHER)
    door.admission.reload({"ada": KeyConfig(sha256=digest(OTHER)), "bert": known()["bert"]})
    assert door.admission.is_revoked(ada)
    assert not door.admission.is_revoked(bert)
    refused(door, HTTPStatus.UNAUTHORIZED, KEY)


def test_no_key_and_no_ticket_is_written_down(tmp_path: Path) -> None:
    door = Door(tmp_path, keys=known())
    ticket = door.admission.ticket("1.2.3.4", bearer(KEY))
    (path,) = (tmp_path / "tickets").iterdir()
    for secret in (KEY, ticket):
        assert secret not in path.name + path.read_text()
    assert path.stat().st_mode & 0o077 == 0
