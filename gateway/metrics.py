"""What the gateway counts, and its Prometheus text. Written by sessions and the engine link, read by `/metrics`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

from engine.messages import Gauges


@dataclass(slots=True)
class Metrics:
    """Counts since the process started; the gauges are computed by whoever renders."""

    sessions: int = 0
    contexts: int = 0
    num_opened: int = 0
    num_done: int = 0
    num_cancelled: int = 0
    num_audio_bytes: int = 0
    num_stalled: int = 0
    num_engine_losses: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def render(self, *, is_engine_up: bool, gauges: Gauges | None) -> str:
        lines = [
            f"rill_sessions {self.sessions}",
            f"rill_contexts {self.contexts}",
            f"rill_contexts_opened_total {self.num_opened}",
            f"rill_contexts_done_total {self.num_done}",
            f"rill_contexts_cancelled_total {self.num_cancelled}",
            f"rill_audio_bytes_total {self.num_audio_bytes}",
            f"rill_stalled_sockets_total {self.num_stalled}",
            f"rill_engine_losses_total {self.num_engine_losses}",
            f"rill_engine_up {int(is_engine_up)}",
        ]
        lines += [f'rill_errors_total{{code="{code}"}} {count}' for code, count in sorted(self.errors.items())]
        if gauges is not None:
            lines += [f"rill_engine_{one.name} {getattr(gauges, one.name)}" for one in fields(gauges)]
        return "\n".join(lines) + "\n"
