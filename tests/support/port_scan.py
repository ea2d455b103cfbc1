"""What a port scanner sends to every port on which some processes listen."""

import contextlib
import socket
from collections.abc import Iterable

import psutil

_WORDS = (
    b"",
    b"\n\n",
    b"GET / HTTP/1.0\r\n\r\n",
    b"\x16\x03\x01\x00\xee\x01\x00\x00\xea\x03\x03" + bytes(228),
    b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48),
    b"SSH-2.0-scan\r\n",
    bytes(1 << 16),
    b"\xff" * (1 << 16),
    bytes(range(256)) * 16,
)


def ports_of(pids: Iterable[int]) -> list[int]:
    """TCP ports on which these processes listen."""
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            connections = psutil.Process(pid).net_connections("tcp")
            found |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return sorted(found)


@contextlib.contextmanager
def scanned(pids: Iterable[int], idle: int = 40):
    """Scan every port; while the block runs, `idle` connections to each stay open."""
    with contextlib.ExitStack() as stack:
        for port in ports_of(pids):
            for words in _WORDS:
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection(("127.0.0.1", port), timeout=5) as scanner,
                ):
                    scanner.sendall(words)
            for number in range(idle):
                with contextlib.suppress(OSError):
                    held = socket.create_connection(("127.0.0.1", port), timeout=5)
                    stack.enter_context(held)
                    held.sendall(_WORDS[number % len(_WORDS)][:9])
        yield
