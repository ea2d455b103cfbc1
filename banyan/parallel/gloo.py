"""Collectives of torch's gloo: between machines, and without the compiled library.

Ranks whose rendezvous is a file are on one machine; they listen on the loopback address only.
"""

import socket
from datetime import timedelta
from urllib.parse import urlsplit

from banyan.parallel.collectives import Rendezvous, Transport
from banyan.parallel.process_group import GroupCollectives, dist, open_store

_LOOPBACK = "127.0.0.1"


def own_address(host: str | None) -> str:
    """This machine's address on the route to `host`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def _open(rendezvous: Rendezvous) -> GroupCollectives:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=rendezvous.timeout_s)
    host = _LOOPBACK if rendezvous.path else own_address(urlsplit(rendezvous.address).hostname)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    group = dist.ProcessGroupGloo(open_store(rendezvous), rendezvous.rank, rendezvous.size, options)
    return GroupCollectives(group, rendezvous)


GLOO = Transport(declines=lambda rendezvous: None, open=_open)
