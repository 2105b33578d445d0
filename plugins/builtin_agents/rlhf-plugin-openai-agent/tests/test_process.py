"""A program's end is the end of all that it started, in whatever session, and whichever way it ends."""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest
from rlhf_plugin_openai_agent import process

STARTS = {
    "a child": "os.fork() == 0 and wait()",
    "a child in a session of its own": "if os.fork() == 0:\n    os.setsid()\n    wait()",
    "a child of a child": "if os.fork() == 0:\n    os.setsid()\n    os.fork() == 0 and wait()\n    os._exit(0)",
}
ENDS = {"ends": "", "fails": "raise SystemExit(3)", "hangs": "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"}
BEGIN = """
import os, signal, sys, time
def wait():
    os.write(out, f"{os.getpid()} ".encode())
    time.sleep(600)
out = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
"""


def is_alive(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes in other sessions are found on Linux")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("start", STARTS)
def test_nothing_is_left(tmp_path, monkeypatch, start, end):
    monkeypatch.setattr(process, "GRACE_S", 0.2)
    file = tmp_path / "started"
    waits = "while not os.path.getsize(sys.argv[1]):\n    time.sleep(0.01)"
    program = "\n".join([BEGIN, STARTS[start], waits, ENDS[end]])

    async def play():
        environment = {"PATH": os.environ["PATH"]}
        running = asyncio.ensure_future(process.run([sys.executable, "-c", program, str(file)], tmp_path, environment))
        if end != "hangs":
            return (await asyncio.wait_for(running, 60)).code
        while not file.exists() or not file.read_text().endswith(" "):
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    assert asyncio.run(play()) == {"ends": 0, "fails": 3, "hangs": None}[end]
    started = [int(word) for word in file.read_text().split()]
    assert started
    until = time.monotonic() + 5.0  # what was killed takes a moment to go
    while any(map(is_alive, started)):
        assert time.monotonic() < until
        time.sleep(0.01)
