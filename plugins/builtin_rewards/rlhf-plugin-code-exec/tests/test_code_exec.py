"""Programs and their tests: what passes, what fails, what nobody can judge, and what stays inside."""

import asyncio
import contextlib
import gzip
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from rlhf_plugin_code_exec import CodeExec, jail, tasks
from rlhf_plugin_code_exec import attacks as hostile
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
        ("def f(): return len", "assert f() == 1", 0.0),
        ("", "try:\n    f(1)\nexcept KeyError: pass\nelse: assert False", 0.0),
        ("import os\ndef f(): os._exit(0)", "try:\n    f()\nexcept: pass\nassert True", 0.0),
        ("class Own(ValueError): pass\ndef f(): raise Own", "try:\n    f()\nexcept ValueError: pass\nelse: assert False", 1.0),
        ("def f(): '\\ud800'.encode()", "try:\n    f()\nexcept UnicodeEncodeError: pass\nelse: assert False", 1.0),
        ("class Solution:\n    def f(self, x): return -x", "assert f(1) == -1", 1.0),
        ("def sum(a, b): return a + b", "assert sum(1, 2) == 3", 1.0),
        ("def f(x): return x + 1", "def check(g):\n    assert g(1) == 2\ncheck(f)", 1.0),
        ("def f(x): return x + 1", "def test_f():\n    assert f(1) == 2", 1.0),
        ("def f(x): return x", "def test_f():\n    assert f(1) == 2", 0.0),
        ("def f(x): return x", "if __name__ == '__main__':\n    assert f(1) == 2", 0.0),
        (" def f(x):\n    return x", "assert f(1) == 1", 1.0),
    ],
)
def test_functions(judge, answer, tests, reward):
    assert value(judge(answer, tests)) == reward


def test_objects_of_the_solution_s_own_are_not_judged(judge):
    told = judge("class P:\n    x = 1\ndef f(): return P()", "assert f().x == 1")
    assert isinstance(told, Unjudged)
    assert "an object of its own class P" in told.reason


@pytest.mark.parametrize(
    ("body", "tests"),
    [
        ("return range(3)", "assert f() == range(3) and list(f()) == [0, 1, 2]"),
        ("yield from range(3)", "assert list(f()) == [0, 1, 2] and next(f()) == 0"),
        ("return map(str, [1])", "assert list(f()) == ['1'] and f() != ['1']"),
        ("import itertools\n    return itertools.chain([1], [2])", "assert sorted(f()) == [1, 2]"),
        ("return {1: 2}.keys()", "assert f() == {1} and f() == {1: 3}.keys()"),
        ("return {1: [2]}.items()", "assert list(f()) == [(1, [2])] and dict(f()) == {1: [2]}"),
        ("return {1: [2], 3: [2]}.values()", "assert list(f()) == [[2], [2]]"),
        (
            "import collections as c\n    return c.deque([1], 2)",
            "from collections import deque\nassert f() == deque([1]) != [1]",
        ),
        ("import collections\n    return collections.Counter('aab')", "assert f().most_common(1) == [('a', 2)]"),
        ("import collections\n    return collections.namedtuple('P', 'x y')(1, 2)", "assert f().x == 1 and f() == (1, 2)"),
        (
            "import fractions\n    return fractions.Fraction(1, 3)",
            "from fractions import Fraction\nassert f() == Fraction(1, 3)",
        ),
        (
            "import decimal\n    return decimal.Decimal('0.50')",
            "from decimal import Decimal\nassert f() == 0.5 == Decimal(1) / 2",
        ),
        ("import datetime\n    return datetime.date(2020, 1, 31)", "assert f() == datetime.date(2020, 1, 31)"),
        (
            "import datetime as d\n    return d.datetime(2020, 1, 1, tzinfo=d.UTC)",
            "assert f().year == 2020 and f().tzinfo",
        ),
        ("import datetime\n    return datetime.timedelta(1)", "assert f().days == 1"),
        ("import http\n    return http.HTTPStatus.OK", "assert f() == 200"),
        ("import enum\n    return enum.IntEnum('C', 'a b').b", "assert f() == 2"),
        ("return bytearray(b'x')", "assert f() == b'x' and f().append(1) is None"),
        ("return 10 ** 5000", "assert f() % 7 == 2 and f() > 10 ** 4999"),
    ],
)
def test_values_of_the_standard_library_keep_their_type_or_at_least_their_items(judge, body, tests):
    assert value(judge(f"def f():\n    {body}", tests)) == 1.0


