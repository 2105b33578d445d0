"""Programs and their tests: what passes, what fails, what nobody can judge, and what stays inside."""

import asyncio
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rlhf_plugin_code_exec import CodeExec, tasks
from rlhf_plugin_code_exec import attacks as hostile
from rlhf_plugin_code_exec.jail import FIRST_UID
from rlhf_plugin_code_exec.runner import JailFailed, Runner
from rlhf_plugin_code_exec.tasks import Calls, Programs, code_of, same_output, solution_of

import rlhf_host
from rlhf_host import Reward, Segment, Task, Trajectory, Unjudged, UserError
from rlhf_host.testing import reward_contract

HUMAN_EVAL = Path(__file__).parents[5] / "shared/data/human_eval.jsonl.gz"
ADD = "def add(a, b):\n    return a + b\n"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="contained by system calls of Linux")

TestContract = reward_contract(
    "code_exec",
    options={"timeout_s": 2.0},
    tasks=[Task("Add", "assert add(1, 2) == 3")],
    texts=(ADD, "def add(a, b): return a"),
)


@pytest.fixture(scope="module")
def judge():
    agent = CodeExec(CodeExec.Options(timeout_s=3.0))

    def run(answer, label=None, prompt="p", **metadata):
        decode = {1: answer}.__getitem__
        row = Trajectory(
            "e",
            "g",
            Task(prompt, label, metadata),
            [Segment("prompt", [0]), Segment("action", [1])],
            decode=lambda ids: decode(ids[0]),
        )
        return asyncio.run(with_new_slots(agent, agent.score([row], None)))[0]

    return run


async def with_new_slots(agent, work):
    agent.runner._slots = None  # of another loop
    return await work


def value(reward):
    assert isinstance(reward, Reward), reward
    assert reward.score == reward.value
    return reward.value


# --- what is judged ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "tests", "reward"),
    [
        (ADD, "assert add(1, 2) == 3", 1.0),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 0.0),
        (f"So:\n```python\nx = 1\n```\nor\n```python\n{ADD}```\nDone.", "assert add([1], [2]) == [1, 2]", 1.0),
        (
            "def add(a, b): return (a, {b: {1.5, None}}, b'x', 2j, float('inf'))",
            "assert add(1, 2) == (1, {2: {1.5, None}}, b'x', 2j, 1e999)",
            1.0,
        ),
        ("def put(x): x.append(1); x.sort()", "a = [3]\nput(a)\nassert a == [1, 3]", 1.0),
        ("def f(x): raise KeyError('k')", "try:\n    f(1)\nexcept KeyError: pass\nelse: assert False", 1.0),
        ("def f(): return float('nan')", "import math\nassert math.isnan(f())", 1.0),
        ("def f(): return (n for n in [1])", "assert f() == [1]", 0.0),
        ("def f(", "assert f() == 1", 0.0),
        ("", "assert f() == 1", 0.0),
        ("def f(): return f()", "assert f() == 1", 0.0),
        ("import sys\ndef f(): sys.exit(0)", "assert f() == 1", 0.0),
        ("def f(): return 1\nimport builtins\nbuiltins.AssertionError = None", "assert f() == 2", 0.0),
        ("class E:\n    __eq__ = lambda *a: True\ndef f(): return [E]", "assert f() == [1]", 0.0),
    ],
)
def test_functions(judge, answer, tests, reward):
    assert value(judge(answer, tests)) == reward


def test_objects_of_the_solution_s_own_are_not_judged(judge):
    told = judge("class P:\n    x = 1\ndef f(): return P()", "assert f().x == 1")
    assert isinstance(told, Unjudged)
    assert "an object of its own class P" in told.reason


