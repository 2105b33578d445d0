"""Limits of programs: at both levels, as root and, where the tests run as root, as a user that is not."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlhf_authoring import reward_contract
from rlhf_plugin_code_exec import CodeExec, attacks, checks
from rlhf_plugin_code_exec.runner import Runner
from rlhf_plugin_code_exec.suites import suite_of

import rlhf_host
from rlhf_host import Segment, Task, Trajectory, Unjudged, UserError

ADD = "def add(a, b):\n    return a + b\n"
NOBODY = 65534

TestContract = reward_contract(
    "code_exec",
    options={"timeout_s": 2.0},
    tasks=[Task("Add", "assert add(1, 2) == 3")],
    texts=(ADD, "def add(a, b): return a"),
)


def programs(place):
    """Processes that work in folders of programs."""
    running = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and os.readlink(process / "cwd").startswith(f"{place}/rlhf-code-"):
                running.append(process.name)
    return running


def left_behind(place):
    escaped = [name for name in os.listdir("/tmp") if name.startswith("rlhf-escaped-")]
    return programs(place), os.listdir(place), escaped


NOTHING = [], [], []


@pytest.mark.parametrize("level", ["A", "B"])
def test_no_attack_gets_out(level, place, runner, at_level):
    assert at_level(level, checks.escapes(runner(level))) == []
    assert left_behind(place) == NOTHING


AS_NOBODY = """
import asyncio, os, sys
os.setgroups([])
os.setresgid({user}, {user}, {user})
os.setresuid({user}, {user}, {user})
from rlhf_plugin_code_exec import CodeExec, checks
from rlhf_plugin_code_exec.runner import JailFailed
runner = CodeExec(CodeExec.Options(timeout_s=3.0, python={python!r})).runner
runner.level = {level!r}
try:
    print(asyncio.run(checks.escapes(runner)))
except JailFailed as failure:
    print("no level", failure)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="the other tests are those of a user")
@pytest.mark.parametrize("level", ["A", "B"])
def test_no_attack_gets_out_of_a_user_that_is_not_root(level, place, anyone_s_python, packages):
    place.chmod(0o777)
    code = AS_NOBODY.format(user=NOBODY, level=level, python=anyone_s_python)
    env = {
        "PATH": "/usr/bin:/bin",
        "TMPDIR": str(place),
        "PYTHONPATH": packages,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    out = subprocess.run([anyone_s_python, "-c", code], capture_output=True, text=True, env=env, cwd=place, timeout=120)
    if out.stdout.startswith("no level"):
        pytest.skip(out.stdout)
    assert out.stdout == "[]\n", out.stdout + out.stderr
    assert left_behind(place) == NOTHING


@pytest.mark.parametrize(
    "name",
    [
        *("reads /etc/passwd", "lists the file system", "lists the folders of programs", "writes outside", "moves a file"),
        *("opens a socket", "opens a raw UNIX socket", "sends to a UNIX socket", "limits another process", "slows another"),
        *("signals as a file's owner", "locks files", "takes a lease", "cuts a file while it reads", "makes a file in memory"),
        *("makes a file without a name", "watches files", "brings a filter", "forks into a namespace", "stops another"),
        *("changes modes", "changes a folder's mode", "changes modes by a link", "changes modes by a descriptor"),
        *("changes times", "changes times to now", "changes owners", "changes attributes"),
    ],
)
def test_uncontained_the_same_attacks_succeed(name, monkeypatch, runner):
    """Those that do no harm: so a test that finds nothing has looked."""
    table = "TRIES" if name in attacks.TRIES else "QUIET"
    for each in ("TRIES", "QUIET"):
        monkeypatch.setattr(checks, each, {name: getattr(attacks, each)[name]} if each == table else {})
    monkeypatch.setattr(checks, "ATTACKS", {})
    made: Runner = runner("none")
    found = asyncio.run(checks.escapes(made))
    assert name in found or any(each.startswith("a change outside") for each in found)


@pytest.mark.parametrize("level", ["A", "B"])
def test_limits_are_those_of_a_program_and_not_of_each_of_its_objects(level, runner, at_level):
    """Memory, bytes and number of files, processes, threads: what several of them have together."""

    def told(name):
        return at_level(level, runner(level, timeout_s=30.0).tests(attacks.ATTACKS[name], checks.WANTED))["results"][0]

    assert told("fills memory in many processes")["why"] == "memory"
    for name in ("fills the disk with many files", "fills the disk with files that have no name", "makes many files"):
        assert json.loads(told(name)["verdict"])["passed"] == 1, name
    for name in ("forks without end", "forks in its children", "starts many threads", "fills memory that it shares"):
        assert json.loads(told(name)["verdict"])["passed"] == 1, name


def test_hostile_programs_in_a_row_leave_nothing_behind(place, runner):
    agent = runner("A")
    codes = [attacks.ATTACKS[name] for name in ("forks without end", "fills memory", "leaves a daemon", "ends itself early")]

    async def run():
        for number in range(24):
            await agent.tests(codes[number % 4].replace("{daemon!r}", "'/tmp/rlhf-escaped-x'"), suite_of("", "f()"))

    asyncio.run(run())
    assert left_behind(place) == NOTHING


@pytest.mark.parametrize("level", ["A", "B"])
@pytest.mark.parametrize(
    "code",
    [
        "import threading\ndef f():\n    t = threading.Thread(target=print)\n    t.start()\n    t.join()\n    return 1",
        "import concurrent.futures as c\ndef f():\n    with c.ThreadPoolExecutor(2) as pool: return sum(pool.map(int, '01'))",
        "from multiprocessing.pool import ThreadPool\ndef f():\n    with ThreadPool(4) as pool: return sum(pool.map(int, '01'))",
        "from multiprocessing import Pool\ndef f():\n    with Pool(2) as pool: return sum(pool.map(int, '01'))",
        "import asyncio\nasync def one():\n    await asyncio.sleep(0)\n    return 1\ndef f(): return asyncio.run(one())",
        "import resource as r\ndef f():\n    r.setrlimit(r.RLIMIT_STACK, r.getrlimit(r.RLIMIT_STACK))\n    return 1",
        "import subprocess as s, sys\ndef f(): return int(s.run([sys.executable, '-ISc', 'print(1)'], stdout=s.PIPE).stdout)",
        "import shutil, os\ndef f():\n    open('a', 'w').write('1')\n    shutil.copy2('a', 'b')\n    os.mkdir('d')\n"
        "    shutil.copytree('d', 'e')\n    shutil.rmtree('d')\n    os.rename('b', 'c')\n    return int(open('c').read())",
    ],
    ids=["thread", "pool", "pool of multiprocessing", "processes", "asyncio", "limits", "process", "files"],
)
def test_honest_programs_work_contained(code, level, runner, at_level):
    told = at_level(level, runner(level).tests(code, suite_of("", "assert f() == 1")))
    assert json.loads(told["results"][0]["verdict"]) == {"passed": 1, "of": 1}


@pytest.mark.parametrize("level", ["A", "B"])
def test_signals_do_in_a_program_what_they_do_anywhere(level, runner, at_level):
    """Also where the run is in the background, and ignores some."""
    code = "import signal\ndef f(): return [signal.getsignal(n) is signal.SIG_IGN for n in (1, 2, 3, 15)]"
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        told = at_level(level, runner(level).tests(code, suite_of("", "assert f() == [False, False, False, False]")))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert json.loads(told["results"][0]["verdict"]) == {"passed": 1, "of": 1}


SLEEPS = "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(300)"
RUN = """
import asyncio, signal, sys
from rlhf_plugin_code_exec import CodeExec
from rlhf_plugin_code_exec.forms import Programs
made = CodeExec(CodeExec.Options(timeout_s=300)).runner
made.level = sys.argv[1]
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
asyncio.run(made.tests(sys.argv[2], Programs([""], [""])))
"""


def wait_for(what):
    until = time.monotonic() + 30
    while not (told := what()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return told


@pytest.mark.parametrize("level", ["A", "B"])
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_ends_takes_its_programs_and_their_folders_with_it(level, end, place):
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, level, SLEEPS], env={**os.environ, "TMPDIR": str(place)}, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: len(programs(place)) >= 3 or run.poll() is not None)
        run.send_signal(end)
        run.wait(30)
    finally:
        run.kill()
    wait_for(lambda: not programs(place))
    wait_for(lambda: not any(os.listdir(folder) for folder in place.iterdir()))
    assert end == signal.SIGKILL or not os.listdir(place)


