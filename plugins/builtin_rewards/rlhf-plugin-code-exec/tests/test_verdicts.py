"""Solutions that try to pass without being right, or not to be judged."""

import pytest

from rlhf_host import Unjudged


def named(table):
    return [pytest.param(*row, id=name) for name, row in table.items()]


TWICE = "for n in (1, 2):\n    assert f(n) == n + 1"
LIAR = (
    "class L:\n    def __init__(self, *a): pass\n    def no(self, *a): return 0.0\n    def yes(self, *a): return True\n"
    "    __sub__ = __rsub__ = __mod__ = __abs__ = __float__ = no\n    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = yes\n"
    "    __bool__ = startswith = issubset = isdigit = yes\ndef f(n): return L()"
)
EQUAL = (
    "class E(int):\n    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = lambda *a: True\n    __hash__ = int.__hash__\n"
)


@pytest.mark.parametrize(
    ("solution", "tests"),
    named(
        {
            "it ends a map": ("def f(n): raise StopIteration", "assert all(map(lambda n: f(n) == n + 1, [1, 2]))"),
            "it ends a map of itself": ("def f(n): raise StopIteration", "assert all(map(f, [1, 2]))"),
            "it ends a zip": ("def f(n): raise StopIteration", "assert all(a == b for a, b in zip(map(f, [1, 2]), [2, 3]))"),
            "it ends a loop": ("def f(n): raise StopIteration", "for a, b in zip(map(f, [1, 2]), [2, 3]):\n    assert a == b"),
            "it ends with a class of its own": (
                "class S(StopIteration): pass\ndef f(n): raise S",
                "assert all(map(f, [1, 2]))",
            ),
            "it ends an asynchronous loop": (
                "def f(n): raise StopAsyncIteration",
                "import asyncio\nclass G:\n    def __aiter__(self): return self\n    async def __anext__(self): return f(1)\n"
                "async def g():\n    async for x in G(): assert x == 2\nasyncio.run(g())",
            ),
            "it ends by a property": (
                "class P:\n    @property\n    def x(self): raise StopIteration\ndef f(n): return P()",
                "assert all(map(lambda n: f(n).x == n, [1, 2]))",
            ),
            "it ends by a length": (
                "class P:\n    def __len__(self): raise StopIteration\ndef f(n): return P()",
                "assert all(map(lambda n: len(f(n)) == n, [1, 2]))",
            ),
            "it ends by an item": (
                "class P:\n    def __getitem__(self, n): raise StopIteration\ndef f(n): return P()",
                "assert all(map(lambda n: f(n)[0] == n, [1, 2]))",
            ),
            "it ends a generator of the tests": ("def f(n): raise GeneratorExit", "assert all(f(n) == n + 1 for n in [1, 2])"),
            "it empties the expectation": ("def f(x):\n    x.clear()\n    return x", "x = [1, 2]\nassert f(x) == x"),
            "it empties what is counted": ("def f(x):\n    x.clear()\n    return 0", "x = [1, 2]\nassert f(x) == sum(x)"),
            "it empties it a statement before": (
                "def f(x):\n    x.clear()\n    return 0",
                "x = [1, 2]\nr = f(x)\nassert r == sum(x)",
            ),
            "it empties it two statements before": (
                "def f(x):\n    x.clear()\n    return []",
                "x = [1, 2]\nr = f(x)\ns = list(r)\nassert s == sorted(x)",
            ),
            "it empties it in a function": (
                "def f(x):\n    x.clear()\n    return []",
                "def check(candidate):\n    x = [1, 2]\n    r = candidate(x)\n    assert sorted(r) == sorted(x)\ncheck(f)",
            ),
            "it empties it under another name": (
                "def f(x):\n    x.clear()\n    return []",
                "def check(given, wanted):\n    r = f(given)\n    assert r == wanted\nx = [1, 2]\ncheck(x, x)",
            ),
            "it empties it in a dict": (
                "def f(x):\n    x.clear()\n    return []",
                "c = {'in': [1]}\nr = f(c['in'])\nassert r == c['in']",
            ),
            "it empties it in unittest": (
                "def f(x):\n    x.clear()\n    return []",
                "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
                "        x = [1]\n        r = f(x)\n        self.assertEqual(r, x)",
            ),
            "it empties an attribute": (
                "def f(x):\n    x.clear()\n    return []",
                "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.x = [1]\n"
                "    def test(self):\n        r = f(self.x)\n        self.assertEqual(r, self.x)",
            ),
            "it empties it within isclose": (
                "def f(x):\n    x.clear()\n    return 0",
                "import math\nx = [1, 2]\nr = f(x)\nassert math.isclose(r, sum(x))",
            ),
            "it empties what is gone over": (
                "def f(x, n):\n    x.clear()\n    return n + 1",
                "x = [1, 7]\nfor n in x:\n    assert f(x, n) == n + 1 < 3",
            ),
            "it empties what all goes over": (
                "def f(x, n):\n    x.clear()\n    return n < 3",
                "x = [1, 7]\nassert all(f(x, n) for n in x)",
            ),
            "it empties what zip goes over": (
                "def f(x, n):\n    x.clear()\n    return n",
                "x, y = [1, 7], [1, 8]\nfor n, m in zip(x, y):\n    assert f(x, n) == m",
            ),
            "it empties what a generator goes over": (
                "def f(x, n):\n    x.clear()\n    return n",
                "x = [1, 7]\nfor n in (m for m in x):\n    assert f(x, n) == n < 3",
            ),
            "it empties what is left to compare": (
                "def f(x):\n    x.clear()\n    return 3",
                "x = [1, 2]\nassert f(x) == 3 and all(n > 5 for n in x) and x == [1, 2]",
            ),
            "it fills the expectation": ("def f(x, y):\n    y.append(x)\n    return [x]", "y = []\nassert f(1, y) == y"),
            "it fills it by keyword": (
                "def f(x, y):\n    y['a'] = x\n    return {'a': x}",
                "y = {}\nr = f(1, y=y)\nassert r == y",
            ),
            "it changes what it must leave": (
                "def f(x):\n    x.sort()\n    return x",
                "a = [3, 1]\nr = f(a)\nassert r == [1, 3]\nassert a == [3, 1]",
            ),
            "equal to everything": (f"{EQUAL}def f(n): return E()", TWICE),
            "equal to everything, in a list": (f"{EQUAL}def f(n): return [E()]", "assert f(1) == [2]"),
            "equal to everything, no number": ("class E:\n    __eq__ = lambda *a: True\ndef f(n): return E()", TWICE),
            "equal to everything, a list": (
                "class L(list):\n    __eq__ = lambda *a: True\ndef f(n): return L([5])",
                "assert f(1) == [2]",
            ),
            "equal to everything, a dict": (
                "class D(dict):\n    __eq__ = lambda *a: True\ndef f(n): return D()",
                "assert f(1) == {1: 2}",
            ),
            "equal to everything, a text": (
                "class S(str):\n    __eq__ = lambda *a: True\n    __hash__ = str.__hash__\ndef f(n): return S('x')",
                "assert f(1) == 'a'",
            ),
            "equal to everything, a float": (
                "class F(float):\n    __eq__ = lambda *a: True\ndef f(n): return F(5)",
                "assert f(1) == 0.5",
            ),
            "equal to itself": ("class E: pass\ne = E()\ndef f(n): return e", "assert f(1) == f(2)"),
            "unequal to everything": ("class E:\n    __ne__ = lambda *a: False\ndef f(n): return E()", "assert not f(1) != 2"),
            "a match": ("import re\ndef f(n): return re.match('a', 'ab')", TWICE),
            "an iterator": ("def f(n): return iter([n + 1])", "assert f(1) == [2]"),
            "an iterator of its own": (
                "class I:\n    def __iter__(self): return self\n    def __next__(self): return 1\ndef f(n): return I()",
                TWICE,
            ),
            "a module": ("import math\ndef f(n): return math", TWICE),
            "a lock": ("import threading\ndef f(n): return threading.Lock()", TWICE),
            "itself": ("def f(n): return f", TWICE),
            "a class": ("def f(n): return int", TWICE),
            "an ellipsis": ("def f(n): return ...", TWICE),
            "an exception": ("def f(n): return ValueError('x')", TWICE),
            "a frame": ("import sys\ndef f(n): return sys._getframe()", TWICE),
            "a list in itself": ("def f(n):\n    x = []\n    x.append(x)\n    return x", "assert f(1) == [2]"),
            "a skipped test": (
                "import unittest\ndef f(n): raise unittest.SkipTest",
                "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)",
            ),
            "a skipped test under a name": (
                "class SkipTest(Exception): __module__ = 'unittest.case'\ndef f(n): raise SkipTest",
                "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)",
            ),
            "a skipped test of pytest": (
                "class Skipped(Exception): __module__ = 'contained.pytest_tests'\ndef f(n): raise Skipped",
                "def test_f():\n    assert f(1) == 2",
            ),
            "an exit": ("def f(n): raise SystemExit(0)", TWICE),
            "an interrupt": ("def f(n): raise KeyboardInterrupt", "try:\n    f(1)\nexcept: pass"),
            "an import that fails": ("def f(n): import no_such", TWICE),
            "an import error": (
                "def f(n): raise ImportError('pytest')",
                "from solution import f\ndef test_f():\n    assert f(1) == 2",
            ),
            "the verdict": (
                "import os\ndef f(n):\n    for d in range(3, 64):\n"
                '        try: os.write(d, b\'{"passed": 1, "of": 1}\')\n        except OSError: pass\n    os._exit(0)',
                TWICE,
            ),
            "a verdict as an answer": (
                'import os\nos.write(4, b\'{"ready": []}\\n\' + b\'{"value": 2, "changed": null}\\n\' * 9)\nos._exit(0)',
                TWICE,
            ),
            "a callback that is none": (
                'import os\ndef f(n):\n    os.write(4, b\'{"callback": [-1, {"l": []}, {"d": []}]}\\n\')',
                TWICE,
            ),
            "a callback of the tests' own": (
                'import os\ndef f(g):\n    os.write(4, b\'{"callback": [0, {"l": []}, {"d": []}]}\\n\')\n    return 1',
                "def g(): raise SystemExit(0)\nassert f(g) == 2",
            ),
            "a type that is none": (
                'import os\ndef f(n):\n    os.write(4, b\'{"value": {"x": ["os.system", ["true"]]}, "changed": null}\\n\')',
                TWICE,
            ),
            "names of the judge": (
                "_rlhf_settle = _rlhf_before = _rlhf_fixed = None\ndef f(n): return 5",
                "for n in [1]:\n    r = f(n)\n    assert r == n + 1",
            ),
            "a patched solution module": (
                "import sys\nfor m in list(sys.modules.values()):\n"
                "    try: m.same = m.encode = lambda *a: True\n    except Exception: pass\ndef f(n): return 5",
                TWICE,
            ),
            "an object that knows how far it is": (LIAR, "assert abs(f(1) - 3.14) < 1e-6"),
            "an object that knows how far it is, turned": (LIAR, "assert abs(3.14 - f(1)) < 1e-6"),
            "an object that is the class": (LIAR + "\nf = L", "assert abs(f(1) - 3.14) < 1e-6"),
            "an object in every range": (LIAR, "assert 3.1 < f(1) < 3.2"),
            "an object in every range, turned": (LIAR, "r = f(1)\nassert r > 3 and 4 > r"),
            "an object that has everything": (LIAR, "assert 3 in f(1)"),
            "an object that begins with everything": (LIAR, "assert f(1).startswith('a')"),
            "an object in every set": (LIAR, "assert f(1).issubset({1})"),
            "an object that is a number": (LIAR, "assert f(1).isdigit()"),
            "an object that is near everything": (
                LIAR,
                "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertAlmostEqual(f(1), 3.14)",
            ),
            "an object that leaves no rest": (LIAR, "assert f(1) % 7 == 0"),
            "a class of another": (
                "class E:\n    __class__ = property(lambda self: int)\n    __eq__ = lambda *a: True\ndef f(n): return E()",
                TWICE,
            ),
            "a type's name": (
                "class range:\n    start = stop = step = 1\n    __eq__ = lambda *a: True\n"
                "range.__module__ = 'builtins'\ndef f(n): return range()",
                TWICE,
            ),
            "names of its own for functions of the tests": (
                "sorted = lambda x: [1, 2]\nisclose = all = lambda *a: True\ndef f(x): return 5",
                "from solution import *\ndef test_f():\n    assert sorted(f([2, 1])) == [1, 2]",
            ),
            "a name of its own for a usual one": (
                "isclose = lambda *a: True\ndef f(x): return 5",
                "from solution import *\ndef test_f():\n    assert isclose(f(1), 2)",
            ),
            "a skip of a library's own": (
                "class ResourceDenied(Exception): pass\nResourceDenied.__module__ = 'ctypes.test'\ndef f(n): raise ResourceDenied",
                "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)",
            ),
            "it empties what the expectation is made of": (
                "def f(x):\n    x.clear()\n    return []",
                "x = [2, 1]\nr = f(x)\nwanted = sorted(x)\nassert r == wanted",
            ),
            "a module in a folder that tests share": (
                "code = 'import json, os; os.write(5, json.dumps(dict(passed=1, of=1)).encode()); os._exit(0)'\n"
                "open('textwrap.py', 'w').write(code)\n"
                "def f(n): return 5",
                "import os, sys\nsys.path.insert(0, os.getcwd())\nf(1)\nimport textwrap\nassert f(1) == 2",
            ),
            "a coroutine that goes back": ("async def g(): return 1\ndef f(n): return 5", "assert f(g()) == 2"),
            "a generator without end that goes back": (
                "def g():\n    while True: yield 1\ndef f(n): return 5",
                "assert f(g()) == 2",
            ),
            "an exception's class that goes back": (
                "class E(ValueError): pass\ndef g(): return E\ndef f(n): return 5",
                "assert f(g()) == 2",
            ),
            "a setup that calls it": (
                "def g(): raise ValueError\ndef f(n): return 5",
                "from solution import g\nx = g()\nassert f(x) == 2",
            ),
            "a skip of the tests": (
                "",
                "import pytest\nimport solution\ndef test_f():\n    if not hasattr(solution, 'g'): pytest.skip()\n    assert 0",
            ),
            "fewer names": ("", TWICE),
            "a name that is there later": ("def g(n): return n + 1", TWICE),
        }
    ),
)
def test_a_solution_that_is_not_right_is_wrong_and_never_unjudged(judge, solution, tests):
    told = judge(solution, tests)
    assert not isinstance(told, Unjudged), told
    assert told.value == 0.0


def test_what_a_task_needs_and_cannot_have_is_unjudged(judge):
    for solution in ("def f(x): return x.n", "class A: pass\ndef f(x): return A()"):
        told = judge(solution, "class N: n = 1\nassert f(N()) == 1")
        assert isinstance(told, Unjudged)
        assert "a test passes a N, which cannot be sent" in told.reason
    derived = judge("class A: pass", "class B(A): pass\nassert B()")
    assert isinstance(derived, Unjudged)
    assert "a class from one of the solution's" in derived.reason


@pytest.mark.parametrize(
    ("solution", "tests", "said"),
    [
        ("def f(n): return n", "assert f(1) == 2, 'f(1) should be 2'", "A test failed. AssertionError: f(1) should be 2"),
        ("def f(n): return n / 0", "assert f(1) == 2", "The program failed. ZeroDivisionError: division by zero"),
        ("def f(n):\n    while True: pass", "assert f(1) == 2", "The program took too long."),
        ("def f(n): return n + 1", "assert f(1) == 2", None),
    ],
)
def test_the_feedback_says_what_failed(judge, solution, tests, said):
    assert judge(solution, tests).feedback == said
