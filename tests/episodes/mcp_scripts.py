"""MCP servers written by hand, correct and broken: `python mcp_scripts.py NAME`."""

import json
import os
import sys
import time

TOOL = {"name": "echo", "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}}}


def read():
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    return json.loads(line)


def write(message):
    print(json.dumps(message if isinstance(message, list) else {"jsonrpc": "2.0", **message}), flush=True)


def serve(tools=(TOOL,), version=None, answer=None, pages=None):
    """Serve requests; `answer(message)` may answer one itself by returning True."""
    while True:
        message = read()
        method, number = message.get("method"), message.get("id")
        if answer is not None and answer(message):
            continue
        if method == "initialize":
            result = {"protocolVersion": version or message["params"]["protocolVersion"], "capabilities": {}}
            write({"id": number, "result": {**result, "serverInfo": {"name": "s", "version": "1"}}})
        elif method == "tools/list":
            result = {"tools": list(tools)}
            if pages:
                result = pages[message["params"].get("cursor")]
            write({"id": number, "result": result})
        elif method == "tools/call":
            content = [{"type": "text", "text": message["params"]["arguments"].get("text", "")}]
            write({"id": number, "result": {"content": content}})


def dies():
    print("no module named nothing", file=sys.stderr)
    sys.exit(3)


def silent():
    time.sleep(600)


def deaf():
    """Closes its output and goes on."""
    os.close(1)
    time.sleep(600)


def babbles():
    while True:
        print("hello", flush=True)


def future():
    serve(version="2031-01-01")


def no_tools():
    serve(tools=())


def twice():
    serve(tools=(TOOL, TOOL))


def nameless():
    serve(tools=({"inputSchema": {"type": "object"}},))


def no_object():
    serve(tools=({"name": "echo", "inputSchema": {"type": "string"}},))


def no_schema():
    serve(tools=({"name": "echo", "inputSchema": {"type": "object", "properties": {"a": {"type": "text"}}}},))


def no_list():
    serve(pages={None: {"tools": "echo"}})


def circle():
    serve(pages={None: {"tools": [TOOL], "nextCursor": "a"}, "a": {"tools": [], "nextCursor": "a"}})


def pages():
    second = {"name": "second", "inputSchema": {"type": "object"}}
    serve(pages={None: {"tools": [TOOL], "nextCursor": "b"}, "b": {"tools": [second]}})


def long_line():
    def answer(message):
        if message["method"] != "tools/list":
            return False
        while True:
            sys.stdout.write("x" * 2**20)

    serve(answer=answer)


def no_result():
    def answer(message):
        if message["method"] != "initialize":
            return False
        write({"id": message["id"]})
        return True

    serve(answer=answer)


def refuses():
    def answer(message):
        write({"id": message["id"], "error": {"code": -32600, "message": "not today"}})
        return True

    serve(answer=answer)


def hungry():
    held = [bytearray(2**20) for _ in range(600)]
    serve(tools=[TOOL] * len(held[0][:1]))


def stubborn():
    """Ends neither with its input nor by SIGTERM."""
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        serve()
    finally:
        time.sleep(600)


def other_tools():
    """Lists another tool from the second start on; argument 2 is a file that remembers."""
    first = not os.path.exists(sys.argv[2])
    with open(sys.argv[2], "a"):
        serve(tools=(TOOL if first else {**TOOL, "name": "shout"},))


def asks():
    """Pings and asks for a sample, for the roots and for nothing known before it answers a call, beside other lines."""
    print("Server running on stdio", flush=True)
    sys.stderr.write("log " * 50_000)
    replies = []

    def answer(message):
        if message.get("method") != "tools/call":
            return False
        write({"method": "notifications/message", "params": {"level": "info", "data": "x"}})
        for number, method in enumerate(["ping", "sampling/createMessage", "roots/list"]):
            write({"id": f"s{number}", "method": method, "params": {}})
            replies.append(read())
        write({"id": 12345, "result": {}})
        one = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {}}
        content = [{"type": "text", "text": json.dumps(replies)}]
        content += [{"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}}]
        content += [
            {"type": "resource_link", "uri": "file:///b", "name": "b"},
            {"type": "audio", "mimeType": "audio/wav"},
        ]
        write([one, {"jsonrpc": "2.0", "id": message["id"], "result": {"content": content}}])
        return True

    serve(answer=answer)


def structured():
    def answer(message):
        if message["method"] != "tools/call":
            return False
        text = message["params"]["arguments"]["text"]
        kinds = {
            "structured": {"result": {"content": [], "structuredContent": {"a": 1}}},
            "input": {"result": {"resultType": "input_required", "content": []}},
            "error": {"error": {"code": -32602, "message": "no such argument"}},
            "odd": {"result": {"content": "text"}},
            "wrong": {"result": {"isError": True, "content": [{"type": "text", "text": "as it is"}]}},
        }
        write({"id": message["id"], **kinds[text]})
        return True

    serve(answer=answer)


def modern_only():
    """Passes messages on to the real server, and refuses `initialize` as one of the revision without it does."""
    import subprocess

    command = [sys.executable, os.path.join(os.path.dirname(__file__), "mcp_server.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, bufsize=1) as server:
        while line := sys.stdin.readline():
            message = json.loads(line)
            if message["method"] == "initialize":
                data = {"supported": ["2026-07-28"], "requested": message["params"]["protocolVersion"]}
                write({"id": message["id"], "error": {"code": -32022, "message": "unsupported", "data": data}})
            else:
                server.stdin.write(line)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
