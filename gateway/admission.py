"""Who may come in and what each may take: keys, tickets, and accounts per address and per key. No sockets, no asyncio.

An API key is 256 random bits, so its SHA-256 is all that the server keeps. A ticket stands for a key for a minute and
for one handshake. Tickets are files beside the engine's socket, where every gateway process of one engine finds them:
taking one is deleting it, which works once.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs

from websockets.datastructures import Headers

from engine.config import GatewayConfig, KeyConfig
from gateway.errors import Denied, Refusal

KEY_PREFIX: Final = "rill_"
TICKETS: Final = 10_000  # outstanding at once
ACCOUNTS: Final = 50_000  # addresses remembered; idle ones make room
BUSY_AFTER_MS: Final = 500
MINUTE_S: Final = 60.0
EVERYTHING: Final = KeyConfig(sha256="0" * 64, controls=False)  # what a caller may where no keys are asked for


def make_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Bucket:
    """A minute's worth of something, refilled evenly. `per_minute` 0: no limit."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def take(self, amount: int, now: float) -> float:
        """0 if there was enough and it is taken, else the seconds until there will be."""
        if not self._per_minute:
            return 0.0
        self._refill(now)
        missing = min(amount, self._per_minute) - self._level
        if missing > 0:
            return missing * MINUTE_S / self._per_minute
        self._level -= amount
        return 0.0

    def is_full(self, now: float) -> bool:
        self._refill(now)
        return self._level >= self._per_minute

    def _refill(self, now: float) -> None:
        grown = max(now - self._at, 0.0) * self._per_minute / MINUTE_S
        self._level = min(self._level + grown, float(self._per_minute))
        self._at = now


@dataclass(slots=True)
class Account:
    """What one address or one key has taken at this moment. A limit of 0 is none."""

    text: Bucket
    voices: Bucket
    handshakes: Bucket
    max_sockets: int
    max_contexts: int
    pending: int = 0
    sockets: int = 0
    contexts: int = 0

    @property
    def has_socket_left(self) -> bool:
        return not self.max_sockets or self.sockets < self.max_sockets

    def is_idle(self, now: float) -> bool:
        in_use = self.pending or self.sockets or self.contexts
        return not in_use and all(one.is_full(now) for one in (self.text, self.voices, self.handshakes))


class Caller:
    """One admitted connection's claim on its accounts; `leave` gives it back. Implements protocol.Quota."""

    def __init__(self, name: str, rights: KeyConfig, accounts: tuple[Account, ...], clock: Callable[[], float]) -> None:
        self.name = name  # of the key; empty where no keys are asked for
        self.rights = rights
        self._accounts = accounts
        self._clock = clock
        self._contexts = 0
        self._is_in = True
        for account in accounts:
            account.sockets += 1

    def take_context(self) -> None:
        """Raises Refusal if the key has as many contexts as it may."""
        for account in self._accounts:
            if account.max_contexts and account.contexts >= account.max_contexts:
                text = f"at most {account.max_contexts} contexts with this key"
                raise Refusal("context_limit", text, after_ms=BUSY_AFTER_MS)
        self._contexts += 1
        for account in self._accounts:
            account.contexts += 1

    def give_context(self) -> None:
        if not self._is_in:
            return  # it went with the connection
        self._contexts -= 1
        for account in self._accounts:
            account.contexts -= 1

    def take_text(self, num_bytes: int) -> None:
        """Raises Refusal when a minute's text is used up."""
        now = self._clock()
        wait_s = max(account.text.take(num_bytes, now) for account in self._accounts)
        if wait_s > 0:
            raise Refusal("quota", "this minute's text is used up", after_ms=int(wait_s * 1000) + 1)

    def take_voice(self) -> None:
        """Raises Refusal when a minute's recordings are used up."""
        now = self._clock()
        wait_s = max(account.voices.take(1, now) for account in self._accounts)
        if wait_s > 0:
            raise Refusal("quota", "this minute's recordings are used up", after_ms=int(wait_s * 1000) + 1)

    def leave(self) -> None:
        """Idempotent."""
        if not self._is_in:
            return
        self._is_in = False
        for account in self._accounts:
            account.sockets -= 1
            account.contexts -= self._contexts
        self._contexts = 0


