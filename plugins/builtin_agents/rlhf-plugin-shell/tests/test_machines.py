"""Episodes in machines of a service: the real client, against a server that speaks its API."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from rlhf_authoring import agent_contract
from rlhf_authoring.learner import Learner
from rlhf_plugin_shell import ShellAgent, machine, service
from rlhf_plugin_shell.leftovers import this_process
from rlhf_plugin_shell.sandboxes import File, SandboxFailed
from rlhf_plugin_shell.work import Work

import rlhf_host
from rlhf_host import EpisodeFailed, Task, UserError

from .test_containers import CHEATS, EPISODES, task

pytest.importorskip("e2b", reason="needs rlhf-plugin-shell[e2b]")
pytest.importorskip("aiohttp", reason="the server needs it")

from .fake_e2b import KEY, FakeE2B

BOX = {"sandbox": "e2b"}


@pytest.fixture(autouse=True)
def e2b(monkeypatch):
    """A service without a machine in the end."""
    folder = tempfile.TemporaryDirectory(prefix="rlhf-test-e2b-")
    os.chmod(folder.name, 0o755)
    made = FakeE2B(folder.name)
    monkeypatch.setattr(service, "FIRST_WAIT_S", 0.05)
    for name, value in (("E2B_API_KEY", KEY), ("E2B_API_URL", made.url), ("E2B_SANDBOX_URL", made.url)):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("E2B_DEBUG", raising=False)
    yield made
    left = list(made.boxes)
    made.stop()
    folder.cleanup()
    assert left == []


TestLines = agent_contract(
    "shell",
    {"format": "line", "max_turns": 3, "at_once": 2, **BOX},
    tasks=[Task("Make a file x.", None, {"tests": "test -e x"})],
    texts=("ls", "exit", "(", "touch x"),
)


@pytest.mark.parametrize("name", EPISODES)
def test_rewards_are_those_of_a_contained_shell(name, play):
    given, lines = EPISODES[name]
    contained, box = (
        play(given, [*lines, "exit"], format="line", tests_timeout_s=3.0, **more) for more in ({"sandbox": "contained"}, BOX)
    )
    assert box.reward == contained.reward
    assert box.text == contained.text
    assert box.row.metrics == contained.row.metrics


SMALL = {name: command for name, command in CHEATS.items() if name != "fills the disk"}
"""The disk is the template's."""


@pytest.mark.parametrize("name", SMALL)
def test_a_policy_that_cheats_gets_nothing_and_its_episode_is_judged(name, play):
    tests = "#!/bin/bash\n# secret\ndiff sorted.txt <(sort names.txt)"
    options = {"timeout_s": 4.0 if name == "has no end" else 60.0, "tests_timeout_s": 20.0, "format": "line", **BOX}
    played = play(task(tests=tests), [SMALL[name], "echo alive", "exit"], max_tokens=50_000, **options)
    assert played.reward == 0.0
    assert "secret" not in played.text
    ends = {"has no end": "took longer than 4 s", "writes 100 MB": "it wrote too much"}
    assert ends.get(name, "") in played.text
    # In the fake both users are root, who can remove bash.
    assert ("exit code 126\n" if name == "removes its folder" else "exit code 0\nalive") in played.text


def opened(does, work=None, **options):
    """Result of a function of a machine."""

    async def main():
        agent = ShellAgent(ShellAgent.Options(**{**BOX, **options}))
        try:
            box = await agent.opened(work or Work())
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
        await box.run("sleep 123 & setsid sleep 124 & true", 5.0)
        after = await box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", 5.0)
        return late, took, after.output

    late, took, after = opened(does)
    assert (late.why, late.code) == ("late", None)
    assert took < 10
    assert not re.search("sleep 1[02][034]", after)


def test_files_are_the_user_s_and_programs_run():
    async def does(box):
        await box.put({"a/run.sh": File(b"#!/bin/sh\necho $1\n", True), "big": File(b"x" * 200_000)})
        ran = await box.run(
            'a/run.sh hi; wc -c < big; ln -s /etc/passwd link; mkfifo pipe; stat -c %U a big "$PWD" | sort -u', 5.0
        )
        parts = [await box.read(f"work/{name}", 100) for name in ("big", "link", "pipe", "none", "a")]
        return ran.output, parts

    output, parts = opened(does)
    assert output == "hi\n200000\nroot\n"
    assert parts == [b"x" * 100, None, None, None, None]


def test_a_machine_has_no_network_its_time_and_no_key(e2b):
    async def does(box):
        return (await box.run("env; ulimit -t; ulimit -f; ulimit -u", 5.0)).output

    told = opened(does, cpu_s=7, file_mb=3, processes=10, sandbox_options={"life_s": 77})
    asked = e2b.made[0]["asked"]
    assert (asked["allow_internet_access"], asked["timeout"], asked["autoPause"]) == (False, 77, False)
    assert asked["metadata"] == {"rlhf": "shell", "rlhf-process": this_process()}
    assert KEY not in json.dumps(asked)
    assert KEY not in told
    assert "rlhf_" not in told
    assert told.endswith("\n7\n3072\n74\n")


