"""Things that go between a solution and its tests: values, objects, functions, exceptions, changes of arguments."""

import json

import pytest


def named(table):
    return [pytest.param(*row, id=name) for name, row in table.items()]


ADD = "def add(a, b):\n    return a + b\n"


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
    assert judge(answer, tests).value == reward


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
    assert judge(f"def f():\n    {body}", tests).value == 1.0


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
    assert judge(f"def f(x):\n    {body}", tests).value == 1.0


def test_a_deadline_is_the_policy_s_fault(judge):
    told = judge("def f():\n    while True: pass", "f()")
    assert (told.value, told.metrics["code/timeouts"]) == (0.0, 1.0)


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
    assert judge(answer, json.dumps({"fn_name": "add", **cases})).value == reward


@pytest.mark.parametrize(
    ("solution", "tests"),
    named(
        {
            "an object": (
                "class P:\n    x = 1\n    def y(self, n): return n\ndef f(): return P()",
                "assert f().x == 1 and f().y(2) == 2",
            ),
            "an object and operators": (
                "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
                "    def __neg__(self): return V(-self.x)\n    def __lt__(self, o): return self.x < o.x\n"
                "    def __len__(self): return self.x\n"
                "    def __getitem__(self, n): return [self.x][n]\n    def __str__(self): return f'V{self.x}'\n"
                "    def __contains__(self, n): return n == self.x\n"
                "    def __iter__(self): return iter([self.x])\n    def __call__(self): return self.x",
                "v = V(1) + V(2)\nassert (-v).x == -3 and V(1) < v and len(v) == 3 and v[0] == 3 and str(v) == 'V3' and 3 in v\n"
                "assert list(v) == [3] and v() == 3 and not V(0) and isinstance(v, V)\n"
                "v.x = 5\nassert v.x == 5 and sorted([v, V(1)])[0].x == 1",
            ),
            "an iterator of its own": (
                "class I:\n    n = 0\n    def __iter__(self): return self\n    def __next__(self):\n        self.n += 1\n"
                "        if self.n > 2: raise StopIteration\n        return self.n\ndef f(): return I()",
                "assert list(f()) == [1, 2] and next(f()) == 1",
            ),
            "a context": (
                "class C:\n    def __enter__(self): return 3\n    def __exit__(self, *a): self.left = True\ndef f(): return C()",
                "c = f()\nwith c as x: assert x == 3\nassert c.left",
            ),
            "a class and its attributes": (
                "class A:\n    n = 2\n    @classmethod\n    def make(cls): return cls()",
                "assert A.n == 2 and A.make().n == 2",
            ),
            "a constant": (
                "LIMIT = 10\ndef f(): return LIMIT",
                "from solution import LIMIT\nassert LIMIT == 10 and f() == LIMIT",
            ),
            "a function": ("def f(x): return lambda y: x + y", "assert f(1)(2) == 3 and callable(f(1))"),
            "a function of the tests": (
                "def f(g): return g(2)",
                "assert f(lambda n: n + 1) == 3\ndef h(n): return n * 2\nassert f(h) == 4",
            ),
            "a function of the tests that calls the solution": (
                "def f(g): return g(2)\ndef h(n): return n + 1",
                "assert f(lambda n: h(n) * 2) == 6",
            ),
            "a function of the tests that raises": (
                "def f(g):\n    try: g()\n    except ValueError as e: return str(e)",
                "def g(): raise ValueError('no')\nassert f(g) == 'no'",
            ),
            "an exception of the tests goes through": (
                "def f(g): return g()",
                "class Own(Exception): pass\ndef g(): raise Own\ntry:\n    f(g)\nexcept Own: pass\nelse: assert False",
            ),
            "a decorator": ("def twice(g): return lambda x: g(g(x))", "@twice\ndef h(x): return x + 1\nassert h(1) == 3"),
            "a built-in function": (
                "def f(g, xs): return [g(x) for x in xs]",
                "assert f(str, [1]) == ['1'] and f(len, ['ab']) == [2] and f(str.upper, ['a']) == ['A']",
            ),
            "an exception of its own": (
                "class E(ValueError): pass\ndef f(): raise E('no', 3)",
                "try:\n    f()\nexcept E as e:\n    assert e.args == ('no', 3)\nelse: assert False",
            ),
            "an exception of a library": (
                "import json\ndef f(): json.loads('{')",
                "import json\ntry:\n    f()\nexcept json.JSONDecodeError: pass\nelse: assert False",
            ),
            "a coroutine": (
                "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x + 1",
                "import asyncio\nassert asyncio.run(f(1)) == 2",
            ),
            "a long iterator": (
                "def f():\n    yield from range(2500)",
                "assert list(f()) == list(range(2500)) and sum(1 for _ in f()) == 2500",
            ),
            "an iterator without end": ("import itertools\ndef f(): return itertools.count(1)", "assert next(f()) == 1"),
            "a generator without end": (
                "def f():\n    n = 0\n    while True:\n        yield n\n        n += 1",
                "from itertools import islice\nassert list(islice(f(), 3)) == [0, 1, 2]",
            ),
            "a match": ("import re\ndef f(): return re.match('(a)', 'ab')", "assert f().group(1) == 'a' and f()"),
            "a path": (
                "from pathlib import Path\ndef f(x): return Path(x)",
                "from pathlib import Path\nassert f('a') == Path('a') and str(f('a')) == 'a'",
            ),
            "threads of the tests": (
                "def f(x): return [x] * 500",
                "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool:\n"
                "    assert list(pool.map(f, range(100))) == [[n] * 500 for n in range(100)]",
            ),
            "a function that sorts by it": (
                "def f(x): return -x",
                "data = [1, 3, 2]\ndata.sort(key=f)\nassert data == [3, 2, 1] == sorted(data, key=f) and max(data, key=f) == 1",
            ),
            "what it prints": (
                "def f(): print('hello')",
                "import io, contextlib\nout = io.StringIO()\n"
                "with contextlib.redirect_stdout(out): f()\nassert out.getvalue() == 'hello\\n'",
            ),
            "what it prints, by pytest": (
                "def f(): print('hello')",
                "def test_f(capsys):\n    f()\n    assert capsys.readouterr().out == 'hello\\n'",
            ),
            "a file of the tests": (
                "def f(p): return len(open(p).readlines())",
                "def test_f(tmp_path):\n    p = tmp_path / 'a.txt'\n"
                "    p.write_text('1\\n2\\n')\n    assert f(p) == f(str(p)) == 2",
            ),
            "a file of the solution": (
                "def f(p): open(p, 'w').write('x')",
                "import os, tempfile\nf('a.txt')\nassert open('a.txt').read() == 'x'\n"
                "with tempfile.TemporaryDirectory() as d:\n    f(d + '/b')\n    assert os.listdir(d) == ['b']",
            ),
            "in place": ("def f(x): x.append(1); x.sort()", "a = [3]\nf(a)\nassert a == [1, 3]"),
            "in place, with a length": (
                "def f(x):\n    x[:] = sorted(set(x))\n    return len(x)",
                "a = [3, 1, 1]\nk = f(a)\nassert a[:k] == [1, 3]\nassert k == 2",
            ),
            "in place, and itself": (
                "def f(x):\n    x.sort()\n    return x",
                "a = [3, 1]\nb = f(a)\nassert b == [1, 3]\nassert a == [1, 3]",
            ),
            "in place, in one statement": (
                "def f(x):\n    x.sort()",
                "a = [3, 1]\nassert f(a) is None and a == [1, 3]\nb = [2, 1]\nassert f(b) or b == [1, 2]",
            ),
            "in place, in a dict": ("def f(d): d['a'] = 1", "d = {}\nf(d)\nassert d == {'a': 1}"),
            "in place, in a matrix": ("def f(m): m[0][0] = 5", "m = [[1], [2]]\nf(m)\nassert m == [[5], [2]]"),
            "a state in an argument, and what is expected of it": (
                "def push(s, x): s.append(x)\ndef peek(s): return s[-1]",
                "s = []\npush(s, 1)\nwanted = s[-1]\nr = peek(s)\nassert r == wanted",
            ),
            "a state in an argument": (
                "def push(s, x): s.append(x)\ndef peek(s): return s[-1]",
                "s = []\npush(s, 1)\nr = peek(s)\nassert r == s[-1] == 1",
            ),
            "it leaves its argument": (
                "def f(x): return sorted(x)",
                "a = [3, 1]\nr = f(a)\nassert r == sorted(a)\nassert a == [3, 1]",
            ),
            "the test changes it afterwards": (
                "def f(x):\n    x.sort()\n    return len(x)",
                "a = [2, 1]\nn = f(a)\na.append(5)\nassert n + 1 == len(a)",
            ),
        }
    ),
)
def test_what_tests_do_with_right_solutions(judge, solution, tests):
    assert judge(solution, tests).value == 1.0
