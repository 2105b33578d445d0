"""Judges of answers in these tests."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import rlhf_plugin_code_exec
from rlhf_plugin_code_exec import CodeExec

import rlhf_host
from rlhf_host import Segment, Task, Trajectory

collect_ignore_glob = [] if sys.platform == "linux" else ["test_*.py"]  # contained by system calls of Linux


def trajectory(answer, label=None, prompt="p", **metadata):
    segments = [Segment("prompt", [0]), Segment("action", [1])]
    return Trajectory("e", "g", Task(prompt, label, metadata), segments, decode=lambda ids: answer)


@pytest.fixture(scope="session")
def score():
    """Scores answers to one task each with a reward."""

    def run(reward, trajectories):
        reward.runner._free = None  # of another loop
        return asyncio.run(reward.score(trajectories, None))

    return run


@pytest.fixture(scope="session")
def judge(score):
    """The reward of one answer: ``judge(answer, label, **columns)``."""
    reward = CodeExec(CodeExec.Options(timeout_s=5.0))
    return lambda *args, **metadata: score(reward, [trajectory(*args, **metadata)])[0]


@pytest.fixture(scope="session")
def runner():
    """Returns what runs programs at a level, with options."""

    def made(level, **options):
        runner = CodeExec(CodeExec.Options(**{"timeout_s": 3.0, **options})).runner
        runner.level = level
        return runner

    return made


NAMESPACES = "from rlhf_plugin_code_exec.jail.kernel import *; unshare(NEWUSER | NEWNET | NEWPID | NEWNS | NEWIPC | NEWUTS)"


@pytest.fixture(scope="session")
def needs_level():
    """Skips a test of a level that this machine does not have; a jail that fails where it has it is no reason to skip."""
    allowed = subprocess.run([sys.executable, "-c", NAMESPACES], capture_output=True, text=True, check=False)

    def needs(level):
        if level == "A" and allowed.returncode != 0:
            pytest.skip(f"this machine has no level A: {allowed.stderr[-200:]}")

    return needs


@pytest.fixture(scope="session")
def at_level(needs_level):
    """Returns what a coroutine gives, where the machine has that level."""

    def result(level, work):
        try:
            needs_level(level)
        except BaseException:
            work.close()
            raise
        return asyncio.run(work)

    return result


@pytest.fixture
def place(monkeypatch, tmp_path_factory):
    """Makes a place for folders of programs, in this test alone; contained programs of other users reach it."""
    tmp_path_factory.getbasetemp()  # pytest's own place is not in it
    folder = Path(tempfile.mkdtemp(prefix="rlhf-test-"))
    folder.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def packages():
    """A ``PYTHONPATH`` with the host, this plugin and what they need."""
    ours = [str(Path(module.__file__).parents[1]) for module in (rlhf_host, rlhf_plugin_code_exec)]
    return os.pathsep.join([*ours, *(path for path in sys.path if path.endswith("-packages"))])


@pytest.fixture(scope="session")
def anyone_s_python(packages):
    """An interpreter of this version that users reach, and that has what the host needs."""
    nobody = 65534
    python = shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin")
    version = "import sys, pydantic; print(*sys.version_info[:2])"
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": packages}
    demoted = {"user": nobody, "group": nobody, "extra_groups": []}
    told = (
        python and subprocess.run([python, "-c", version], capture_output=True, text=True, env=env, cwd="/", **demoted).stdout
    )
    if told != f"{sys.version_info[0]} {sys.version_info[1]}\n":
        pytest.skip("needs an interpreter of this version, and this environment, that other users can reach")
    return python