@pytest.mark.parametrize(
    ("body", "tests"),
    [
        ("return sum(x)", "assert f(range(4)) == 6 and f(n for n in [1, 2]) == 3"),
        ("return x / 2", "from decimal import Decimal\nassert f(Decimal(1)) == Decimal('0.5')"),
        ("return x.year", "import datetime\nassert f(datetime.date(2020, 1, 1)) == 2020"),
        ("return len(str(x))", "import sys\nassert f(10 ** 5000) == 5001"),
        (
            "x.append(x.popleft())",
            "from collections import deque\na = deque([1, 2])\nf(a)\nassert a == deque([2, 1])",
        ),
        ("x.append(1)", "line = bytearray(b'0')\nf(line)\nassert line == bytearray([48, 1])"),
        ("return x.a", "from collections import namedtuple\nassert f(namedtuple('P', 'a')(1)) == 1"),
    ],
)
def test_values_that_tests_pass(judge, body, tests):
    assert value(judge(f"def f(x):\n    {body}", tests)) == 1.0


@pytest.mark.parametrize(
    ("body", "tests", "reason"),
    [
        ("return x(1)", "assert f(lambda n: n + 1) == 2", "a test passes a function"),
        ("return x(1)", "try:\n    f(lambda n: n + 1)\nexcept BaseException: assert False", "a test passes a function"),
        ("return x.n", "class N: n = 1\nassert f(N()) == 1", "a test passes a N"),
        ("return lambda y: x + y", "assert f(1)(2) == 3", "call a function that the solution gives"),
        ("import pathlib\n    return pathlib.PurePath(x)", "assert str(f('a')) == 'a'", "gives a PurePosixPath"),
        ("import itertools\n    return itertools.count(x)", "assert next(f(1)) == 1", "gives a count"),
    ],
)
def test_what_cannot_be_sent_is_not_judged(judge, body, tests, reason):
    told = judge(f"def f(x):\n    {body}", tests)
    assert isinstance(told, Unjudged), told
    assert reason in told.reason


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (None, "has no tests"),
        ("assert f( == 1", "are no Python"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ("122", "call nothing of the solution: give assert statements, {inputs, outputs}, or test and entry_point"),
        (122, "has no tests: give assert statements"),
        ([1, 2], "call nothing of the solution"),
        ("Paris", "call nothing of the solution"),
        ("assert True", "call nothing of the solution"),
        ("def check(f):\n    assert f(1) == 2", "call nothing of the solution"),
        (
            "import unittest\nclass T(unittest.TestCase):\n    def test(self): assert add(1, 2) == 3",
            "call nothing of the solution",
        ),
        ("assert np.allclose(add(1, 2), 3)", "use attributes of np"),
        ({"inputs": 5, "outputs": 5}, "neither lists nor texts"),
        ("assert add(1, 2) == " + "-" * 100_000 + "3", "cannot be read: MemoryError"),
        ("[" * 100_000, "are no Python"),
        ('{"a":' * 100_000, "cannot be read: RecursionError"),
        ("assert add(1, 2) == 3\0", "are no Python|null bytes"),
        ({"fn_name": "add", "inputs": [1], "outputs": [1]}, "the list of the function's arguments"),
        ({"fn_name": "a-b", "inputs": [[1]], "outputs": [1]}, "no name of a function"),
        ({"fn_name": "add", "inputs": [[{1}]], "outputs": [1]}, "cannot be read: TypeError"),
    ],
)
def test_a_task_without_usable_tests_is_not_judged(judge, tests, reason):
    told = judge(ADD, tests)
    assert isinstance(told, Unjudged), told
    assert re.search(reason if "|" in reason else re.escape(reason), told.reason)


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
    assert value(judge("print(int(input()) * 2)", {"inputs": "12", "outputs": "24"})) == 1.0, "a text is one test"
    assert value(judge("print(len(str(10 ** 5000)))", {"inputs": "", "outputs": "5001"})) == 1.0
    assert same_output("1.0000001 x\n", "1.0 x")
    assert not same_output("1 y", "1 x")


