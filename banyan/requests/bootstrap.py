"""Bootstrap fields: how a prefill and a decode server refer to the same prompt.

Both servers get the same body. A prompt has one room; its n sequences are numbered parts of it.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from banyan.base.errors import RequestError
from banyan.messages.plan import FAKE_ROOM

if TYPE_CHECKING:
    from banyan.requests.request_spec import RequestSpec
    from banyan.requests.sampling_params import Limits

_ROOMS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_HERE = ("routed_dp_rank", "data_parallel_rank")
"""Two names for the same field; the first one counts."""
_THERE = "disagg_prefill_dp_rank"
HEADER = "x-data-parallel-rank"
FIELDS = (*_ROOMS, *_HERE, _THERE)
DEFAULT_PORT = 8998
_MOST_REPLICAS = 1 << 16
_HOST = re.compile(r"\[[0-9A-Fa-f:.]{2,45}\]|[\w.-]{1,253}", re.ASCII)
_OWN_ROUTES = ("probe", "warm-up")
"""Routes of the server's own requests: it runs both prefill and decode for them."""


@dataclass(frozen=True)
class BootstrapRoom:
    """KV transfer of one prompt between two servers.

    Attributes:
        number: bootstrap_room; None = no transfer.
        prefill_address: host:port of the prefill server.
        replica: replica of this server; None = any.
        prefill_replica: replica of the prefill server; None = chosen by the number.
    """

    number: int | None = None
    prefill_address: str = ""
    replica: int | None = None
    prefill_replica: int | None = None

    def name(self, part: int) -> bytes:
        """`Generate.transfer_id` of sequence `part`; b"" without a room."""
        if self.number is None:
            return b""
        return self.number.to_bytes(8, "little") + part.to_bytes(4, "little")


NO_ROOM = BootstrapRoom()


def bootstrap_rooms(fields: Callable[[str], object], num: int | None) -> list[BootstrapRoom]:
    """The bootstrap room of each prompt.

    Args:
        fields: returns the value of a field, None if the body does not have it.
        num: prompts of a batch; None for a single prompt, whose fields are not lists.

    Raises:
        RequestError: names the field, the rule and the value.
    """
    hosts, ports, rooms = (_spread(fields(name), name, num) for name in _ROOMS)
    ranks = (_rank(fields(name), name) for name in _HERE)
    here = next((rank for rank in ranks if rank is not None), None)
    there = _rank(fields(_THERE), _THERE)
    found = [
        replace(_bootstrap_room(*given), replica=here, prefill_replica=there)
        for given in zip(hosts, ports, rooms, strict=True)
    ]
    named = [room.number for room in found if room.number is not None]
    if len(named) != len(dict.fromkeys(named)):
        raise RequestError(
            "bootstrap_room must be another number for each prompt", param="bootstrap_room"
        )
    return found


def with_replica(fields: Mapping[str, object], header: str) -> Mapping[str, object]:
    """`fields` with the replica of the header X-Data-Parallel-Rank, which overrides the body.

    Raises:
        RequestError: the header is not a number.
    """
    if not (header.isascii() and header.isdecimal() and len(header) <= len(str(_MOST_REPLICAS))):
        raise RequestError(
            f"X-Data-Parallel-Rank must be the number of a replica, got {header[:40]!r}",
            param=_HERE[0],
        )
    return {**fields, _HERE[0]: int(header)}


def check_room(request: "RequestSpec", limits: "Limits") -> None:
    """RequestError if a sequence does not fit the disaggregation mode of this server."""
    if not limits.role:
        name = (
            _ROOMS[2]
            if request.message.transfer_id
            else _THERE
            if request.message.prefill_replica >= 0
            else ""
        )
        if name:
            raise RequestError(
                f"{name} asks for a server that shares the work with another one",
                param=name,
                code="not_available",
                hint="Start the server with --disaggregation-mode prefill or decode.",
            )
        return
    is_invented = limits.fakes_prompts and not request.message.prefill_address
    if request.route in _OWN_ROUTES or not limits.has_rooms or is_invented:
        return
    if not request.message.transfer_id:
        raise RequestError(
            f"This is a {limits.role} server, and the request names no bootstrap_room",
            param="bootstrap_room",
            code="no_room",
            hint="Send requests to the router of the two servers.",
        )
    if limits.role == "decode" and not request.message.prefill_address:
        raise RequestError(
            "bootstrap_host must name the server that computes the prompt", param="bootstrap_host"
        )
    if request.hidden:
        raise RequestError(
            "hidden states are not handed over from one server to another",
            param="return_hidden_states",
            code="not_available",
        )


def with_room(request: "RequestSpec", limits: "Limits") -> "RequestSpec":
    """The request with a room of its own if its prompt is invented: because
    --disaggregation-transfer-backend is fake, or because it names no prefill server and
    --disaggregation-decode-enable-fake-auto is given."""
    if request.route in _OWN_ROUTES:
        return request
    if limits.fakes_prompts and not request.message.prefill_address:
        room = BootstrapRoom(secrets.randbits(63) | FAKE_ROOM)
        return request.with_message(transfer_id=room.name(0))
    if limits.has_rooms or request.message.transfer_id:
        return request
    return request.with_message(transfer_id=BootstrapRoom(secrets.randbits(63)).name(0))


def _spread(value: object, name: str, num: int | None) -> Sequence[object]:
    if num is None:
        return [value]
    if not isinstance(value, list):
        if name == "bootstrap_room" and value is not None and num > 1:
            raise RequestError(
                f"bootstrap_room must be a list of {num} numbers, one for each prompt", param=name
            )
        return [value] * num
    if len(value) != num:
        raise RequestError(
            f"{name} must be one value or {num} of them, got {len(value)}.", param=name
        )
    return value


def _rank(value: object, name: str) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < _MOST_REPLICAS:
        raise RequestError(
            f"{name} must be the number of a replica, got {str(value)[:40]!r}", param=name
        )
    return value


def _bootstrap_room(host: object, port: object, room: object) -> BootstrapRoom:
    if room is None and host is None:
        return NO_ROOM
    if type(room) is not int or not 0 <= room < 1 << 63:
        raise RequestError(
            f"bootstrap_room must be an integer in [0, 2^63), got {str(room)[:40]!r}",
            param="bootstrap_room",
        )
    if host is None:
        return BootstrapRoom(room)
    if not isinstance(host, str) or not _HOST.fullmatch(host):
        raise RequestError(
            f"bootstrap_host must be the name or address of a server, got {str(host)[:40]!r}",
            param="bootstrap_host",
        )
    port = DEFAULT_PORT if port is None else port
    if type(port) is not int or not 0 < port < 1 << 16:
        raise RequestError(
            f"bootstrap_port must be an integer in [1, 65535], got {str(port)[:40]!r}",
            param="bootstrap_port",
        )
    return BootstrapRoom(room, f"{host}:{port}")
