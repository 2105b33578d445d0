"""Tasks in directories: what of them is used, what is refused by name, and that their own solutions are right."""

import asyncio
import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from rlhf_authoring import tasks_contract
from rlhf_authoring.learner import Learner
from rlhf_plugin_shell import HarborTasks, ShellAgent
from rlhf_plugin_shell.check import check
from rlhf_plugin_shell.directory import solution_in, work_in
from rlhf_plugin_shell.dockerfile import Unsupported, read_dockerfile

import rlhf_host
from rlhf_host import EpisodeFailed, UserError

TOML = """
schema_version = "1.4"
[task]
name = "rlhf/hello"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 20.0
env = {EXPECTED = "Hello"}
[agent]
timeout_sec = 30.0
[environment]
build_timeout_sec = 60.0
cpus = 1
memory_mb = 512
storage_mb = 100
env = {WHO = "world"}
[solution]
env = {GREETING = "Hello"}
"""
DOCKERFILE = """
# a comment
FROM ubuntu:24.04 AS main
LABEL a=b
WORKDIR /app
ENV NAME=hello.txt \\
    MORE="two words"
COPY data ./data
COPY a.txt b.txt /app/
CMD ["bash"]
"""
TEST = """#!/bin/bash
# CTRF and the like go to the same folder
ls /tests > /logs/verifier/listing.txt
if [ "$(cat /app/$NAME)" = "$EXPECTED, $WHO" ] && bash /tests/more/inner.sh; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0.5 > /logs/verifier/reward.txt
  [ -e "/app/$NAME" ] || echo 0 > /logs/verifier/reward.txt
fi
"""
SOLVE = '#!/bin/bash\necho "$GREETING, $WHO" > /app/$NAME\n'
FILES = {
    "instruction.md": "Write a greeting to /app/hello.txt.\n",
    "task.toml": TOML,
    "environment/Dockerfile": DOCKERFILE,
    "environment/data/x/y.txt": "y",
    "environment/a.txt": "a",
    "environment/b.txt": "b",
    "tests/test.sh": TEST,
    "tests/more/inner.sh": "test -e /app/data/x/y.txt && test -e /app/b.txt && test ! -e /solution",
    "solution/solve.sh": SOLVE,
}


def write(folder, **changed):
    """Writes the task with some files changed; the names have ``__`` for ``/``. ``None``: without the file."""
    files = FILES | {name.replace("__", "/").replace("_toml", ".toml"): text for name, text in changed.items()}
    for name, text in files.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def settings(old, new):
    assert old in TOML
    return TOML.replace(old, new)


@pytest.fixture
def hello(tmp_path):
    return write(tmp_path / "tasks/hello")


def test_what_a_task_brings(hello):
    work = work_in(hello, "plain")
    assert {name: file.content for name, file in work.files.items()} == {"data/x/y.txt": b"y", "a.txt": b"a", "b.txt": b"b"}
    assert set(work.tests) == {"test.sh", "more/inner.sh"}
    assert (work.folder, work.setup, work.only_reported) == ("/app", "", True)
    assert work.variables == {"NAME": "hello.txt", "MORE": "two words", "WHO": "world"}
    assert work.tests_variables == {"EXPECTED": "Hello"}
    assert (work.seconds, work.tests_s, work.setup_s) == (30.0, 20.0, 60.0)
    assert (work.cpus, work.memory_mb, work.disk_mb) == (1.0, 512, 100)
    files, variables = solution_in(hello)
    assert (set(files), variables) == ({"solve.sh"}, {"GREETING": "Hello"})


def test_older_fields_are_read_too(tmp_path):
    old = 'version = "1.0"\nartifacts = []\n[environment]\nmemory = "2G"\nstorage = "512M"\nworkdir = "/other"\n'
    work = work_in(write(tmp_path, task_toml=old, environment__Dockerfile="FROM debian\nWORKDIR /app"), "plain")
    assert (work.memory_mb, work.disk_mb, work.folder) == (2048, 512, "/other")


