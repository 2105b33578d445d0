"""Stands for the Python of an environment with verifiers: speaks the worker's protocol, with a switch for each fault.

``args`` has faults of the start, and the data of a task has those of its episode.
"""

import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request


def answer(number, **told):
    sys.stdout.write(json.dumps({"id": number, **told}) + "\n")
    sys.stdout.flush()


def ask(url, prompt):
    body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.loads(response.read())["choices"][0]["message"]["content"]


def play(data, base_url, **_):
    fault = data.get("fault")
    told = {"ok": True, "agents": [["agent", True]], "turns": 1, "truncated": False, "stop": "done", "metrics": {"length": 1.0}}
    if fault == "exits":
        os._exit(3)
    if fault == "nonsense":
        sys.stdout.write("what is no answer\n")
        sys.stdout.flush()
    if fault == "sleeps":
        time.sleep(60)
    if fault == "silent":
        return told | {"rewards": {"right": 1.0}}
    try:
        said = ask(base_url, data["prompt"])
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        return told | {"rewards": {"right": 0.0}, "truncated": True, "stop": "context_length"}
    rewards = {"right": float(said == data["answer"]), "short": 0.25}
    parts = {"right": [rewards["right"], 1.0], "short": [0.5, 0.5]}
    changes = {
        "raises": {"ok": False, "error": {"type": "TaskError", "message": "no such file", "status": None}},
        "refused": {"ok": False, "error": {"type": "ProviderError", "message": "a bad request", "status": 400}},
        "late": {"ok": False, "late": "scoring"},
        "nan": {"rewards": {"right": float("nan")}},
        "none": {"rewards": {}},
        "above": {"parts": {"right": [7.0, 1.0]}},
        "penalty": {"parts": {"right": [1.0, 1.0], "long": [0.5, -1.0]}},
        "two": {"agents": [["solver", True], ["critic", True]]},
        "judge": {"agents": [["judge", False]]},
    }
    return told | {"rewards": rewards, "parts": parts} | changes.get(fault, {})


def run(request):
    number = request.pop("id")
    try:
        answer(number, ok=play(**request))
    except Exception as error:
        answer(number, error={"type": type(error).__name__, "message": str(error), "wrong": False})


def main():
    first = json.loads(sys.stdin.readline())
    args = first["args"]
    with open(args.get("count", os.devnull), "a") as file:
        file.write("started\n")
    sys.stderr.write("a line of the log\n")
    sys.stderr.flush()
    if args.get("start") == "dies":
        sys.exit(4)
    if args.get("start") == "sleeps":
        time.sleep(60)
    if args.get("start") == "wrong":
        return answer(0, error={"type": "Wrong", "message": "verifiers cannot be imported there: none", "wrong": True})
    if first["op"] == "tasks":
        rows = args.get("rows", [{"prompt": "2+3=", "answer": "5"}])
        return answer(0, ok=rows[first["skip"] :][: first["size"]])
    answer(0, ok={})
    while line := sys.stdin.readline():
        request = json.loads(line)
        if request.pop("op") == "play":
            threading.Thread(target=run, args=(request,), daemon=True).start()
        else:
            answer(request["id"], error={"type": "CancelledError", "message": "", "wrong": False})


main()
