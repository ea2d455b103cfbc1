"""Weights from a running server (--load-format remote_instance): the seed's side and the new one's.

The new server asks the seed for its weight files over HTTP, and takes their bytes over plain
connections. The bytes of all files, one after another, are divided into as many parts as there are
connections. The first line of a connection is "TOKEN PART PARTS"; the token comes with the list of
files, and no connection without it gets a byte.

    nccl              the new server names ports; the seed listens there until it has sent once
    transfer_engine   the seed listens on a port of its own, from its start on

The files lie in memory (/dev/shm) where there is room, and are removed when the process ends.
"""

import atexit
import contextlib
import hmac
import http.client
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from banyan.base.errors import ConfigError, ModelError, RequestError
from banyan.base.log import logger, printable
from banyan.config.schema import REMOTE_INSTANCE, Config, LoadConfig
from banyan.formats.shards import check_weight_files, files_of_weights, has_weights
from banyan.model_config.model_config import ModelConfig

log = logger(__name__)

INIT_ROUTE = "/init_weights_send_group_for_remote_instance"
SEND_ROUTE = "/send_weights_to_remote_instance"
ENGINE_ROUTE = "/remote_instance_transfer_engine_info"
ENGINE = "transfer_engine"
"""The backend whose seed listens on a port of its own; the other one is "nccl"."""
MOST_PORTS = 64
_CONNECTIONS = 4
"""Over which a new server takes weights from a port of the seed's own."""
_MOST_FILES, _MOST_NAME, _MOST_LINE = 100_000, 255, 256
_MOST_REPLY_BYTES = 64 << 20
_HELLO_S, WAIT_S, _STALL_S, SEND_S = 10.0, 300.0, 120.0, 3600.0
"""Time for the first line; until the new server comes; without a byte; for all bytes."""
_PIECE_BYTES = 4 << 20
_MEMORY = "/dev/shm"
_FOLDER = "banyan-weights-"


class SentFile(msgspec.Struct, frozen=True):
    """A weight file of a seed."""

    name: str
    size_bytes: int


class SeedReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a seed answers to the new server."""

    success: bool
    message: str = ""
    files: list[SentFile] = []
    token: str = ""
    port: int = 0
    """Where a seed with ENGINE listens."""
    weight_version: str = ""


# --- the seed ------------------------------------------------------------------------------------


class SeedFiles:
    """The files of the weights that a server has loaded.

    Args:
        path: file or folder; "" = the weights came from no file.
    """

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._states = _states_of(path)

    @property
    def listed(self) -> list[SentFile]:
        return [SentFile(os.path.basename(path), size) for path, size, _ in self.checked()]

    def checked(self) -> list[tuple[str, int, int]]:
        """Path, size and time of each file.

        Raises:
            RequestError: there are none, or they are no longer those that were loaded.
        """
        if not self._states:
            raise RequestError("The weights of this server were read from no file.")
        if _states_of(self._path) != self._states:
            raise RequestError(
                f"The files at {printable(self._path)!r} are not those that the weights were read "
                "from."
            )
        return self._states


def _states_of(path: str) -> list[tuple[str, int, int]]:
    if not path:
        return []
    with contextlib.suppress(OSError, ModelError):
        found = [(str(file), file.stat()) for file in files_of_weights(path)]
        return [(file, facts.st_size, facts.st_mtime_ns) for file, facts in found]
    return []


class WeightSender:
    """Listens on ports and sends each connection its part of the files.

    Args:
        ports: 0 = any free one.
        is_once: close when every part has been sent once, or after WAIT_S.
    """

    def __init__(self, files: SeedFiles, host: str, ports: Sequence[int], is_once: bool) -> None:
        self.files, self.token = files, secrets.token_hex(16)
        self._go = threading.Event()
        self._is_once, self._parts = is_once, len(ports)
        self._sent_bytes, self._errors = 0, list[str]()
        self._lock = threading.Lock()
        self._listeners: list[socket.socket] = []
        for port in ports:
            try:
                self._listeners.append(socket.create_server((host, port), backlog=MOST_PORTS))
            except OSError as error:
                self.close()
                raise RequestError(f"Port {port} cannot be opened: {error.strerror}.") from None
        if not is_once:
            self._go.set()
        work = [(self._listen, listener) for listener in self._listeners]
        self._threads = [threading.Thread(target=f, args=(x,), daemon=True) for f, x in work]
        for thread in self._threads:
            thread.start()

    @property
    def is_open(self) -> bool:
        """Whether a connection may still come, or is served."""
        return any(thread.is_alive() for thread in self._threads)

    @property
    def port(self) -> int:
        return int(self._listeners[0].getsockname()[1])

    def send(self) -> str:
        """Send to the connections, and wait for the end; returns what came of it.

        Raises:
            RequestError: a part was not sent.
        """
        self._go.set()
        for thread in self._threads:
            thread.join(SEND_S)
        self.close()
        if self._errors or self._sent_bytes != sum(each.size_bytes for each in self.files.listed):
            why = "; ".join(self._errors) or "a connection did not come"
            raise RequestError(f"Not all weights were sent: {printable(why, 300)}.")
        return f"{self._sent_bytes} bytes were sent over {self._parts} connections."

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _listen(self, listener: socket.socket) -> None:
        listener.settimeout(WAIT_S if self._is_once else None)
        with contextlib.suppress(OSError):  # closed, or nobody came
            while True:
                connection, _ = listener.accept()
                if self._is_once and self._serve(connection):
                    return
                if not self._is_once:
                    threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> bool:
        """Whether the peer had the token."""
        with connection:
            try:
                part, parts = self._hello(connection)
            except (OSError, ValueError):
                log.warning("a connection for weights had no token")
                return False
            try:
                if not self._go.wait(WAIT_S):
                    raise TimeoutError(f"nobody asked to send within {WAIT_S:g} s")
                sent = self._send_part(connection, part, parts)
                with self._lock:
                    self._sent_bytes += sent
            except (OSError, RequestError) as error:
                log.warning("weights were not sent: %s", error)
                self._errors.append(str(error))
        return True

    def _hello(self, connection: socket.socket) -> tuple[int, int]:
        connection.settimeout(_HELLO_S)
        with connection.makefile("rb") as file:
            token, part, parts = file.readline(_MOST_LINE).decode().split()
        is_legal = 0 <= int(part) < int(parts) <= MOST_PORTS
        if not hmac.compare_digest(token.encode(), self.token.encode()) or not is_legal:
            raise ValueError("no token")
        connection.settimeout(_STALL_S)
        return int(part), int(parts)

    def _send_part(self, connection: socket.socket, part: int, parts: int) -> int:
        states = self.files.checked()
        sizes = [size for _, size, _ in states]
        sent = 0
        for at, offset, count in _pieces(sizes, part, parts):
            with open(states[at][0], "rb") as file:
                sent += connection.sendfile(file, offset, count)
        return sent


@dataclass(frozen=True)
class _Hello:
    """What the first line of a connection says."""

    token: str
    part: int
    parts: int


def _pieces(sizes: Sequence[int], part: int, parts: int) -> Iterator[tuple[int, int, int]]:
    """File, offset and bytes of what one part of all bytes consists of."""
    total = sum(sizes)
    first, last, start = total * part // parts, total * (part + 1) // parts, 0
    for at, size in enumerate(sizes):
        low, high = max(first, start), min(last, start + size)
        if low < high:
            yield at, low - start, high - low
        start += size


# --- the new server ------------------------------------------------------------------------------


def with_weights_of_seed(config: Config, model_config: ModelConfig) -> tuple[Config, ModelConfig]:
    """Both, with the weights of a running server in a folder of this process; as they
    are without --load-format remote_instance.

    Raises:
        ConfigError: the seed cannot be reached, or sends no weights of this model.
    """
    model = config.model
    if model.load_format != REMOTE_INSTANCE:
        return config, model_config
    key = config.server.admin_api_key or config.server.api_key.partition(" ")[0]
    folder = _fetch(model, key, Path(model_config.path))
    check_weight_files(folder)
    model = replace(model, path=folder, load_format=model_config.format)
    return replace(config, model=model), replace(model_config, path=folder)


def _fetch(model: LoadConfig, key: str, source: Path) -> str:
    """The folder with the seed's weight files, and links to the other files of `source`."""
    where = f"the seed instance at {model.seed_host}:{model.seed_port}"
    asked: dict[str, object] = {}
    is_engine = model.seed_backend == ENGINE
    ports = [] if is_engine else seed_ports(model)
    if not is_engine:
        listed = ",".join(map(str, ports))
        asked = {"master_address": model.seed_host, "ports": listed, "backend": "nccl"}
        asked |= {"group_name": f"send_weights_{os.getpid()}", "group_rank": 1, "world_size": 2}
    reply = _ask(model, key, where, ENGINE_ROUTE if is_engine else INIT_ROUTE, asked)
    _check_files(reply, where)
    if is_engine:
        ports = [reply.port] * _CONNECTIONS
    total = sum(file.size_bytes for file in reply.files)
    folder = _new_folder(model.download_dir, total)
    for each in source.iterdir() if source.is_dir() else ():
        if not has_weights([each.name]) and not each.name.endswith(".index.json"):
            (folder / each.name).symlink_to(each.resolve())
    paths = [folder / file.name for file in reply.files]
    for path, file in zip(paths, reply.files, strict=True):
        with path.open("xb") as made:
            made.truncate(file.size_bytes)
    sizes = [file.size_bytes for file in reply.files]
    hellos = [_Hello(reply.token, part, len(ports)) for part in range(len(ports))]
    with ThreadPoolExecutor(len(ports) + 1, "take-weights") as pool:
        takes = [
            pool.submit(_take_part, (model.seed_host, port), hello, paths, sizes)
            for port, hello in zip(ports, hellos, strict=True)
        ]
        if not is_engine:
            pool.submit(_ask, model, key, where, SEND_ROUTE, asked).result()
        try:
            for take in takes:
                take.result()
        except OSError as error:
            raise ConfigError(
                f"{where} did not send all of its {total} bytes: {error.strerror or error}",
                hint="see its log; start again",
            ) from None
    log.info(
        "weights_bytes=%d files=%d connections=%d came from %s, weight version %s",
        total,
        len(paths),
        len(ports),
        where,
        printable(reply.weight_version, 80),
    )
    return str(folder)


