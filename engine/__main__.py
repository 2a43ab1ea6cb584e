"""`python -m engine --config configs/embedded.toml [--socket PATH]`"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import uvloop

from engine import config as profiles
from engine.checkpoint import CheckpointError
from engine.config import ConfigError
from engine.server import serve
from engine.voices import VoiceFileError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine", description="Serve speech over a Unix socket.")
    parser.add_argument("--config", type=Path, default=Path("configs/embedded.toml"), help="the profile, a TOML file")
    parser.add_argument("--socket", type=Path, help="where to listen; the profile's if left out")
    parser.add_argument("--leashed", action="store_true", help="end when the standard input does")
    parser.add_argument("--log", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    given = parser.parse_args()
    logging.basicConfig(level=given.log, format="%(asctime)s engine %(levelname)s %(message)s")
    try:
        config = profiles.load(given.config)
        socket = given.socket or Path(config.gateway.socket)
        return uvloop.run(serve(config, socket, is_leashed=given.leashed))
    except (ConfigError, CheckpointError, VoiceFileError) as error:
        print(f"engine: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
