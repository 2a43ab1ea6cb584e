"""One utterance, from `open` to its terminal message. No I/O and no clock of its own: `now` is passed in, in seconds.

Text comes in by pieces and leaves as clauses for the engine; float audio comes from the engine and leaves as numbered
messages, as far as the listener's credit goes. Whatever ends the context ends it once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from engine import messages as engine
from gateway import wire
from gateway.clauses import ClauseCutter, Stretch
from gateway.encodings import Encoder
from gateway.errors import Refusal
from gateway.quarantine import Quarantine
from gateway.spans import Span

LEAD_S: Final = 10.0  # audio the engine may be ahead of what the socket took, so that a slow reader rests its row
START_LEAD_S: Final = 5.0  # promise 5: until the first credit, elapsed time and this
SHORTEST_MS: Final = 20
LONGEST_MS: Final = 200
CREDIT_STEP_S: Final = 0.1  # the engine is told when its limit has grown by so much
CLAUSES: Final = 10_000  # of one context: hours of speech
FLUSHES: Final = 1_024  # unanswered, of one context
PREPARED: Final = 3  # clauses that the engine works on ahead of the voice
OPENING: Final = 24  # characters from which on the beginnings of a clause that comes by words are suspects too


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The context's name at the engine."""

    context: int
    epoch: int


@dataclass(frozen=True, slots=True)
class _Piece:
    n: int
    end: int  # characters of the context's text up to the piece's end


@dataclass(slots=True)
class _Clause:
    """A clause at the engine; by words, as much of it as has come."""

    end: int  # characters of the context's text up to the clause's end
    num_bytes: int = 0
    text: str = ""  # as long as more of it may come
    fingerprints: list[str] = field(default_factory=list)  # of the whole; by words, of its beginnings from OPENING on
    is_whole: bool = False
    samples: int | None = None  # of the context, when all of the clause's audio is in


@dataclass(frozen=True, slots=True)
class _Mark:
    """A message that waits until the audio before `pos` has been sent."""

    pos: int
    message: wire.Flushed | wire.Done


class Playout:
    """When a listener who plays at once runs dry; in seconds."""

    def __init__(self) -> None:
        self._dry_at: float | None = None

    def send(self, audio_s: float, now: float) -> float | None:
        """More audio goes out. What the listener still had, negative if it was dry; None at a start."""
        lead = None if self._dry_at is None else self._dry_at - now
        self._dry_at = max(self._dry_at or now, now) + audio_s
        return lead

    def restart(self) -> None:
        """The next wait is nobody's fault: the listener asked for it, or there was nothing to say."""
        self._dry_at = None


