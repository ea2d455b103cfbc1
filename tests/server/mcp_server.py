"""A real MCP server for test_tool_servers, run as a process of its own.

Arguments: transport ("sse" or "streamable-http") and name. It prints its port.
"""

import socket
import sys
import threading

import anyio
import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations


def served(name: str) -> MCPServer:
    server = MCPServer(name)

    @server.tool(annotations=ToolAnnotations(read_only_hint=True))
    def get_weather(city: str) -> str:
        """Weather of a city"""
        return f"sunny in {city}"

    @server.tool()
    def fails() -> str:
        """Fails"""
        raise ValueError("it rains")

    @server.tool()
    async def sleeps() -> str:
        """Never answers"""
        await anyio.sleep_forever()
        return ""

    @server.tool()
    def dies() -> str:
        """Ends the process"""
        threading.Thread(target=lambda: __import__("os")._exit(1)).start()
        threading.Event().wait()
        return ""

    @server.tool()
    def long(chars: int) -> str:
        """A long text"""
        return "x" * chars

    return server


def main() -> None:
    server = served(sys.argv[2])
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    app = server.sse_app() if sys.argv[1] == "sse" else server.streamable_http_app()
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listener])


if __name__ == "__main__":
    main()