@pytest.mark.parametrize("what", [429, 500, 502, 503, "drop", "late"])
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v2/sandboxes"), ("GET", "/v2/sandboxes"), ("POST", "/files"), ("DELETE", "/sandboxes/")]
)
def test_faults_that_pass_are_tried_again(e2b, what, method, path):
    e2b.fail(method, path, what, what)

    async def does(box):
        return (await box.run("echo a", 5.0)).output

    assert opened(does, Work(files={"a": File(b"1")})) == "a\n"
    assert e2b.faults[method, path] == []
    assert len(e2b.made) == 1, "a machine whose answer was lost is the same one"


def test_a_command_that_was_refused_is_started_again_and_one_that_was_lost_is_not(e2b):
    async def does(box):
        e2b.fail("POST", "/process.Process/Start", 429, 429)
        ran = await box.run("echo a >> x; cat x", 5.0)
        e2b.fail("POST", "/process.Process/Start", "drop")
        with pytest.raises(SandboxFailed, match="starting a command"):
            await box.run("echo b >> x", 5.0)
        return ran.output

    assert opened(does) == "a\n"


@pytest.mark.parametrize(("what", "said"), [(429, "429: Rate limit .*"), (500, "500: no, "), ("drop", "")])
def test_faults_that_last_fail_the_episode_by_name_and_are_no_zero(e2b, what, said, play):
    e2b.fail("POST", "/v2/sandboxes", *[what] * 60)
    with pytest.raises(EpisodeFailed, match=rf"the shell: making a machine: {said}.*\(3 tries\)") as told:
        play(task(), ["exit"], format="line", sandbox_options={"tries": 3}, **BOX)
    assert told.value.retryable
    assert KEY not in f"{told.value} {told.value.__cause__!r}"
    assert e2b.made == []


def test_a_machine_that_is_gone_fails_the_episode(e2b):
    async def does(box):
        e2b.kill(box.box.sandbox_id)
        with pytest.raises(SandboxFailed, match="starting a command: "):
            await box.run("ls", 5.0)

    async def meanwhile(box):
        runs = asyncio.ensure_future(box.run("sleep 20", 30.0))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(e2b.kill, box.box.sandbox_id)
        with pytest.raises(SandboxFailed, match="a command was lost"):
            await runs

    opened(does)
    opened(meanwhile)


def test_what_commands_broke_is_no_failure_of_the_machine():
    async def does(box):
        await box.run("export PATH=/nowhere; ls() { exit 3; }; export -f ls", 5.0)
        first = await box.run("ls", 5.0)
        removed = await box.run("/bin/rm -rf ~ /tmp; echo done", 5.0)
        fresh = await box.run("pwd; type -t ls", 5.0, fresh=True)
        return first.code, removed.output, fresh.output

    code, removed, fresh = opened(does)
    assert code == 3
    assert removed.startswith("done\n")
    assert fresh == "/work\nfile\n"


KILLED = """
import asyncio
from rlhf_plugin_shell import ShellAgent
from rlhf_plugin_shell.work import Work
async def main():
    agent = ShellAgent(ShellAgent.Options(sandbox="e2b", sandbox_options={"life_s": 15}))
    box = await agent.opened(Work())
    print("open", flush=True)
    await box.run("sleep 1000", 1000.0)
asyncio.run(main())
"""


def killed(times=1):
    processes = [subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) for _ in range(times)]
    assert [process.stdout.readline() for process in processes] == ["open\n"] * times
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def test_the_service_ends_the_machine_of_a_run_that_was_killed(e2b):
    e2b.speed = 5.0  # its 15 s are 3
    killed()
    assert len(e2b.boxes) == 1
    until = time.monotonic() + 10
    while e2b.boxes and time.monotonic() < until:
        time.sleep(0.1)
    assert e2b.boxes == {}


def test_the_next_start_ends_what_killed_runs_left_and_nothing_else(e2b, caplog):
    killed(3)  # more than a page of the list
    left = set(e2b.boxes)
    assert len(left) == 3

    async def does(box):
        return set(e2b.boxes), await other()

    async def other():
        agent = ShellAgent(ShellAgent.Options(**BOX))
        await agent.sandboxes.start()
        await agent.sandboxes.close()
        return set(e2b.boxes)

    mine, after = opened(does)
    assert mine.isdisjoint(left)
    assert mine == after
    assert "ended 3 machines of runs that were killed" in caplog.text


def test_a_run_renews_the_time_of_its_machines(e2b):
    async def does(box):
        end = time.monotonic() + 14
        while time.monotonic() < end and not any("/timeout" in call for call in e2b.calls):
            await asyncio.sleep(0.1)
        return await box.run("echo here", 60.0)

    assert "here" in str(opened(does, sandbox_options={"life_s": 15}))
    assert any("/timeout" in call for call in e2b.calls)