def legal_ports(text: str) -> list[int] | None:
    """Ports with blanks or commas between them, or as a list in JSON; None if one is no port."""
    words = text.translate(str.maketrans("[],", "   ")).split()
    ports = [int(word) for word in words if word.isascii() and word.isdecimal() and len(word) < 6]
    is_legal = 0 < len(ports) == len(words) == len(set(ports)) <= MOST_PORTS
    return ports if is_legal and all(0 < port < 1 << 16 for port in ports) else None


def seed_ports(model: LoadConfig) -> list[int]:
    """The ports of --remote-instance-weight-loader-send-weights-group-ports: numbers, or a list as
    JSON.

    Raises:
        ConfigError: one is no port, or there are too many.
    """
    ports = legal_ports(" ".join(model.seed_ports))
    if ports is None:
        raise ConfigError(
            "--remote-instance-weight-loader-send-weights-group-ports "
            f"{printable(' '.join(model.seed_ports), 80)}: give up to {MOST_PORTS} different ports",
            hint="for example: 31000 31001",
        )
    return ports


def _ask(model: LoadConfig, key: str, where: str, route: str, body: dict[str, object]) -> SeedReply:
    """Call a route of the seed: POST with a body, else GET.

    Raises:
        ConfigError: it cannot be reached, or refuses.
    """
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    link = http.client.HTTPConnection(model.seed_host, model.seed_port, timeout=SEND_S)
    try:
        method = "POST" if body else "GET"
        link.request(method, route, json.dumps(body) if body else None, headers)
        answer = link.getresponse()
        raw = answer.read(_MOST_REPLY_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(
            f"{where} cannot be reached: {printable(str(error), 200)}",
            hint="start it first, and name its --host and --port",
        ) from None
    finally:
        link.close()
    with contextlib.suppress(msgspec.MsgspecError):
        reply = msgspec.json.decode(raw, type=SeedReply)
        if answer.status == 200 and reply.success:
            return reply
    why = printable(raw.decode(errors="replace"), 400)
    raise ConfigError(
        f"{where} refuses {route} ({answer.status}): {why}",
        hint="both need the same keys, and the seed its weight files",
    )


def _check_files(reply: SeedReply, where: str) -> None:
    """Refuse names that leave a folder, and files that a folder of weights does not have."""
    names = [file.name for file in reply.files]
    are_plain = all(n == os.path.basename(n) and 0 < len(n) <= _MOST_NAME for n in names)
    if not names or len(set(names)) != len(names) or len(names) > _MOST_FILES or not are_plain:
        raise ConfigError(f"{where} names no legal list of weight files")
    if odd := next((name for name in names if not has_weights([name])), ""):
        raise ConfigError(
            f"{where} serves {printable(odd, 80)!r}, and weights are taken from folders only",
            hint="copy that file, and name it with --model-path",
        )
    if any(file.size_bytes < 0 for file in reply.files):
        raise ConfigError(f"{where} names a file of less than no bytes")


def _new_folder(wanted: str, size_bytes: int) -> Path:
    """A folder that is removed when this process ends: in memory if there is room, else on disk."""
    _remove_left_folders()
    has_room = os.path.isdir(_MEMORY) and shutil.disk_usage(_MEMORY).free > size_bytes
    place = wanted or (_MEMORY if has_room else tempfile.gettempdir())
    if (free := shutil.disk_usage(place).free) <= size_bytes:
        raise ConfigError(
            f"{place} has {free} bytes left, the weights need {size_bytes}",
            hint="name a larger one with --download-dir",
        )
    folder = tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-", dir=place)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _remove_left_folders() -> None:
    """Remove folders in memory of processes that were killed."""
    for folder in Path(_MEMORY).glob(f"{_FOLDER}[0-9]*-*"):
        pid = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(folder, ignore_errors=True)


def _take_part(
    address: tuple[str, int], hello: _Hello, paths: Sequence[Path], sizes: Sequence[int]
) -> None:
    """Take one part of all bytes to its places in the files.

    Raises:
        OSError: the connection ended before.
    """
    piece = memoryview(bytearray(_PIECE_BYTES))
    with socket.create_connection(address, _STALL_S) as link:
        link.sendall(f"{hello.token} {hello.part} {hello.parts}\n".encode())
        link.settimeout(WAIT_S)
        for at, offset, count in _pieces(sizes, hello.part, hello.parts):
            with paths[at].open("r+b") as file:
                file.seek(offset)
                while count:
                    got = link.recv_into(piece, min(count, _PIECE_BYTES))
                    if not got:
                        raise ConnectionResetError(f"{count} bytes of {paths[at].name} are missing")
                    file.write(piece[:got])
                    count -= got
