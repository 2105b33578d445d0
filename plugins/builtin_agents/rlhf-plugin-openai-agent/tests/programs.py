"""Programs as people write them; each is told by its first argument."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


def ask(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def ask_by_messages(text):
    body = json.dumps({"max_tokens": 4, "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Content-Type": "application/json", "x-api-key": os.environ["ANTHROPIC_API_KEY"]}
    request = urllib.request.Request(f"{os.environ['ANTHROPIC_BASE_URL']}/v1/messages", body, headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)["generation_token_ids"]


def report(path, **body):
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + path
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=20).read()


def main(kind, task_file):
    task = json.loads(Path(task_file).read_text())
    if kind == "silent":
        return
    if kind == "anthropic":
        print(float(bool(ask_by_messages(task["prompt"]))))
        return
    said = ask(task["prompt"])
    if kind == "prints":
        print("thinking ...")
        print(json.dumps({"reward": 0.5, "score": 1.0, "metrics": {"words": len(said.split())}}))
    elif kind == "posts":
        report("/reward", reward=0.25, score=0.0)
        print(1.0)
    elif kind == "fails":
        sys.exit("no sandbox today")
    elif kind == "gives up":
        report("/fail", reason="the shop is closed", retryable=False)
        time.sleep(0.2)
    elif kind == "hangs":
        child = subprocess.Popen(["sleep", "60"])
        Path(os.environ["PROCESSES"]).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(60)
    elif kind == "daemon":  # in a session of its own, holding the pipes
        subprocess.Popen(["sleep", "40"], start_new_session=True)
        print("1.0", flush=True)
    elif kind == "environment":
        print(json.dumps({"reward": float("SECRET_KEY" not in os.environ and os.environ.get("ALLOWED") == "1")}))
    elif kind == "misspells":
        print(json.dumps({"reward": 1.0, "scroe": 1.0}))
    elif kind == "nan":
        print('{"reward": NaN}')


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
