"""Host names and addresses."""

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether an address or name stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