def test_a_job_that_nobody_wants_any_more_leaves_nothing(place, runner):
    async def run():
        job = asyncio.create_task(runner("B", cpus=1)._job({"code": SLEEPS, "inputs": [""], "first_only": True}, 100.0))
        while not programs(place):
            await asyncio.sleep(0.05)
        job.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await job

    asyncio.run(run())
    assert left_behind(place) == NOTHING


def test_folders_of_dead_runs_go_and_those_of_others_stay(place, runner):
    dead, young = place / "rlhf-code-4000000-x", place / "rlhf-code-y"
    for folder in (dead, young):
        folder.mkdir()
    os.utime(dead, (1, 1))
    asyncio.run(runner("B").tests(ADD, suite_of("", "add(1, 2)")))
    assert os.listdir(place) == ["rlhf-code-y"]


def test_a_machine_that_cannot_contain_is_refused_unless_it_is_trusted(judge):
    broken = CodeExec(CodeExec.Options(python="/nowhere/python"))
    with pytest.raises(UserError, match=r"cannot contain programs on this machine: .*No such file"):
        asyncio.run(broken.check())
    broken._checked = True
    row = Trajectory("e", "g", Task("p", "f()"), [Segment("prompt", [0]), Segment("action", [1])], decode=lambda ids: "x")
    [told] = asyncio.run(broken.score([row], None))
    assert isinstance(told, Unjudged)
    assert "the jail: " in told.reason
    trusting = CodeExec(CodeExec.Options(python="/nowhere/python", trust=True))
    assert asyncio.run(trusting.check()) == "none"


def test_two_steps_of_training(tmp_path):
    pytest.importorskip("rlhf_plugin_rloo", reason="a whole run needs an algorithm")
    settings = {"rollout.n": 4, "train.batch_size": 2, "train.steps": 2, "train.threads": 1, "rollout.max_new_tokens": 4}
    data = [{"prompt": f"{n}+{n}=", "label": {"inputs": [""], "outputs": [""]}} for n in range(1, 5)]
    made = {"model": "quickstart", "data": data, "run_dir": str(tmp_path / "run")}
    rlhf_host.train(algo="rloo", rewards="code_exec", **made, **settings)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["reward/max"] for row in rows] == [1.0, 1.0], "a number is a program that writes nothing"
    assert {"code/timeouts", "code/errors", "code/wrong"} <= set(rows[0])
