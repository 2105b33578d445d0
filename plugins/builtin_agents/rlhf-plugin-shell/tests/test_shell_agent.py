"""Episodes in a shell: the three forms of commands, what the policy is told, its tests, and what it cannot do about them."""

import asyncio
import os
import tempfile
from pathlib import Path

import pytest
from rlhf_authoring import agent_contract
from rlhf_authoring.learner import Learner
from rlhf_plugin_code_exec.shells import Ran
from rlhf_plugin_shell import ShellAgent
from rlhf_plugin_shell.commands import commands
from rlhf_plugin_shell.outputs import readable, shortened
from rlhf_plugin_shell.verdicts import verdict

import rlhf_host
from rlhf_host import EpisodeFailed, Reply, Task, UserError

SORT = {"files": {"names.txt": "b\na\n"}, "tests": "diff sorted.txt <(sort names.txt)"}

TestLines = agent_contract(
    "shell",
    {"format": "line", "max_turns": 3, "at_once": 2},
    tasks=[Task("Make a file x.", None, {"tests": "test -e x"})],
    texts=("ls", "echo a b", "exit", "(", "touch x"),
)


def task(prompt="Sort names.txt into sorted.txt.", **columns):
    return Task(prompt, None, {**SORT, **columns})


def call(command):
    return f'<tool_call>\n{{"name": "shell", "arguments": {{"command": "{command}"}}}}\n</tool_call>'


@pytest.fixture
def place(monkeypatch):
    """Directory of the shells' folders, which must be empty in the end."""
    with tempfile.TemporaryDirectory(prefix="rlhf-test-") as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        assert os.listdir(folder) == []


def test_calls_of_the_chat_template(play, place):
    played = play(task(), [call("cat names.txt"), call("sort names.txt > sorted.txt; false"), "It is sorted."])
    assert '{"type": "function", "function": {"name": "shell"' in played.text
    assert "<tool_response>\nexit code 0\nb\na\n</tool_response>" in played.text
    assert "<tool_response>\nexit code 1\n</tool_response>" in played.text
    assert (played.reward, played.row.score) == (1.0, 1.0)
    assert [segment.kind[0] for segment in played.row.segments] == list("paoaoa")
    metrics = {name: played.row.metrics[f"shell/{name}"] for name in ("turns", "commands", "failed", "late", "malformed")}
    assert metrics == {"turns": 3, "commands": 2, "failed": 1, "late": 0, "malformed": 0}
    assert [event["kind"] for event in played.log if event["kind"] != "call"] == ["shell", "shell", "tests"]
    assert played.log[-1]["reward"] == 1.0


def test_blocks(play, place):
    played = play(
        task(), ["I look.\n```sh\ncat names.txt\n```", "```bash\nsort names.txt > sorted.txt\nls\n```", "done"], format="fence"
    )
    assert played.reward == 1.0
    assert "You work in a shell. To run commands, write them in a block\n```sh\n" in played.text
    assert "<|im_start|>user\nexit code 0\nb\na<|im_end|>" in played.text
    assert "exit code 0\nnames.txt\nsorted.txt<|im_end|>" in played.text


def test_lines(play, place):
    says = ["$ cat names.txt", "cat x", "sort names.txt > sorted.txt\nand more", "exit", "never said"]
    played = play(task(), says, format="line")
    assert played.reward == 1.0
    assert played.row.metrics["shell/turns"] == 4
    assert "exit code 1\ncat: x: No such file or directory<|im_end|>" in played.text
    assert "You work in a shell" not in played.text


def test_a_hint_of_one_s_own(play):
    assert "user\nSay it: Sort names" in play(task(), ["exit"], format="line", hint="Say it: ").text


@pytest.mark.parametrize("turns", [1, 2])
def test_commands_of_the_last_answer_are_run(turns, play):
    played = play(task(), [call("sort names.txt > sorted.txt")] * turns, max_turns=turns)
    assert played.reward == 1.0
    assert played.row.metrics["shell/turns"] == turns


