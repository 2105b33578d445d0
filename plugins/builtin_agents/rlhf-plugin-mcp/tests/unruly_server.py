"""A server that keeps no measure: ``unruly_server.py HOW``, where HOW names what it does without end."""

import itertools
import json
import sys
import threading
import time


def send(**message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def write_on(how):
    """Writes what nobody asked for, for ever."""
    while True:
        if how == "lines":
            print("no message" * 10)
        elif how == "notifications":
            send(method="notifications/message", params={"level": "info", "data": "x"})
        else:
            sys.stdout.write("x" * 65536)


def complain():
    while True:
        sys.stderr.write("ouch " * 10_000)


def listing(how, cursor):
    if how == "slow pages":
        time.sleep(0.3)
    tools = [{"name": f"t{cursor}", "inputSchema": {"type": "object"}}]
    return {"tools": [] if "empty" in how else tools, **({"nextCursor": f"{cursor + 1}"} if "pages" in how else {})}


def main(how):
    if how == "errors":
        threading.Thread(target=complain, daemon=True).start()
    for number in itertools.count():
        message = json.loads(sys.stdin.readline() or "null")
        if message is None:
            return
        parameters = message.get("params") or {}
        if message.get("method") == "initialize":
            if "at once" in how:
                write_on(how.split()[0])
            about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "unruly", "version": "1"}}
            send(id=message["id"], result={"protocolVersion": parameters["protocolVersion"], **about})
        elif message.get("method") == "tools/list":
            if how in ("lines", "notifications", "one line"):
                write_on(how)
            if how == "some lines":
                print(*range(100), sep="\n")
            send(id=message["id"], result=listing(how, int(parameters.get("cursor") or 0)))
        elif "id" in message:
            send(id=message["id"], error={"code": -32601, "message": f"no {number}"})


main(sys.argv[1])
