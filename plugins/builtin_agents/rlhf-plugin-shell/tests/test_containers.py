"""Episodes in containers: rewards as in a contained shell, what commands cannot do about them, and that nothing is left."""

import asyncio
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlhf_authoring import agent_contract
from rlhf_authoring.learner import Learner
from rlhf_plugin_shell import ShellAgent
from rlhf_plugin_shell.container import STAYS, Container, archive, only_file
from rlhf_plugin_shell.docker_command import docker_command
from rlhf_plugin_shell.leftovers import is_over, this_process
from rlhf_plugin_shell.sandboxes import File, SandboxFailed
from rlhf_plugin_shell.work import Work

import rlhf_host
from rlhf_host import EpisodeFailed, Task, UserError

SORT = {"files": {"names.txt": "b\na\n"}, "tests": "diff sorted.txt <(sort names.txt)"}
BOX = {"sandbox": "docker", "sandbox_options": {"image": "debian:12"}}


@pytest.fixture(autouse=True)
def stand_in(docker):
    return docker


TestLines = agent_contract(
    "shell",
    {"format": "line", "max_turns": 3, "at_once": 2, **BOX},
    tasks=[Task("Make a file x.", None, {"tests": "test -e x"})],
    texts=("ls", "exit", "(", "touch x"),
)


def task(prompt="Sort names.txt into sorted.txt.", **columns):
    return Task(prompt, None, {**SORT, **columns})


EPISODES = {
    "sorted": (task(), ["cat names.txt", "sort names.txt > sorted.txt"]),
    "not sorted": (task(), ["cat names.txt > sorted.txt"]),
    "nothing": (task(), ["exit"]),
    "state": (
        task(tests='test "$(cat x)" = "1 2 /tmp/d"'),
        ["export A=1; f() { echo 2; }; export -f f; mkdir -p /tmp/d; cd /tmp/d", 'echo "$A $(f) $PWD" > "$HOME/x"'],
    ),
    "setup": (task(setup="echo made > c", tests="grep -q made c && test ! -e d"), ["touch e"]),
    "a report": (task(tests='echo 0.25 > "$LOGS_DIR/verifier/reward.txt"'), ["exit"]),
    "JSON": (task(tests='echo \'{"reward": 0.5, "speed": 2}\' > "$LOGS_DIR/verifier/reward.json"'), ["exit"]),
    "a link as report": (task(tests='ln -s /etc/hostname "$LOGS_DIR/verifier/reward.txt"'), ["exit"]),
    "tests for ever": (task(tests="sleep 100"), ["exit"]),
    "a script": (task(tests="#!/usr/bin/python3\nimport sys\nsys.exit(open('names.txt').read() != 'b\\na\\n')"), ["exit"]),
    "tests see no settings": (
        task(tests='test -z "$X$BASH_ENV" && test "$(type -t sort)" = file && test -z "$(ls -A ~)" && test -e mine'),
        ["cd /tmp; touch x; export X=1; sort() { true; }; export -f sort; touch ~/mine"],
    ),
    "exit": (task(tests="test -e x"), ["exit 7", "touch x"]),
}


@pytest.mark.parametrize("name", EPISODES)
def test_rewards_are_those_of_a_contained_shell(name, play):
    given, lines = EPISODES[name]
    contained, box = (
        play(given, [*lines, "exit"], format="line", tests_timeout_s=3.0, **more) for more in ({"sandbox": "contained"}, BOX)
    )
    assert box.reward == contained.reward
    assert box.text == contained.text
    assert box.row.metrics == contained.row.metrics