@pytest.mark.parametrize(
    ("tests", "reason"),
    [(None, "has no tests"), ("assert f( == 1", "are no Python"), ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs")],
)
def test_a_task_without_usable_tests_is_not_judged(judge, tests, reason):
    told = judge(ADD, tests)
    assert isinstance(told, Unjudged)
    assert reason in told.reason


def test_a_deadline_is_the_policy_s_fault(judge):
    told = judge("def f():\n    while True: pass", "f()")
    assert (told.value, told.metrics["code/timeouts"]) == (0.0, 1.0)


def test_programs_that_read(judge):
    cases = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
    good = "a, b = map(int, input().split())\nprint(a + b)"
    assert value(judge(good, cases)) == 1.0
    assert value(judge(good, json.dumps(cases))) == 1.0
    assert value(judge("print(3)", cases)) == 0.0
    partial = CodeExec(CodeExec.Options(timeout_s=3.0, partial=True))
    row = Trajectory(
        "e", "g", Task("p", cases), [Segment("prompt", [0]), Segment("action", [1])], decode=lambda ids: "print(3)"
    )
    [told] = asyncio.run(partial.score([row], None))
    assert (told.value, told.metrics["code/wrong"]) == (0.5, 1.0)
    assert same_output("1.0000001 x\n", "1.0 x")
    assert not same_output("1 y", "1 x")


def test_answers_that_continue_a_prompt_or_repeat_it():
    before = "import math\n\ndef helper(x): return x\n\ndef area(r):\n    '''Area.'''\n"
    body = "    return math.pi * r * r\n"
    assert solution_of(body, before) == before + body
    whole = "def area(r):\n    return math.pi * r * r\n"
    assert solution_of(f"```python\n{whole}```", before) == "import math\n\ndef helper(x): return x\n\n\n" + whole
    assert code_of("```\nx\n```") == "x\n"
    assert code_of("```python\nunfinished") == "unfinished"


def test_what_tests_call():
    told = tasks.tests_of(
        Task(
            "p",
            "import math\nfor n in range(3):\n    assert half(n) == math.floor(n / 2)",
            {"test_setup_code": "def half2(n): ..."},
        )
    )
    assert isinstance(told, Calls)
    assert told.names == ["half"]
    assert isinstance(tasks.tests_of(Task("p", None, {"input_output": '{"inputs": [["1", "2"]], "outputs": ["3"]}'})), Programs)


@pytest.mark.skipif(not HUMAN_EVAL.exists(), reason="needs HumanEval beside the checkout")
@pytest.mark.timeout(300)
def test_human_eval_s_solutions_pass_and_wrong_ones_fail():
    rows = [json.loads(line) for line in gzip.decompress(HUMAN_EVAL.read_bytes()).splitlines()]
    assert len(rows) == 164
    agent = CodeExec(CodeExec.Options(timeout_s=20.0))

    async def judged(bodies):
        trajectories = []
        for row, body in zip(rows, bodies, strict=True):
            task = Task(row["prompt"], None, {"test": row["test"], "entry_point": row["entry_point"]})
            segments = [Segment("prompt", [0]), Segment("action", [1])]
            trajectories.append(Trajectory("e", "g", task, segments, decode=lambda ids, body=body: body))
        return await with_new_slots(agent, agent.score(trajectories, None))

    right = asyncio.run(judged([row["canonical_solution"] for row in rows]))
    wrong = asyncio.run(judged(["    return None\n"] * len(rows)))
    assert (sum(map(value, right)), sum(map(value, wrong))) == (164, 0)


# --- what stays inside ---------------------------------------------------------------------------------


def runner(level, **limits):
    made = CodeExec(CodeExec.Options(timeout_s=2.0, **limits)).runner
    made.level = level
    return made


def left_behind():
    """Of this process: others run programs too."""
    told = subprocess.run(["ps", "-eo", "uid"], capture_output=True, text=True, check=True).stdout.split()
    first = FIRST_UID + 2 * (os.getpid() % 1000 * 64)
    mine = [uid for uid in told if uid.isdigit() and first <= int(uid) < first + 128]
    folders = [name for name in os.listdir("/tmp") if name.startswith((f"rlhf-code-{os.getpid()}-", "rlhf-escaped-"))]
    return mine, folders


@pytest.mark.parametrize("level", ["A", "B"])
def test_no_attack_gets_out(level):
    try:
        assert asyncio.run(hostile.escapes(runner(level))) == []
    except JailFailed as failure:
        pytest.skip(f"this machine has no level {level}: {failure}")
    assert left_behind() == ([], [])


@pytest.mark.parametrize(
    "name",
    ["reads /etc/passwd", "lists the file system", "writes outside", "opens a socket", "opens a raw UNIX socket"],
)
def test_uncontained_the_same_attacks_succeed(name, monkeypatch):
    """Those that do no harm: so a test that finds nothing has looked."""
    monkeypatch.setattr(hostile, "ATTACKS", {name: hostile.ATTACKS[name]})
    made: Runner = runner("none")
    found = asyncio.run(hostile.escapes(made))
    assert name in found or "a file outside: daemon" in found


def test_hostile_programs_in_a_row_leave_nothing_behind():
    agent = runner("A")
    codes = [hostile.ATTACKS[name] for name in ("forks without end", "fills memory", "leaves a daemon", "ends itself early")]

    async def run():
        for number in range(24):
            await agent.tests(codes[number % 4].replace("{daemon!r}", "'/tmp/rlhf-escaped-x'"), Calls("", "f()", ["f"]))

    asyncio.run(run())
    assert left_behind() == ([], [])


def test_a_machine_that_cannot_contain_is_refused_unless_it_is_trusted(judge):
    broken = CodeExec(CodeExec.Options(python="/nowhere/python"))
    with pytest.raises(UserError, match=r"cannot contain programs on this machine: .*No such file"):
        asyncio.run(broken.check())
    broken._checked = True
    row = Trajectory("e", "g", Task("p", "f()"), [Segment("prompt", [0]), Segment("action", [1])], decode=lambda ids: "x")
    [told] = asyncio.run(with_new_slots(broken, broken.score([row], None)))
    assert isinstance(told, Unjudged)
    assert "the jail: " in told.reason
    trusting = CodeExec(CodeExec.Options(python="/nowhere/python", trust=True))
    assert asyncio.run(trusting.check()) == "none"


def test_two_steps_of_training(tmp_path):
    settings = {"rollout.n": 4, "train.batch_size": 2, "train.steps": 2, "train.threads": 1, "rollout.max_new_tokens": 4}
    data = [{"prompt": f"{n}+{n}=", "label": {"inputs": [""], "outputs": [""]}} for n in range(1, 5)]
    made = {"model": "quickstart", "data": data, "run_dir": str(tmp_path / "run")}
    rlhf_host.train(algo="rloo", rewards="code_exec", **made, **settings)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["reward/max"] for row in rows] == [1.0, 1.0], "a number is a program that writes nothing"
    assert {"code/timeouts", "code/errors", "code/wrong"} <= set(rows[0])
