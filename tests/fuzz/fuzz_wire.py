"""Coverage-guided bytes against the unpacker and the protocol behind it: `make fuzz FUZZ_S=3600`.

Every input must give messages or a Violation with one of the protocol's close codes, in little time; libFuzzer stops
at anything else, at 1 s for one input and at 1 GiB of memory, and writes the input to a file.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["gateway.wire", "gateway.protocol", "gateway.context", "gateway.voices"]):
    from gateway import wire
    from gateway.errors import Refusal, Violation
    from tests.gateway.test_protocol import Bench
    from tests.gateway.test_wire import MESSAGES, UNDECODABLE

CLOSE_CODES = (4400, 1007, 1009)
bench = Bench()


def check(data: bytes) -> None:
    try:
        table = wire.unpack(data)
    except Violation as violation:
        assert violation.close_code in CLOSE_CODES, violation
        return
    try:
        wire.parse(table)
    except Refusal as refusal:
        assert refusal.code in ("bad_message", "unsupported"), refusal
    bench.protocol.receive(data)
    bench.read()
    assert len(bench.log) < 100
    if len(bench.log) > 50 or bench.protocol.num_contexts > 8:
        bench.protocol.close()
        bench.read()
        bench.log.clear()
        bench.port.posted.clear()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate([*map(wire.pack, MESSAGES), *UNDECODABLE.values()]):
            (Path(folder) / str(number)).write_bytes(data)
        limits = ["-max_len=4096", "-timeout=1", "-rss_limit_mb=1024"]
        atheris.Setup([sys.argv[0], *limits, *sys.argv[1:], folder], check)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
