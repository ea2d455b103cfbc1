"""Two engines or servers that share the work, and requests that go to both."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

import httpx

from banyan.llm import Engine
from tests.system.serving import Server, free_port, serving

WAIT_S = 60.0
FLAGS = {"engine_mode": "inprocess", "threads": 1, "max_total_tokens": 4096}
_rooms = count(1000)


def fresh_room() -> int:
    return next(_rooms)


class Pair:
    """Two engines of this process.

    Attributes:
        port: where decode is sent to; a proxy's, or that of prefill itself.
    """

    def __init__(self, prefill: Engine, decode: Engine, port: int) -> None:
        self.prefill = prefill
        self.decode = decode
        self.port = port
        self.pool = ThreadPoolExecutor(16)

    def meeting(self, room: object = None) -> dict[str, object]:
        room = fresh_room() if room is None else room
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.port,
            "bootstrap_room": room,
        }

    def start(self, room: object = None, **body: object) -> tuple[Future, Future]:
        """The same request to both, as a router sends it."""
        whole = {**body, **self.meeting(room)}
        sides = self.prefill, self.decode
        first, second = (self.pool.submit(side.generate, **whole) for side in sides)
        return first, second

    def ask(self, room: object = None, **body: object) -> object:
        """What the decode side answers."""
        first, second = self.start(room, **body)
        answer = second.result(WAIT_S)
        first.result(WAIT_S)
        return answer


@contextmanager
def engines(
    model: Path,
    prefill: dict[str, object] | None = None,
    decode: dict[str, object] | None = None,
    through: Callable[[int], int] | None = None,
) -> Iterator[Pair]:
    """A pair on one model; `through` gives the port of a proxy to that of prefill."""
    port = free_port()
    with ExitStack() as stack:
        given = {
            "disaggregation_mode": "prefill",
            "disaggregation_bootstrap_port": port,
            **(prefill or {}),
        }
        one = stack.enter_context(Engine(str(model), **{**FLAGS, **given}))
        taken = {"disaggregation_mode": "decode", **(decode or {})}
        two = stack.enter_context(Engine(str(model), **{**FLAGS, **taken}))
        pair = Pair(one, two, through(port) if through else port)
        stack.callback(pair.pool.shutdown, wait=False, cancel_futures=True)
        yield pair


class Servers:
    """Two servers."""

    def __init__(self, prefill: Server, decode: Server, port: int) -> None:
        self.prefill = prefill
        self.decode = decode
        self.port = port
        self.pool = ThreadPoolExecutor(8)

    def start(
        self, route: str, body: dict[str, object], room: object = None
    ) -> tuple["Future[httpx.Response]", "Future[httpx.Response]"]:
        """The same request to both, as a router sends it."""
        meeting = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.port,
            "bootstrap_room": fresh_room() if room is None else room,
        }
        whole = {**body, **meeting}
        sides = self.prefill, self.decode
        first, second = (self.pool.submit(side.http.post, route, json=whole) for side in sides)
        return first, second


@contextmanager
def servers(
    folder: Path,
    model: Path,
    *flags: str,
    prefill: tuple[str, ...] = (),
    decode: tuple[str, ...] = (),
) -> Iterator[Servers]:
    port = free_port()
    common = ("--model-path", str(model), "--threads", "1", "--max-total-tokens", "8192", *flags)
    giving = (
        *("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port)),
        *prefill,
    )
    taking = ("--disaggregation-mode", "decode", *decode)
    with (
        serving(folder / "prefill.log", *common, *giving) as one,
        serving(folder / "decode.log", *common, *taking) as two,
    ):
        pair = Servers(one, two, port)
        yield pair
        pair.pool.shutdown(wait=False, cancel_futures=True)  # what waits ends with its server


class Proxy:
    """Stands between a decode server and a prefill server.

    Attributes:
        spoil: what becomes of the bytes that prefill sends, given how many came before.
    """

    def __init__(self, target: int) -> None:
        self.spoil: Callable[[int, bytes], bytes] = lambda at, data: data
        self.sent = 0
        self._target = target
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._socket.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=self._copy, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._copy, args=(far, near, True), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        at = 0
        try:
            while data := source.recv(1 << 16):
                if is_answer:
                    at, data = at + len(data), self.spoil(at, data)
                    self.sent = at
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
