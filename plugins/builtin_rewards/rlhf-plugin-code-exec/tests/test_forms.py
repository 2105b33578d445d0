"""Rows in the shapes of public data sets: each is judged, right and wrong, or refused by name."""

import base64
import gzip
import json
import pickle
import re
import zlib
from pathlib import Path

import pytest
from rlhf_plugin_code_exec import CodeExec, forms

from rlhf_host import Reward, Segment, Task, Trajectory, Unjudged

HUMAN_EVAL = Path(__file__).parents[5] / "shared/data/human_eval.jsonl.gz"
ADD, SUBTRACT = "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return a - b\n"
METHOD = (
    "class Solution:\n    def add(self, a, b):\n        return a + b\n",
    "class Solution:\n    def add(self, a, b):\n        return 0\n",
)
SUM, ZERO = "print(sum(map(int, input().split())))", "print(0)"
STACK = "class Stack:\n    def __init__(self): self.xs = []\n    def push(self, x): self.xs.append(x)\n"
STACKS = (
    STACK + "    def pop(self):\n        if not self.xs: raise IndexError('empty')\n        return self.xs.pop()\n"
    "    def __len__(self): return len(self.xs)\n",
    STACK + "    def pop(self): return 0\n    def __len__(self): return len(self.xs)\n",
)


def packed(cases):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