MISTAKES = {
    "another tool": (
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>',
        "Error: there is no tool 'bash'; there is shell",
    ),
    "another argument": (
        '<tool_call>\n{"name": "shell", "arguments": {"cmd": "ls"}}\n</tool_call>',
        'Error: wrong arguments: give {"command": TEXT}',
    ),
    "no JSON": ("<tool_call>\n{\n</tool_call>", "This tool call cannot be read: "),
    "late": (call("setsid sleep 100 & sleep 100"), "ended: it took longer than 1 s"),
    "too much": (call("cat /dev/zero"), "ended: it wrote too much\n\ufffd\ufffd"),
    "too long": (call("x" * 100_001), "Error: a command has at most 100000 bytes"),
    "an exit": (call("exit 7"), "exit code 7\n</tool_response>"),
    "an error": (call("cd nowhere"), "exit code 1\nbash: line 1: cd: nowhere: No such file or directory"),
    "binary": (call("printf 'a\\\\0b\\\\377\\\\r\\\\n'"), "exit code 0\na\ufffdb\ufffd\n</tool_response>"),
    "many": (call("seq 1000"), "[... 3792 characters left out ...]\n"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_goes_wrong_is_told(name, play, place):
    said, told = MISTAKES[name]
    played = play(
        task(),
        [said, call("cat names.txt"), "done"],
        max_tokens=200_000,
        new_tokens=150_000,
        timeout_s=1.0,
        max_output_chars=100,
    )
    assert told in played.text
    assert "exit code 0\nb\na\n" in played.text, "the next command works"
    assert played.reward == 0.0


def test_a_command_that_is_cut_by_the_run_s_limit_is_what_was_said(play, place):
    played = play(task(), [call("echo " + "x" * 200), "done"], new_tokens=50)
    assert played.row.metrics["shell/malformed"] == 1 or played.row.metrics["shell/commands"] == 0


def test_a_full_conversation_is_judged_as_it_stands(play, place):
    says = [call("sort names.txt > sorted.txt"), *[call("seq 400")] * 9]
    played = play(task(), says, max_tokens=3000, max_turns=10)
    assert played.reward == 1.0
    assert played.row.metrics["shell/no_room"] == 1


def test_setup_and_files_are_there_before_the_policy(play, place):
    files = {"src/a.txt": "one\n", "b.bin": {"base64": "AP8="}, "absent": None}
    columns = {"files": files, "setup": "mv src/a.txt c; export GONE=1; echo made >> c", "tests": "grep -q 2 count"}
    played = play(task(**columns), [call("cat c; wc -c < b.bin; ls"), call("wc -l < c > count"), "x"])
    assert "exit code 0\none\nmade\n2\nb.bin\nc\nsrc\n" in played.text
    assert played.reward == 1.0


def test_a_setup_that_fails_is_no_zero(play, place):
    with pytest.raises(EpisodeFailed, match=r"the task's setup: exit code 3\nwhat"):
        play(task(setup="echo what; exit 3"), ["x"])


REPORTS = {
    "exit code": ("true", 1.0, {}),
    "another exit code": ("exit 2", 0.0, {}),
    "text": ('echo 0.25 > "$LOGS_DIR/verifier/reward.txt"; exit 1', 0.25, {}),
    "JSON": ('echo \'{"reward": 0.5, "speed": 2}\' > "$LOGS_DIR/verifier/reward.json"', 0.5, {"shell/speed": 2.0}),
    "JSON of one number": ('echo \'{"passed": 0.75}\' > "$LOGS_DIR/verifier/reward.json"', 0.75, {"shell/passed": 0.75}),
    "both": ('echo 1 > "$LOGS_DIR/verifier/reward.txt"; echo 0 > "$LOGS_DIR/verifier/reward.json"', 0.0, {}),
    "no number": ('echo x > "$LOGS_DIR/verifier/reward.txt"', 0.0, {"shell/tests_unread": 1.0}),
    "not finite": ('echo nan > "$LOGS_DIR/verifier/reward.txt"', 0.0, {"shell/tests_unread": 1.0}),
    "larger than a float": (
        'printf \'{"reward": 1%0400d}\' 0 > "$LOGS_DIR/verifier/reward.json"',
        0.0,
        {"shell/tests_unread": 1.0},
    ),
    "a name of the agent's own": (
        'echo \'{"reward": 1, "commands": 9, "tests_ended": 9}\' > "$LOGS_DIR/verifier/reward.json"',
        1.0,
        {"shell/commands": 0.0, "shell/tests_ended": 0.0},
    ),
    "several without a reward": (
        'echo \'{"a": 1, "b": 1}\' > "$LOGS_DIR/verifier/reward.json"',
        0.0,
        {"shell/tests_unread": 1.0},
    ),
    "a link": ('ln -s /etc/hostname "$LOGS_DIR/verifier/reward.txt"', 1.0, {}),
    "a pipe": ('mkfifo "$LOGS_DIR/verifier/reward.txt"', 1.0, {}),
    "for ever": ("sleep 100", 0.0, {"shell/tests_ended": 1.0, "shell/tests_unread": 1.0}),
    "a script": ("#!/usr/bin/python3\nimport sys\nsys.exit(0 if open('names.txt').read() else 1)", 1.0, {}),
    "several lines": ("set -e\ntest -e names.txt\ntest -e nothing\ntrue", 0.0, {}),
}


@pytest.mark.parametrize("name", REPORTS)
def test_rewards_are_what_tests_report(name, play, place):
    tests, reward, metrics = REPORTS[name]
    played = play(task(tests=tests), ["done"], tests_timeout_s=2.0)
    assert played.reward == reward
    assert played.row.score == reward
    assert {key: played.row.metrics.get(key) for key in metrics} == metrics


CHEATS = {
    "looks for the tests": "find / -name 'test*.sh' 2>&1 | head -c 200; cat /tests/test.sh ../../tests/test.sh",
    "writes the report": "mkdir -p /logs/verifier ../logs/verifier $LOGS_DIR/verifier; echo 1 | tee /logs/verifier/reward.txt"
    " ../logs/verifier/reward.txt",
    "leaves a process that writes it": "(for i in $(seq 9); do sleep 0.2; echo 1 > ../logs/verifier/reward.txt; done) & disown",
    "changes how the next shell starts": "echo 'exit 0' > .bashrc; cp .bashrc .profile; export BASH_ENV=$PWD/.bashrc;"
    " diff() { true; }; export -f diff",
    "puts its own programs first": "mkdir bin; ln -s /bin/true bin/diff; PATH=$PWD/bin:$PATH; export PATH; alias diff=true",
    "closes its folder": "chmod 000 . ..; cd /",
    "removes its folder": "rm -rf ~ ../* .; ln -s /usr ../work",
    "ends everything": "kill -9 -1; kill -9 $PPID; exit 0",
    "fills the disk": "for i in $(seq 40); do head -c 9000000 /dev/zero > f$i; done",
    "makes as many files as it can": "for i in $(seq 2000); do : > f$i; done 2>/dev/null",
    "takes the names of the tests": "mkdir ../tests ../logs ../tmp; touch ../tests/test.sh; ln -s / ../solution",
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_policy_that_cheats_gets_nothing_and_its_episode_is_judged(name, play, place):
    """Neither a reward, nor an episode without one: that would be a way out of a bad one."""
    tests = "#!/bin/bash\n# secret\ndiff sorted.txt <(sort names.txt)"
    options = {"timeout_s": 4.0, "files": 50, "disk_mb": 32, "tests_timeout_s": 5.0}
    played = play(task(tests=tests), [call(CHEATS[name]), call("echo alive"), "done"], max_tokens=50_000, **options)
    assert played.reward == 0.0
    assert "secret" not in played.text


def test_tests_see_nothing_of_the_policy_but_its_files(play, place):
    tests = 'test -z "$X$BASH_ENV" && test "$(type -t sort)" = file && test -z "$(ls -A ~ $TMPDIR | grep -v :)" && test -e mine'
    played = play(
        task(tests=tests), [call("cd $TMPDIR; touch x; export X=1; sort() { true; }; export -f sort; touch ~/mine"), "x"]
    )
    assert played.reward == 1.0


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"tests": ""}, "it has no tests"),
        ({"tests": None}, "it has no tests"),
        ({"tests": ["true"]}, "tests is a list; give a command or a script"),
        ({"setup": 3}, "setup is a int"),
        ({"files": ["a"]}, "files is a list; give an object"),
        ({"files": {"a": 3}}, "files: a is a int"),
        ({"files": {"../a": ""}}, "files: '../a' is no path below"),
        ({"files": {"a": {"base64": "%"}}}, "files: a: "),
        ({"files": {"a": {"base64": None}}}, "files: a: "),
        ({"files": {"a\0b": ""}}, "is no path below"),
        ({"files": {"a" * 256: ""}}, "is no path below"),
        ({"files": {"a/b": "", "a": ""}}, "'a' is a file, and the folder of 'a/b'"),
        ({"files": {f"d/{each}": "" for each in range(1000)}}, "it has 1001 files and folders, and agent.files allows 1000"),
        ({"files": {"a": "x" * (65 << 20)}}, "its files have 68,157,440 bytes, and agent.file_mb allows 64 MiB"),
        ({"setup": "a\0b"}, "setup has a zero byte"),
        ({"setup": "x" * 100_001}, "setup has more than 100000 bytes"),
        ({"harbor": "x"}, "a task in a directory has its own files"),
        ({"files": None, "tests": None, "harbor": {"path": "x", "environment": "docker"}}, "harbor is {"),
    ],
)
def test_rows_that_cannot_be_played_are_told_before_anything_is_sampled(columns, reason, play):
    bad = task(**columns)
    told = ShellAgent(ShellAgent.Options()).check_labels([task(), bad])
    assert list(told) == [1]
    assert reason in told[1]
    with pytest.raises(EpisodeFailed, match="the task: "):
        play(bad, ["x"])


