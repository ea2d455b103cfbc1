"""The load client's HTTP: every framing is read whole, and every break is that request's error."""

import asyncio
import itertools

import pytest

from banyan.base.errors import ConfigError
from banyan.bench.http import ExchangeError, HttpClient
from tests.bench.scripted import CHUNKED, LENGTH, UNTIL_CLOSE, Script, scripted_server

PIECES = [b"data: one\n\n", b"data: two\n\n", b"data: three\n\n"]


@pytest.mark.parametrize("framing", [CHUNKED, LENGTH, UNTIL_CLOSE])
@pytest.mark.asyncio
async def test_a_body_is_read_whole_in_every_framing(framing: str) -> None:
    async with scripted_server(lambda route, body: Script(PIECES, framing=framing)) as scripted:
        server = HttpClient(scripted.url)
        for _ in range(3):
            reply = await server.request("POST", "/x", b"{}")
            assert reply.status == 200
            assert reply.body == b"".join(PIECES)
            times = [reply.started, *(at for at, _ in reply.pieces)]
            assert times == sorted(times)
        server.close()


@pytest.mark.asyncio
async def test_a_connection_is_used_again_unless_that_is_switched_off() -> None:
    async with scripted_server(lambda route, body: Script(PIECES)) as scripted:
        for keep_alive, expected in ((True, 1), (False, 5)):
            scripted.connections = 0
            server = HttpClient(scripted.url, keep_alive=keep_alive)
            for _ in range(5):
                await server.request("POST", "/x", b"{}")
            server.close()
            assert scripted.connections == expected


@pytest.mark.asyncio
async def test_requests_at_the_same_time_have_connections_of_their_own() -> None:
    hold = asyncio.Event()
    numbers = itertools.count()

    def answer(route: str, body: dict) -> Script:
        return Script([str(body["n"]).encode()], hold=hold, framing=CHUNKED)

    async with scripted_server(answer) as scripted:
        server = HttpClient(scripted.url)
        tasks = [
            asyncio.create_task(server.request("POST", "/x", b'{"n": %d}' % next(numbers)))
            for _ in range(8)
        ]
        while len(scripted.asked) < 8:
            await asyncio.sleep(0)
        hold.set()
        replies = await asyncio.gather(*tasks)
        assert [int(r.body) for r in replies] == list(range(8))
        assert scripted.connections == 8
        server.close()


@pytest.mark.parametrize("framing", [CHUNKED, LENGTH])
@pytest.mark.asyncio
async def test_an_answer_that_breaks_off_is_an_error(framing: str) -> None:
    script = Script(PIECES[:2], framing=framing, is_cut=True)
    async with scripted_server(lambda route, body: script) as scripted:
        server = HttpClient(scripted.url)
        with pytest.raises(ExchangeError, match="in the middle of its answer"):
            await server.request("POST", "/x", b"{}")


@pytest.mark.asyncio
async def test_a_server_that_does_not_answer_in_time_is_an_error() -> None:
    hold = asyncio.Event()
    async with scripted_server(lambda route, body: Script(hold=hold)) as scripted:
        server = HttpClient(scripted.url)
        with pytest.raises(ExchangeError, match=r"within 0.05 s"):
            await server.request("POST", "/x", b"{}", timeout_s=0.05)
        hold.set()


@pytest.mark.asyncio
async def test_a_closed_port_is_an_error_that_names_the_server() -> None:
    async with scripted_server(lambda route, body: Script()) as scripted:
        url = scripted.url
    with pytest.raises(ExchangeError, match="does not answer"):
        await HttpClient(url).request("GET", "/")


@pytest.mark.asyncio
async def test_bytes_that_are_not_http_are_an_error() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0-x\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(ExchangeError, match="not HTTP"):
            await HttpClient(f"http://127.0.0.1:{port}").request("GET", "/")


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="http://host:port"):
        HttpClient("127.0.0.1:30000")
