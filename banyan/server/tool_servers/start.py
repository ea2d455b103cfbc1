"""--tool-server: connects to the named tool servers and lists their tools."""

import asyncio
from urllib.parse import urlsplit

from banyan.base.errors import ConfigError
from banyan.base.install import install_command
from banyan.base.log import logger
from banyan.server.tool_servers.base import ToolServer, ToolServers
from banyan.server.tool_servers.demo import DemoServer

log = logger(__name__)

DEMO = "demo"
"""Name of the tool server in this process."""
_PATHS = ("/sse", "/mcp")
"""Paths that are tried, in order, for a server given as HOST:PORT."""


async def start_tool_servers(names: str) -> ToolServers:
    """Connect to the servers of a comma-separated list: `demo`, HOST:PORT, or a URL.

    Raises:
        ConfigError: a name is malformed, a server does not respond, two have the same label, or the
            package of the protocol is not installed.
    """
    servers = await asyncio.gather(*(_start(name) for name in named_servers(names)))
    found: dict[str, ToolServer] = {}
    for server in servers:
        if server.label in found:
            raise ConfigError(f"--tool-server names two servers that are called {server.label!r}")
        found[server.label] = server
        where = server.url or "in this process"
        log.info("tools of %s (%s): %s", server.label, where, ", ".join(server.tools) or "none")
    return ToolServers(found)


def named_servers(names: str) -> list[str]:
    """The names of a comma-separated list."""
    return [name.strip() for name in names.split(",")] if names else []


async def _start(name: str) -> ToolServer:
    if name == DEMO:
        return DemoServer()
    urls = addresses(name)
    try:
        from banyan.server.tool_servers.mcp_server import open_server
    except ImportError as error:
        raise ConfigError(
            f"--tool-server {name} needs the package mcp, which cannot be imported: {error}",
            hint=f"run: {install_command('tools')}",
        ) from None
    return await open_server(urls)


def addresses(name: str) -> list[str]:
    """URLs to try for a server; ConfigError if `name` is not an address."""
    has_scheme = "://" in name
    try:
        parts = urlsplit(name if has_scheme else f"http://{name}")
        is_whole = bool(parts.hostname) and (has_scheme or parts.port is not None)
    except ValueError:
        is_whole = False
    if not is_whole or parts.scheme not in ("http", "https"):
        raise ConfigError(
            f"--tool-server takes demo, HOST:PORT or an http(s) URL, separated by commas; "
            f"{name!r} is none of them"
        )
    if has_scheme and parts.path not in ("", "/"):
        return [name]
    return [f"{parts.scheme}://{parts.netloc}{path}" for path in _PATHS]
