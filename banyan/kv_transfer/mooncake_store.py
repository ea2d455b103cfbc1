"""--hicache-storage-backend mooncake: KV pages in the memory of a Mooncake cluster.

This process may lend memory to the cluster, until it ends; memory lent by others stays.

Each value begins with a head and a checksum like FileStore's records, and is checked on reading.
The master limits the memory: when it is full the master evicts pages or refuses new ones.
"""

import errno
import socket
from typing import TYPE_CHECKING

from banyan.base.errors import ConfigError
from banyan.base.install import install_command
from banyan.base.log import printable
from banyan.kv_transfer.store import SUM_BYTES, Damaged, Missing, StoreOptions, checksum

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

_FLAG = "--hicache-storage-backend mooncake"
_EXTRA = "--hicache-storage-backend-extra-config"
_MAGIC = b"BANYANP2"
_NOT_FOUND, _NO_ROOM = -704, -200
_PAGES = 16
"""Fewest pages of memory that may be lent."""
_CALL_S = 3.0
_TEXTS = {
    "master_server_address": "",
    "local_hostname": "127.0.0.1",
    "metadata_server": "P2PHANDSHAKE",
    "protocol": "tcp",
    "device_name": "",
}
_UNITS = {"b": 0, "kb": 10, "mb": 20, "gb": 30, "tb": 40}


class MooncakeStore:
    """
    Args:
        client: a MooncakeDistributedStore after setup.
        identity: as in `StoreOptions`.
        lent_bytes: memory that this process lends.
    """

    def __init__(
        self, client: "MooncakeDistributedStore", identity: bytes, lent_bytes: int
    ) -> None:
        self._client = client
        self._identity = identity
        self._lent_bytes = lent_bytes

    @property
    def capacity_bytes(self) -> int:
        """Memory that this process lends; other processes may lend more."""
        return self._lent_bytes

    def has(self, name: bytes) -> bool:
        found = self._client.is_exist(self._key(name))
        if found < 0 and found != _NOT_FOUND:
            raise _failed("does not answer", found)
        return found == 1

    def read(self, name: bytes) -> memoryview:
        content = self._client.get(self._key(name))
        if not content:
            status = self._client.get_size(self._key(name))
            if status == _NOT_FOUND:
                raise Missing
            raise _failed("does not give a page", status)
        head = self._head(name)
        payload = memoryview(content)[len(head) + SUM_BYTES :]
        stored = content[len(head) : len(head) + SUM_BYTES]
        if not content.startswith(head) or stored != checksum(head, payload):
            self._client.remove(self._key(name), True)
            raise Damaged(f"{self._key(name)} is not the page that its name says; it was removed")
        return payload

    def write(self, name: bytes, payload: bytes | memoryview) -> None:
        head = self._head(name)
        status = self._client.put_parts(self._key(name), head + checksum(head, payload), payload)
        if status == _NO_ROOM:
            raise OSError(errno.ENOSPC, "the memory that is lent to mooncake is full")
        if status:
            raise _failed("does not take a page", status)

    def delete(self, name: bytes) -> None:
        status = self._client.remove(self._key(name), True)
        if status not in (0, _NOT_FOUND):
            raise _failed("does not remove a page", status)

    def close(self) -> None:
        self._client.close()

    def _key(self, name: bytes) -> str:
        return f"banyan/{self._identity.hex()[:32]}/{name.hex()}"

    def _head(self, name: bytes) -> bytes:
        return _MAGIC + self._identity + name


def open_mooncake_store(options: StoreOptions) -> MooncakeStore:
    """The store of --hicache-storage-backend mooncake.

    Extra keys, named as Mooncake's own: "master_server_address" (needed), "global_segment_size"
    (needed; bytes, or a text like "4gb": memory that this process lends, 0 = none),
    "local_buffer_size", "local_hostname", "metadata_server", "protocol", "device_name".
    """
    extra = dict(options.extra)
    extra.pop("path", None)  # set from an environment variable for the file store
    texts = {key: _text(extra, key, default) for key, default in _TEXTS.items()}
    largest = max(options.page_bytes, default=0)
    if not texts["master_server_address"] or "global_segment_size" not in extra:
        raise ConfigError(
            f"{_FLAG} needs master_server_address and global_segment_size in {_EXTRA}",
            hint="start mooncake_master, and lend it memory: bytes, 0 where others lend theirs",
        )
    lent = _size(extra, "global_segment_size", 0)
    buffer = _size(extra, "local_buffer_size", max(16 << 20, 8 * largest))
    if extra:
        raise ConfigError(
            f"{_EXTRA} has no {printable(next(iter(extra)), 60)!r}",
            hint=f"{', '.join(_TEXTS)}, global_segment_size and local_buffer_size are what the "
            "mooncake store takes",
        )
    if lent and lent < _PAGES * largest:
        raise ConfigError(
            f"{_EXTRA}: global_segment_size {lent:,}; {_PAGES * largest:,} bytes are {_PAGES} "
            "pages, the least that is of use",
            hint="lend more, or 0 where others lend their memory",
        )
    kind = _client_kind()
    _check_master(texts["master_server_address"])
    client = kind()
    status = client.setup(
        texts["local_hostname"],
        texts["metadata_server"],
        lent,
        buffer,
        texts["protocol"],
        texts["device_name"],
        texts["master_server_address"],
    )
    if status:
        raise ConfigError(
            f"{_FLAG}: its client does not start at {printable(texts['local_hostname'], 60)} "
            f"(status {status})",
            hint="name an address of this machine as local_hostname, and less memory",
        )
    return MooncakeStore(client, options.identity, lent)


def _client_kind() -> "type[MooncakeDistributedStore]":
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ConfigError(
            f"{_FLAG}: its client does not load: {error}",
            hint=f"run: {install_command('mooncake')} (on Debian and Ubuntu also: apt install "
            "libibverbs1)",
        ) from None
    return MooncakeDistributedStore


def _check_master(address: str) -> None:
    """Fail at once if no master answers; Mooncake's client would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CALL_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{_FLAG}: no master answers at {printable(address, 80)!r}: {error}",
            hint="start mooncake_master, and name HOST:PORT as master_server_address",
        ) from None


def _text(extra: dict[str, object], key: str, default: str) -> str:
    value = extra.pop(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{_EXTRA}: {key} must be a text, got {printable(repr(value), 60)}")
    return value


def _size(extra: dict[str, object], key: str, default: int) -> int:
    value = extra.pop(key, default)
    if isinstance(value, str):
        number = value.strip().lower().rstrip("bkmgt")
        unit = value.strip().lower()[len(number) :] or "b"
        if number.strip().isdecimal() and len(number) < 16 and unit in _UNITS:
            value = int(number) << _UNITS[unit]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 50:
        raise ConfigError(
            f"{_EXTRA}: {key} must be a number of bytes, or a text like '4gb', got "
            f"{printable(repr(value), 60)}"
        )
    return value


def _failed(what: str, status: int) -> OSError:
    return OSError(errno.EIO, f"mooncake {what} (status {status})")
