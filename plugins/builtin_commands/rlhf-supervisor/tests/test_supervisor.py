"""A program that is supervised: what begins it again, what ends it, and who ends with whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rlhf_supervisor import supervised

from rlhf_host import UserError

PROGRAM = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from rlhf_supervisor import processes, supervisor

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background
processes.GRACE_S = 0.3
supervisor.FIRST_S, supervisor.LOOK_S = 0.05, 0.01
run = Path(sys.argv[1])
resume = supervisor.supervised(run, restarts=int(sys.argv[2]))

def note(about):
    (run / "config.yaml").touch()
    (run / "new.json").write_text(json.dumps(about))
    (run / "new.json").replace(run / "run.json")

def step(number):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": number}) + chr(10))

def save(number):
    (run / f"checkpoints/step-{number:06d}").mkdir(parents=True)

def fail(number, error):
    note(begun | {"status": "failed", "step": number, "error": error, "ended": time.time()})
    sys.exit(1)

with (run / "attempts").open("a") as file:
    print(resume, file=file)
attempt = len((run / "attempts").read_text().splitlines())
begun = {"status": "running", "resumed_after": [1] if attempt > 3 else []}
note(begun)
exec(sys.argv[3])
"""


@pytest.fixture
def begin(tmp_path) -> Callable[..., subprocess.Popen[str]]:
    """Begins the program, whose supervised part is ``body``, for the run ``run``."""

    def start(body: str, restarts: int = 5, stderr: object = subprocess.PIPE) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, "run", str(restarts), body]
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        return subprocess.Popen(command, cwd=tmp_path, stderr=stderr, text=True, env=buffered)  # type: ignore[call-overload]

    return start


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def attempts(run: Path) -> list[str]:
    return (run / "attempts").read_text().splitlines()


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_goes_on_from_the_newest_checkpoint_and_says_what_died(begin, tmp_path):
    body = """
if attempt == 1:
    step(1); step(2)
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == 2:
    step(1); save(1); step(2); step(3)
    os.kill(os.getpid(), signal.SIGSEGV)
if attempt == 3:  # which found the checkpoint damaged
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == 4:
    fail(3, "no room left in 4096 bytes")
"""
    code, said = ended(begin(body))
    assert code == 0
    assert attempts(tmp_path / "run") == ["None", "run", "run", "run", "run"]
    lines = [line.partition(": ")[2] for line in said.splitlines()]
    assert [line.partition("SIGKILL")[0] for line in lines if "SIGKILL" in line] == [
        "The run died after step 2: it was killed by ",
        "The run died after step 3: it was killed by ",
    ]
    assert lines[0].endswith("It has no checkpoint, begins anew, does steps 1 to 2 again, in 0.05 s (restart 1 of 5).")
    assert "it was ended by SIGSEGV. It goes on from the checkpoint of step 1, does steps 2 to 3 again" in lines[1]
    # A checkpoint is progress: after it the wait is short again, and doubles without one.
    assert [line.rpartition(" in ")[2].partition(" s ")[0] for line in lines if " in 0" in line] == [
        "0.05",
        "0.05",
        "0.1",
        "0.2",
    ]
    way = "It has no checkpoint, begins anew, does steps 1 to 3 again."
    assert lines[2] == f"The checkpoint of step 1 could not be used, as it says above. {way}"
    assert "after step 3: no room left in 4096 bytes. It goes on" in lines[4]