CONTRACT = Path(tempfile.mkdtemp(prefix="rlhf-test-harbor-"))
atexit.register(shutil.rmtree, CONTRACT)
write(CONTRACT / "train")
write(CONTRACT / "eval", **{"instruction.md": "Another greeting."})
TestContract = tasks_contract("harbor", {"directory": str(CONTRACT / "train"), "eval_directory": str(CONTRACT / "eval")})
REFUSED = {
    "RUN": (
        {"environment__Dockerfile": "FROM ubuntu\nWORKDIR /app\nRUN apt-get update && \\\n  apt-get install x"},
        "RUN apt-get update",
    ),
    "another image": (
        {"environment__Dockerfile": "FROM python:3.13-slim\nWORKDIR /app"},
        "FROM python:3.13-slim: its programs",
    ),
    "two images": ({"environment__Dockerfile": "FROM ubuntu\nFROM debian"}, "FROM debian: only one image"),
    "ADD": ({"environment__Dockerfile": "FROM ubuntu\nADD x y"}, "Dockerfile: ADD x y"),
    "USER": ({"environment__Dockerfile": "FROM ubuntu\nUSER me"}, "Dockerfile: USER me"),
    "COPY from elsewhere": ({"environment__Dockerfile": "FROM ubuntu\nWORKDIR /app\nCOPY --from=x a b"}, "COPY --from=x a b"),
    "COPY to elsewhere": (
        {"environment__Dockerfile": "FROM ubuntu\nWORKDIR /app\nCOPY a.txt /opt/"},
        "COPY to /opt/, which is not",
    ),
    "COPY of nothing": ({"environment__Dockerfile": "FROM ubuntu\nWORKDIR /app\nCOPY c.txt ."}, "COPY c.txt: it is not in"),
    "COPY of others": (
        {"environment__Dockerfile": "FROM ubuntu\nWORKDIR /app\nCOPY ../tests ."},
        "COPY ../tests: it is not in",
    ),
    "COPY of an absolute path": (
        {"environment__Dockerfile": "FROM ubuntu\nWORKDIR /app\nCOPY /etc/passwd ."},
        "COPY /etc/passwd: it is not in environment/",
    ),
    "COPY of nothing to nowhere": ({"environment__Dockerfile": "FROM ubuntu\nCOPY []"}, r"COPY \[\]: only sources"),
    "ENV of nothing": ({"environment__Dockerfile": "FROM ubuntu\nENV"}, "Dockerfile: ENV"),
    "ENV without a name": ({"environment__Dockerfile": "FROM ubuntu\nENV =b"}, "Dockerfile: ENV =b"),
    "a quoted $": ({"environment__Dockerfile": "FROM ubuntu\nENV A=1 B='$A'"}, "a \\$ that may stand for itself"),
    "RUN of nothing": ({"environment__Dockerfile": "FROM ubuntu\nRUN"}, "Dockerfile: RUN"),
    "a quoted folder": ({"environment__Dockerfile": 'FROM ubuntu\nWORKDIR "/app"'}, 'WORKDIR "/app"'),
    "a relative folder": ({"task_toml": settings("cpus = 1", "workdir = 'app'")}, "the working folder is app"),
    "a folder that is a number": ({"task_toml": settings("cpus = 1", "workdir = 5")}, "the working folder is 5"),
    "a folder by a detour": ({"task_toml": settings("cpus = 1", "workdir = '/a/../etc'")}, "the working folder is /a/../etc"),
    "what Docker ignores": ({"environment__.dockerignore": "x"}, "environment/.dockerignore"),
    "a name of a variable": ({"task_toml": settings("WHO", "'W H'")}, "environment.env.W H is no environment variable"),
    "a zero byte": ({"task_toml": settings("world", "\\u0000")}, "environment.env.WHO is no environment variable"),
    "a variable": ({"environment__Dockerfile": "FROM ubuntu\nWORKDIR $X"}, r"\$X: a variable that no ENV sets"),
    "no folder": ({"environment__Dockerfile": "FROM ubuntu"}, "the working folder is none"),
    "the root": ({"environment__Dockerfile": "FROM ubuntu\nWORKDIR /"}, "the working folder is /;"),
    "a folder of the system": ({"environment__Dockerfile": "FROM ubuntu\nWORKDIR /usr/src"}, "the working folder is /usr/src"),
    "no image": ({"environment__Dockerfile": "WORKDIR /app"}, "it has no FROM"),
    "no Dockerfile": ({"environment__Dockerfile": None}, "environment/Dockerfile is missing"),
    "compose": ({"environment__docker-compose.yaml": "x"}, "environment/docker-compose.yaml"),
    "no tests": ({"tests__test.sh": None, "tests__test.bat": "x"}, "tests/test.sh is missing"),
    "ignored files": ({"tests__.harborignore": "x"}, "tests/.harborignore"),
    "earlier turns": ({"trajectory.json": "{}"}, "trajectory.json"),
    "steps": ({"task_toml": TOML + "[[steps]]\nname = 'a'\n"}, "task.toml: steps"),
    "artifacts": ({"task_toml": "artifacts = ['/app']\n" + TOML}, "task.toml: artifacts"),
    "a version": ({"task_toml": settings("1.4", "2.0")}, "schema_version 2.0"),
    "no TOML": ({"task_toml": "["}, "task.toml: "),
    "a user": ({"task_toml": settings("[agent]", "[agent]\nuser = 'me'")}, "agent.user"),
    "a separate verifier": (
        {"task_toml": settings("[verifier]", "[verifier]\nenvironment_mode = 'separate'")},
        "environment_mode separate",
    ),
    "an unknown field": ({"task_toml": settings("[agent]", "[agent]\nmood = 1")}, "agent.mood"),
    "chosen hosts": ({"task_toml": settings("cpus = 1", "network_mode = 'allowlist'")}, "environment.network_mode allowlist"),
    "an image": ({"task_toml": settings("cpus = 1", "docker_image = 'x'")}, "environment.docker_image x"),
    "Windows": ({"task_toml": settings("cpus = 1", "os = 'windows'")}, "environment.os windows"),
    "GPUs": ({"task_toml": settings("cpus = 1", "gpus = 1")}, "environment.gpus"),
    "servers": ({"task_toml": settings("cpus = 1", "mcp_servers = [{name = 'x', url = 'y'}]")}, "environment.mcp_servers"),
    "a variable of yours": (
        {"task_toml": settings('"Hello"}\n[agent]', '"${KEY}"}\n[agent]')},
        r"verifier.env.EXPECTED \$\{KEY\}",
    ),
    "a time": ({"task_toml": settings("30.0", "-1")}, "agent.timeout_sec '-1' is no number from 0.1 to"),
    "a size": ({"task_toml": settings("memory_mb = 512", "memory = 'much'")}, "environment.memory 'much'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name, tmp_path):
    changed, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        work_in(write(tmp_path, **changed), "plain")


def test_links_are_refused(hello):
    (hello / "tests/link").symlink_to("/etc/passwd")
    with pytest.raises(Unsupported, match="tests/link is a link"):
        work_in(hello, "plain")


@pytest.mark.parametrize("name", ["environment/a.txt", "environment/data", "environment/Dockerfile", "tests", "task.toml"])
def test_files_behind_links_are_not_read(name, hello, tmp_path):
    """A task from elsewhere could bring any file of this machine into its prompt or its shell."""
    (hello / name).rename(tmp_path / "moved")
    (hello / name).symlink_to(tmp_path / "moved")
    with pytest.raises(Unsupported, match=f"{name} is a link"):
        work_in(hello, "plain")


def test_an_instruction_is_text_of_the_task(hello, capsys):
    for content, message in ((b"", "is empty"), (b"\xff", "can't decode"), (None, "is a link")):
        if content is None:
            (hello / "instruction.md").unlink()
            (hello / "instruction.md").symlink_to("/etc/passwd")
        else:
            (hello / "instruction.md").write_bytes(content)
        with pytest.raises(UserError, match=message):
            HarborTasks(HarborTasks.Options(directory=str(hello))).load_tasks("train", 0)
        assert asyncio.run(check(str(hello), "plain", ShellAgent(ShellAgent.Options()))) == 1
        assert message in capsys.readouterr().out


HOSTED = """FROM python:3.13-slim
WORKDIR /app
ENV A="it's"
RUN mkdir made && \\
    echo "$A" > made/x
WORKDIR /app/made
RUN pwd >> x
WORKDIR /app
"""


def test_with_host_commands_of_the_image_are_run_in_the_shell(tmp_path, play):
    test = '#!/bin/sh\n[ "$(cat made/x)" = "it\'s\n/app/made" ] && echo 1 > /logs/verifier/reward.txt'
    folder = write(tmp_path / "a", environment__Dockerfile=HOSTED, tests__test_sh=None, **{"tests__test.sh": test})
    [task] = HarborTasks(HarborTasks.Options(directory=str(folder), environment="host")).load_tasks("train", 0)
    assert play(task, ["done"]).reward == 1.0
    (folder / "environment/Dockerfile").write_text(HOSTED + "RUN apt-get install -y cowsay\n")
    with pytest.raises(EpisodeFailed, match="the task's setup: exit code"):
        play(task, ["done"])


def test_an_episode_has_the_paths_of_the_format(hello, play):
    [task] = HarborTasks(HarborTasks.Options(directory=str(hello.parent))).load_tasks("train", 0)
    assert task.prompt == "Write a greeting to /app/hello.txt."
    says = [
        f'<tool_call>\n{{"name": "shell", "arguments": {{"command": "{command}"}}}}\n</tool_call>'
        for command in ("pwd; ls; ls /tests /solution /logs; echo $WHO$EXPECTED", "echo Hello, world > /app/hello.txt")
    ]
    played = play(task, [*says, "done"])
    assert "exit code 0\n/app\na.txt\nb.txt\ndata\n" in played.text
    assert "world\n</tool_response>" in played.text, "variables of the verifier are the verifier's"
    for path in ("/tests", "/solution", "/logs"):
        assert f"cannot access '{path}': No such file" in played.text
    assert played.reward == 1.0
    assert play(task, ["done"]).reward == 0.0
    wrong = play(task, [says[1].replace("Hello", "Goodbye"), "done"])
    assert wrong.reward == 0.5


def test_the_smaller_deadline_counts_and_the_task_s_time_is_that_of_all_commands(tmp_path, play):
    toml = settings("timeout_sec = 30.0", "timeout_sec = 1.5").replace("timeout_sec = 20.0", "timeout_sec = 1")
    test = "#!/bin/sh\nsleep 60; echo 1 > /logs/verifier/reward.txt"
    folder = write(tmp_path, task_toml=toml, **{"tests__test.sh": test})
    [task] = HarborTasks(HarborTasks.Options(directory=str(folder))).load_tasks("train", 0)
    say = '<tool_call>\n{"name": "shell", "arguments": {"command": "sleep 1"}}\n</tool_call>'
    played = play(task, [say, say, say, say])
    assert (played.row.metrics["shell/commands"], played.row.metrics["shell/late"]) == (2, 1)
    assert (played.reward, played.row.metrics["shell/tests_ended"]) == (0.0, 1.0)


def test_solutions_are_right_and_no_work_is_not(tmp_path, hello, capsys):
    tasks = hello.parent
    write(tasks / "wrong", **{"solution__solve.sh": "#!/bin/sh\necho Hi | tee /app/hello.txt; exit 3"})
    write(tasks / "free", **{"tests__test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt"})
    write(tasks / "silent", **{"tests__test.sh": "#!/bin/sh\ntrue"})
    write(tasks / "refused", environment__Dockerfile="FROM alpine\nWORKDIR /app")
    write(tasks / "unsolved", **{"solution__solve.sh": None})
    assert asyncio.run(check(str(tasks), "plain", ShellAgent(ShellAgent.Options()))) == 5
    assert capsys.readouterr().out.splitlines() == [
        "free: no work gets 1",
        "hello: good",
        "refused: not played: Dockerfile: FROM alpine: its programs are not here",
        "silent: its solution gets 0: the tests wrote neither reward.json nor reward.txt",
        "solution: exit code 0",
        "tests: exit code 0",
        "unsolved: not played: solution/solve.sh is missing",
        "wrong: its solution gets 0.5",
        "solution: exit code 3",
        "Hi",
        "tests: exit code 0",
    ]
    for folder, code in (("hello", 0), ("wrong", 1), ("nowhere", 2)):
        command = [sys.executable, "-m", "rlhf_plugin_shell.check", str(tasks / folder)]
        assert subprocess.run(command, capture_output=True, check=False).returncode == code


def test_sources_that_are_none(tmp_path):
    for path, message in ((tmp_path, "no directory in it has a task.toml"), (tmp_path / "x", "there is no such directory")):
        with pytest.raises(UserError, match=message):
            HarborTasks(HarborTasks.Options(directory=str(path))).load_tasks("train", 0)
    write(tmp_path / "a", **{"instruction.md": None})
    with pytest.raises(UserError, match=r"a/instruction\.md"):
        HarborTasks(HarborTasks.Options(directory=str(tmp_path))).load_tasks("train", 0)


def test_refused_tasks_stop_a_run_or_are_left_out(tmp_path, hello, caplog):
    write(hello.parent / "refused", environment__Dockerfile="FROM alpine\nWORKDIR /app")
    settings = {"rollout.n": 2, "train.batch_size": 1, "train.steps": 1, "train.threads": 1, "rollout.max_new_tokens": 4}
    run = {"algo": Learner(), "model": "quickstart", "agent": {"name": "shell", "format": "line", "max_turns": 1}}
    data = {"sources": [{"path": "harbor", "directory": str(hello.parent)}]}
    with pytest.raises(UserError, match=r"1 of 2 tasks of .* cannot be played here: refused: Dockerfile: FROM alpine: its"):
        rlhf_host.train(**run, data=data, run_dir=str(tmp_path / "a"), **settings)
    data["sources"][0]["refused"] = "skip"
    made = rlhf_host.train(**run, data=data, run_dir=str(tmp_path / "b"), **settings)
    assert len(made.metrics) == 1
    assert "left out 1 of 2 tasks" in caplog.text


def pipe(name):
    def change(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def sparse(name):
    return lambda folder: os.truncate(folder / name, 1 << 40)


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def toml(more):
    return text("task.toml", f"{settings('cpus = 1', '')}\n{more}\n")


def dockerfile(more):
    return text("environment/Dockerfile", f"FROM ubuntu\nWORKDIR /app\n{more}\n")


def deep_folders(folder):
    (folder / "tests" / "/".join("d" * 60)).mkdir(parents=True)


ABSURD = {
    **{
        f"a pipe: {name}": (pipe(name), f"{name.removeprefix('environment/')} is no file")
        for name in FILES
        if name != "task.toml"
    },
    **{
        f"an endless file: {name}": (sparse(name), f"{name.removeprefix('environment/')} has 1,099,511,627,776 bytes")
        for name in FILES
    },
    "lists in lists": (toml("[metadata]\nx = " + "[" * 3000 + "]" * 3000), "task.toml: "),
    "tables in tables": (toml("[metadata." + "a." * 20_000 + "b]"), "task.toml: a key of more than 32 parts"),
    "quoted tables": (toml("[metadata." + '"a".' * 9000 + "b]"), "task.toml: a key of more than 32 parts"),
    "lists in tables": (toml("[source]\nx = " + "[{a = " * 20 + "1" + "}]" * 20), "task.toml: tables within tables"),
    "a variable that doubles": (dockerfile("ENV A=xxxxxxxx\n" + "ENV A=$A$A\n" * 60), "more than 100,000 characters"),
    "variables that grow": (dockerfile("".join(f"ENV A{n}={'x' * 400}\n" for n in range(500))), "values of ENV have more"),
    "endless lines": (dockerfile("ENV A=\\\n" + "aaa\\\n" * 60_000), "has 300,0.. bytes; there is room for 262,144"),
    "many steps": (dockerfile("USER root\n" * 2000), "more than 1,000 instructions"),
    "large variables": (toml(f"[source]\n[solution.env]\nA = '{'x' * 300_000}'"), "task.toml has 30.,... bytes"),
    "many digits": (toml("x = " + "9" * 5000), "task.toml: Exceeds the limit"),
    "a folder with a zero byte": (
        text("task.toml", settings("cpus = 1", 'workdir = "/a\\u0000b"')),
        "the working folder is /a.b;",
    ),
    "folders in folders": (deep_folders, "tests has folders within folders, more than 48"),
    "no text": (lambda folder: (folder / "instruction.md").write_bytes(b"\xff"), "instruction.md: 'utf-8' codec"),
    "lines in a reason": (dockerfile("HEALTHCHECK " + "x\\\n" * 9000), "HEALTHCHECK x+ ..."),
}
NUMBERS = {
    **{f"cpus = {value}": "environment.cpus" for value in ("inf", "nan", "1e308", "9" * 4000, "true", "0", "-1")},
    **{f"memory_mb = {value}": "environment.memory_mb" for value in ("inf", "1e-300", "1e300")},
    **{f"memory = '{value}'": "environment.memory" for value in ("9" * 400 + "G", "1K", "infG", "999999999999999G")},
}


def refusal(folder):
    with pytest.raises(UserError) as refused:
        HarborTasks(HarborTasks.Options(directory=str(folder))).load_tasks("train", 0)
    assert "\n" not in str(refused.value)
    return str(refused.value)[:800]


@pytest.mark.parametrize("name", ABSURD)
def test_what_is_absurd_is_refused_in_one_line(name, hello):
    change, reason = ABSURD[name]
    change(hello)
    if name.endswith("solve.sh"):
        with pytest.raises(ValueError, match=reason):
            solution_in(hello)
    else:
        assert re.search(reason, refusal(hello))


@pytest.mark.parametrize("field", NUMBERS)
def test_absurd_numbers_are_refused_by_their_field(field, tmp_path):
    key, old = field.split()[0], {"cpus": "cpus = 1", "memory_mb": "memory_mb = 512", "memory": "memory_mb = 512"}
    told = refusal(write(tmp_path / "task", task_toml=settings(old[key], field)))
    assert f"task.toml: {NUMBERS[field]} '" in told


def test_words_of_a_dockerfile():
    built = read_dockerfile(
        'from ubuntu\n\tworkdir\t/a\nWORKDIR b\nENV OLD one two\nENV A=1 AB=2 B="$OLD"\nCOPY ["x y", "z/"]\nUSER root\n'
        "ENV C=${AB}_$AB\nCOPY /x $A/y$AB/"
    )
    assert built.folder == "/a/b"
    assert built.variables == {"OLD": "one two", "A": "1", "AB": "2", "B": "one two", "C": "2_2"}
    assert built.copies == [(["x y"], "/a/b/z/"), (["/x"], "/a/b/1/y2/")]