PROGRAMS = {
    "APPS": {"input_output": json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})},
    "TACO, lines in lists": {"input_output": json.dumps({"inputs": [["1 2", ""], ["3 4"]], "outputs": [["3"], ["7"]]})},
    "DeepCoder": {"tests": json.dumps([{"input": "1 2", "output": "3", "type": "stdin_stdout"}] * 2)},
    "DeepCoder, LiveCodeBench in it": {
        "tests": json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin", "metadata": {}}])
    },
    "open-r1": {
        "verification_info": {
            "language": "python",
            "test_cases": [{"fn_name": None, "input": "1 2\n", "output": "3\n", "type": "stdin_stdout"}],
        }
    },
    "open-r1, as a label": {
        "label": {"language": "python", "test_cases": [{"input": "1 2\n", "output": "3\n", "type": "stdin_stdout"}]}
    },
    "SYNTHETIC-1": {
        "verification_info": "{'language': 'python', 'test_cases': [{'input': '1 2', 'output': '3', 'type': 'stdin_stdout'}]}",
        "gold_standard_solution": "print(3)",
    },
    "test_cases": {"test_cases": [{"input": "1 2", "output": "3"}]},
    "code_contests": {
        "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
        "private_tests": {"input": [], "output": []},
        "generated_tests": {"input": ["5 6\n"], "output": ["11\n"]},
        "solutions": {"language": [1], "solution": ["..."]},
    },
    "code_contests, a list": {"public_tests": [{"input": "1 2\n", "output": "3\n"}], "private_tests": None},
    "codeforces": {"official_tests": [{"input": "1 2\n", "output": "3\n"}], "language": "en"},
    "Eurus and PRIME": {
        "reward_model": {"style": "rule", "ground_truth": json.dumps({"inputs": ["1 2"], "outputs": ["3"]})},
        "ability": "code",
    },
    "rStar": {"inputs": ["1 2"], "outputs": ["3"]},
    "LiveCodeBench": {
        "public_test_cases": json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin"}]),
        "private_test_cases": packed([{"input": "4 5", "output": "9", "testtype": "stdin"}]),
        "metadata": "{}",
        "starter_code": "",
    },
}
CALLS = {
    "APPS": {"input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]})},
    "PrimeIntellect": {"tests": [{"fn_name": "add", "input": [1, 2], "output": [3], "type": "function_call"}]},
    "DeepCoder": {"tests": json.dumps([{"input": [1, 2], "output": 3, "type": "function", "fn_name": "add"}])},
    "LiveCodeBench": {
        "public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
        "private_test_cases": packed([{"input": "[1]\n[2]", "output": "[1, 2]", "testtype": "functional"}]),
        "metadata": json.dumps({"func_name": "add"}),
        "starter_code": "class Solution:\n    def add(self, a, b):\n        ",
    },
    "LiveCodeBench in DeepCoder": {
        "tests": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}])
    },
    "a list and the function beside it": {"tests": [{"input": [1, 2], "output": 3}], "fn_name": "add"},
    "MBPP": {"test_list": ["assert add(1, 2) == 3"], "test_setup_code": "", "challenge_test_list": []},
    "MBPP, cleaned": {"test_list": ["assert math.isclose(add(1, 2), 3)"], "test_imports": ["import math"]},
    "AceCode": {"test_cases": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]},
    "HumanEval": {
        "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n",
        "entry_point": "add",
        "prompt_code": "def add(a, b):\n    '''Add.'''\n",
    },
    "a call of check in it": {"test": "def check(f):\n    assert f(1, 2) == 3\n\ncheck(add)", "entry_point": "add"},
    "LeetCode": {
        "test": "def check(candidate):\n    assert candidate(a = 1, b = 2) == 3\n",
        "entry_point": "Solution().add",
        "input_output": [{"input": "a = 1, b = 2", "output": "3"}],
        "starter_code": "class Solution:\n    def add(self, a, b):\n        ",
    },
    "Skywork": {
        "reward_model": {
            "ground_truth": json.dumps(
                {
                    "import_prefix": "from typing import *\nimport math\n",
                    "test_code": "def check(candidate):\n    assert candidate(1, 2) == math.floor(3.5)\n",
                    "entry_point": "Solution().add",
                }
            )
        }
    },
    "BigCodeBench": {
        "test": "import unittest\nclass TestCases(unittest.TestCase):\n"
        "    def test_case_1(self):\n        self.assertEqual(add(1, 2), 3)\n",
        "entry_point": "add",
        "code_prompt": "def add(a, b):\n",
    },
    "KodCode": {
        "test": "from solution import add\n\ndef test_add():\n"
        "    assert add(1, 2) == 3\n\ndef test_lists():\n    assert add([1], [2]) == [1, 2]\n",
        "solution": ADD,
        "test_info": [{"function_name": "add"}],
    },
    "code-r1": {"reward_model": json.dumps({"ground_truth": json.dumps({"functional": "assert add(1, 2) == 3"})})},
    "arguments by name": {"test_cases": [{"input": {"a": 1, "b": 2}, "output": 3}], "fn_name": "add"},
    "a solution as the label": {"label": ADD + "print(add(1, 2))\n", "tests": "assert add(1, 2) == 3"},
    "functions that are called": {"label": "def test_add():\n    assert add(1, 2) == 3\ntest_add()"},
}
METHODS = {name: CALLS[name] for name in ("APPS", "LiveCodeBench", "MBPP", "LeetCode", "Skywork")}
FILES = {
    "pytest": """
        import pytest
        from your_module import Stack

        @pytest.fixture
        def stack():
            s = Stack()
            s.push(1)
            yield s

        def test_pop(stack):
            assert stack.pop() == 1
            assert len(stack) == 0

        def test_empty():
            with pytest.raises(IndexError, match='empty'):
                Stack().pop()

        @pytest.mark.parametrize("values, last", [([1], 1), pytest.param([1, 2.5], 2.5), ([0.1 + 0.2], pytest.approx(0.3))])
        def test_last(values, last):
            s = Stack()
            for value in values:
                s.push(value)
            assert s.pop() == last
    """,
    "pytest, fixtures": """
        import pytest

        def setup_module(module):
            global FIRST
            FIRST = 1

        @pytest.fixture(params=[[], [2, 3]])
        def values(request):
            return request.param

        @pytest.fixture
        def stack(values):
            s = Stack()
            for value in [FIRST, *values]:
                s.push(value)
            return s

        @pytest.mark.parametrize(argnames='more', argvalues=[5, 6], ids=str)
        def test_pop(stack, values, more, tmp_path):
            stack.push(more)
            assert stack.pop() == more
            assert len(stack) == 1 + len(values)
            assert stack.pop() == (values or [1])[-1]
    """,
    "pytest, a class": """
        from solution import *

        class TestStack:
            def setup_method(self, method):
                self.stack = Stack()
                self.stack.push(3)

            def test_pop(self):
                assert self.stack.pop() == 3
                assert not self.stack
    """,
    "unittest": """
        import unittest

        class StackTest(unittest.TestCase):
            def setUp(self):
                self.stack = Stack()

            def test_pop(self):
                for n in range(3):
                    with self.subTest(n=n):
                        self.stack.push(n)
                        self.assertEqual(self.stack.pop(), n)

            def test_empty(self):
                self.assertIsInstance(self.stack, Stack)
                self.assertRaises(IndexError, self.stack.pop)

        if __name__ == '__main__':
            unittest.main()
    """,
    "unittest, with coroutines": """
        from unittest import IsolatedAsyncioTestCase, main

        class StackTests(IsolatedAsyncioTestCase):
            async def test_pop(self):
                s = Stack()
                s.push(1)
                self.assertEqual(s.pop(), 1)

        main()
    """,
    "assertions": """
        s = Stack()
        s.push([1])
        assert len(s) == 1 and s.pop() == [1]
        try:
            s.pop()
            assert False, 'no error'
        except IndexError as error:
            assert str(error) == 'empty'
    """,
}


