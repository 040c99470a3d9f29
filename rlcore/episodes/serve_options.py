"""The command line of `rlcore serve`."""

from __future__ import annotations

import ipaddress
import os
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from rlcore.episodes.server import ServerOptions

KEY = "RLCORE_SERVE_KEY"
"""The environment variable with the server's key."""


def add_options(parser: ArgumentParser) -> None:
    """Add the command's own options."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: only this machine)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free one (default: 8000)")
    parser.add_argument("--key", default="", help=f"key that clients must send (default: the variable {KEY})")
    parser.add_argument("--max-sessions", type=int, default=1024, help="most sessions at a time (default: 1024)")
    parser.add_argument("--idle-seconds", type=float, default=3600.0, help="a session quiet for so long is forgotten")
    parser.add_argument("--max-body-mb", type=float, default=8.0, help="longest request body, in MiB (default: 8)")
    parser.add_argument("--session-tokens", type=int, default=2**20, help="most tokens that a session keeps")


def server_options(given: Namespace, target: str) -> ServerOptions:
    """Return the server's options. Raises ConfigError for another address than this machine's own without a key."""
    require_server("rlcore serve")
    from rlcore.episodes.server import ServerOptions

    key = given.key or os.environ.get(KEY, "")
    if not key and not _is_loopback(given.host):
        raise ConfigError(f"--host {given.host} can be reached from other machines: give --key KEY, or set {KEY}")
    if not 0 <= given.port < 2**16:
        raise ConfigError(f"--port {given.port} has to be from 0 to {2**16 - 1}")
    for name, least in (("max_sessions", 1), ("idle_seconds", 0.1), ("max_body_mb", 0.001), ("session_tokens", 1)):
        if not getattr(given, name) >= least:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(given, name)} has to be at least {least}")
    return ServerOptions(
        model=Path(target).name or target,
        host=given.host,
        port=given.port,
        key=key,
        body_bytes=int(given.max_body_mb * 2**20),
        most_sessions=given.max_sessions,
        idle_seconds=given.idle_seconds,
        held_tokens=given.session_tokens,
    )


def require_server(what: str) -> None:
    """Raise ConfigError, naming `what` needs it, if the packages of the extra `serve` are missing."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{what} needs {' and '.join(missing)}: pip install 'rlcore[serve]'")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
