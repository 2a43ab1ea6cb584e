"""A state machine of one connection: whatever the client, the engine and the clock do, in any order, each step leaves
a legal state or a named error. The model is what a client could know; the engine keeps its own promises only."""

from __future__ import annotations

from typing import Any

import msgpack
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from engine import messages as engine
from gateway.context import Lease
from gateway.errors import FINAL_CODES, RETRY_CODES, Refusal, Violation
from tests.gateway.raw_client import TERMINAL
from tests.gateway.test_protocol import SECOND, Bench, FakePort, caller

IDS = st.sampled_from(["a", "b", "c", "d"])
PIECES = st.sampled_from(
    ["", " ", "Hi. ", "...", "🙂", "One two three four five six. ", "word " * 60, "<|endofprompt|>"]
)
KINDS = st.sampled_from(["open", "text", "flush", "end", "cancel", "credit", "voices", "ping", "sing", 5, None])
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.binary(max_size=5),
)
FIELDS = st.sampled_from(
    ["c", "n", "s", "f", "ms", "voice", "fmt", "seed", "speed", "sampling", "window_ms", "pace", "x"]
)


class Connection(RuleBasedStateMachine):
    leases = Bundle("leases")

    @initialize(contexts=st.integers(1, 3), sockets=st.integers(0, 2))
    def begin(self, contexts: int, sockets: int) -> None:
        self.bench = Bench(quota=caller(contexts=sockets), contexts=contexts, text_bytes=400, context_idle_ms=20_000)
        self.max_contexts = contexts
        self.pieces: dict[str, int] = {}
        self.clauses: dict[Lease, int] = {}  # done of each
        self.over: set[str] = set()
        self.is_lost = False

    # ---- the client

    def say(self, t: str, **fields: Any) -> None:
        self.bench.protocol.receive(msgpack.packb({"t": t, **fields}))

    @rule(c=IDS, seed=st.none() | st.integers(0, 3), pace=st.sampled_from([None, "none", "listen"]))
    def open(self, c: str, seed: int | None, pace: str | None) -> None:
        before = self.bench.protocol.num_contexts
        self.say("open", c=c, seed=seed, pace=pace)
        if self.bench.protocol.num_contexts > before:
            self.pieces[c] = 0

    @rule(c=IDS, piece=PIECES, skip=st.sampled_from([0, 0, 0, 1]))
    def text(self, c: str, piece: str, skip: int) -> None:
        self.say("text", c=c, n=self.pieces.get(c, 0) + skip, s=piece)
        self.pieces[c] = self.pieces.get(c, 0) + 1

    @rule(t=st.sampled_from(["flush", "end", "cancel"]), c=IDS, f=st.integers(0, 3))
    def order(self, t: str, c: str, f: int) -> None:
        self.say(t, c=c, f=f)

    @rule(c=IDS, ms=st.sampled_from([0, 100, 1_000, 10_000, 2**40]))
    def credit(self, c: str, ms: int) -> None:
        self.say("credit", c=c, ms=ms)

    @rule(t=KINDS, fields=st.dictionaries(FIELDS, VALUES, max_size=4))
    def nonsense(self, t: Any, fields: dict[str, Any]) -> None:
        self.bench.protocol.receive(msgpack.packb({"t": t, **fields}))

    @rule(data=st.binary(max_size=40))
    def noise(self, data: bytes) -> None:
        try:
            self.bench.protocol.receive(data)
        except Violation as violation:
            assert violation.close_code in (4400, 1007, 1009)

    # ---- the engine

    @rule(target=leases)
    def seat(self) -> Any:
        """The engine gives a lane to whoever waits for one."""
        new = [lease for lease in self.bench.port.routes if lease not in self.clauses]
        for lease in new:
            self.clauses[lease] = 0
            self.tell(lease, engine.Opened(**self.key(lease)))
        return multiple(*new)

    @rule(lease=leases, samples=st.sampled_from([1, 100, 3_000, 24_000]))
    def sound(self, lease: Lease, samples: int) -> None:
        self.tell(lease, engine.Audio(**self.key(lease), pcm=SECOND[: 4 * samples]))

    @rule(lease=leases)
    def take(self, lease: Lease) -> None:
        if (posted := self.posted(lease)) > self.clauses[lease]:
            self.tell(lease, engine.ClauseTaken(**self.key(lease), index=posted - 1))

    @rule(lease=leases)
    def finish_clause(self, lease: Lease) -> None:
        if self.posted(lease) > self.clauses[lease]:
            self.clauses[lease] += 1
            self.tell(lease, engine.ClauseDone(**self.key(lease), index=self.clauses[lease] - 1, samples=0))

    @rule(lease=consumes(leases), how=st.sampled_from(["done", "engine_error", "overloaded", "made_up", "gone"]))
    def finish(self, lease: Lease, how: str) -> None:
        key = self.key(lease)
        if how == "done":
            self.tell(lease, engine.Done(**key, samples=0))
        elif how == "gone":
            self.tell(lease, engine.Cancelled(**key))
        else:
            self.tell(lease, engine.Failed(**key, code=how, message="secret words", retry=how == "overloaded"))

    @precondition(lambda self: not self.is_lost)
    @rule()
    def lose_engine(self) -> None:
        self.is_lost = True
        self.bench.port.ready = None
        for lease, deliver in list(self.bench.port.routes.items()):
            self.bench.port.routes.pop(lease)
            deliver(engine.Failed(**self.key(lease), code="engine_restart", message="", retry=True))

    @precondition(lambda self: self.is_lost)
    @rule()
    def find_engine(self) -> None:
        self.is_lost = False
        self.bench.port.ready = FakePort().ready

    def key(self, lease: Lease) -> dict[str, Any]:
        return {"context": lease.context, "epoch": lease.epoch}

    def posted(self, lease: Lease) -> int:
        return sum(m.context == lease.context for m in self.bench.posted(engine.Clause))

    def tell(self, lease: Lease, event: engine.ToGateway) -> None:
        if (deliver := self.bench.port.routes.get(lease)) is not None:
            deliver(event)

    # ---- time and the writer

    @rule(seconds=st.sampled_from([0.05, 1.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.bench.now += seconds
        self.bench.protocol.tick()

    @rule()
    def write(self) -> None:
        self.bench.read()

    @rule()
    def drain(self) -> None:
        self.bench.protocol.drain(1_000, "shutdown")

    @rule()
    def end_all(self) -> None:
        self.bench.protocol.end_all(Refusal("draining", "gone"))

    # ---- what must hold

    @invariant()
    def limits_hold(self) -> None:
        protocol = self.bench.protocol
        assert protocol.num_contexts <= self.max_contexts
        assert protocol.num_contexts >= len(self.bench.port.routes)  # a context may outlive its lease, not the reverse

    @invariant()
    def every_use_of_an_id_keeps_the_promises(self) -> None:
        uses: dict[str, list[dict[str, Any]]] = {}
        for message in self.bench.log:
            if (c := message.get("c")) is None:
                continue
            use = uses.setdefault(c, [])
            check_step(use, message)
            use.append(message)
            if message["t"] in TERMINAL:
                uses[c] = []

    @invariant()
    def errors_are_named_and_give_nothing_away(self) -> None:
        for message in self.bench.log:
            if message["t"] == "error":
                assert message["code"] in FINAL_CODES | RETRY_CODES
                assert message["retry"] == (message["code"] in RETRY_CODES)
                assert "secret" not in message["msg"]

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.protocol.close()
        self.bench.read()
        self.every_use_of_an_id_keeps_the_promises()
        assert not self.bench.port.routes
        assert self.bench.protocol.num_contexts == 0
        assert self.bench.caller._accounts[0].contexts == 0
        ended = {m.context for m in self.bench.posted(engine.Cancel)}
        assert len(ended) == len(self.bench.posted(engine.Cancel))  # each is cancelled once at most


def check_step(use: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """May this message follow those, in one use of an id?"""
    kinds = [one["t"] for one in use]
    if message["t"] == "opened":
        assert kinds == []
    elif message["t"] == "audio":
        heard = [one for one in use if one["t"] == "audio"]
        assert "opened" in kinds and message["q"] == len(heard)
        assert message["pos"] == sum(len(one["d"]) // 2 for one in heard)
        assert 0 < len(message["d"]) <= 2 * 4_800
    elif message["t"] in ("flushed", "done"):
        assert message.get("pos", message.get("samples")) == sum(len(one.get("d", b"")) // 2 for one in use)
    elif message["t"] == "taken":
        assert all(one["n"] < message["n"] for one in use if one["t"] == "taken")


TestConnection = Connection.TestCase
TestConnection.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
