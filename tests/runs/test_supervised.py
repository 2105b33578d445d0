"""``--max-restarts``: a run whose process is killed goes on by itself, with the values of one that was left alone."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

DEADLY = '''
import os, signal, threading
from pathlib import Path

calls, one = 0, threading.Lock()

def deadly(completions):
    """Kills its process where a file says so, or fails there each time."""
    global calls
    plan = Path(__file__).parent / "plan"
    with one:
        calls += 1
        if plan.exists():
            at, what = plan.read_text().split()
            if calls >= int(at) and what == "fail":
                plan.write_text("0 fail")
                raise RuntimeError("no luck")
            if calls == int(at):
                plan.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
    return [sum(letter in "aeiou" for letter in text) / 8 for text in completions]
'''

VARIES = ("time/", "memory/", "tokens_per_s", "tflops")


@pytest.fixture
def deadly(small_run, tmp_path):
    """Flags of a run of six steps whose reward, called four times a step, does what ``plan`` says."""
    (tmp_path / "deadly.py").write_text(DEADLY)
    words = [str(word) for word in small_run]
    words[words.index("--reward") + 1] = f"{tmp_path / 'deadly.py'}:deadly"
    return [*words, "--train.steps", "6", "--checkpoint.every", "2"]


def values(run: Path) -> list[dict]:
    """The rows of its metrics, without what no two runs share."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(VARIES)} for row in rows]


@pytest.mark.parametrize("calls", [1, 14, 24])
def test_a_run_that_is_killed_has_the_values_of_one_that_was_left_alone(rlhf, deadly, tmp_path, calls):
    """Before the first step ends, in the middle, and in the last step."""
    rlhf.run(*deadly, "--run-dir", tmp_path / "whole")
    (tmp_path / "plan").write_text(f"{calls} kill")
    said = rlhf.run(*deadly, "--run-dir", tmp_path / "run", "--max-restarts", "2").stderr
    assert "it was killed by SIGKILL" in said
    assert "(restart 1 of 2)" in said
    assert "has no effect" not in said
    assert values(tmp_path / "run") == values(tmp_path / "whole")
    assert [row["step"] for row in values(tmp_path / "run")] == list(range(1, 7))
    draws = [json.loads(line)["draws"] for line in (tmp_path / "run/ledger.jsonl").read_text().splitlines()]
    numbers = [number for line in draws for number, *_ in line]
    assert numbers == list(range(len(numbers)))


def test_the_same_command_goes_on_after_all_was_killed_and_another_is_refused(rlhf, rlhf_process, deadly, tmp_path):
    run = tmp_path / "run"
    command = [*deadly, "--run-dir", run, "--max-restarts", "2"]
    rlhf.run(*deadly, "--run-dir", tmp_path / "whole")
    process = rlhf_process.start(*command, "--train.steps", "6")
    deadline = time.monotonic() + 200
    while not (run / "checkpoints/step-000002").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    (child,) = _children(process.pid)
    process.kill()
    os.kill(child, signal.SIGKILL)
    process.communicate()
    other = rlhf.run(*command, "--actor.lr", "1e-4", code=2).stderr
    assert "has a run, not as in the run so far: roles.actor.lr 0.001 → 0.0001: choose another --run-dir, or " in other
    rlhf.run(*command[:-1], "7")
    assert values(run) == values(tmp_path / "whole")
    assert "is finished at step 6" in rlhf.run(*command, code=2).stderr


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_the_same_error_of_a_reward_that_is_not_killed_twice_ends_it(rlhf, deadly, tmp_path):
    (tmp_path / "plan").write_text("10 fail")
    said = rlhf.run(*deadly, "--run-dir", tmp_path / "run", "--max-restarts", "9", "--rollout.max-unjudged", "0", code=1).stderr
    last = [line for line in said.splitlines() if line.startswith("Supervisor")][-1]
    assert "The run died after step 2: " in last
    assert "RuntimeError: no luck" in last
    assert "It was the same error at the same step as before, so the run ends. Continue with:" in last


def test_bad_settings_are_refused_at_once(rlhf, deadly, tmp_path):
    said = rlhf.run(*deadly, "--run-dir", tmp_path / "run", "--max-restarts", "9", "--actor.model", "nowhere", code=2).stderr
    assert "Supervisor" not in said
    assert not (tmp_path / "run").exists()


def test_without_the_package_it_says_what_to_install(site):
    done = site.rlhf("train", "--max-restarts", "1", RLHF_DISABLE_PLUGINS="rlhf-supervisor:supervised")
    assert done.returncode == 2
    assert "max_restarts needs another package: pip install " in done.stderr
