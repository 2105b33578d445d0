"""Work in a process of its own ends with the process that asked for it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlhf_authoring.child import answers

PATIENCE_S = 20.0
ASK = """
import time
from rlhf_authoring.child import answers
work = answers("test_child:hang", {}, 60)
print(next(work), flush=True)
time.sleep(600)
"""


def hang(job):
    """Has a child of its own."""
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield [os.getpid(), grandchild.pid]
    time.sleep(600)


def reads(job):
    yield sys.stdin.read()


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind(number):
    asks = subprocess.Popen([sys.executable, "-c", ASK], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)
    assert asks.stdout is not None
    pids = [int(word.strip("[],")) for word in asks.stdout.readline().split()]
    assert all(map(lives, pids))
    os.kill(asks.pid, number)
    asks.wait(PATIENCE_S)
    end = time.monotonic() + PATIENCE_S
    while any(map(lives, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(lives, pids))


def test_the_work_reads_nothing():
    assert next(answers(f"{__name__}:reads", {}, PATIENCE_S)) == ""
