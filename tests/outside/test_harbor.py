"""Tasks in directories as the real ``harbor`` makes and reads them. ``make test-harbor`` sets it up."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest
from rlhf_plugin_shell import ShellAgent
from rlhf_plugin_shell.check import check
from rlhf_plugin_shell.directory import TOP, USED, solution_in, work_in

BIN = Path(__file__).parents[2] / "build/harbor/bin"
pytestmark = [
    pytest.mark.skipif(not (BIN / "harbor").exists(), reason="needs harbor: make test-harbor"),
    pytest.mark.timeout(300),
]
FIELDS = """
import json
from harbor.models.task import config
from harbor.models.task.paths import TaskPaths
from harbor.models.trial.paths import EnvironmentPaths
parts = {"verifier": config.VerifierConfig, "agent": config.AgentConfig, "environment": config.EnvironmentConfig,
         "solution": config.SolutionConfig}
paths, inside = TaskPaths("/task"), EnvironmentPaths()
print(json.dumps({
    "top": list(config.TaskConfig.model_fields),
    "version": config.TaskConfig.model_fields["schema_version"].default,
    **{name: list(part.model_fields) for name, part in parts.items()},
    "paths": [str(each) for each in (paths.instruction_path, paths.config_path, paths.environment_dir, paths.solve_path,
              paths.test_path, paths.trajectory_path)],
    "inside": [str(each) for each in (inside.tests_dir, inside.solution_dir, inside.reward_text_path, inside.reward_json_path)],
}))
"""
READ = """
import json, sys
from harbor.models.task.task import Task
config = Task(sys.argv[1]).config
print(json.dumps(config.model_dump(mode="json")))
"""
REFUSED = {
    "top": {"multi_step_reward_strategy", "steps", "artifacts"},
    "verifier": {"allowed_hosts", "user", "environment", "collect"},
    "agent": {"allowed_hosts", "user"},
    "environment": {"allowed_hosts", "gpus", "gpu_types", "tpu", "mcp_servers", "skills_dir", "healthcheck"},
    "solution": set(),
}
"""Fields that are refused by name; a new one of harbor's is refused too, and this test tells of it."""
HEAD = "FROM ubuntu:24.04\nWORKDIR /app\nCOPY words.txt .\n"


def told(code, *arguments):
    out = subprocess.run([BIN / "python", "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1])


def test_each_field_of_the_format_is_used_or_refused():
    fields = told(FIELDS)
    assert fields["version"].startswith("1.")
    assert set(fields["top"]) - set(TOP) == REFUSED["top"]
    for name, used in USED.items():
        assert set(fields[name]) - set(used) == REFUSED[name]
    names = ("instruction.md", "task.toml", "environment", "solution/solve.sh", "tests/test.sh", "trajectory.json")
    assert fields["paths"] == [f"/task/{name}" for name in names]
    assert fields["inside"] == ["/tests", "/solution", "/logs/verifier/reward.txt", "/logs/verifier/reward.json"]


@pytest.fixture
def made(tmp_path):
    """A task that ``harbor init`` made, with contents."""
    command = ["init", "rlhf/words", "--task", "--no-pytest", "--verifier-mode", "shared", "--include-standard-metadata"]
    subprocess.run([BIN / "harbor", *command, "-o", tmp_path], check=True, capture_output=True, stdin=subprocess.DEVNULL)
    folder = tmp_path / "words"
    (folder / "instruction.md").write_text("Count the words of words.txt into /app/count.")
    (folder / "environment/Dockerfile").write_text(HEAD)
    (folder / "environment/words.txt").write_text("one two three")
    test = '#!/bin/bash\n[ "$(cat count)" = 3 ]\necho $((1 - $?)) > /logs/verifier/reward.txt\n'
    (folder / "tests/test.sh").write_text(test)
    (folder / "solution/solve.sh").write_text("#!/bin/bash\nwc -w < words.txt > /app/count\n")
    return folder


def test_a_task_that_harbor_made_is_played(made, capsys):
    read = told(READ, str(made))
    work = work_in(made, "plain")
    assert (work.seconds, work.tests_s) == (read["agent"]["timeout_sec"], read["verifier"]["timeout_sec"])
    assert work.setup_s == read["environment"]["build_timeout_sec"]
    assert (work.cpus, work.memory_mb, work.disk_mb) == tuple(
        read["environment"][name] for name in ("cpus", "memory_mb", "storage_mb")
    )
    assert set(solution_in(made)[0]) == {"solve.sh"}
    assert asyncio.run(check(str(made), "plain", ShellAgent(ShellAgent.Options()))) == 0
    assert capsys.readouterr().out == "words: good\n"


def test_harbor_accepts_what_is_read_here(made):
    old = 'version = "1.0"\n[verifier]\ntimeout_sec = 9.0\n[environment]\nmemory = "2G"\nstorage = "10G"\ncpus = 2\n'
    (made / "task.toml").write_text(old)
    read, work = told(READ, str(made))["environment"], work_in(made, "plain")
    assert (work.memory_mb, work.disk_mb, work.cpus) == (read["memory_mb"], read["storage_mb"], read["cpus"])
    (made / "task.toml").write_text(old + "workdir = '/app/in'\n[agent]\ntimeout_sec = 1.5\n[solution]\nenv = {C = 'd'}\n")
    (made / "environment/Dockerfile").write_text("FROM ubuntu:24.04\nWORKDIR /app\n")
    read, work = told(READ, str(made)), work_in(made, "plain")
    assert (work.folder, work.seconds) == (read["environment"]["workdir"], read["agent"]["timeout_sec"])
    assert solution_in(made)[1] == read["solution"]["env"]