class Tickets:
    """One-use tickets of one folder, shared by the processes that use it. The clock is the wall's."""

    def __init__(self, folder: Path, lifetime_s: float, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._lifetime_s = lifetime_s
        self._clock = clock

    def issue(self, name: str) -> str:
        """A ticket for the key of this name. Raises Denied if too many are outstanding."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if sum(1 for _ in self._folder.iterdir()) >= TICKETS and not self._sweep():
            raise Denied(HTTPStatus.TOO_MANY_REQUESTS, "too many tickets are outstanding", retry_after_s=60)
        ticket = secrets.token_urlsafe(32)
        path = self._path(ticket)
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(f"{self._clock() + self._lifetime_s} {name}")
        return ticket

    def redeem(self, ticket: str) -> str | None:
        """The name of the key it stands for, once; None for any other string."""
        path = self._path(ticket)
        try:
            expires, _, name = path.read_text().partition(" ")
            path.unlink()  # of two who try at once, one finds nothing here
        except OSError:
            return None
        return name if float(expires) >= self._clock() else None

    def _path(self, ticket: str) -> Path:
        return self._folder / digest(ticket)

    def _sweep(self) -> int:
        """Delete what has expired; how many that were."""
        count = 0
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError, ValueError):
                if float(path.read_text().partition(" ")[0]) < self._clock():
                    path.unlink()
                    count += 1
        return count


class Admission:
    """The accounts and the door. `knock` and `settle` bracket a handshake; `enter` lets a caller in."""

    def __init__(self, config: GatewayConfig, tickets: Tickets, clock: Callable[[], float]) -> None:
        self._config = config
        self._keys: Mapping[str, KeyConfig] = config.keys
        self._tickets = tickets
        self._clock = clock
        self._addresses: dict[str, Account] = {}
        self._by_key: dict[str, Account] = {}

    @property
    def asks_for_keys(self) -> bool:
        return bool(self._keys)

    def reload(self, keys: Mapping[str, KeyConfig]) -> None:
        """Other keys and limits from now on; what is taken stays taken."""
        self._keys = keys
        now = self._clock()
        for name, account in self._by_key.items():
            if (rights := keys.get(name)) is not None:
                account.max_sockets, account.max_contexts = rights.sockets, rights.contexts
                account.text = Bucket(rights.text_minute, now)
                account.voices = Bucket(rights.voices_minute, now)

    def is_revoked(self, caller: Caller) -> bool:
        """Has the caller's key gone since, or another taken its name?"""
        known = self._keys.get(caller.name)
        return self.asks_for_keys and (known is None or known.sha256 != caller.rights.sha256)

    # ---- addresses

    def address(self, peer: str, headers: Headers | None = None) -> str:
        """Whom to hold to account: the peer or, behind a proxy that we know, whom it names; IPv6 by its /64."""
        address = peer
        if headers is not None and peer in self._config.proxies:
            named = [one.strip() for one in ",".join(headers.get_all("X-Forwarded-For")).split(",")]
            others = [one for one in named if one and one not in self._config.proxies]
            address = others[-1] if others else peer
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return peer
        if parsed.version == 6 and not parsed.is_loopback:
            return str(ipaddress.ip_network((parsed, 64), strict=False))
        return str(parsed)

    def knock(self, address: str) -> bool:
        """A connection that has said nothing yet. False: too many such; call `settle` for every True."""
        account = self._account(address)
        if account is None or account.pending >= self._config.address_pending:
            return False
        account.pending += 1
        return True

    def settle(self, address: str) -> None:
        """The connection has made its request, or is gone."""
        self._addresses[address].pending -= 1

    def _account(self, address: str) -> Account | None:
        account = self._addresses.get(address)
        if account is None:
            if len(self._addresses) >= ACCOUNTS and not self._forget_idle():
                return None
            account = self._addresses[address] = self._new_account()
        return account

    def _new_account(self) -> Account:
        now, config = self._clock(), self._config
        return Account(
            text=Bucket(config.address_text_minute, now),
            voices=Bucket(config.address_voices_minute, now),
            handshakes=Bucket(config.address_handshakes_minute, now),
            max_sockets=config.address_sockets,
            max_contexts=0,
        )

    def _forget_idle(self) -> int:
        now = self._clock()
        idle = [address for address, account in self._addresses.items() if account.is_idle(now)]
        for address in idle:
            del self._addresses[address]
        return len(idle)

    # ---- callers

    def enter(self, address: str, headers: Headers, query: str) -> Caller:
        """Raises Denied: 401 without a valid key or ticket, 429 beyond an account's limits."""
        account = self._account(address)
        if account is None:
            raise Denied(HTTPStatus.SERVICE_UNAVAILABLE, "too many callers", retry_after_s=1)
        self._count_handshake(account)
        name = self._name_of(headers, query)
        accounts = (account,) if not self._keys else (account, self._key_account(name))
        if not all(one.has_socket_left for one in accounts):
            raise Denied(HTTPStatus.TOO_MANY_REQUESTS, "too many connections", retry_after_s=5)
        return Caller(name, self._keys.get(name, EVERYTHING), accounts, self._clock)

    def ticket(self, address: str, headers: Headers) -> str:
        """One ticket for the bearer of a key. Raises Denied."""
        account = self._account(address)
        if not self._keys or account is None:
            raise Denied(HTTPStatus.NOT_FOUND, "this server asks for no keys, so it gives no tickets")
        self._count_handshake(account)
        return self._tickets.issue(self._bearer(headers))

    def may_see_metrics(self, headers: Headers, *, is_local: bool) -> bool:
        """Operators on this machine, and bearers of a key."""
        if is_local or not self._keys:
            return True
        try:
            return bool(self._bearer(headers))
        except Denied:
            return False

    def _count_handshake(self, account: Account) -> None:
        wait_s = account.handshakes.take(1, self._clock())
        if wait_s > 0:
            raise Denied(HTTPStatus.TOO_MANY_REQUESTS, "too many handshakes", retry_after_s=int(wait_s) + 1)

    def _name_of(self, headers: Headers, query: str) -> str:
        if not self._keys:
            return ""
        tickets = parse_qs(query).get("ticket", [])
        if not tickets:
            return self._bearer(headers)
        name = self._tickets.redeem(tickets[0]) if len(tickets) == 1 else None
        if name is None or name not in self._keys:
            raise Denied(HTTPStatus.UNAUTHORIZED, "this ticket is not valid, or not any more")
        return name

    def _bearer(self, headers: Headers) -> str:
        """The name of the key in the Authorization header. Every key is compared, in constant time."""
        given = headers.get_all("Authorization")
        scheme, _, key = (given[0] if len(given) == 1 else "").partition(" ")
        found, hashed = "", digest(key.strip())
        for name, known in self._keys.items():
            if hmac.compare_digest(known.sha256, hashed):
                found = name
        if not found or scheme.lower() != "bearer":
            raise Denied(HTTPStatus.UNAUTHORIZED, "a key is needed: Authorization: Bearer KEY")
        return found

    def _key_account(self, name: str) -> Account:
        account = self._by_key.get(name)
        if account is None:
            rights, now = self._keys[name], self._clock()
            account = self._by_key[name] = Account(
                text=Bucket(rights.text_minute, now),
                voices=Bucket(rights.voices_minute, now),
                handshakes=Bucket(0, now),
                max_sockets=rights.sockets,
                max_contexts=rights.contexts,
            )
        return account