def test_a_machine_that_nobody_waits_for_any_more_is_ended(e2b):
    async def main():
        agent = ShellAgent(ShellAgent.Options(**BOX))
        opening = asyncio.ensure_future(agent.opened(Work()))
        while not e2b.boxes:
            await asyncio.sleep(0.01)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await agent.sandboxes.close()

    asyncio.run(main())
    assert len(e2b.made) == 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"E2B_API_KEY": ""}, "needs a key in the environment variable E2B_API_KEY"),
        ({"E2B_API_KEY": "e2b_wrong"}, r"listing machines: 401: .* bad key \.\.\."),
        ({"E2B_DEBUG": "true"}, "E2B_DEBUG is set, and its client then ends no sandboxes"),
        ({"E2B_API_URL": "http://127.0.0.1:9"}, r"listing machines: .*\(5 tries\)"),
    ],
)
def test_a_service_that_cannot_be_used_stops_the_run_before_it_samples(setting, message, monkeypatch):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message) as told:
        opened(lambda box: None)
    assert "e2b_wrong" not in str(told.value)
    assert told.value.__cause__ is None


def test_a_missing_client_names_what_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'rlhf-plugin-shell\[e2b\]'"):
        opened(lambda box: None)


def run(tmp_path, data, name="a", **more):
    settings = {"rollout.n": 2, "train.batch_size": 2, "train.steps": 2, "train.threads": 1, "rollout.max_new_tokens": 6}
    agent = {"name": "shell", "format": "line", "max_turns": 1, **BOX, **more}
    return rlhf_host.train(algo=Learner(), model="quickstart", agent=agent, data=data, run_dir=str(tmp_path / name), **settings)


def test_a_run_gives_the_rewards_of_a_contained_one_and_says_what_it_used(tmp_path, e2b):
    data = [{"prompt": f"{n}+{n}=", "tests": 'test "$(cat x 2>&1 | wc -c)" -gt 3'} for n in range(1, 5)]
    e2b.fail("POST", "/v2/sandboxes", 429, 500)
    in_boxes = run(tmp_path, data, "a", at_once=2).metrics
    in_shells = run(tmp_path, data, "b", sandbox="contained").metrics
    for box, contained in zip(in_boxes, in_shells, strict=True):
        named = [key for key in box if key.startswith(("reward", "shell/turns", "shell/commands")) or key == "loss"]
        assert {key: box[key] for key in named} == {key: contained[key] for key in named}
        assert box["shell/sandboxes"] == contained["shell/sandboxes"] == 4
        assert box["shell/sandbox_failures"] == 0
        assert box["shell/sandbox_s"] > 0
        assert box["shell/sandbox_start_s"] > 0
    assert e2b.most <= 2
    written = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if KEY.encode() in path.read_bytes()]


def test_a_template_that_is_missing_or_too_small_stops_the_run(tmp_path, e2b):
    data = [{"prompt": "1+1=", "tests": "true"}, {"prompt": "2+2=", "tests": "true"}]
    with pytest.raises(UserError, match=r"the template none cannot be used: .*template 'none' not found"):
        run(tmp_path, data, sandbox_options={"template": "none"})
    rows = [{**row, "docker_image": "python:3.13"} for row in data]
    with pytest.raises(UserError, match=r"its image python:3\.13 has no template"):
        run(tmp_path, rows)
    with pytest.raises(UserError, match="the machine has no user 'nobody'"):
        run(tmp_path, data, sandbox_options={"user": "nobody"})
    made = run(tmp_path, rows, "b", sandbox_options={"templates": {"python:3.13": "python-box"}})
    assert len(made.metrics) == 2
    assert {each["asked"]["templateID"] for each in e2b.made} == {"base", "python-box"}


def test_who_is_not_root_cannot_become_it(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sudo", "su"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o4755)
    path = f"{folder}:{os.path.dirname(str(shutil.which('chmod')))}"
    subprocess.run(
        [str(shutil.which("bash")), "-c", machine.SAME_USER.replace(" doas pkexec", "")], env={"PATH": path}, check=True
    )
    assert [oct((folder / name).stat().st_mode)[-4:] for name in ("sudo", "su")] == ["0755", "0755"]


def test_a_task_of_harbor_is_played_in_a_machine(tmp_path, play):
    folder = Path(tmp_path, "t")
    for name in ("environment", "tests"):
        (folder / name).mkdir(parents=True)
    (folder / "instruction.md").write_text("Sort.\n")
    (folder / "task.toml").write_text('version = "1.0"\n')
    (folder / "environment/Dockerfile").write_text("FROM ubuntu:24.04\nWORKDIR /app\nCOPY words.txt .\n")
    (folder / "environment/words.txt").write_text("b\na\n")
    script = (
        "#!/bin/bash\nset -o pipefail\ndiff /app/sorted.txt <(printf 'a\\nb\\n')\necho $((!$?)) > /logs/verifier/reward.txt\n"
    )
    (folder / "tests/test.sh").write_text(script)
    given = Task("Sort.", None, {"harbor": str(folder)})
    assert play(given, ["pwd; sort words.txt > sorted.txt", "exit"], format="line", **BOX).reward == 1.0
    assert play(given, ["exit"], format="line", **BOX).reward == 0.0