def each(table, answers):
    return [
        pytest.param(row, code, float(place == 0), id=f"{name}-{place}")
        for name, row in table.items()
        for place, code in enumerate(answers)
    ]


@pytest.mark.parametrize(
    ("row", "code", "right"),
    [*each(PROGRAMS, (SUM, ZERO)), *each(CALLS, (ADD, SUBTRACT)), *each(METHODS, METHOD), *each(FILES, STACKS)],
)
def test_rows_of_public_data_sets(judge, row, code, right):
    if isinstance(row, str):
        row = {"test": "\n".join(line[8:] for line in row.splitlines())}
    label, columns = row.get("label"), {key: each for key, each in row.items() if key != "label"}
    assert judge(code, label, **columns).value == right


@pytest.mark.parametrize(
    ("label", "columns", "reason"),
    [
        (None, {}, "it has no tests: give assert statements, a file of pytest or unittest"),
        ("assert f( == 1", {}, "are no Python"),
        ({"inputs": ["1"], "outputs": []}, {}, "1 inputs and 0 outputs"),
        ({"inputs": 5, "outputs": 5}, {}, "neither lists nor texts"),
        ("122", {}, "neither assertions nor calls: give assert statements"),
        (122, {}, "has no tests: give assert statements"),
        ([1, 2], {}, "neither assertions nor calls"),
        ("Paris", {}, "neither assertions nor calls"),
        ("assert True", {}, "use no function that they do not define themselves"),
        (ADD + "print(add(1, 2))", {}, "use no function that they do not define themselves"),
        ("def check(f):\n    assert f(1) == 2", {}, "use no function that they do not define"),
        ("def check(f):\n    assert add(1) == 2", {}, "define functions and call none of them"),
        ("assert add(1, 2) == " + "-" * 100_000 + "3", {}, "cannot be read: MemoryError"),
        ("[" * 100_000, {}, "cannot be read: RecursionError"),
        ('{"a":' * 100_000, {}, "cannot be read: RecursionError"),
        ("assert add(1, 2) == 3\0", {}, "null bytes|are no Python"),
        ({"fn_name": "add", "inputs": [1], "outputs": [1]}, {}, "the list of the function's arguments"),
        ({"fn_name": "a-b", "inputs": [[1]], "outputs": [1]}, {}, "no name of a function"),
        ({"fn_name": "add", "inputs": [[{1}]], "outputs": [1]}, {}, "cannot be read: TypeError"),
        ({"answer": 5}, {}, "its tests are an object with answer: give"),
        ([{"input": [1, 2], "output": 3, "type": "function"}], {}, "do not name it: give fn_name"),
        (
            [{"input": "1", "output": "3", "type": "stdin"}, {"fn_name": "f", "input": [1], "output": 3}],
            {},
            "and others run a program",
        ),
        ([{"input": "1", "wanted": "3"}], {}, "are objects with input, wanted: give input and output"),
        (None, {"verification_info": {"language": "cpp", "test_cases": [{"input": "", "output": ""}]}}, "its language is cpp"),
        (None, {"FAIL_TO_PASS": ["test_a"], "test_patch": "diff", "repo": "a/b"}, "as in SWE-bench"),
        (None, {"official_tests": [{"input": "", "output": ""}], "generated_checker": "import sys"}, "generated_checker"),
        (None, {"tests": "from unittest.mock import patch\nassert add(1, 2) == 3"}, "replace parts of their process (patch)"),
        (
            None,
            {"tests": "def test_add(monkeypatch):\n    assert add(1, 2) == 3"},
            "replace parts of their process (monkeypatch)",
        ),
        (None, {"tests": "assert eval(add('1', '+2')) == 3"}, "could run what the solution gives (eval)"),
        (
            None,
            {"tests": "import subprocess\nassert subprocess.run(add(1, 2))"},
            "could run what the solution gives (subprocess)",
        ),
        (None, {"tests": "import pickle\nassert pickle.loads(add(1, 2)) == 3"}, "could run what the solution gives (pickle)"),
        (
            None,
            {"tests": "import no_such\nassert no_such.close(add(1, 2), 3)"},
            "its tests import no_such, which .* does not have",
        ),
        (None, {"tests": "def test_add(browser):\n    assert add(1, 2) == 3"}, "needs the fixture 'browser'"),
        (
            None,
            {"tests": "import pytest\n@pytest.mark.skip\ndef test_add():\n    assert add(1, 2) == 3"},
            "no test of its file runs",
        ),
        (None, {"tests": "assert add(1, 2) == 3", "test_setup_code": "1 / 0"}, "the task's own code fails: ZeroDivisionError"),
    ],
)
def test_a_task_without_usable_tests_is_not_judged_and_says_why(judge, label, columns, reason):
    told = judge(ADD, label, **columns)
    assert isinstance(told, Unjudged), told
    assert re.search(reason if "|" in reason or ".*" in reason else re.escape(reason), told.reason), told.reason


