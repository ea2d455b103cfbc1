"""Collectives by torch's gloo: between machines, and where the compiled library is missing.

Ranks that meet at a file are on one machine, and listen on its loopback alone.
"""

import socket
from datetime import timedelta
from urllib.parse import urlsplit

from banyan.parallel.collectives import Meeting, Transport
from banyan.parallel.process_group import GroupCollectives, dist, open_store

_LOOPBACK = "127.0.0.1"


def own_address(host: str | None) -> str:
    """The address of this machine from which it reaches the meeting; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def _open(meeting: Meeting) -> GroupCollectives:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=meeting.timeout_s)
    host = _LOOPBACK if meeting.path else own_address(urlsplit(meeting.address).hostname)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    group = dist.ProcessGroupGloo(open_store(meeting), meeting.rank, meeting.size, options)
    return GroupCollectives(group, meeting)


GLOO = Transport(declines=lambda meeting: None, open=_open)
