"""Programs for the agent ``harness``: they do what the task's prompt says."""

import json
import os
import socket
import sys
import time
import urllib.request
from pathlib import Path

task = json.loads(Path(sys.argv[1]).read_text())


def ask(text):
    """The policy's answer."""
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def shell(*lines):
    """The answers to lines, in one connection."""
    with socket.socket(socket.AF_UNIX) as opened:
        opened.connect(os.environ["RLHF_SHELL"])
        with opened.makefile("rwb") as file:
            told = []
            for line in lines:
                file.write(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")
                file.flush()
                told.append(json.loads(file.readline()))
            return told


does = task["prompt"]
if does == "one command":
    print(shell({"command": ask("go")}))
elif does == "says what it sees":
    told = shell(
        {"command": "echo $A; export A=1; exit 3"},
        {"command": "echo $A", "timeout": 5},
        {"command": "sleep 50", "timeout": 0.5},
        b"no json\n",
        {"command": 3},
        {"command": "x", "timeout": -1},
        {"command": "echo \0"},
        {"command": "head -c 9000000 /dev/zero"},
        {"command": "echo alive"},
    )
    for each in told:
        each["output"] = each.get("output", "")[:100]
    seen = {"told": told, "task": sorted(task), "metadata": task["metadata"], "env": sorted(os.environ)}
    ask("go")
    print(json.dumps(seen))
elif does == "asks nothing":
    print(shell({"command": "true"}))
elif does == "falls":
    ask("go")
    sys.exit("on its nose")
elif does == "leaves a command":
    ask("go")
    opened = socket.socket(socket.AF_UNIX)
    opened.connect(os.environ["RLHF_SHELL"])
    opened.sendall(json.dumps({"command": "sleep 3; touch late"}).encode() + b"\n")
    time.sleep(0.3)
elif does == "hangs":
    ask("go")
    time.sleep(100)
elif does == "a line without end":
    ask("go")
    print(shell(b"x" * (3 << 20) + b"\n"))
