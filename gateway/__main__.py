"""`python -m gateway --config F`: the gateway process alone; an engine must serve the same socket."""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import uvloop

from engine import config as profiles
from gateway import logs
from gateway.errors import ConfigError
from gateway.server import check_exposure, run


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 ended by a signal, 2 the configuration can't be."""
    options = _parser().parse_args(arguments)
    try:
        config = _config(options)
        check_exposure(config, without_keys=options.without_keys)
        with logs.writing(config.log):
            uvloop.run(run(config, _announce, load_keys=lambda: _config(options).keys, is_leashed=options.leashed))
    except (ConfigError, profiles.ConfigError) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 2
    except asyncio.CancelledError:
        return 0
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gateway", description=__doc__)
    parser.add_argument("--config", type=Path, help="the profile, a TOML file; default: the embedded voice's")
    parser.add_argument("--host", help="where to listen; default: the profile's")
    parser.add_argument("--port", type=int, help="0: any free port")
    parser.add_argument("--socket", help="the engine's Unix socket")
    parser.add_argument("--without-keys", action="store_true", help="let others than this machine in without a key")
    parser.add_argument("--leashed", action="store_true", help="end when the standard input does")
    return parser


def _config(options: argparse.Namespace) -> profiles.GatewayConfig:
    config = (profiles.load(options.config) if options.config else profiles.Config()).gateway
    named = {name: getattr(options, name) for name in ("host", "port", "socket")}
    return replace(config, **{name: value for name, value in named.items() if value is not None})


def _announce(news: str) -> None:
    """For the operator, or the supervisor."""
    print(news, flush=True)


if __name__ == "__main__":
    sys.exit(main())
