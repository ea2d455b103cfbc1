"""HTTPS: certificates, keys with a password, clients that must show one, and new ones."""

import asyncio
import contextlib
import random
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from banyan.base.clock import VirtualClock
from banyan.base.errors import BanyanError, ConfigError
from banyan.bench.http import ExchangeError, HttpClient
from banyan.cli.client import Client
from banyan.config.cli import described
from banyan.config.schema import ServerConfig
from banyan.server.http.listen import bind, web_server
from banyan.server.http.tls import LOOK_S, tls_context
from tests.server.fakes import Site, steps
from tests.support.flags import config_of

AUTHORITY = trustme.CA()


def files(folder: Path, number: int = 0) -> tuple[str, str]:
    """A certificate for this machine and its key."""
    issued = AUTHORITY.issue_cert("localhost", "127.0.0.1")
    key, cert = folder / f"{number}.key", folder / f"{number}.pem"
    issued.private_key_pem.write_to_path(key)
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    return str(cert), str(key)


def flags(folder: Path, *more: str) -> ServerConfig:
    cert, key = files(folder)
    return config_of("--ssl-certfile", cert, "--ssl-keyfile", key, *more).server


def trusting() -> ssl.SSLContext:
    """A client's, who knows the authority alone."""
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)
    return context


@contextlib.contextmanager
def serving(context: ssl.SSLContext | None, site: Site | None = None) -> Iterator[int]:
    """The application behind real connections; yields its port."""
    listener = bind(ServerConfig(port=0))
    web = web_server((site or Site()).app, 5, 1.0, context)
    thread = threading.Thread(target=lambda: asyncio.run(web.serve([listener])), daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        web.should_exit = True
        thread.join(60)
        listener.close()


def test_a_server_with_a_certificate_speaks_https(tmp_path: Path) -> None:
    with serving(tls_context(flags(tmp_path))) as port:
        with httpx.Client(base_url=f"https://localhost:{port}", verify=trusting()) as client:
            assert client.get("/livez").status_code == 200
            body = {"text": "ab", "stream": True}
            with client.stream("POST", "/generate", json=body) as answer:
                assert answer.read().endswith(b"data: [DONE]\n\n")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://localhost:{port}/livez")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"https://localhost:{port}/livez")  # nobody vouches for the authority


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_versions_of_the_protocol_are_refused(tmp_path: Path) -> None:
    client = trusting()
    client.minimum_version, client.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with serving(tls_context(flags(tmp_path))) as port, pytest.raises(httpx.ConnectError):
        httpx.get(f"https://localhost:{port}/livez", verify=client)


def test_a_key_may_have_a_password(tmp_path: Path) -> None:
    cert, key = files(tmp_path)
    plain = serialization.load_pem_private_key(Path(key).read_bytes(), None)
    hidden = plain.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"sesame"),
    )
    Path(key).write_bytes(hidden)
    given = ("--ssl-certfile", cert, "--ssl-keyfile", key)
    assert tls_context(config_of(*given, "--ssl-keyfile-password", "sesame").server)
    for wrong in ((), ("--ssl-keyfile-password", "other")):
        with pytest.raises(ConfigError, match="--ssl-keyfile"):
            tls_context(config_of(*given, *wrong).server)