def test_answers_that_continue_a_prompt_or_repeat_it():
    before = "import math\n\ndef helper(x): return x\n\ndef area(r):\n    '''Area.'''\n"
    body = "    return math.pi * r * r\n"
    assert solution_of(body, before) == before + body
    whole = "def area(r):\n    return math.pi * r * r\n"
    assert solution_of(f"```python\n{whole}```", before) == "import math\n\ndef helper(x): return x\n\n\n" + whole
    nested = "    def area(r): return r\n    return area(r)\n"
    assert solution_of(f"```python\n{nested}```", before) == before + nested, "a body may define a helper of the same name"
    indented = "  def area(r):\n      return math.pi * r * r\n"
    assert solution_of(f"```python\n{indented}```", before) == solution_of(whole, before)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```\nx\n```", "x\n"),
        ("```python\nunfinished", "unfinished"),
        ("x = 1", "x = 1"),
        ("```python3\nx\n```", "x\n"),
        ("```Python \nx\n```", "x\n"),
        ('```py title="a.py"\nx\n```', "x\n"),
        ("~~~python\nx\n~~~", "x\n"),
        ("```python\r\nx\r\ny\r\n```\r\n", "x\ny\n"),
        ("- so:\n  ```python\n  if x:\n      y\n  ```\n", "if x:\n    y\n"),
        ("1. ```python\n   if x:\n       y\n   ```\n", "if x:\n    y\n"),
        ("So: ```python\nif x:\n    y\n```", "if x:\n    y\n"),
        ("```python\nx\n```\nOutput:\n```\n1\n```", "x\n"),
        ("```python\nx\n```\n```text\n1\n```\n", "x\n"),
        ("```\nx\n```\n```json\n{}\n```\n", "x\n"),
        ("```\na\n```\n```\nb\n```\n", "b\n"),
        ("Put it in ``` fences:\n```python\nx\n```", "x\n"),
    ],
)
def test_the_code_of_an_answer(answer, code):
    assert code_of(answer).rstrip() == code.rstrip()


@pytest.mark.parametrize("answer", ["`" * 20_000, "~" * 20_000 + "!", "```" + " " * 20_000 + "!", "```" + "a" * 20_000 + "!"])
@pytest.mark.timeout(2)
def test_an_answer_of_fences_alone_takes_no_time(answer):
    assert code_of(answer) == answer


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
    helped = tasks.tests_of(Task("p", "same(1)", {"test_setup_code": "def same(n):\n    assert half(n) == 0"}))
    assert isinstance(helped, Calls)
    assert helped.names == ["half"], "a helper of the task's calls it"


@pytest.mark.parametrize(
    "metadata",
    [
        {"test_list": ["assert math.isclose(area(1), math.pi)"], "test_imports": ["import math"]},
        {"test_list": ["assert isclose(area(1), pi)"], "test_imports": "from math import *\nfrom math import isclose, pi"},
        {"test_list": ["assert math.isclose(area(1), math.pi)"]},
        {"tests": "assert datetime.timedelta(area(1)).days == 3"},
    ],
)
def test_modules_that_tests_use_are_not_the_solution_s(judge, metadata):
    assert value(judge("def area(r): return 3.141592653589793 * r", **metadata)) == 1.0
    assert value(judge("def area(r): return 1\nclass math:\n    isclose, pi = lambda *a: True, 1", **metadata)) == 0.0


