from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.errors import ConfigError
from gateway.spans import make_tracer
from tests.gateway.conftest import StackMaker
from tests.gateway.raw_client import raw_client


async def test_each_context_is_one_span_without_its_text(make_stack: StackMaker) -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    provider = trace.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    async with make_stack(tracer=make_tracer(provider)) as stack, raw_client(stack.address) as client:
        await client.speak("a", "Nobody may read this. ")
        await client.speak("b", "FAULT comes here. ")
        await client.say("open", c="c")
        await client.say("cancel", c="c")
        await client.hear_end("c")
    spans = {span.attributes["rill.context"]: span for span in memory.get_finished_spans()}
    assert [spans[c].attributes["rill.outcome"] for c in "abc"] == ["done", "engine_error", "cancelled"]
    assert [event.name for event in spans["a"].events] == ["opened", "first audio"]
    assert spans["a"].attributes["rill.samples"] > 0
    assert not spans["b"].status.is_ok and spans["c"].status.is_unset
    assert "Nobody" not in memory.get_finished_spans()[0].to_json()


def test_nothing_of_opentelemetry_is_imported_unless_asked_for() -> None:
    code = "import gateway.server, gateway.cli, sys; assert not any(n.startswith('opentelemetry') for n in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)


def test_spans_without_the_extra_are_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match="otel"):
        make_tracer()