@pytest.mark.parametrize("body", ["sys.exit(0)", "sys.exit(2)", "sys.exit(130)", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_success_bad_settings_and_an_end_that_somebody_asked_for_are_not_retried(begin, tmp_path, body):
    code, said = ended(begin(body))
    assert code == {"sys.exit(0)": 0, "sys.exit(2)": 2, "sys.exit(130)": 130}.get(body, 143)
    assert said == ""
    assert attempts(tmp_path / "run") == ["None"]


def test_the_same_error_at_the_same_step_twice_ends_it(begin, tmp_path):
    code, said = ended(begin("step(7); fail(7, f'process {os.getpid()} ran out of {attempt}.5 GiB')"))
    assert code == 1
    assert len(attempts(tmp_path / "run")) == 2
    *_, last, command = said.splitlines()
    assert "The run died after step 7: process " in last
    assert last.endswith("It was the same error at the same step as before, so the run ends. Continue with:")
    assert command.endswith("rlhf train --resume run")


def test_it_begins_again_so_often(begin, tmp_path):
    code, said = ended(begin("step(attempt); save(attempt); os.kill(os.getpid(), signal.SIGKILL)", restarts=2))
    assert code == 137
    assert len(attempts(tmp_path / "run")) == 3
    assert "It had all its restarts (--max-restarts 2), so it ends." in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_goes_to_the_run_which_ends_with_a_checkpoint(begin, tmp_path, number):
    body = """
def end(number, frame):
    save(4)
    (run / "got").write_text(signal.Signals(number).name)
    sys.exit(130)
signal.signal(signal.SIGTERM, end), signal.signal(signal.SIGINT, end)
(run / "ready").touch()
time.sleep(60)
"""
    process = begin(body)
    until((tmp_path / "run/ready").exists)
    process.send_signal(number)
    code, said = ended(process)
    assert code == 130
    assert (tmp_path / "run/got").read_text() == ("SIGINT" if number == signal.SIGINT else "SIGTERM")
    assert f"{number.name}: the checkpoint of step 4 was written 0." in said
    assert len(attempts(tmp_path / "run")) == 1


def test_a_run_ends_with_its_supervisor_and_one_supervisor_has_a_run(begin, tmp_path):
    body = """
signal.signal(signal.SIGTERM, lambda *_: (save(4), sys.exit(130)))
(run / "pid").write_text(str(os.getpid()))
(run / "ready").touch()
time.sleep(60)
"""
    process = begin(body)
    until((tmp_path / "run/ready").exists)
    code, said = ended(begin(body))
    assert code == 1
    assert "run is kept running by another process with --max-restarts: wait for it or stop it" in said
    process.kill()
    process.communicate()
    number = int((tmp_path / "run/pid").read_text())
    until(lambda: not Path(f"/proc/{number}").exists())
    assert (tmp_path / "run/checkpoints/step-000004").is_dir()
    assert ended(begin("assert resume == run"))[0] == 0


def test_what_a_dead_run_has_left_ends_before_the_next_begins(begin, tmp_path):
    """Also what has a session of its own and was left by its parent; what others run stays."""
    body = """
if attempt == 1:
    subprocess.Popen([sys.executable, "-c", "import subprocess; print(subprocess.Popen(['sleep', '300']).pid)"],
                     stdout=(run / "left").open("w"), start_new_session=True).wait()
    os.kill(os.getpid(), signal.SIGKILL)
left = int((run / "left").read_text())
assert not Path(f"/proc/{left}").exists()
"""
    other = subprocess.Popen(["sleep", "300"])
    code, said = ended(begin(body))
    assert code == 0, said
    assert "1 processes of it were still there, and were killed." in said
    assert other.poll() is None
    other.kill()
    other.wait()


def test_what_the_program_had_started_before_is_not_of_the_run(tmp_path):
    """Neither are what that starts later and its exit code; an orphan of the run is let go of while the run goes on."""
    before = """
import subprocess, sys
ended = subprocess.Popen(["sh", "-c", "exit 7"])
server = subprocess.Popen(["sh", "-c", "sleep 0.1; sleep 300; true"], start_new_session=True)
"""
    body = """
subprocess.run(["sh", "-c", "sleep 0.02 & echo $!"], stdout=(run / "orphan").open("w"))
orphan = int((run / "orphan").read_text())
deadline = time.monotonic() + 30
while Path(f"/proc/{orphan}").exists():
    assert time.monotonic() < deadline
    time.sleep(0.01)
if attempt == 1:
    time.sleep(0.15)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    after = """
except SystemExit:
    print(ended.wait(), server.poll())
    os.killpg(server.pid, 9)
    raise

def note"""
    program = before + PROGRAM.replace("resume = ", "try:\n    resume = ", 1).replace("\ndef note", after, 1)
    command = [sys.executable, "-c", program, "run", "1", body]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "7 None\n"), done.stderr
    assert "were killed" not in done.stderr
    assert len(attempts(tmp_path / "run")) == 2


def test_a_full_disk_under_its_messages_ends_no_run(begin, tmp_path):
    with Path("/dev/full").open("w") as full:
        process = begin("if attempt == 1: os.kill(os.getpid(), signal.SIGKILL)", stderr=full)
        assert process.wait(60) == 0
    assert len(attempts(tmp_path / "run")) == 2


def test_a_run_that_is_stopped_is_named(begin, tmp_path):
    process = begin("(run / 'pid').write_text(str(os.getpid())); time.sleep(0.4)")
    until(lambda: (tmp_path / "run/pid").exists() and (tmp_path / "run/pid").read_text())
    number = int((tmp_path / "run/pid").read_text())
    os.kill(number, signal.SIGSTOP)
    time.sleep(0.1)
    os.kill(number, signal.SIGCONT)
    code, said = ended(process)
    assert code == 0
    assert f"The run is stopped (SIGSTOP) and waits: kill -CONT {number} lets it go on." in said
    assert "The run goes on." in said


def test_a_program_with_threads_is_refused(tmp_path):
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="busy")
    thread.start()
    try:
        with pytest.raises(UserError, match=r"from the beginning of a program: this one has threads already \(.*busy"):
            supervised(tmp_path / "run", restarts=1)
    finally:
        done.set()
        thread.join()
    assert not (tmp_path / "run").exists()
