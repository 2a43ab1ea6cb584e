"""One OpenTelemetry span per context, where the operator asks for it: `pip install .[otel]` and `spans = true`.

Nothing of OpenTelemetry is imported before `make_tracer` is called. A span holds ids, codes and sizes, never text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from gateway import wire
from gateway.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry import trace


class Span(Protocol):
    """A context's life."""

    def event(self, name: str) -> None:
        """Something happened now."""

    def end(self, outcome: str, **fields: float | None) -> None:
        """The terminal message is written. `outcome`: done, cancelled, or an error's code."""


class NoSpan:
    def event(self, name: str) -> None:
        pass

    def end(self, outcome: str, **fields: float | None) -> None:
        pass


Tracer = Callable[[str, wire.Opened], Span]  # a session's id and what a context really uses


def no_spans(session: str, opened: wire.Opened) -> Span:
    return NoSpan()


class OtelSpan:
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def end(self, outcome: str, **fields: float | None) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("rill.outcome", outcome)
        for name, value in fields.items():
            if value is not None:
                self._span.set_attribute(f"rill.{name}", value)
        if outcome not in ("done", "cancelled"):
            self._span.set_status(StatusCode.ERROR, outcome)
        self._span.end()


def make_tracer(provider: trace.TracerProvider | None = None) -> Tracer:
    """Spans through `provider`; without one, through OTLP as the OTEL_ variables say. Raises ConfigError."""
    try:
        source = (provider or _otlp_provider()).get_tracer("rill.gateway")
    except ImportError as error:
        raise ConfigError(f"[gateway] spans needs the extra `otel`: {error}") from error

    def start(session: str, opened: wire.Opened) -> Span:
        attributes: dict[str, str | int] = {
            "rill.session": session,
            "rill.context": opened.c,
            "rill.voice": opened.voice,
            "rill.enc": opened.enc,
            "rill.rate": opened.rate,
        }
        return OtelSpan(source.start_span("rill.context", attributes=attributes))

    return start


def _otlp_provider() -> trace.TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