def test_clients_must_show_a_certificate_when_a_flag_asks_for_it(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    AUTHORITY.cert_pem.write_to_path(ca)
    with serving(tls_context(flags(tmp_path, "--ssl-ca-certs", str(ca)))) as port:
        url = f"https://localhost:{port}/livez"
        with pytest.raises(httpx.HTTPError):
            httpx.get(url, verify=trusting())
        known = trusting()
        AUTHORITY.issue_cert("a-client").configure_cert(known)
        assert httpx.get(url, verify=known).status_code == 200


@pytest.mark.parametrize("more", [(), ("--enable-ssl-refresh",)])
def test_another_certificate_is_taken_without_a_restart(tmp_path: Path, more, caplog) -> None:
    clock = VirtualClock()
    with serving(tls_context(flags(tmp_path, *more), clock)) as port:

        def shown() -> str:
            return ssl.get_server_certificate(("127.0.0.1", port))

        first = shown()
        clock.advance_to(LOOK_S + 1)
        assert shown() == first
        other = files(tmp_path, 1)
        Path(other[0]).replace(tmp_path / "0.pem")  # between the two the pair does not fit
        clock.advance_to(2 * (LOOK_S + 1))
        assert shown() == first
        assert ("the certificate stays as it was" in caplog.text) == bool(more)
        Path(other[1]).replace(tmp_path / "0.key")
        clock.advance_to(3 * (LOOK_S + 1))
        shown()
        assert (shown() != first) == bool(more)


def test_open_connections_outlive_new_certificates_and_files_half_written(tmp_path: Path) -> None:
    """The pair changes under a stream and a kept connection, byte by byte, in any order."""
    site, clock, dice = Site(), VirtualClock(), random.Random(3)
    site.generator.script = lambda _: steps(*"abcdefgh")
    pairs = [[Path(f).read_bytes() for f in files(tmp_path, number)] for number in range(3)]
    context = tls_context(flags(tmp_path, "--enable-ssl-refresh"), clock)
    now = tmp_path / "0.pem", tmp_path / "0.key"
    with serving(context, site) as port, ExitStack() as stack:
        url = f"https://localhost:{port}"
        kept = stack.enter_context(httpx.Client(base_url=url, verify=trusting()))
        assert kept.get("/livez").status_code == 200
        streams = stack.enter_context(httpx.Client(base_url=url, verify=trusting()))
        site.generator.hold_after = 3
        held = stack.enter_context(
            streams.stream("POST", "/generate", json={"text": "a", "stream": True})
        )
        begun = next(held.iter_raw())
        shown: set[str] = set()
        for number in range(60):
            at = dice.randrange(2)
            whole = pairs[number % 3][at]
            now[at].write_bytes(whole[: dice.choice((0, 1, len(whole) // 2, len(whole)))])
            if number % 7 == 0:
                now[1 - at].unlink(missing_ok=True)
            if number % 3 == 0:
                for path, content in zip(now, pairs[number % 2], strict=True):
                    path.write_bytes(content)
            clock.advance_to((number + 1) * (LOOK_S + 1))
            shown.add(ssl.get_server_certificate(("127.0.0.1", port)))
            assert kept.get("/livez").status_code == 200
        assert len(shown) >= 2 and b"data: " in begun
        assert not held.is_closed


def test_a_pair_that_changes_while_it_is_read_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    with serving(tls_context(flags(tmp_path, "--enable-ssl-refresh"), clock)) as port:
        pair = [Path(name).read_bytes() for name in files(tmp_path, 1)]
        load, key = ssl.SSLContext.load_cert_chain, tmp_path / "0.key"

        def changed_after(*args: object, **more: object) -> None:
            load(*args, **more)
            key.write_bytes(b"half")

        (tmp_path / "0.pem").write_bytes(pair[0])
        key.write_bytes(pair[1])
        monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", changed_after)
        for turn in range(3):
            clock.advance_to((turn + 1) * (LOOK_S + 1))
            assert httpx.get(f"https://localhost:{port}/livez", verify=trusting()).is_success


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--ssl-keyfile", "x"), "give --ssl-certfile"),
        (("--enable-ssl-refresh",), "give --ssl-certfile"),
        (("--ssl-certfile", "/none.pem"), "/none.pem: No such file"),
        (("--ssl-certfile", __file__), "in PEM"),
    ],
)
def test_what_is_wrong_with_the_files_is_reported(given, message) -> None:
    with pytest.raises(ConfigError, match=f"(?i){message}"):
        tls_context(config_of(*given).server)


def test_a_password_is_never_shown(tmp_path: Path) -> None:
    assert "sesame" not in str(described(config_of("--ssl-keyfile-password", "sesame")))


@pytest.mark.parametrize("verb", ["chat", "bench"])
def test_clients_of_the_command_trust_the_authority_that_is_named(
    verb: str, tmp_path: Path
) -> None:
    root = tmp_path / "root.pem"
    AUTHORITY.cert_pem.write_to_path(root)

    def status(url: str, cacert: str) -> int:
        if verb == "chat":
            return 200 if Client(url, cacert=cacert).is_healthy() else 0
        with contextlib.suppress(ExchangeError):
            return asyncio.run(HttpClient(url, cacert=cacert).request("GET", "/health")).status
        return 0

    with serving(tls_context(flags(tmp_path))) as port:
        url = f"https://localhost:{port}"
        assert status(url, str(root)) == 200
        assert status(url, "") == 0
        with pytest.raises(BanyanError, match="--cacert FILE"):
            Client(url).post("/v1/models", {})


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), ("x", "no certificate")])
def test_an_authority_that_cannot_be_read_is_named(
    content: str | None, why: str, tmp_path: Path
) -> None:
    file = tmp_path / "root.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"--cacert .*root.pem: .*{why}"):
        Client("https://localhost", cacert=str(file))