CHEATS = {
    "looks for the tests": "find / -name 'test*.sh' 2>/dev/null | head -c 200; cat /tests/test.sh ../../tests/test.sh",
    "writes the report": "mkdir -p /logs/verifier; echo 1 | tee /logs/verifier/reward.txt",
    "leaves a process that writes it": "(while :; do echo 1 > /logs/verifier/reward.txt; done) >/dev/null 2>&1 & disown",
    "replaces the shell by such a process": "setsid bash -c 'while :; do mkdir -p /logs/verifier; echo 1 >"
    " /logs/verifier/reward.txt; done' >/dev/null 2>&1 & exec true",
    "ends everything": "kill -9 -1; kill -9 $PPID 1; exit 0",
    "removes its folder": "rm -rf ~ ../* .",
    "takes the names of the tests": "mkdir /tests /logs; touch /tests/test.sh; ln -s / /solution",
    "has /logs lead elsewhere": "rm -rf /logs; ln -s /tmp /logs; mkdir /tmp/verifier; echo 1 > /tmp/verifier/reward.txt",
    "lets its state write": "echo 'echo 1 > /logs/verifier/reward.txt' > /tmp/.shell-state",
    "has no end": "setsid sleep 100 & sleep 100",
    "writes 100 MB": "head -c 100000000 /dev/zero",
    "a fork bomb": ":(){ :|:& };:",
    "fills the disk": "for i in $(seq 20); do head -c 9000000 /dev/zero > f$i; done; sleep 9",
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_policy_that_cheats_gets_nothing_and_its_episode_is_judged(name, play):
    tests = "#!/bin/bash\n# secret\ndiff sorted.txt <(sort names.txt)"
    options = {"timeout_s": 4.0, "disk_mb": 32, "tests_timeout_s": 5.0, "format": "line", **BOX}
    played = play(task(tests=tests), [CHEATS[name], "echo alive", "exit"], max_tokens=50_000, **options)
    assert played.reward == 0.0
    assert "secret" not in played.text
    ends = {"has no end": "took longer than 4 s", "writes 100 MB": "it wrote too much", "fills the disk": "files are too large"}
    assert ends.get(name, "") in played.text
    if name not in ("fills the disk",):
        assert "exit code 0\nalive" in played.text


def opened(does, **options):
    """Result of a function of a container, with its agent."""

    async def main():
        agent = ShellAgent(ShellAgent.Options(**{**BOX, **options}))
        try:
            box = await agent.opened(Work())
            try:
                return await does(box)
            finally:
                await box.close()
        finally:
            await agent.sandboxes.close()

    return asyncio.run(main())


def test_a_command_that_is_ended_leaves_no_process():
    async def does(box):
        began = time.monotonic()
        late = await box.run("trap '' TERM; setsid sleep 100 & sleep 100", 1.0)
        took = time.monotonic() - began
        left = await box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", 5.0)
        await box.run("sleep 123 & setsid sleep 124 & true", 5.0)
        after = await box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", 5.0)
        return late, took, left.output, after.output

    late, took, left, after = opened(does)
    assert (late.why, late.code) == ("late", None)
    assert took < 10
    assert "sleep 100" not in left
    assert not re.search("sleep 12[34]", after)


def test_the_first_process_rests_without_any_program():
    process = subprocess.Popen([str(shutil.which("bash")), "-c", STAYS], env={"PATH": "/removed"}, stderr=subprocess.DEVNULL)
    try:
        time.sleep(1.0)
        assert process.poll() is None
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        used = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        assert used < 0.2, "seconds of the processor, its children's too, in one"
    finally:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        process.kill()
        process.wait()


def test_output_is_read_no_further_than_its_limit():
    async def does(box):
        return await box.run("head -c 100000000 /dev/zero", 30.0), await box.run("echo alive", 5.0)

    much, alive = opened(does)
    assert (much.why, len(much.output)) == ("output", 4 << 20)
    assert alive.output == "alive\n"


def test_a_container_has_its_limits_and_no_network(docker):
    async def does(box):
        return docker.about(box.id), await box.run("cat /proc/net/dev | wc -l; echo $HOME $PWD", 5.0)

    about, ran = opened(does, memory_mb=512, processes=10, cpu_s=7, file_mb=3)
    [run] = [call for call in docker.calls if call[0] == "run"]
    given = " ".join(run)
    for flag in (
        *("--network none", "--memory 536870912b --memory-swap 536870912b", "--pids-limit 74", "--ulimit cpu=7"),
        *("--ulimit fsize=3145728", "--cap-drop ALL", "--security-opt no-new-privileges", "--pull never"),
    ):
        assert flag in given
    assert not {"--volume", "-v", "--mount", "--privileged", "--publish", "-p"} & set(run)
    assert about["network"] == "none"
    assert ran.output == "3\n/work /work\n"


def test_every_flag_is_one_of_docker_s():
    """The stand-in takes the flags that are listed in it; these are those of Docker's own command, where it is installed."""
    path = os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if "rlhf-test-docker" not in each)
    real = shutil.which("docker", path=path)
    if real is None:
        pytest.skip("Docker's command is not installed here")
    FLAGS = runpy.run_path(str(Path(__file__).parent / "stand_in_docker.py"))["FLAGS"]

    for command, flags in FLAGS.items():
        if command.startswith("compose"):
            continue
        told = subprocess.run([real, *command.split(), "--help"], capture_output=True, text=True, check=True).stdout
        known = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", told))
        assert set(flags) <= known, command