class Context:
    """The text, audio and credit of one context; `post` takes what the engine is to be told."""

    def __init__(
        self,
        request: wire.Open,
        opened: wire.Opened,
        lease: Lease,
        *,
        now: float,
        window_ms: int,
        text_bytes: int,
        post: Callable[[engine.ToEngine], None],
        quarantine: Quarantine,
        span: Span,
    ) -> None:
        self.c = request.c
        self.span = span
        self.lease = lease
        self.is_done = False  # the engine has no more for it
        self.sent = 0  # samples, at the context's rate
        self._opened = opened
        self._opened_at = now  # when the client asked
        self._heard_at = now  # when the client or the engine last said something of it, or audio went out
        self._quarantine = quarantine
        by_words = request.aggregation == "word"
        # With a clause's text, what the engine works on:
        self._kind = (opened.voice, request.instruct, request.lang, "word" if by_words else None)
        self.lead_s: float | None = None  # the listener's, when the last message went out
        self._playout = Playout()
        self._is_open = False
        self._first_audio_at: float | None = None
        self._paced = request.pace != "none"
        self._window_s = window_ms / 1000
        self._credit_s: float | None = None
        self._told = 0  # credit at the engine, samples at 24 kHz
        self._encoder = Encoder(opened.enc, opened.rate)
        self._cutter = ClauseCutter(by_words=by_words)
        self._pieces: deque[_Piece] = deque()
        self._clauses: list[_Clause] = []
        self._num_pieces = 0
        self._received = 0  # characters
        self._cut = 0  # characters in clauses
        self._num_taken = 0  # clauses whose text has gone to the model
        self._waiting_bytes = 0  # of text that hasn't
        self._text_bytes = text_bytes
        self._has_ended = False
        self._flushes: deque[tuple[int, int]] = deque()  # clauses before it, its number
        self._num_clauses_done = 0
        self._audio = bytearray()
        self._marks: deque[_Mark] = deque()
        self._num_audio = 0
        self._post = post
        self.tell_credit(now)

    # ---- what the client says

    def text(self, message: wire.Text, now: float) -> None:
        """Raises Refusal: out of order, after the end, more than may wait, or what has killed the engine twice."""
        self._heard_at = now
        if self._has_ended:
            raise Refusal("bad_sequence", "text after end")
        if message.n != self._num_pieces:
            raise Refusal("bad_sequence", f"text piece {message.n}, expected {self._num_pieces}")
        self._waiting_bytes += len(message.s.encode())
        if self._waiting_bytes > self._text_bytes:
            raise Refusal("text_too_long", f"more than {self._text_bytes} bytes of text wait to be spoken")
        self._num_pieces += 1
        self._received += len(message.s)
        if self._pieces and self._pieces[-1].end == self._received:
            self._pieces.pop()  # empty pieces share one entry, so that what waits is bounded by its bytes
        self._pieces.append(_Piece(message.n, self._received))
        for stretch in self._cutter.stretches(message.s):
            self._speak(stretch)

    def flush(self, message: wire.Flush, now: float) -> None:
        """All text so far becomes clauses; `flushed` follows the last one's audio."""
        self._heard_at = now
        if len(self._flushes) + len(self._marks) >= FLUSHES:
            raise Refusal("text_too_long", f"more than {FLUSHES} flushes wait to be answered")
        self._speak_rest()
        self._flushes.append((len(self._clauses), message.f))
        self._mark_flushes()

    def end(self, now: float) -> None:
        self._heard_at = now
        if self._has_ended:
            return
        self._has_ended = True
        self._speak_rest()
        self._post(engine.End(context=self.lease.context, epoch=self.lease.epoch))

    def credit(self, ms: float, now: float) -> None:
        self._heard_at = now
        self._credit_s = max(self._credit_s or 0.0, ms / 1000)
        self.tell_credit(now)

    def _speak_rest(self) -> None:
        for stretch in self._cutter.rest():
            self._speak(stretch)

    def _speak(self, stretch: Stretch) -> None:
        text, is_last = stretch
        clause = self._clauses[-1] if self._is_amid else _Clause(self._cut)
        fingerprint = self._quarantine.fingerprint(*self._kind, clause.text + text)
        if self._quarantine.is_refused(fingerprint):
            raise Refusal("engine_error", "this input has stopped the engine twice")
        if not self._is_amid:
            self._add_clause(clause)
        self._cut += len(text)
        clause.end, clause.num_bytes = self._cut, clause.num_bytes + len(text.encode())
        if len(clause.text) < OPENING:
            clause.fingerprints.clear()
        clause.fingerprints.append(fingerprint)
        clause.text, clause.is_whole = "" if is_last else clause.text + text, is_last
        index, lease = len(self._clauses) - 1, self.lease
        self._post(engine.Clause(context=lease.context, epoch=lease.epoch, index=index, text=text, is_last=is_last))

    @property
    def _is_amid(self) -> bool:
        """Is more of the last clause to come?"""
        return bool(self._clauses) and not self._clauses[-1].is_whole

    def _add_clause(self, clause: _Clause) -> None:
        if len(self._clauses) >= CLAUSES:
            raise Refusal("text_too_long", f"more than {CLAUSES} clauses in one context")
        if self._is_silent:
            self._playout.restart()
        self._clauses.append(clause)

    # ---- what the engine says

    def open(self, now: float) -> wire.Opened:
        """The engine has given it a lane, maybe after a wait in its queue."""
        self._is_open = True
        self._heard_at = now
        queued_ms = round(self.queued_s(now) * 1000)
        return replace(self._opened, queued_ms=queued_ms or None)

    def taken(self, index: int) -> wire.Taken | None:
        """The clause's text has gone to the model; the answer names the last piece of which all has gone."""
        for clause in self._clauses[self._num_taken : index + 1]:
            self._waiting_bytes -= clause.num_bytes
        self._num_taken = max(self._num_taken, index + 1)
        last = None
        while self._pieces and self._pieces[0].end <= self._clauses[index].end:
            last = self._pieces.popleft().n
        return None if last is None else wire.Taken(c=self.c, n=last)

    def audio(self, pcm: bytes, now: float) -> None:
        self._heard_at = now
        self._audio += self._encoder.push(pcm)

    def clause_done(self, index: int) -> wire.Taken | None:
        """All of the clause's audio is in; a clause without any may never have been taken before."""
        for fingerprint in self._clauses[index].fingerprints:
            self._quarantine.clear(fingerprint)
        self._clauses[index].fingerprints.clear()
        self._clauses[index].samples = self._encoder.position
        self._num_clauses_done = index + 1
        self._mark_flushes()
        return self.taken(index)

    def done(self, stats: dict[str, float]) -> None:
        self.is_done = True
        self._audio += self._encoder.drain()
        self._marks.append(_Mark(self.produced, self._done_message(stats)))

    def _mark_flushes(self) -> None:
        while self._flushes and self._flushes[0][0] <= self._num_clauses_done:
            number = self._flushes.popleft()[1]
            self._audio += self._encoder.drain()
            self._marks.append(_Mark(self.produced, wire.Flushed(c=self.c, f=number, pos=self.produced)))

    def _done_message(self, stats: dict[str, float]) -> wire.Done:
        return wire.Done(c=self.c, samples=self.produced, ms=self._ms(self.produced), stats=stats)

    # ---- how it stands

    @property
    def is_open(self) -> bool:
        """Has the engine given it a lane?"""
        return self._is_open

    @property
    def _is_silent(self) -> bool:
        """All that was said is spoken and sent."""
        return self._num_clauses_done == len(self._clauses) and not self._audio

    @property
    def _has_message(self) -> bool:
        """Enough audio for a message waits here."""
        return self.produced - self.sent >= self._samples(SHORTEST_MS / 1000)

    @property
    def state(self) -> str:
        """One of metrics.STATES."""
        if not self._is_open:
            return "queued"
        if self._has_message:
            return "resting"
        return "speaking" if self._num_clauses_done < len(self._clauses) else "idle"

    @property
    def _lacks_text(self) -> bool:
        """May the engine be waiting for the client?"""
        return self._num_clauses_done >= len(self._clauses) - self._is_amid

    def suspects(self) -> list[str]:
        """What the engine is working on, by fingerprint."""
        last = self._num_taken + PREPARED
        under_way = self._clauses[self._num_clauses_done : last]
        return [fingerprint for clause in under_way for fingerprint in clause.fingerprints]

    def silence_s(self, now: float) -> float:
        """How long nothing has come of it or for it. A place in the engine's queue is the engine's to time."""
        return now - self._heard_at if self._is_open else 0.0

    def neglect(self) -> Refusal:
        """Why nothing has: who is being waited for."""
        if self._has_message:
            return Refusal("slow_client", "its audio is given no credit")
        if not self._lacks_text:
            return Refusal("internal", "the engine has not answered in time")
        return Refusal("idle", "no text has come for it")

    # ---- what goes out

    @property
    def produced(self) -> int:
        """Samples that the engine has made, at the context's rate."""
        return self.sent + len(self._audio) // self._encoder.bytes_per_sample

    @property
    def num_bytes(self) -> int:
        """Audio that waits here."""
        return len(self._audio)

    def next_message(self, now: float) -> wire.Audio | wire.Flushed | wire.Done | None:
        """The next message of this context that may be sent now, in order; None if it has to wait."""
        if not self._is_open:
            return None
        if self._marks and self._marks[0].pos == self.sent:
            message = self._marks.popleft().message
            return self._timed(message) if isinstance(message, wire.Done) else message
        if count := self._num_sendable(now):
            return self._cut_audio(count, now)
        if self._has_message:
            self._playout.restart()  # it waits for the client's credit
        return None

    def _num_sendable(self, now: float) -> int:
        """Samples for the next message: 20 to 200 ms, less only just before a mark."""
        shortest, longest = self._samples(SHORTEST_MS / 1000), self._samples(LONGEST_MS / 1000)
        ready = (self._marks[0].pos if self._marks else self.produced) - self.sent
        count = min(ready, longest, max(self._samples(self._limit_s(now)) - self.sent, 0))
        if count == longest and 0 < ready - count < shortest:
            count -= shortest  # leave no crumb
        is_enough = count >= shortest or (bool(self._marks) and count == ready)
        return count if is_enough else 0

    def _cut_audio(self, count: int, now: float) -> wire.Audio:
        size = count * self._encoder.bytes_per_sample
        message = wire.Audio(c=self.c, q=self._num_audio, pos=self.sent, d=bytes(self._audio[:size]))
        del self._audio[:size]
        self._num_audio += 1
        self.sent += count
        self._heard_at = now
        if self._first_audio_at is None:
            self._first_audio_at = now
        self.lead_s = self._playout.send(count / self._opened.rate, now)
        self.tell_credit(now)
        return message

    @property
    def first_audio_s(self) -> float | None:
        """From the client's `open` to the first audio message."""
        return None if self._first_audio_at is None else self._first_audio_at - self._opened_at

    def queued_s(self, now: float) -> float:
        """Since the client's `open`."""
        return now - self._opened_at

    def _timed(self, done: wire.Done) -> wire.Done:
        stats = dict(done.stats)
        if self.first_audio_s is not None:
            stats["first_audio_ms"] = round(self.first_audio_s * 1000, 1)
        return wire.Done(c=done.c, samples=done.samples, ms=done.ms, stats=stats)

    def cancelled(self, played_ms: float | None) -> wire.Cancelled:
        heard = self.sent if played_ms is None else min(self.sent, self._samples(played_ms / 1000))
        upto = max((one.end for one in self._clauses if one.samples is not None and one.samples <= heard), default=0)
        return wire.Cancelled(c=self.c, samples=self.sent, ms=self._ms(self.sent), text_upto=upto)

    # ---- credit

    def tell_credit(self, now: float) -> None:
        """Tell the engine how far it may go, if that has grown: what the listener allows, near what the socket took."""
        limit_s = min(self._limit_s(now), self.sent / self._opened.rate + LEAD_S)
        samples = int(limit_s * engine.SAMPLE_RATE_HZ)
        if not self.is_done and samples >= self._told + CREDIT_STEP_S * engine.SAMPLE_RATE_HZ:
            self._told = samples
            self._post(engine.Credit(context=self.lease.context, epoch=self.lease.epoch, samples=samples))

    def _limit_s(self, now: float) -> float:
        """The audio position, in seconds, up to which the listener lets us send."""
        if not self._paced:
            return float("inf")
        if self._credit_s is not None:
            return self._credit_s
        return max(self._window_s, now - self._opened_at + START_LEAD_S)

    def _samples(self, seconds: float) -> int:
        return int(min(seconds, 2.0**40) * self._opened.rate)

    def _ms(self, samples: int) -> float:
        return round(samples * 1000 / self._opened.rate, 3)
