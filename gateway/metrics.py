"""What the gateway measures, for Prometheus. Written by sessions and the engine link, read by `/metrics`.

With several gateway processes at one port (PROMETHEUS_MULTIPROC_DIR is set by whoever starts them) each writes its
values to files there, and any of them answers for all.
"""

from __future__ import annotations

import os
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from engine.messages import Gauges

MILLISECONDS = tuple(one / 1000 for one in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000))
FIRST_AUDIO_S = (0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
LEAD_S = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STATES = ("queued", "idle", "speaking", "resting")  # a context's: see Context.state


class Metrics:
    """One process's series, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.sessions = self._gauge("rill_sessions", "Open connections")
        self.contexts = self._gauge("rill_contexts", "Contexts by state", "state")
        self.engine_up = self._gauge("rill_engine_up", "1 while the engine's link stands")
        self.engine = {
            one.name: self._gauge(f"rill_engine_{one.name}", f"The engine's {one.name}", mode="mostrecent")
            for one in fields(Gauges)
        }
        self.opened = self._counter("rill_contexts_opened", "Contexts opened")
        self.ended = self._counter("rill_contexts_ended", "Contexts ended, by their terminal message", "by")
        self.refusals = self._counter("rill_refusals", "Errors sent, by code", "code")
        self.turned_away = self._counter("rill_handshake_refusals", "Handshakes refused, by HTTP status", "status")
        self.audio_bytes = self._counter("rill_audio_bytes", "Audio sent")
        self.stalled = self._counter("rill_stalled_writers", "Sockets aborted because nobody read them")
        self.underruns = self._counter("rill_underruns", "Audio messages sent after the listener had run dry")
        self.engine_losses = self._counter("rill_engine_losses", "Times the engine's link was lost")
        self.first_audio = self._histogram("rill_first_audio_seconds", "From open to first audio", FIRST_AUDIO_S)
        self.queue = self._histogram("rill_queue_seconds", "From open to a lane at the engine", FIRST_AUDIO_S)
        self.gap = self._histogram("rill_gap_seconds", "How long the listener was dry before a message", MILLISECONDS)
        self.lead = self._histogram("rill_lead_seconds", "Audio the listener still had when more was sent", LEAD_S)
        self.cancel_ack = self._histogram("rill_cancel_ack_seconds", "From cancel to its answer", MILLISECONDS)
        self.engine_abort = self._histogram("rill_engine_abort_seconds", "From cancel to a free row", MILLISECONDS)
        self.loop_lag = self._histogram("rill_loop_lag_seconds", "How late the event loop was", MILLISECONDS)

    def _gauge(self, name: str, words: str, *labels: str, mode: str = "livesum") -> Gauge:
        return Gauge(name, words, labels, registry=self.registry, multiprocess_mode=mode)  # type: ignore[arg-type]

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(name, words, labels, registry=self.registry)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, words, registry=self.registry, buckets=buckets)

    def take(self, gauges: Gauges | None) -> None:
        """What the engine says of itself; None: it is gone."""
        self.engine_up.set(0 if gauges is None else 1)
        for name, gauge in self.engine.items():
            gauge.set(0 if gauges is None else getattr(gauges, name))

    def value(self, name: str, **labels: str) -> float:
        """This process's value of a series; 0 where nothing has been counted yet."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def render(self) -> bytes:
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self.registry)
        everyone = CollectorRegistry()
        MultiProcessCollector(everyone)  # type: ignore[no-untyped-call]
        return generate_latest(everyone)
