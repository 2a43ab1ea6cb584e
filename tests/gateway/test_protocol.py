"""The state machine alone: a clock that the test turns and an engine that the test plays."""

from __future__ import annotations

import array
import itertools
import random
import tempfile
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import messages as engine
from engine.config import KeyConfig
from gateway import wire
from gateway.admission import Account, Bucket, Caller
from gateway.context import FLUSHES, Lease
from gateway.errors import FINAL_CODES, RETRY_CODES, EngineUnavailable
from gateway.metrics import Metrics
from gateway.protocol import Deliver, ProtocolLimits, SpeechProtocol
from gateway.quarantine import Quarantine
from gateway.spans import no_spans
from gateway.voices import Room
from tests.gateway.raw_client import TERMINAL, check_promises

SUSPECTS = tempfile.TemporaryDirectory(prefix="rill-")  # of one engine, so that none is struck twice
SECOND = array.array("f", [0.25] * 24_000).tobytes()


class FakePort:
    """An engine link whose other end is the test."""

    def __init__(self) -> None:
        voices = [engine.VoiceInfo(id="ada", name="Ada", lang="en", ms=4000)]
        self.ready: engine.Ready | None = engine.Ready(model="fake", voices=voices, sample_rate=24_000, lanes=4)
        self.posted: list[engine.ToEngine] = []
        self.routes: dict[Lease, Deliver] = {}
        self.quarantine = Quarantine(Path(SUSPECTS.name), lambda: 0.0)
        self.room = Room()
        self._numbers = itertools.count(1)

    def lease(self, deliver: Deliver) -> Lease:
        if self.ready is None:
            raise EngineUnavailable("away")
        lease = Lease(context=next(self._numbers), epoch=1)
        self.routes[lease] = deliver
        return lease

    def post(self, message: engine.ToEngine) -> None:
        self.posted.append(message)

    def release(self, lease: Lease) -> None:
        self.routes.pop(lease, None)


def caller(**rights: Any) -> Caller:
    """Somebody whose key has these limits."""
    key = KeyConfig(sha256="0" * 64, **rights)
    account = Account(
        text=Bucket(key.text_minute, 100.0),
        voices=Bucket(key.voices_minute, 100.0),
        handshakes=Bucket(0, 100.0),
        max_sockets=key.sockets,
        max_contexts=key.contexts,
    )
    return Caller("somebody", key, (account,), lambda: 100.0)


class Bench:
    """One protocol on the bench."""

    dialect = SpeechProtocol

    def __init__(self, quota: Caller | None = None, **limits: int) -> None:
        self.now = 100.0
        self.port = FakePort()
        self.metrics = Metrics()
        self.caller = quota or caller()
        self.log: list[dict[str, Any]] = []
        self.protocol = self.dialect(
            session="s",
            port=self.port,
            limits=ProtocolLimits(**limits),
            quota=self.caller,
            metrics=self.metrics,
            tracer=no_spans,
            clock=lambda: self.now,
            seeds=random.Random(5),
        )
        self.read()
        self.log.clear()

    def say(self, t: str, **fields: Any) -> list[dict[str, Any]]:
        data: bytes = msgpack.packb({"t": t, **fields})
        self.protocol.receive(data)
        return self.read()

    def read(self) -> list[dict[str, Any]]:
        new = [msgpack.unpackb(data) for data in self.protocol.to_send()]
        self.log += new
        return new

    def open(self, c: str = "a", **fields: Any) -> Lease:
        """An opened context; the lease's name at the engine."""
        self.say("open", c=c, **fields)
        lease = list(self.port.routes)[-1]
        self.tell(lease, engine.Opened(context=lease.context, epoch=lease.epoch))
        return lease

    def tell(self, lease: Lease, event: engine.ToGateway) -> list[dict[str, Any]]:
        """The engine says something to whoever holds the lease."""
        if (deliver := self.port.routes.get(lease)) is not None:
            deliver(event)
        return self.read()

    def audio(self, lease: Lease, pcm: bytes = SECOND) -> list[dict[str, Any]]:
        return self.tell(lease, engine.Audio(context=lease.context, epoch=lease.epoch, pcm=pcm))

    def posted(self, kind: type[engine.ToEngine]) -> list[Any]:
        return [message for message in self.port.posted if isinstance(message, kind)]