KILLED = """
import asyncio, sys
from rlhf_plugin_shell import ShellAgent
from rlhf_plugin_shell.work import Work
async def main():
    agent = ShellAgent(ShellAgent.Options(sandbox="docker", sandbox_options={"image": "debian:12"}))
    box = await agent.opened(Work())
    print(agent.sandboxes._begun[1]._guard.pid, flush=True)
    await box.run("sleep 1000", 1000.0)
asyncio.run(main())
"""


def killed(guarded):
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    guard = int(process.stdout.readline())
    time.sleep(0.5)
    if not guarded:
        os.kill(guard, signal.SIGKILL)
    process.kill()
    process.communicate()


def test_a_run_that_is_killed_leaves_nothing(docker):
    killed(guarded=True)
    until = time.monotonic() + 20
    while docker.there() and time.monotonic() < until:
        time.sleep(0.1)
    assert docker.there() == []


def test_what_is_left_all_the_same_is_removed_by_the_next_run_and_nothing_else(docker):
    killed(guarded=False)
    [left] = docker.there()

    async def does(box):
        return docker.there(), await other()

    async def other():
        """Another run that begins meanwhile."""
        agent = ShellAgent(ShellAgent.Options(**BOX))
        await agent.sandboxes.start()
        await agent.sandboxes.close()
        return docker.there()

    mine, after = opened(does)
    assert len(mine) == 1
    assert left not in mine
    assert after == mine


def test_which_processes_are_over():
    assert not is_over(this_process())
    assert is_over(this_process() + "1")
    here, _, _ = this_process().rpartition("/")
    assert is_over(f"{here.rpartition('/')[0]}/4194999/12")
    assert not is_over("another-boot/4026531836/1/12")
    assert not is_over("")


def test_an_image_that_cannot_be_had_stops_the_run_before_it_samples(tmp_path, docker):
    data = [{"prompt": "1+1=", "tests": "true", "docker_image": "nowhere/none:1"}, {"prompt": "2+2=", "tests": "true"}]
    with pytest.raises(
        UserError, match=r"1 of 2 images .* nowhere/none:1: docker pull: .*manifest for nowhere/none:1 not found"
    ):
        run(tmp_path, data)
    assert not any(call[0] == "exec" and "ls" in call for call in docker.calls)


def run(tmp_path, data, name="a", **more):
    settings = {"rollout.n": 2, "train.batch_size": 2, "train.steps": 2, "train.threads": 1, "rollout.max_new_tokens": 6}
    agent = {"name": "shell", "format": "line", "max_turns": 1, **BOX, **more}
    return rlhf_host.train(algo=Learner(), model="quickstart", agent=agent, data=data, run_dir=str(tmp_path / name), **settings)


def test_a_container_that_does_not_start_costs_its_episode_alone(tmp_path, docker):
    data = [{"prompt": f"{n}+{n}=", "tests": "exit $((RANDOM % 2))"} for n in range(1, 5)]
    made = run(tmp_path, data, "a")
    assert len(made.metrics) == 2
    docker.fail("run", 2)
    with pytest.raises(EpisodeFailed, match="no space left on device"):
        opened(lambda box: None)
    docker.fail("run", 0)


