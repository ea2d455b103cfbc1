"""Hosts: what an address says of who may reach it."""

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether an address or name stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