def kinds(messages: list[dict[str, Any]]) -> list[str]:
    return [message["t"] for message in messages]


def test_opened_says_what_is_really_used() -> None:
    bench = Bench()
    bench.open(fmt={"enc": "mulaw", "rate": 8000})
    (opened,) = bench.log
    assert opened == {"t": "opened", "c": "a", "rate": 8000, "enc": "mulaw", "seed": opened["seed"], "voice": "ada"}
    assert bench.posted(engine.Open)[0].seed == opened["seed"]


def test_each_context_gets_its_own_seed_and_a_named_one_is_kept() -> None:
    bench = Bench()
    for c in "abc":
        bench.open(c)
    assert len({message["seed"] for message in bench.log}) == 3
    bench.open("d", seed=77)
    assert bench.log[-1]["seed"] == 77


def test_audio_is_cut_into_messages_of_20_to_200_ms() -> None:
    bench = Bench()
    lease = bench.open()
    heard = bench.audio(lease, SECOND[: 4 * 9_700])  # 404 ms
    assert [len(message["d"]) // 2 for message in heard] == [4800, 4320, 580]
    assert [message["pos"] for message in heard] == [0, 4800, 9120]
    assert bench.audio(lease, SECOND[: 4 * 100]) == []  # 4 ms wait for more
    done = bench.tell(lease, engine.Done(context=lease.context, epoch=1, samples=9_800))
    assert kinds(done) == ["audio", "done"]
    assert done[1]["samples"] == 9_800


def test_flushed_follows_the_audio_of_its_clauses() -> None:
    bench = Bench()
    lease = bench.open()
    bench.say("text", c="a", n=0, s="Good morning")
    assert bench.say("flush", c="a", f=9) == []
    (clause,) = bench.posted(engine.Clause)
    assert clause.text == "Good morning"
    bench.audio(lease)
    heard = bench.tell(lease, engine.ClauseDone(context=lease.context, epoch=1, index=0, samples=24_000))
    assert {"t": "flushed", "c": "a", "f": 9, "pos": 24_000} in heard
    assert kinds(bench.say("flush", c="a", f=10)) == ["flushed"]  # nothing new to speak


def test_taken_names_the_last_piece_that_is_wholly_with_the_model() -> None:
    bench = Bench()
    lease = bench.open()
    for n, piece in enumerate(["This is the first ", "sentence. And ", "more"]):
        bench.say("text", c="a", n=n, s=piece)
    taken = engine.ClauseTaken(context=lease.context, epoch=1, index=0)
    assert bench.tell(lease, taken) == [{"t": "taken", "c": "a", "n": 0}]
    bench.say("end", c="a")
    last = engine.ClauseTaken(context=lease.context, epoch=1, index=1)
    assert bench.tell(lease, last) == [{"t": "taken", "c": "a", "n": 2}]


def test_cancelled_overtakes_the_audio_of_others_and_nothing_follows_it() -> None:
    bench = Bench()
    one, two = bench.open("a"), bench.open("b")
    for lease in (one, two):  # delivered but not yet read by the socket
        bench.port.routes[lease](engine.Audio(context=lease.context, epoch=1, pcm=SECOND))
    data: bytes = msgpack.packb({"t": "cancel", "c": "a"})
    bench.protocol.receive(data)
    heard = bench.read()
    assert heard[0] == {"t": "cancelled", "c": "a", "samples": 0, "ms": 0.0, "text_upto": 0}
    assert {message["c"] for message in heard[1:]} == {"b"}
    assert bench.posted(engine.Cancel) == [engine.Cancel(context=one.context, epoch=1)]
    assert bench.audio(one) == []


def test_an_id_may_be_reused_and_late_audio_of_its_past_is_dropped() -> None:
    bench = Bench()
    first = bench.open("a")
    stale = bench.port.routes[first]
    bench.say("cancel", c="a")
    second = bench.open("a")
    stale(engine.Audio(context=first.context, epoch=1, pcm=SECOND))
    assert bench.read() == []
    assert kinds(bench.audio(second))[0] == "audio"


def test_text_upto_counts_whole_clauses_that_were_sent_or_played() -> None:
    bench = Bench()
    lease = bench.open()
    first = "This is one sentence. "
    bench.say("text", c="a", n=0, s=first + "This is another one. And so on")
    bench.audio(lease)
    bench.tell(lease, engine.ClauseDone(context=lease.context, epoch=1, index=0, samples=24_000))
    bench.audio(lease)
    assert bench.say("cancel", c="a")[0]["text_upto"] == len(first)
    lease = bench.open()
    bench.say("text", c="a", n=0, s=first)
    bench.audio(lease)
    bench.tell(lease, engine.ClauseDone(context=lease.context, epoch=1, index=0, samples=24_000))
    assert bench.say("cancel", c="a", played_ms=500)[0]["text_upto"] == 0


def test_without_credit_a_context_may_be_five_seconds_ahead_of_the_clock() -> None:
    bench = Bench()
    lease = bench.open()
    sent = sum(len(message["d"]) // 2 for _ in range(8) for message in bench.audio(lease))
    assert sent == 5 * 24_000
    assert bench.posted(engine.Credit)[0].samples == 5 * 24_000
    bench.now += 1.5
    bench.protocol.tick()
    assert sum(len(message["d"]) // 2 for message in bench.read()) == 1.5 * 24_000
    assert bench.posted(engine.Credit)[-1].samples == 6.5 * 24_000


def test_from_the_first_credit_on_credit_alone_decides() -> None:
    bench = Bench()
    lease = bench.open()
    bench.say("credit", c="a", ms=300)
    assert sum(len(message["d"]) // 2 for message in bench.audio(lease)) == 7_200
    bench.now += 60
    bench.protocol.tick()
    assert bench.read() == []
    assert sum(len(message["d"]) // 2 for message in bench.say("credit", c="a", ms=500)) == 4_800
    assert bench.say("credit", c="a", ms=100) == []  # it never shrinks
    assert sum(len(message["d"]) // 2 for message in bench.say("credit", c="a", ms=10_000)) == 12_000
    assert bench.posted(engine.Credit)[-1].samples == 240_000


def test_a_socket_that_takes_nothing_rests_the_row_even_with_credit() -> None:
    bench = Bench()
    bench.open(pace="none")
    assert bench.posted(engine.Credit)[-1].samples == 240_000
    bench.say("credit", c="a", ms=10_000_000)
    assert bench.posted(engine.Credit)[-1].samples == 240_000


def test_credit_is_for_the_audio_and_the_end_comes_with_its_last_sample() -> None:
    bench = Bench()
    lease = bench.open()
    bench.say("credit", c="a", ms=400)
    bench.audio(lease)
    assert bench.tell(lease, engine.Done(context=lease.context, epoch=1, samples=24_000)) == []
    assert kinds(bench.say("credit", c="a", ms=1_000))[-1] == "done"


def test_text_that_waits_is_bounded() -> None:
    bench = Bench(text_bytes=1_000)
    bench.open()
    bench.say("text", c="a", n=0, s="word " * 150)
    (error,) = bench.say("text", c="a", n=1, s="word " * 150)
    assert (error["c"], error["code"], error["retry"]) == ("a", "text_too_long", False)
    assert len(bench.posted(engine.Cancel)) == 1
    assert bench.say("text", c="a", n=2, s="late") == []  # it crossed the error on the wire


def test_flushes_that_nobody_answers_are_bounded() -> None:
    bench = Bench()
    lease = bench.open()
    bench.say("credit", c="a", ms=0)
    bench.say("text", c="a", n=0, s="Hello there")
    for f in range(FLUSHES):
        assert bench.say("flush", c="a", f=f) == []
    bench.audio(lease)
    assert bench.tell(lease, engine.ClauseDone(context=lease.context, epoch=1, index=0, samples=24_000))[1:] == []
    (error,) = bench.say("flush", c="a", f=FLUSHES)
    assert (error["c"], error["code"], error["retry"]) == ("a", "text_too_long", False)


def test_clauses_of_one_context_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.context.CLAUSES", 2)
    bench = Bench()
    bench.open()
    for n in range(2):
        bench.say("text", c="a", n=n, s="...")
        assert bench.say("flush", c="a", f=n) == []
    bench.say("text", c="a", n=2, s="...")
    assert bench.say("flush", c="a", f=2)[0]["code"] == "text_too_long"


def test_empty_pieces_take_no_memory_and_are_taken_with_what_follows() -> None:
    bench = Bench()
    lease = bench.open()
    for n in range(1_000):
        bench.say("text", c="a", n=n, s="")
    bench.say("text", c="a", n=1_000, s="Hi.")
    bench.say("text", c="a", n=1_001, s="")
    assert len(bench.protocol._contexts["a"]._pieces) == 2
    bench.say("end", c="a")
    taken = engine.ClauseTaken(context=lease.context, epoch=1, index=0)
    assert bench.tell(lease, taken) == [{"t": "taken", "c": "a", "n": 1_001}]


def test_a_duplicate_open_leaves_the_first_context_alone() -> None:
    bench = Bench()
    lease = bench.open()
    (error,) = bench.say("open", c="a")
    assert (error["code"], "c" in error) == ("duplicate_context", False)
    assert kinds(bench.audio(lease))[0] == "audio"


def test_text_out_of_sequence_or_after_the_end_ends_the_context() -> None:
    bench = Bench()
    bench.open("a")
    assert bench.say("text", c="a", n=1, s="x")[0]["code"] == "bad_sequence"
    bench.open("b")
    bench.say("end", c="b")
    assert bench.say("text", c="b", n=0, s="x")[0]["code"] == "bad_sequence"


def test_the_context_limit_is_freed_by_a_cancel_at_once() -> None:
    bench = Bench(contexts=2)
    bench.open("a")
    bench.open("b")
    (error,) = bench.say("open", c="c")
    assert (error["c"], error["code"], error["retry"]) == ("c", "context_limit", True)
    bench.say("cancel", c="a")
    bench.open("c")
    assert bench.log[-1]["t"] == "opened"


def test_without_an_engine_an_open_is_refused_for_now() -> None:
    bench = Bench()
    bench.port.ready = None
    (error,) = bench.say("open", c="a")
    assert (error["c"], error["code"], error["retry"]) == ("a", "engine_restart", True)
    assert error["after_ms"] > 0


def test_a_speed_that_cannot_be_had_is_refused_plainly() -> None:
    bench = Bench()
    assert bench.say("open", c="a", speed=1.5)[0]["code"] == "unsupported"
    bench.open("b", speed=1.0)
    assert bench.log[-1]["t"] == "opened"


def test_an_engine_error_with_the_users_words_does_not_pass_them_on() -> None:
    bench = Bench()
    lease = bench.open()
    failed = engine.Failed(context=lease.context, epoch=1, code="engine_error", message="secret words", retry=False)
    (error,) = bench.tell(lease, failed)
    assert "secret" not in error["msg"]


def test_draining_refuses_new_contexts_and_finishes_open_ones() -> None:
    bench = Bench()
    lease = bench.open()
    bench.protocol.drain(5_000, "shutdown")
    assert bench.read() == [{"t": "goaway", "deadline_ms": 5_000, "why": "shutdown"}]
    assert bench.say("open", c="b")[0]["code"] == "draining"
    assert not bench.protocol.is_idle
    bench.tell(lease, engine.Done(context=lease.context, epoch=1, samples=0))
    assert bench.protocol.is_idle


def test_answers_that_are_not_read_are_noticed() -> None:
    bench = Bench()
    ping: bytes = msgpack.packb({"t": "ping", "x": "x" * 200})
    for _ in range(2_000):
        bench.protocol.receive(ping)
    assert bench.protocol.is_flooded


IDS = st.sampled_from(["a", "b", "c"])
CLIENT = st.one_of(
    st.fixed_dictionaries(
        {"t": st.just("open"), "c": IDS},
        optional={"seed": st.integers(-1, 5), "voice": st.sampled_from(["ada", "eve"])},
    ),
    st.fixed_dictionaries(
        {"t": st.just("text"), "c": IDS, "n": st.integers(0, 2), "s": st.sampled_from(["", "Hi. ", "One two three. "])}
    ),
    st.fixed_dictionaries({"t": st.just("flush"), "c": IDS, "f": st.integers(-1, 3)}),
    st.fixed_dictionaries({"t": st.sampled_from(["end", "cancel"]), "c": IDS}),
    st.fixed_dictionaries({"t": st.just("credit"), "c": IDS, "ms": st.sampled_from([0, 500, 5_000, "much"])}),
    st.fixed_dictionaries({"t": st.sampled_from(["voices", "ping", "sing", 5])}),
)
ENGINE = st.sampled_from(["opened", "taken", "audio", "clause", "done", "failed", "lost", "back"])
STEPS = st.lists(st.one_of(CLIENT, ENGINE, st.just("time"), st.just("read")), max_size=60)


def play_engine(bench: Bench, step: str, turn: int) -> None:
    """What the engine might say next to one of the leased contexts, in the order that an engine keeps."""
    if step == "back":
        bench.port.ready = FakePort().ready
    if step == "lost":
        bench.port.ready = None
        for lease, deliver in list(bench.port.routes.items()):
            bench.port.routes.pop(lease)
            deliver(_failed(lease))
    if not bench.port.routes:
        return
    lease = list(bench.port.routes)[turn % len(bench.port.routes)]
    mine = [m for m in bench.port.posted if m.context == lease.context and isinstance(m, engine.Clause)]
    key = {"context": lease.context, "epoch": lease.epoch}
    events: dict[str, engine.ToGateway] = {
        "opened": engine.Opened(**key),
        "audio": engine.Audio(**key, pcm=SECOND[: 4 * 3_000]),
        "done": engine.Done(**key, samples=0),
        "failed": _failed(lease),
    }
    if mine:
        events["taken"] = engine.ClauseTaken(**key, index=len(mine) - 1)
        events["clause"] = engine.ClauseDone(**key, index=len(mine) - 1, samples=0)
    if step in events:
        bench.port.routes[lease](events[step])


def _failed(lease: Lease) -> engine.Failed:
    return engine.Failed(context=lease.context, epoch=lease.epoch, code="engine_restart", message="", retry=True)


@given(STEPS)
@settings(max_examples=250, deadline=None)
def test_any_message_in_any_state_keeps_the_promises(steps: list[Any]) -> None:
    bench = Bench(contexts=2)
    for turn, step in enumerate(steps):
        if isinstance(step, dict):
            bench.protocol.receive(msgpack.packb(step))
        elif step == "time":
            bench.now += 0.7
            bench.protocol.tick()
        elif step == "read":
            bench.read()
        else:
            play_engine(bench, step, turn)
    bench.protocol.close()
    bench.read()
    for c in "abc":
        check_each_use([message for message in bench.log if message.get("c") == c])
    assert not bench.port.routes  # nothing is left behind at the engine
    assert bench.protocol.num_contexts == 0
    for error in (message for message in bench.log if message["t"] == "error"):
        assert error["code"] in FINAL_CODES | RETRY_CODES


def check_each_use(messages: list[dict[str, Any]]) -> None:
    """An id's messages, split where a use of it ends. The last one may have been cut off by the hang-up."""
    use: list[dict[str, Any]] = []
    for message in messages:
        use.append(message)
        if message["t"] in TERMINAL:
            check_promises(use)
            use = []
    assert all(message["t"] not in TERMINAL for message in use)


def test_the_wire_limits_told_are_the_ones_that_hold() -> None:
    bench = Bench(contexts=3, text_bytes=500)
    (ready,) = [
        msgpack.unpackb(data)
        for data in SpeechProtocol(
            session="s",
            port=bench.port,
            limits=ProtocolLimits(contexts=3, text_bytes=500),
            quota=caller(),
            metrics=Metrics(),
            tracer=no_spans,
            clock=lambda: 0.0,
            seeds=random.Random(0),
        ).to_send()
    ]
    assert ready["proto"] == wire.SUBPROTOCOL
    assert (ready["limits"]["contexts"], ready["limits"]["text_bytes"]) == (3, 500)
    assert ready["voices"] == [{"id": "ada", "name": "Ada", "lang": "en", "ms": 4000}]


def test_by_words_a_clause_goes_to_the_engine_as_its_words_come() -> None:
    bench = Bench(context_idle_ms=20_000)
    lease = bench.open(aggregation="word")
    assert bench.posted(engine.Open)[0].by_words
    for n, piece in enumerate(["The boat w", "ent down", " the river at", " 8:20. And th"]):
        bench.say("text", c="a", n=n, s=piece)
    said = [(clause.index, clause.text, clause.is_last) for clause in bench.posted(engine.Clause)]
    assert said == [
        (0, "The", False), (0, " boat", False), (0, " went", False), (0, " down", False), (0, " the", False),
        (0, " river", False), (0, " at 8:20. ", True),
    ]  # fmt: skip
    taken = bench.tell(lease, engine.ClauseTaken(context=lease.context, epoch=lease.epoch, index=0))
    assert taken == [{"t": "taken", "c": "a", "n": 2}]
    bench.audio(lease)
    bench.tell(lease, engine.ClauseDone(context=lease.context, epoch=lease.epoch, index=0, samples=24_000))
    bench.say("text", c="a", n=4, s="en it came back")
    last = bench.posted(engine.Clause)[-1]
    assert (last.index, last.is_last) == (1, False)
    bench.now += 21
    bench.protocol.tick()
    assert bench.read()[-1]["code"] == "idle"


def death_over(bench: Bench, text: str, engine_life: str, **fields: Any) -> list[dict[str, Any]]:
    """What the caller is told of a text that is being spoken when the engine dies."""
    lease = bench.open(**fields)
    bench.port.quarantine.engine = engine_life
    told = bench.say("text", c="a", n=0, s=text)
    if lease in bench.port.routes:
        failed = engine.Failed(context=lease.context, epoch=1, code="engine_restart", message="", retry=True)
        told += bench.tell(lease, failed)
    return told


DEADLY = "This sentence is the death of engines wherever they cut it off, and nobody knows why it should be so"


def test_by_words_a_deadly_text_is_known_wherever_the_engine_died_over_it(tmp_path: Path) -> None:
    bench = Bench()
    bench.port.quarantine = Quarantine(tmp_path, lambda: 0.0)
    for life, length in (("one", 52), ("two", 40)):
        assert death_over(bench, DEADLY[:length], life, aggregation="word")[-1]["code"] == "engine_restart"
    assert death_over(bench, DEADLY[:60], "three", aggregation="word")[-1]["code"] == "engine_error"
    assert death_over(bench, DEADLY + ".", "three")[-1]["code"] == "engine_restart"  # that is another job


def test_by_words_a_beginning_that_is_spoken_to_its_end_is_cleared(tmp_path: Path) -> None:
    bench = Bench()
    bench.port.quarantine = Quarantine(tmp_path, lambda: 0.0)
    death_over(bench, DEADLY[:60], "one", aggregation="word")
    lease = bench.open(aggregation="word")
    bench.say("text", c="a", n=0, s=DEADLY[:60])
    bench.say("end", c="a")
    bench.tell(lease, engine.ClauseDone(context=lease.context, epoch=lease.epoch, index=0, samples=24_000))
    bench.say("cancel", c="a")
    assert death_over(bench, DEADLY[:60], "two", aggregation="word")[-1]["code"] == "engine_restart"
    assert death_over(bench, "This one is fine", "three", aggregation="word")[-1]["code"] == "engine_restart"
    bench.open(aggregation="word")
    assert not bench.say("text", c="a", n=0, s="This one is good, as far as it goes")