@pytest.mark.parametrize("code", [ADD, SUBTRACT, "", "1 / 0", "import os\nos._exit(0)"])
def test_whether_a_task_is_judged_does_not_depend_on_the_answer(judge, code):
    """A policy would learn to give the answers that are not."""
    for tests in ("import no_such\nassert no_such.close(add(1, 2), 3)", "def test_add(browser):\n    assert add(1, 2) == 3"):
        told = judge(code, tests)
        assert isinstance(told, Unjudged) or told.value == 0.0
    assert judge(code, "from solution import add\ndef test_add():\n    assert add(1, 2) == 3").value == float(code == ADD)


def test_what_tests_call():
    told = forms.tests_of(
        Task(
            "p",
            "import math\nfor n in range(3):\n    assert half(n) == math.floor(n / 2)",
            {"test_setup_code": "def half2(n): ..."},
        )
    )
    assert isinstance(told, forms.Suite)
    assert told.names == ["half"]
    helped = forms.tests_of(Task("p", "same(1)", {"test_setup_code": "def same(n):\n    assert half(n) == 0"}))
    assert isinstance(helped, forms.Suite)
    assert helped.names == ["half"], "a helper of the task's calls it"
    usual = forms.tests_of(Task("p", "assert Counter(f('a')) == Counter('a')"))
    assert isinstance(usual, forms.Suite)
    assert (usual.names, usual.usual) == (["f"], ["Counter"])
    own = forms.tests_of(Task("p", "assert gcd(4, 6) == 2"))
    assert isinstance(own, forms.Suite)
    assert (own.names, own.usual) == (["gcd"], []), "where there is nothing else, it is the solution's"


