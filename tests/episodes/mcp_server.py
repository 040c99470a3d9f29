"""An MCP server made with the package `mcp`, for the tests: `python mcp_server.py`."""

import os
import sys
import time

from mcp.server.mcpserver import Context, Image, MCPServer

server = MCPServer("test", instructions="Count.")
total = 0


@server.tool()
def double(number: int) -> int:
    """Double a number, and add it to the total."""
    global total
    total += number
    print(f"doubling {number}", file=sys.stderr)
    return 2 * number


@server.tool(name="step")
def the_total() -> str:
    """Return the total: a tool with the name of a method that is no tool."""
    return f"the total is {total} in {os.getpid()}"


@server.tool()
def divide(a: float, b: float) -> float:
    """Divide a by b."""
    return a / b


@server.tool(name="get-picture")
def picture() -> list:
    """Return text and a picture."""
    return ["a dot", Image(data=b"\x89PNG", format="png")]


@server.tool()
async def progress(context: Context) -> str:
    """Send notifications before the answer."""
    await context.report_progress(1, 2)
    return "done"


@server.tool()
def end(status: int) -> str:
    """End the server's process."""
    print("the end is near", file=sys.stderr, flush=True)
    os._exit(status)


@server.tool()
def sleep(seconds: float) -> str:
    """Answer late."""
    time.sleep(seconds)
    return "awake"


if __name__ == "__main__":
    server.run()