@pytest.mark.parametrize(
    ("answer", "cases", "reward"),
    [
        ("def add(a, b): return a + b", {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}, 1.0),
        ("def add(a, b): return a + b", {"inputs": [[1, 2], [3, 4]], "outputs": [3, 8]}, 0.0),
        ("def add(a, b): return a + b", {"inputs": [[1, 2]], "outputs": [[3]]}, 1.0),
        ("def add(a, b): return [a, (b, None)]", {"inputs": [["x", True]], "outputs": [["x", [True, None]]]}, 1.0),
        ("class Solution:\n    def add(self, a, b): return a + b", {"inputs": [[1, 2]], "outputs": [3]}, 1.0),
        ("print(input())", {"inputs": [[1, 2]], "outputs": [3]}, 0.0),
    ],
)
def test_functions_with_inputs_and_outputs(judge, answer, cases, reward):
    assert value(judge(answer, json.dumps({"fn_name": "add", **cases}))) == reward


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


@pytest.fixture(autouse=True)
def place(monkeypatch):
    """Where folders of programs are made, in this test alone; contained programs of other users reach it."""
    folder = Path(tempfile.mkdtemp(prefix="rlhf-test-"))
    folder.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


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
def test_no_attack_gets_out(level, place):
    try:
        assert asyncio.run(hostile.escapes(runner(level))) == []
    except JailFailed as failure:
        pytest.skip(f"this machine has no level {level}: {failure}")
    assert left_behind(place) == NOTHING


@pytest.mark.parametrize(
    "name",
    [
        "reads /etc/passwd",
        "lists the file system",
        "writes outside",
        "opens a socket",
        "opens a raw UNIX socket",
        "limits another process",
        "signals as a file's owner",
        "shares memory",
    ],
)
def test_uncontained_the_same_attacks_succeed(name, monkeypatch):
    """Those that do no harm: so a test that finds nothing has looked."""
    monkeypatch.setattr(hostile, "ATTACKS", {name: hostile.ATTACKS[name]})
    made: Runner = runner("none")
    found = asyncio.run(hostile.escapes(made))
    assert name in found or "a file outside: daemon" in found


def test_hostile_programs_in_a_row_leave_nothing_behind(place):
    agent = runner("A")
    codes = [hostile.ATTACKS[name] for name in ("forks without end", "fills memory", "leaves a daemon", "ends itself early")]

    async def run():
        for number in range(24):
            await agent.tests(codes[number % 4].replace("{daemon!r}", "'/tmp/rlhf-escaped-x'"), Calls("", "f()", ["f"]))

    asyncio.run(run())
    assert left_behind(place) == NOTHING


FILTERED = """
import ctypes, errno, fcntl, os, resource, socket, sys
sys.path.insert(0, {folder!r})
import jail
library = ctypes.CDLL(None, use_errno=True)
jail.seccomp(True)
answers = []
for attempt in {attempts}:
    try:
        told = attempt()
        answers.append(errno.errorcode.get(ctypes.get_errno(), "allowed") if told == -1 else "allowed")
    except OSError as error:
        answers.append(errno.errorcode[error.errno])
print(*answers)
"""


