"""The judged side is hermetic: attacks made of parts change nothing there, and right solutions of the same tests are right."""

import base64
import itertools
import json
import pickle
import zlib

import pytest
from hypothesis import given, settings, strategies
from rlhf_plugin_code_exec import CodeExec, forms

from rlhf_host import Reward, Segment, Task, Trajectory, Unjudged

from . import generated


def row(code, label=None, **columns):
    segments = [Segment("prompt", [0]), Segment("action", [1])]
    return Trajectory("e", "g", Task("p", label, columns), segments, decode=lambda ids: code)


@pytest.fixture(scope="session")
def values(score):
    """Returns the value of each name, or why it is unjudged."""
    reward = CodeExec(CodeExec.Options(timeout_s=30.0))

    def judged(rows):
        told = score(reward, [row(code, tests) for _, code, tests in rows])
        each = [one.value if isinstance(one, Reward) else one.reason for one in told]
        return dict(zip([name for name, _, _ in rows], each, strict=True))

    return judged


def all_are(value, rows):
    return {name: value for name, _, _ in rows}


DECIDED = [(name, "def f(): return None", tests) for name, tests in generated.DECIDED.items()]
TRICKS = [(name, *each) for name, each in generated.TRICKS.items()]
EMPTIED, FORGED, HONEST = list(generated.emptied()), list(generated.forged()), list(generated.honest())


def test_some_of_each_kind(values):
    some = [*EMPTIED[::76], *FORGED[::22], *DECIDED[::8], *TRICKS[::20]]
    assert values(some) == all_are(0.0, some)
    assert values(HONEST[::170]) == all_are(1.0, HONEST[::170])


@pytest.mark.parametrize("turn", range(3))
def test_an_emptied_argument_passes_no_test(values, turn):
    assert values(EMPTIED[turn::3]) == all_are(0.0, EMPTIED[turn::3])


PARTS = [generated.LOOPS, generated.CALLS, generated.EMPTYING, dict(generated.places())]


@settings(max_examples=60, deadline=None)
@given(*(strategies.sampled_from(sorted(part)) for part in PARTS))
def test_any_loop_call_way_and_place(values, loop, call, way, place):
    tests = dict(generated.places())[place](f"{generated.CALLS[call]}\n{generated.LOOPS[loop]}")
    attack = f"def f(x):\n    {generated.EMPTYING[way]}\n    return []\n"
    assert values([("attack", attack, tests), ("right", generated.RIGHT, tests)]) == {"attack": 0.0, "right": 1.0}


def test_every_combination_is_judged():
    kinds = dict(generated.places())
    for place, call, loop in itertools.product(kinds, generated.CALLS, generated.LOOPS):
        forms.tests_of(Task(prompt="", ground_truth=kinds[place](f"{generated.CALLS[call]}\n{generated.LOOPS[loop]}")))


def test_what_says_yes_to_everything_answers_no_question(values):
    assert values(FORGED) == all_are(0.0, FORGED)


def test_a_solution_does_not_decide_which_tests_run(values):
    assert values(DECIDED) == all_are(0.0, DECIDED)


def test_tricks_are_wrong_and_judged(values):
    assert values(TRICKS) == all_are(0.0, TRICKS)


@pytest.mark.parametrize("turn", range(5))
def test_five_hundred_right_solutions_are_right(values, turn):
    assert len(HONEST) >= 500
    assert values(HONEST[turn::5]) == all_are(1.0, HONEST[turn::5])


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("print('1e99999999999999999999')", "5"),
        ("print('-1e-99999999999999999999')", "5"),
        ("print('1e' + '9' * 4000)", "5"),
        ("print('1' * 10000)", "5"),
        ("print('9' * 4_000_000)", "5.0"),
        ("print('1e400')", "5.0"),
        ("print('sNaN')", "5"),
        ("print('\\u00b2')", "5"),
        ("import sys\nsys.stdout.buffer.write(b'\\xff\\xfe')", "5"),
    ],
)
def test_what_one_answer_prints_takes_no_other_with_it(score, code, wanted):
    reward = CodeExec(CodeExec.Options(timeout_s=30.0))
    tests = {"inputs": [""], "outputs": [wanted]}
    assert [each.value for each in score(reward, [row(code, tests), row("print(5)", tests)])] == [0.0, 1.0]


