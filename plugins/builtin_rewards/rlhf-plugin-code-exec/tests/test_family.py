"""Processes as the jail counts them."""

import os
import subprocess
import sys

import pytest
from rlhf_plugin_code_exec.jail import family

PARENT = "import subprocess, sys, threading, time\nfor _ in range(2):\n"
PARENT += "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
PARENT += "child = subprocess.Popen(['sleep', '60'])\nprint(child.pid, flush=True)\nsys.stdin.read()\nchild.kill()"


@pytest.mark.parametrize("listed", [True, False], ids=["the kernel lists them", "it does not"])
def test_children_and_their_threads_and_memory(monkeypatch, listed):
    monkeypatch.setattr(family, "LISTED", listed and family.LISTED)
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        child = int(parent.stdout.readline())
        assert parent.pid in family.children(os.getpid())
        assert family.children(parent.pid) == [child]
        assert family.descendants([parent.pid]) == [parent.pid, child]
        assert family.threads([parent.pid, child]) == 4
        assert 1 << 20 < family.memory([parent.pid, child]) < 1 << 30
    finally:
        parent.communicate("")
    assert family.children(parent.pid) == []
    assert (family.threads([parent.pid]), family.memory([parent.pid])) == (0, 0)