@pytest.mark.parametrize(
    "metadata",
    [
        {"test_list": ["assert math.isclose(area(1), math.pi)"], "test_imports": ["import math"]},
        {"test_list": ["assert isclose(area(1), pi)"], "test_imports": "from math import *\nfrom math import isclose, pi"},
        {"test_list": ["assert math.isclose(area(1), math.pi)"]},
        {"test_list": ["assert isclose(area(1), pi)"]},
        {"tests": "assert datetime.timedelta(area(1)).days == 3"},
    ],
)
def test_modules_that_tests_use_are_not_the_solution_s(judge, metadata):
    assert judge("def area(r): return 3.141592653589793 * r", **metadata).value == 1.0
    assert judge("def area(r): return 1\nclass math:\n    isclose, pi = lambda *a: True, 1", **metadata).value == 0.0
    assert judge("def area(r): return 1\nisclose, pi = lambda *a: True, 1", **metadata).value == 0.0


def test_partial_rewards(score):
    reward = CodeExec(CodeExec.Options(timeout_s=5.0, partial=True))

    def row(answer, label):
        return Trajectory(
            "e", "g", Task("p", label), [Segment("prompt", [0]), Segment("action", [1])], decode=lambda ids: answer
        )

    rows = [
        row("print(3)", {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}),
        row("def add(a, b): return 3", {"fn_name": "add", "inputs": [[1, 2], [3, 4], [2, 1], [0, 3]], "outputs": [3, 7, 3, 3]}),
    ]
    programs, calls = score(reward, rows)
    assert (programs.value, programs.metrics["code/wrong"]) == (0.5, 1.0)
    assert (calls.value, calls.metrics["code/wrong"]) == (0.75, 1.0)


def test_the_interpreter_that_lacks_a_module_is_said(score, caplog):
    reward = CodeExec(CodeExec.Options(timeout_s=5.0))
    segments = [Segment("prompt", [0]), Segment("action", [1])]
    rows = [
        Trajectory("e", "g", Task("p", label), segments, decode=lambda ids, answer=answer: answer)
        for answer, label in (
            ("import no_such", {"inputs": [""], "outputs": [""]}),
            ("import no_such\n" + ADD, "assert add(1, 2) == 3"),
        )
    ]
    assert [(each.value, each.metrics["code/missing_modules"]) for each in score(reward, rows)] == [(0.0, 1.0)] * 2
    assert [each.message.count("programs import no_such, which") for each in caplog.records if "no_such" in each.message] == [1]


@pytest.mark.skipif(not HUMAN_EVAL.exists(), reason="needs HumanEval beside the checkout")
@pytest.mark.timeout(300)
def test_human_eval_s_solutions_pass_and_wrong_ones_fail(score):
    rows = [json.loads(line) for line in gzip.decompress(HUMAN_EVAL.read_bytes()).splitlines()]
    assert len(rows) == 164
    reward = CodeExec(CodeExec.Options(timeout_s=20.0))

    def judged(bodies):
        trajectories = []
        for row, body in zip(rows, bodies, strict=True):
            task = Task(row["prompt"], None, {"test": row["test"], "entry_point": row["entry_point"]})
            segments = [Segment("prompt", [0]), Segment("action", [1])]
            trajectories.append(Trajectory("e", "g", task, segments, decode=lambda ids, body=body: body))
        told = score(reward, trajectories)
        assert all(isinstance(each, Reward) for each in told)
        return sum(each.value for each in told)

    assert judged([row["canonical_solution"] for row in rows]) == 164
    assert judged(["    return None\n"] * len(rows)) == 0