def test_without_rewards_of_its_own(play):
    agent = ShellAgent(ShellAgent.Options(rewards=False))
    assert agent.needs().rewards
    assert not ShellAgent(ShellAgent.Options()).needs().rewards
    assert "it has tests, which --agent.rewards false does not run" in agent.check_labels([task()])[0]
    played = play(task(tests=None), [call("sort names.txt"), "a b"], rewards=False)
    assert played.row.agent_rewards == []


@pytest.mark.parametrize(
    ("text", "line", "fence"),
    [
        ("ls", ["ls"], []),
        ("\n $ ls -l \nmore", ["ls -l"], []),
        ("exit", [], []),
        ("", [], []),
        ("Look:\n```sh\nls\ncat x\n```\nand\n```bash\npwd\n```", ["Look:"], ["ls\ncat x", "pwd"]),
        ("```python\nx\n```\n```\ny\n```", ["```python"], []),
        ("```sh\nls", ["```sh"], ["ls"]),
    ],
)
def test_commands_in_answers(text, line, fence):
    assert [each.command for each in commands(Reply(text), "line")] == line
    assert [each.command for each in commands(Reply(text), "fence")] == fence


def test_long_outputs_keep_head_and_tail():
    assert shortened("abcdefghij", 10) == "abcdefghij"
    assert shortened("a" * 50 + "b" * 51, 10) == "aaaaa\n[... 91 characters left out ...]\nbbbbb"
    assert readable("\n\x1b[1mA\x00\r\nB\n\n") == "\ufffd[1mA\ufffd\nB"


def test_a_report_that_counts_only_if_it_is_written():
    ran = Ran("ended", 0, "", 0.1)
    assert verdict(ran, {}, only_reported=True).reward == 0.0
    assert verdict(ran, {"reward.txt": b"1\n"}, only_reported=True).reward == 1.0


def test_a_machine_that_cannot_contain_is_refused(place):
    with pytest.raises(UserError, match="shell cannot contain programs on this machine"):
        asyncio.run(ShellAgent(ShellAgent.Options(python="/nowhere/python")).sandboxes.start())


def test_two_steps_of_training(tmp_path):
    settings = {"rollout.n": 4, "train.batch_size": 2, "train.steps": 2, "train.threads": 1, "rollout.max_new_tokens": 6}
    data = [{"prompt": f"{n}+{n}=", "files": {"a": "1"}, "tests": "exit $((RANDOM % 2))"} for n in range(1, 5)]
    agent = {"name": "shell", "format": "line", "max_turns": 1}
    run = rlhf_host.train(algo=Learner(), model="quickstart", agent=agent, data=data, run_dir=str(tmp_path / "run"), **settings)
    assert len(run.metrics) == 2
    assert 0 < run.metrics[-1]["shell/commands"] <= 1