def test_a_run_gives_the_rewards_of_a_contained_one(tmp_path):
    data = [{"prompt": f"{n}+{n}=", "tests": 'test "$(cat x 2>&1 | wc -c)" -gt 3'} for n in range(1, 5)]
    in_boxes = run(tmp_path, data, "a").metrics
    in_shells = run(tmp_path, data, "b", sandbox="contained", sandbox_options={}).metrics
    for box, contained in zip(in_boxes, in_shells, strict=True):
        named = [key for key in box if (key.startswith(("reward", "shell")) and not key.endswith("_s")) or key == "loss"]
        assert {key: box[key] for key in named} == {key: contained[key] for key in named}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sandbox": "jail"}, "there is no sandbox 'jail'; installed: contained, docker"),
        (
            {"sandbox": "docker", "sandbox_options": {"imag": "x"}},
            "sandbox_options.imag: no such option; options of docker: image, network",
        ),
        ({"sandbox": "contained", "sandbox_options": {"image": "x"}}, "options of contained: trust, python"),
        ({"sandbox": "docker", "trust": True}, "trust is for --agent.sandbox contained"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ShellAgent.Options(**options)


@pytest.mark.parametrize(
    ("options", "columns", "reason"),
    [
        ({}, {"docker_image": "debian:12"}, r"it needs a container \(debian:12\): --agent.sandbox docker or podman"),
        ({"sandbox": "docker"}, {}, "it names no image: a column docker_image"),
        ({"sandbox": "docker"}, {"docker_image": "--privileged"}, "'--privileged' is no name of an image"),
        ({"sandbox": "docker"}, {"docker_image": 3}, "docker_image is a int; give an image"),
    ],
)
def test_rows_that_cannot_be_played_are_told(options, columns, reason):
    told = ShellAgent(ShellAgent.Options(**options)).check_labels([task(**columns)])
    assert re.search(reason, told[0])


def test_a_command_that_is_not_there_or_does_not_answer_is_said(docker, monkeypatch):
    with pytest.raises(UserError, match="there is no command nerdctl here"):
        opened(lambda box: None, sandbox_options={"image": "debian:12", "command": "nerdctl"})
    docker.fail("ps", 1)
    with pytest.raises(
        UserError, match="docker cannot be used by this user here: docker ps: Error response from daemon: no space"
    ):
        opened(lambda box: None)


def test_podman_is_called_by_its_name(docker):
    async def does(box):
        return box.docker.path, (await box.run("echo a", 5.0)).output

    assert opened(does, sandbox="podman") == (str(docker.place / "bin/podman"), "a\n")


def test_variables_of_this_process_reach_neither_the_command_nor_the_container(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "xyzzy")

    async def does(box):
        return (await box.run("env", 5.0)).output

    assert "xyzzy" not in opened(does)


def test_archives():
    files = {"a/b.txt": File(b"1"), "run": File(b"2", True)}
    packed = archive("/work/x", files, writable=True)
    assert only_file(packed, 10) is None, "its first entry is a folder"
    assert only_file(b"no archive", 10) is None
    single = archive("/", {"a": File(b"x" * 5000)})
    assert only_file(single, 100) == b"x" * 100
    assert only_file(single[:1000], 100) == b"x" * 100, "the beginning is enough"


def test_a_container_that_is_gone_fails_the_episode(docker):
    async def does(box):
        await box.docker.call("rm", "--force", box.id)
        with pytest.raises(SandboxFailed):
            await box.run("ls", 5.0)
        return True

    assert opened(does)


def test_with_a_real_docker():
    """The same with Docker or Podman, where one is installed and answers."""
    path = os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if "rlhf-test-docker" not in each)
    real = next((found for name in ("docker", "podman") if (found := shutil.which(name, path=path))), None)
    if real is None or subprocess.run([real, "info"], capture_output=True, check=False).returncode != 0:
        pytest.skip("neither Docker nor Podman answers here")
    image = os.environ.get("RLHF_TEST_IMAGE", "debian:12")

    async def does(box: Container):
        late = await box.run("trap '' TERM; setsid sleep 100 & sleep 100", 1.0)
        bomb = await box.run(":(){ :|:& };:", 2.0)
        kept = await box.run("echo a > x; export A=1; cd /tmp", 5.0)
        told = await box.run('echo "$A$PWD"; cat ~/x; ls /proc | grep -c "^[0-9]"; cat /proc/net/dev | wc -l', 5.0)
        return late.why, bomb.why, kept.code, told.output.split()

    options = {"image": image, "command": real}
    why, _, code, told = opened(does, sandbox_options=options, timeout_s=60.0)
    assert (why, code, told[:2], told[3]) == ("late", 0, ["1/tmp", "a"], "3")
    assert docker_command(real) is not None
    left = subprocess.run(
        [real, "ps", "--all", "--quiet", "--filter", "label=rlhf.shell.owner"], capture_output=True, check=True
    )
    assert left.stdout == b""
    assert Path(real).exists()