@pytest.mark.parametrize(
    ("attempts", "answer"),
    [
        (["resource.prlimit({pid}, resource.RLIMIT_CPU, (0, 0))", "resource.prlimit({pid}, resource.RLIMIT_CPU)"], "EPERM"),
        (["os.setpriority(os.PRIO_PROCESS, {pid}, 5)", "os.sched_setaffinity({pid}, [0])"], "EPERM"),
        (["os.sched_setscheduler({pid}, 0, os.sched_param(0))", "os.sched_setparam({pid}, os.sched_param(0))"], "EPERM"),
        (["library.shmget(0, 4096, 0o600)", "library.semget(0, 1, 0o600)", "library.msgget(0, 0o600)"], "EPERM"),
        (["library.mq_open(b'/rlhf', 0o102, 0o600, None)", "library.semop(0, None, 0)", "library.shmat(0, None, 0)"], "EPERM"),
        (["fcntl.fcntl(0, 8, {pid})", "fcntl.fcntl(0, 15, bytes(8))", "fcntl.ioctl(os.pipe()[0], 0x8901, bytes(4))"], "EPERM"),
        (
            ["resource.setrlimit(resource.RLIMIT_CORE, (0, 0))", "resource.getrlimit(7)", "fcntl.fcntl(0, fcntl.F_GETFD)"],
            "allowed",
        ),
        (
            ["os.sched_getaffinity(0)", "os.getpriority(os.PRIO_PROCESS, 0)", "os.set_inheritable(os.pipe()[0], True)"],
            "allowed",
        ),
    ],
)
def test_system_calls_that_reach_others_are_refused_whoever_makes_them(attempts, answer):
    """By the filter alone: the user of this test may do it all."""
    with hostile._decoy() as decoy:
        limits = resource.prlimit(decoy.pid, resource.RLIMIT_CPU)
        calls = "[" + ", ".join(f"lambda: {attempt}" for attempt in attempts) + "]"
        code = FILTERED.format(folder=str(Path(jail.__file__).parent), attempts=calls.replace("{pid}", str(decoy.pid)))
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
        assert out.stdout.split() == [answer] * len(attempts)
        assert resource.prlimit(decoy.pid, resource.RLIMIT_CPU) == limits


@pytest.mark.parametrize("level", ["A", "B"])
@pytest.mark.parametrize(
    "code",
    [
        "import threading\ndef f():\n    t = threading.Thread(target=print)\n    t.start()\n    t.join()\n    return 1",
        "import concurrent.futures as c\ndef f():\n    with c.ThreadPoolExecutor(2) as pool: return sum(pool.map(int, '01'))",
        "import asyncio\nasync def one():\n    await asyncio.sleep(0)\n    return 1\ndef f(): return asyncio.run(one())",
        "import resource as r\ndef f():\n    r.setrlimit(r.RLIMIT_STACK, r.getrlimit(r.RLIMIT_STACK))\n    return 1",
        "import subprocess as s, sys\ndef f(): return int(s.run([sys.executable, '-ISc', 'print(1)'], stdout=s.PIPE).stdout)",
    ],
    ids=["thread", "pool", "asyncio", "limits", "process"],
)
def test_honest_programs_work_contained(code, level):
    try:
        told = asyncio.run(runner(level).tests(code, Calls("", "assert f() == 1", ["f"])))
    except JailFailed as failure:
        pytest.skip(f"this machine has no level {level}: {failure}")
    assert json.loads(told["results"][0]["verdict"]) == {"passed": True}


SLEEPS = "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(300)"
RUN = """
import asyncio, sys
from rlhf_plugin_code_exec import CodeExec
from rlhf_plugin_code_exec.tasks import Programs
made = CodeExec(CodeExec.Options(timeout_s=300)).runner
made.level = sys.argv[1]
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


def test_a_job_that_nobody_wants_any_more_leaves_nothing(place):
    async def run():
        job = asyncio.create_task(runner("B", cpus=1)._job({"code": SLEEPS, "inputs": [""], "first_only": True}, 100.0))
        while not programs(place):
            await asyncio.sleep(0.05)
        job.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await job

    asyncio.run(run())
    assert left_behind(place) == NOTHING


def test_folders_of_dead_runs_go_and_those_of_others_stay(place):
    dead, young = place / "rlhf-code-4000000-x", place / "rlhf-code-y"
    for folder in (dead, young):
        folder.mkdir()
    os.utime(dead, (1, 1))
    asyncio.run(runner("B").tests(ADD, Calls("", "add(1, 2)", ["add"])))
    assert os.listdir(place) == ["rlhf-code-y"]


def test_a_folder_too_deep_to_be_removed_by_recursion_is_removed(place):
    code = "import os\nfor _ in range(1050):\n    os.mkdir('d')\n    os.chdir('d')\nos.chmod('.', 0)"
    told = asyncio.run(runner("B").tests(code, Programs([""], [""])))
    assert told["results"][0]["why"] == "ended"
    assert left_behind(place) == NOTHING


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
