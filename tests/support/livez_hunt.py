"""Polls /livez on kept connections while others close: python -m tests.support.livez_hunt

The server runs in a process of its own. Pollers keep their connections. Leavers send a request and
reset or close the connection at once. Late pollers send a request when the keep-alive time ends;
the server may close such a connection without an answer, and may not leave it open. The exit code
is 1 if a request has no answer on a connection that stays open for SILENT_S.
"""

import argparse
import asyncio
import random
import socket
import struct
import subprocess
import sys
from collections import Counter

import uvloop

SILENT_S = 10.0
KEEP_ALIVE_S = 1
_REQUEST = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: close sends a reset."""


async def _serve() -> None:
    from banyan.config.schema import Config, ServerConfig
    from banyan.server.http.listen import bind
    from banyan.server.routes import open_http_listener
    from banyan.server.state import ServerState

    config = ServerConfig(port=0, keep_alive_s=KEEP_ALIVE_S)
    listener = bind(config)
    site = open_http_listener(ServerState(Config(server=config)), listener)
    await site.start()
    print(listener.getsockname()[1], flush=True)
    await asyncio.Event().wait()


class Hunt:
    """The clients and their counts."""

    def __init__(self, port: int, polls: int) -> None:
        self.counts: Counter[str] = Counter()
        self._port = port
        self._left = polls

    async def run(self, pollers: int, leavers: int, late: int) -> None:
        others = [asyncio.create_task(self._leave()) for _ in range(leavers)]
        others += [asyncio.create_task(self._poll(is_late=True)) for _ in range(late)]
        await asyncio.gather(*(self._poll() for _ in range(pollers)))
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _poll(self, is_late: bool = False) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        while self._left > 0:
            self._left -= not is_late
            try:
                writer.write(_REQUEST)
                async with asyncio.timeout(SILENT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                    await reader.readexactly(size)
                self.counts["late answers" if is_late else "answers"] += 1
            except TimeoutError:
                self.counts["NEVER ANSWERED"] += 1
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            except (asyncio.IncompleteReadError, ConnectionError):
                self.counts["late, closed" if is_late else "CLOSED"] += 1
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            if is_late:
                await asyncio.sleep(KEEP_ALIVE_S + random.uniform(-0.004, 0.004))

    async def _leave(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            raw = socket.socket()
            raw.setblocking(False)
            await loop.sock_connect(raw, ("127.0.0.1", self._port))
            if random.random() < 0.5:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            await loop.sock_sendall(raw, _REQUEST * random.randint(1, 3))
            await asyncio.sleep(random.choice((0, 0, 0.0005, 0.002)))
            raw.close()
            self.counts["leavers"] += 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--polls", type=int, default=200_000)
    parser.add_argument("--serve", action="store_true")
    given = parser.parse_args()
    if given.serve:
        uvloop.run(_serve())
    command = [sys.executable, "-m", "tests.support.livez_hunt", "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        hunt = Hunt(int(server.stdout.readline()), given.polls)
        uvloop.run(hunt.run(pollers=32, leavers=16, late=32))
        server.kill()
    print(dict(hunt.counts))
    return int(bool(hunt.counts["NEVER ANSWERED"] or hunt.counts["CLOSED"]))


if __name__ == "__main__":
    raise SystemExit(main())
