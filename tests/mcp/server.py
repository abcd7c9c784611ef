"""An MCP server made with the official Python SDK: `server.py stdio`, or `server.py http PORT TOKEN`."""

import os
import sys
from pathlib import Path

try:
    from mcp.server.mcpserver import MCPServer
except ImportError:  # version 1 of the SDK
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("probe")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def place() -> str:
    """Say where the server runs: the host name, and whether it sees the host's canary."""
    return f"{os.uname().nodename} canary={Path(os.environ.get('CANARY', '/nonexistent')).exists()}"


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("the tool failed on purpose")


def serve_http(token: str) -> None:
    import uvicorn

    app = server.streamable_http_app()

    async def guarded(scope, receive, send):
        if scope["type"] == "http":
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            if headers.get("authorization") != f"Bearer {token}":
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
        await app(scope, receive, send)

    uvicorn.run(guarded, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")


if sys.argv[1] == "http":
    serve_http(sys.argv[3])
else:
    server.run()
