"""A private server for one command: a child process that ends with it."""

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from banyan.base.child_process import Child, read_process_spec, spawn, watch_parent
from banyan.base.errors import BanyanError, DeviceError
from banyan.cli.client import Client

_POLL_S = 0.05


@contextmanager
def private_server(argv: Sequence[str]) -> Iterator[Client]:
    """A server started with `argv` on a free loopback port, stopped at the end of the block."""
    port = free_port()
    words = [*argv, "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    child = spawn("banyan.cli.private", "server", json.dumps(words).encode())
    client = Client(f"http://127.0.0.1:{port}")
    try:
        _wait_until_healthy(child, client)
        yield client
    finally:
        child.stop()


def _wait_until_healthy(child: Child, client: Client) -> None:
    """However long it takes: a download or a first compilation shows by itself that it goes on."""
    while not client.is_healthy():
        if not child.is_alive():
            raise DeviceError("the server did not start", hint="see its message above")
        time.sleep(_POLL_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _child() -> int:
    from banyan.cli.main import main

    # A group of its own: Ctrl-C in the terminal stops the answer, not the server.
    os.setpgrp()
    words = json.loads(read_process_spec())
    watch_parent()
    return main(["serve", *words])


if __name__ == "__main__":
    try:
        raise SystemExit(_child())
    except BanyanError as error:
        raise SystemExit(error.exit_code) from None
