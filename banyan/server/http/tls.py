"""TLS: the certificate of the server, and the check of client certificates."""

import os
import ssl
from contextlib import ExitStack, suppress
from pathlib import Path

from banyan.base.clock import Clock, WallClock
from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.config.schema import ServerConfig

log = logger(__name__)

LOOK_S = 1.0
"""How often the files are checked while connections arrive (--enable-ssl-refresh)."""
_PROTOCOLS = ["http/1.1"]


def tls_context(server: ServerConfig, clock: Clock | None = None) -> ssl.SSLContext | None:
    """The TLS settings of connections; None = no TLS.

    Raises:
        ConfigError: a file is missing or malformed, or a flag is.
    """
    if not server.ssl_cert:
        if server.ssl_key or server.ssl_ca or server.ssl_password or server.ssl_refresh:
            raise ConfigError(
                "TLS needs a certificate", hint="give --ssl-certfile, with --ssl-keyfile"
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_PROTOCOLS)
    _load(context, server, _read(server))
    if server.ssl_ca:
        try:
            context.load_verify_locations(server.ssl_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ssl-ca-certs {server.ssl_ca}: {_why(error)}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    if server.ssl_refresh:
        _Refresh(context, server, clock or WallClock())
    return context


class _Refresh:
    """Loads a changed certificate for new connections; malformed files change nothing."""

    def __init__(self, context: ssl.SSLContext, server: ServerConfig, clock: Clock) -> None:
        self._server = server
        self._clock = clock
        self._looked_s = clock.now()
        self._seen = self._state()
        context.sni_callback = self._look

    def _look(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called at the start of each connection, with or without a server name."""
        now = self._clock.now()
        if now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            files = _read(self._server)  # once: they may change again between the two loads
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._server, files)
            _load(context, self._server, files)  # a bad pair would leave it unusable
        except ConfigError as error:
            log.error("the certificate stays as it was: %s", error)
        else:
            log.info("loaded the certificate %s", self._server.ssl_cert)

    def _state(self) -> list[tuple[int, int, int]]:
        """Identity of the current versions of the files."""
        found: list[tuple[int, int, int]] = []
        for path in (self._server.ssl_cert, self._server.ssl_key):
            with suppress(OSError):  # it is being replaced
                if path:
                    facts = os.stat(path)
                    found.append((facts.st_ino, facts.st_mtime_ns, facts.st_size))
        return found


def _read(server: ServerConfig) -> list[bytes]:
    """The certificate, and the key if it has a file of its own."""
    try:
        return [Path(path).read_bytes() for path in (server.ssl_cert, server.ssl_key) if path]
    except OSError as error:
        raise _unusable(server, error) from None


def _load(context: ssl.SSLContext, server: ServerConfig, files: list[bytes]) -> None:
    with ExitStack() as stack:
        paths: list[str] = []
        for content in files:  # OpenSSL reads files alone: these lie in memory
            file = stack.enter_context(open(os.memfd_create("tls"), "wb"))
            file.write(content)
            file.flush()
            paths.append(f"/proc/self/fd/{file.fileno()}")
        try:
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(*paths, password=lambda: server.ssl_password)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise _unusable(server, error) from None


def _unusable(server: ServerConfig, error: Exception) -> ConfigError:
    files = f"--ssl-certfile {server.ssl_cert}"
    if server.ssl_key:
        files += f", --ssl-keyfile {server.ssl_key}"
    return ConfigError(f"{files}: {_why(error)}", hint="give a certificate and its own key, in PEM")


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "it is not in PEM"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