@pytest.mark.parametrize("part", ["solution_of", "verdict_of"])
def test_any_exception_is_the_row_s_own(score, monkeypatch, part):
    """Whatever a solution makes go wrong where it is judged."""

    def fails(*args):
        raise RecursionError

    monkeypatch.setattr(f"rlhf_plugin_code_exec.reward.{part}", fails)
    reward = CodeExec(CodeExec.Options(timeout_s=30.0))
    [told] = score(reward, [row("def f(n): return n", "assert f(1) == 1")])
    assert (told.value, told.metrics["code/errors"]) == (0.0, 1.0)
    assert told.feedback == "The program failed. RecursionError while it was judged"


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("def f(n): return 10 ** 5000", 5.5),
        ("from decimal import Decimal\ndef f(n): return Decimal('sNaN')", 5),
        ("from decimal import Decimal\ndef f(n): return Decimal('1e999999999')", 5.5),
        ("from fractions import Fraction\ndef f(n): return Fraction(10 ** 400, 3)", 5.5),
        ("def f(n): return '\\ud800'", 5),
        ("def f(n):\n    x = []\n    for _ in range(5000): x = [x]\n    return x", 5),
        ("import os\ndef f(n):\n    os.write(4, b'[' * 100_000 + b'\\n')", 5),
        ('import os\ndef f(n):\n    os.write(4, b\'{"raised": [["idlelib.idle:x"], "a", []]}\\n\')', 5),
    ],
)
def test_other_cases_count_where_one_result_cannot_be_compared(score, code, wanted):
    reward = CodeExec(CodeExec.Options(timeout_s=30.0, partial=True))
    [told] = score(reward, [row(code, {"fn_name": "f", "inputs": [[1]], "outputs": [wanted]})])
    assert told.value == 0.0


CASES = [{"input": "4 5", "output": "9", "testtype": "stdin"}]
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(CASES)))).decode()


@pytest.mark.parametrize(
    "private",
    [
        PACKED[: len(PACKED) // 2],
        PACKED[:20] + PACKED[21:],
        base64.b64encode(zlib.compress(pickle.dumps(CASES))).decode(),
        base64.b64encode(zlib.compress(pickle.dumps(ValueError("x")))).decode(),
        base64.b64encode(zlib.compress(pickle.dumps('[{"input'))).decode(),
        base64.b64encode(zlib.compress(b"nothing")).decode(),
        json.dumps(CASES)[:-5],
        "see the archive",
        "",
        None,
        5,
        ["4 5"],
        {"input": "4 5"},
    ],
    ids=range(13),
)
def test_a_row_whose_private_tests_cannot_be_read_is_not_judged_by_its_example(score, private):
    example = json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin"}])
    columns = {"public_test_cases": example, "private_test_cases": private, "metadata": "{}", "starter_code": ""}
    reward = CodeExec(CodeExec.Options(timeout_s=30.0))
    [told] = score(reward, [row("print(3)", None, **columns)])
    assert isinstance(told, Unjudged), told
    assert "its private_test_cases" in told.reason
    assert list(reward.check_labels([Task("p", None, columns)])) == [0]


USED = "import no_such\nassert no_such.close(f(1), 2)"
UNUSABLE = [
    USED,
    "class N: pass\nassert f(N()) == 1",
    "def test_f(browser):\n    assert f(1) == 1",
    "class A(f): pass\nassert A()",
    "import pytest\n@pytest.mark.skip\ndef test_f():\n    assert f(1) == 1",
    "import itertools\nassert f(itertools.count()) == 1",
    "x = 1 / 0\nassert f(x) == 1",
]
WAYS = ["", "def f(", "1 / 0", "import os\nos._exit(0)", "while True: pass", "def f(n): return n", "def f(n): raise SystemExit"]


@pytest.mark.parametrize("tests", UNUSABLE)
def test_a_task_that_cannot_be_used_is_not_judged_whatever_the_answer(score, tests):
    reward = CodeExec(CodeExec.Options(timeout_s=3.0))
    told = score(reward, [row(code, tests) for code in WAYS])
    assert [type(each) for each in told] == [Unjudged] * len(WAYS)
    assert len({each.reason for each in told}) == 1


@pytest.mark.parametrize(
    ("solution", "tests"),
    [
        ("return kind is ValueError", "with f():\n    raise ValueError"),
        ("return kind is ValueError", "with f():\n    int('x')"),
        ("pass", "with f() as x:\n    assert x.n == 1"),
        ("C.n = kind", "try:\n    with f(): raise KeyError\nexcept KeyError: pass\nassert f().n is not None"),
    ],
)
def test_contexts_of_solutions(judge, solution, tests):
    code = f"class C:\n    n = 1\n    def __enter__(self): return self\n    def __exit__(self, kind, *_): {solution}\n"
    assert judge(f"{code}def f(): return C()", tests).value == 1.0
