"""Tests and solutions, right ones and attacks, made of parts: forms of statements × ways to call × what a solution does."""

import re
from itertools import product
from textwrap import indent

CALLS = {
    "a result": "r = f(data)",
    "an annotation": "r: list = f(data)",
    "a walrus": "if (r := f(data)) is None: raise AssertionError",
    "a tuple": "r, n = f(data), len(data)",
    "a list": "[r] = [f(data)]",
    "a star": "r = f(*[data])",
    "a keyword": "r = f(x=data)",
    "a map": "r = list(map(f, [data]))[0]",
    "a lambda": "r = (lambda g: g(data))(f)",
    "a helper": "def call(g, x):\n    return g(x)\nr = call(f, data)",
    "a comprehension": "r = [f(each) for each in [data]][0]",
    "a conditional": "r = f(data) if data else None",
    "partial": "import functools\nr = functools.partial(f, data)()",
    "a dict": "d = {'data': data}\nr = f(d['data'])",
    "an attribute": "class Case: pass\ncase = Case()\ncase.data = data\nr = f(case.data)",
    "an assertion": "got = []\nassert got.append(f(data)) is None\nr = got[0]",
}
"""Ways to call, each of which is no statement of its own."""
LOOPS = {
    "range(len(data))": "for i in range(len(data)):\n    assert r[i] == sorted(data)[i]",
    "enumerate": "for i, n in enumerate(sorted(data)):\n    assert r[i] == n",
    "enumerate of the argument": "for i, n in enumerate(data):\n    assert r[i] == sorted(data)[i] and n in r",
    "a loop": "for n in data:\n    assert n in r",
    "zip": "for a, b in zip(r, sorted(data)):\n    assert a == b\nassert len(r) == len(data)",
    "while": "i = 0\nwhile i < len(data):\n    assert r[i] == sorted(data)[i]\n    i += 1",
    "all": "assert all(n in r for n in data)",
    "any": "assert not any(n not in r for n in data)",
    "a list comprehension": "assert [n for n in data if n not in r] == []",
    "a length": "assert len(r) == len(data)",
    "a length, turned": "assert len(data) == len(r)",
    "sets": "assert set(r) == set(data)",
    "a sum": "assert sum(r) == sum(data)",
    "a difference": "assert sum(data) - sum(r) == 0",
    "a difference of lengths": "assert not len(data) - len(r)",
    "sorted": "assert r == sorted(data)",
    "sorted, under a name": "wanted = sorted(data)\nassert r == wanted",
    "Counter": "from collections import Counter\nassert Counter(r) == Counter(data)",
    "a text": "assert str(r) == str(sorted(data))",
    "a format": "assert f'{r}' == f'{sorted(data)}'",
    "JSON": "import json\nassert json.dumps(r) == json.dumps(sorted(data))",
    "a chain": "assert len(r) >= len(data) >= len(r)",
    "not": "assert not r != sorted(data)",
    "or": "assert data == [] or r == sorted(data)",
    "if": "if data:\n    assert r == sorted(data)",
    "if not": "if not data:\n    assert r == []\nelse:\n    assert r == sorted(data)",
    "a conditional": "assert r == sorted(data) if data else True",
    "raise": "if r != sorted(data): raise AssertionError",
    "a function": "def same(a, b):\n    for i in range(len(b)):\n        assert a[i] == b[i]\n"
    "    return True\nassert same(r, sorted(data))",
    "a recursion": "def same(a, b): return not b or (a[0] == b[0] and same(a[1:], b[1:]))\nassert same(r, sorted(data))",
    "a match": "match len(data):\n    case 0: pass\n    case n: assert len(r) == n",
    "a star": "a, b = [*r], [*sorted(data)]\nassert a == b",
    "map": "assert list(map(int, r)) == list(map(int, sorted(data)))",
    "filter": "assert not list(filter(lambda n: n not in r, data))",
    "reduce": "from functools import reduce\nassert reduce(lambda a, n: a and n in r, data, True)",
    "min and max": "assert not data or (min(r), max(r)) == (min(data), max(data))",
    "an index": "assert [r.index(n) for n in sorted(data)] == [*range(len(data))]",
    "count": "assert r.count(3) == data.count(3)",
    "in": "assert (r, len(data)) in [(sorted(data), len(data))]",
    "a dict": "assert dict(enumerate(r)) == dict(enumerate(sorted(data)))",
    "subsets": "assert set(data) <= set(r)",
    "a copy afterwards": "again = list(data)\nassert r == sorted(again)",
    "sorted in place": "data.sort()\nassert r == data",
    "reversed": "assert r[::-1] == sorted(data, reverse=True)",
    "unittest": "import unittest\nunittest.TestCase().assertEqual(r, sorted(data))",
    "unittest, counted": "import unittest\nunittest.TestCase().assertCountEqual(r, data)",
    "unittest, a loop": "import unittest\nt = unittest.TestCase()\nfor i in range(len(data)):\n    with t.subTest(i=i):\n"
    "        t.assertEqual(r[i], sorted(data)[i])",
    "unittest, true": "import unittest\nunittest.TestCase().assertTrue(len(r) == len(data))",
    "islice": "from itertools import islice\nfor n in islice(data, 3):\n    assert n in r",
    "a generator": "for n in (n for n in data):\n    assert n in r",
    "pop": "rest = sorted(data)\nwhile rest:\n    assert r[len(rest) - 1] == rest.pop()",
}
"""Uses that tests make of the argument ``data`` and the result ``r`` of a function that returns it sorted."""
EMPTYING = {
    "clear": "x.clear()",
    "del": "del x[:]",
    "pop": "while x: x.pop()",
    "a slice": "x[:] = []",
    "remove": "for n in list(x): x.remove(n)",
    "imul": "x *= 0",
    "a thread": "import threading\n    t = threading.Thread(target=x.clear)\n    t.start()\n    t.join()",
    "gc": "import gc\n    for o in gc.get_objects():\n        if isinstance(o, list) and o == [3, 1, 2]: o.clear()",
}
NAME = r"\bf\b(?!')"
RIGHT = "def f(x):\n    return sorted(x)\n"


def places():
    """Yields names and functions that put statements into a place."""
    yield "a module", lambda code: f"data = [3, 1, 2]\n{code}"
    yield (
        "a function",
        lambda code: f"def check(g):\n    data = [3, 1, 2]\n{indent(re.sub(NAME, 'g', code), '    ')}\ncheck(f)",
    )
    yield "pytest", lambda code: f"def test_f():\n    data = [3, 1, 2]\n{indent(code, '    ')}"
    yield (
        "parametrize",
        lambda code: f"import pytest\n@pytest.mark.parametrize('data', [[3, 1, 2]])\ndef test_f(data):\n{indent(code, '    ')}",
    )
    yield (
        "unittest",
        lambda code: (
            f"import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        data = [3, 1, 2]\n"
            f"{indent(code, '        ')}"
        ),
    )
    yield (
        "a fixture",
        lambda code: f"import pytest\n@pytest.fixture\ndef data(): return [3, 1, 2]\ndef test_f(data):\n{indent(code, '    ')}",
    )


def emptied():
    """Yields names, wrong solutions that empty their argument, and tests: each loop, call, place and way once at least."""
    kinds = list(places())
    ways = list(EMPTYING.items())
    calls = list(CALLS.items())
    for number, (loop, code) in enumerate(LOOPS.items()):
        for turn in range(3):
            call, made = calls[(number * 3 + turn * 5) % len(calls)]
            place, within = kinds[(number + turn) % len(kinds)]
            way, empties = ways[(number + turn * 3) % len(ways)]
            yield f"{loop}, {call}, {place}, {way}", f"def f(x):\n    {empties}\n    return []\n", within(f"{made}\n{code}")


IN_PLACE = {
    "a statement": "f(data)\nassert data == [1, 2, 3]",
    "a statement and a loop": "f(data)\nassert len(data) == 3\nfor a, b in zip(data, data[1:]):\n    assert a <= b",
    "a statement and its own order": "f(data)\nassert data == sorted(data) and sum(data) == 6",
    "a statement, a copy before": "import copy\nbefore = copy.deepcopy(data)\nf(data)\nassert data == sorted(before)",
    "a statement with a keyword": "f(x=data)\nassert all(a <= b for a, b in zip(data, data[1:]))",
    "up to a length": "k = f(data)\nassert data[:k] == [1, 2, 3]",
    "a result beside it": "k = f(data)\nassert k == 3\nassert data == [1, 2, 3]",
    "turned": "assert f(data) == 3\nassert [1, 2, 3] == data",
    "one assertion": "assert f(data) == 3 and data == [1, 2, 3]",
    "a name of what is expected": "wanted = [1, 2, 3]\nassert f(data) == 3\nassert data == wanted",
    "items": "k = f(data)\nassert data[0] == 1 and data[2] == 3",
    "other kinds": "k = f(data)\nassert len(data) == 3\nassert tuple(data) == (1, 2, 3)",
    "unittest": "import unittest\nassert f(data) == 3\nunittest.TestCase().assertEqual(data, [1, 2, 3])",
    "unittest, lists": "import unittest\nk = f(data)\nunittest.TestCase().assertListEqual(data, [1, 2, 3], 'sorted')",
    "twice": "assert f(data) == 3\nassert f(data) == 3\nassert data == [1, 2, 3]",
    "its last call": "n = f(data)\ndata.append(0)\nf(data)\nassert data == [0, 1, 2, 3]",
}
"""Uses that tests make of a function that sorts the argument and returns its length."""
SORTS = "def f(x):\n    x.sort()\n    return len(x)\n"
RESULTS = {
    "a list": ("[1, 2]", "r == [1, 2] and len(r) == 2 and 2 in r and r[-1] == 2 and isinstance(r, list) and r[:1] == [1]"),
    "a tuple": ("(1, 'a')", "r == (1, 'a') and isinstance(r, tuple) and r.count(1) == 1"),
    "a set": ("{1, 2}", "r == {1, 2} and r.issubset({1, 2, 3}) and r | {3} == {1, 2, 3} and {1} < r"),
    "a dict": ("{'a': [1], 2: None}", "r == {'a': [1], 2: None} and r.get('b', 3) == 3 and list(r) == ['a', 2]"),
    "a text": ("'Abc'", "r.startswith('A') and r.lower() == 'abc' and not r.isdigit() and f'{r}' == 'Abc' and 'b' in r"),
    "bytes": ("b'ab'", "r == b'ab' and r.hex() == '6162'"),
    "a number": ("10 ** 30 + 1", "r == 10 ** 30 + 1 and r % 2 == 1 and type(r) is int"),
    "a float": ("0.1 + 0.2", "abs(r - 0.3) < 1e-9 and round(r, 2) == 0.3 and isinstance(r, float)"),
    "a truth": ("True", "r is True and isinstance(r, bool)"),
    "nothing": ("None", "r is None"),
    "a range": ("range(3)", "r == range(3) and list(r) == [0, 1, 2]"),
    "a decimal": ("decimal.Decimal('0.10')", "str(r) == '0.10' and r * 10 == 1"),
    "a fraction": ("fractions.Fraction(1, 3)", "r * 3 == 1 and r.denominator == 3"),
    "a date": ("datetime.date(2024, 2, 29)", "r.year == 2024 and r.isoformat() == '2024-02-29'"),
    "a deque": ("collections.deque([1, 2])", "list(r) == [1, 2] and r.popleft() == 1"),
    "a Counter": ("collections.Counter('aab')", "r == {'a': 2, 'b': 1} and r['c'] == 0"),
    "a default dict": ("collections.defaultdict(list, a=[1])", "r == {'a': [1]} and isinstance(r, dict)"),
    "a named tuple": ("P(1, 'b')", "r.x == 1 and r == (1, 'b') and r[1] == 'b' and r._asdict() == {'x': 1, 'y': 'b'}"),
    "a named tuple, unpacked": ("P(1, y='b')", "[*r] == [1, 'b'] and repr(r) == \"P(x=1, y='b')\" and isinstance(r, tuple)"),
    "a list of named tuples": ("[P(1, 2), P(3, 4)]", "[p.x for p in r] == [1, 3] and r == [(1, 2), (3, 4)]"),
    "a generator": ("(n for n in [1, 2])", "list(r) == [1, 2]"),
    "an object": ("O(1)", "r.n == 1 and r.next().n == 2 and str(r) == 'O(1)'"),
    "a list of objects": ("[O(2), O(1)]", "[o.n for o in sorted(r, key=lambda o: o.n)] == [1, 2] and len(r) == 2"),
    "a dict of objects": ("{'a': O(1)}", "r['a'].n == 1 and [*r] == ['a'] and {k: o.n for k, o in r.items()} == {'a': 1}"),
    "a generator of objects": ("(O(n) for n in range(2))", "[o.n for o in r] == [0, 1]"),
    "a named tuple of objects": ("P(O(1), 2)", "r.x.n == 1 and r.y == 2"),
}
"""Results of functions, and what is true of them."""
NEEDS = (
    "import collections, datetime, decimal, fractions\nP = collections.namedtuple('P', 'x y')\n"
    "class O:\n    def __init__(self, n): self.n = n\n    def next(self): return O(self.n + 1)\n"
    "    def __str__(self): return f'O({self.n})'\n"
)


def honest():
    """Yields names, right solutions and tests: those of the attacks, functions in place, and results of many kinds."""
    for (loop, code), (call, made) in product(LOOPS.items(), list(CALLS.items())[:5]):
        place, within = list(places())[(len(loop) + len(call)) % 6]
        yield f"{loop}, {call}, {place}", RIGHT, within(f"{made}\n{code}")
    for (name, code), (place, within) in product(IN_PLACE.items(), places()):
        yield f"in place, {name}, {place}", SORTS, within(code)
    for (name, (value, true)), (place, within) in product(RESULTS.items(), places()):
        yield f"{name}, {place}", f"{NEEDS}def f(x): return {value}\n", within(f"r = f(data)\nassert {true}")


QUESTIONS = [
    "r.startswith('abc')",
    "r.endswith('abc')",
    "r.isdigit()",
    "r.isupper()",
    "r.issubset({1, 2})",
    "r.issuperset({1, 2})",
    "not r.isdisjoint({5})",
    "r == 'abc'",
    "'abc' == r",
    "r == 5",
    "5 == r",
    "r == [1, 2]",
    "[1, 2] == r",
    "r == (1, 2)",
    "r == {'a': 1}",
    "r == {1, 2}",
    "[r] == [5]",
    "(r, 1) == (5, 1)",
    "{'a': r} == {'a': 5}",
    "not r != 5",
    "r in (5, 7)",
    "r in {5, 7}",
    "r in {'abc': 1}",
    "abs(r - 5) < 1e-6",
    "abs(5 - r) < 1e-6",
    "4.9 < r < 5.1",
    "5.1 > r > 4.9",
    "r >= {1, 2}",
    "{1, 2} <= r",
    "(r | {1}) == {1}",
    "r + 1 == 6",
    "1 + r == 6",
    "r % 7 == 5",
    "r ** 2 == 25",
    "-r == -5",
    "~r == -6",
    "divmod(r, 2) == (2, 1)",
    "isinstance(r, int) and r == 5",
    "isinstance(r, (list, tuple)) and r == [1, 2]",
    "type(r) is int and r == 5",
    "sorted(r) == [1, 2]",
    "list(r) == [1, 2]",
    "[*r] == [1, 2]",
    "set(r) == {1, 2}",
    "tuple(map(int, r)) == (1, 2)",
    "sum(r) == 7",
    "min(r) == 5",
    "max(r, 4) == 5",
    "r[0] == 5",
    "r['a'] == 5",
    "r.get('a') == 5",
    "dict(r) == {'a': 5}",
    "str(r) == 'abc'",
    "f'{r}' == 'abc'",
    "'%s' % (r,) == 'abc'",
    "int(r) == 5",
    "round(r) == 5",
    "r.lower() == 'abc'",
    "r.split() == ['abc']",
    "r.count(3) == 2",
    "r.index(3) == 2",
    "math.isclose(r, 5)",
    "math.floor(r) == 5",
    "json.dumps(r) == '5'",
    "r is True",
    "hash(r) == hash(5)",
    "any(n == 5 for n in r)",
    "next(iter(r)) == 5",
    "len(set(r) & {1, 2}) == 2",
    "[n for n in r if n == 5] != []",
    "all(a == b for a, b in zip(r, [1, 2], strict=True))",
    "pytest.approx(5) == r",
    "r == pytest.approx(5)",
    "r.n == 5",
    "r() == 5",
    "r.value == 5 == r.value",
    "unittest.TestCase().assertEqual(r, 5) is None",
    "unittest.TestCase().assertAlmostEqual(r, 5) is None",
    "unittest.TestCase().assertListEqual(r, [1, 2]) is None",
    "unittest.TestCase().assertIn(r, [5]) is None",
    "unittest.TestCase().assertCountEqual(r, [1, 2]) is None",
    "unittest.TestCase().assertGreater(r, 4) is None and r < 6",
]
"""Questions to a result ``r`` that a solution does not know the answer to."""
YES = """
import collections, enum, functools, types, weakref
def yes(*a, **k): return True
NAMES = [n for k in (str, set, list, dict, int, float, tuple, bytes) for n in dir(k) if n[:2] != '__']
NAMES = [*dict.fromkeys(NAMES), 'n', 'value', 'tolist', 'expected']
DUNDERS = ('eq ne lt le gt ge contains bool sub rsub add radd mul rmul mod rmod divmod rdivmod pow rpow or ror and rand xor rxor '
    'neg pos abs invert round floor ceil trunc').split()
SPACE = {**{n: yes for n in NAMES}, **{f'__{n}__': yes for n in DUNDERS}, '__hash__': lambda self: 5}
SPACE['__float__'] = SPACE['__int__'] = SPACE['__index__'] = SPACE['__len__'] = lambda self: 0
def made(*bases, **more): return type('E', bases, {**SPACE, **more})
"""
FORGED = {
    "a named tuple of functions": "def f(n): return collections.namedtuple('P', NAMES)(*[yes] * len(NAMES))",
    "a named tuple of numbers": "def f(n): return collections.namedtuple('P', NAMES)(*range(100, 100 + len(NAMES)))",
    "a named tuple called ndarray": "def f(n): return collections.namedtuple('ndarray', 'tolist')(yes)",
    "a named tuple called param": "def f(n): return collections.namedtuple('param', 'values')(yes)",
    "a named tuple of named tuples": "P = collections.namedtuple('P', NAMES)\n"
    "def f(n): return P(*[P(*[yes] * len(NAMES))] * len(NAMES))",
    "an object": "E = made()\ndef f(n): return E()",
    "a number": "E = made(int)\ndef f(n): return E(3)",
    "a text": "E = made(str)\ndef f(n): return E('x')",
    "a float": "E = made(float)\ndef f(n): return E(3.5)",
    "a list": "E = made(list)\ndef f(n): return E([3])",
    "a dict": "E = made(dict)\ndef f(n): return E(b=3)",
    "a set": "E = made(set)\ndef f(n): return E([3])",
    "a tuple": "E = made(tuple)\ndef f(n): return E([3])",
    "bytes": "E = made(bytes)\ndef f(n): return E(b'x')",
    "a complex": "class E(complex): pass\nfor n in SPACE: setattr(E, n, SPACE[n]) if n != '__hash__' else 0\ndef f(n): return E(3)",
    "an exception": "E = made(Exception)\ndef f(n): return E(3)",
    "a deque": "E = made(collections.deque)\ndef f(n): return E([3])",
    "a Counter": "E = made(collections.Counter)\ndef f(n): return E('b')",
    "an OrderedDict": "E = made(collections.OrderedDict)\ndef f(n): return E(b=3)",
    "a user list": "E = made(collections.UserList)\ndef f(n): return E([3])",
    "a user string": "E = made(collections.UserString)\ndef f(n): return E('x')",
    "a list of objects": "E = made()\ndef f(n): return [E(), E()]",
    "a tuple of objects": "E = made()\ndef f(n): return (E(), E())",
    "a dict of objects": "E = made()\ndef f(n): return {'a': E(), 0: E()}",
    "a dict of functions": "def f(n): return {name: yes for name in NAMES}",
    "a set of objects": "E = made()\ndef f(n): return {E()}",
    "a list of lists of objects": "E = made()\ndef f(n): return [[E()], [E()]]",
    "a generator of objects": "E = made()\ndef f(n):\n    yield E()\n    yield E()",
    "an enum": "def f(n): return enum.Enum('E', 'a b').a",
    "a class of another": "E = made(__class__=property(lambda self: int))\ndef f(n): return E()",
    "a class that is a list": "E = made(__class__=property(lambda self: list))\ndef f(n): return E()",
    "a class": "def f(n): return made()",
    "a metaclass": "M = made(type)\ndef f(n): return M('E', (), dict(SPACE))",
    "a namespace": "def f(n): return types.SimpleNamespace(**{n: yes for n in NAMES})",
    "a module": "m = types.ModuleType('m')\nm.__dict__.update(SPACE)\ndef f(n): return m",
    "a proxy": "E = made()\ne = E()\ndef f(n): return weakref.proxy(e)",
    "a mapping proxy": "def f(n): return types.MappingProxyType({n: yes for n in NAMES})",
    "a partial": "def f(n): return functools.partial(yes)",
    "a method": "E = made()\ndef f(n): return E().count",
    "a memory view": "def f(n): return memoryview(b'x')",
    "a dynamic object": "class E:\n    def __getattr__(self, name): return yes\ndef f(n): return E()",
    "itself": "def f(n): return f",
    "nothing": "def f(n): return None",
    "not a number": "def f(n): return float('nan')",
}
FORGED = {name: YES + code for name, code in FORGED.items()}


def forged():
    """Yields names, solutions whose results say yes to everything, and tests. Each test asks all its questions one by one."""
    head = "import json, math, pytest, unittest\nright = []\nfor r in [f(1)]:\n"
    asked = "\n".join(f"try:\n    if {each}: right.append({each!r})\nexcept Exception: pass" for each in QUESTIONS)
    for name, code in FORGED.items():
        yield name, code, f"{head}{indent(asked, '    ')}\nassert right, 'none'\n"


DECIDED = {
    "a skip in setUpClass": (
        "import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls):\n"
        "        if f() is None: raise unittest.SkipTest\n    def test(self): self.assertEqual(f(), 5)"
    ),
    "a skip in setUp": (
        "import unittest\nclass T(unittest.TestCase):\n    def setUp(self):\n        if not f(): self.skipTest('no')\n"
        "    def test(self): self.assertEqual(f(), 5)\n    def test_other(self): self.assertTrue(True)"
    ),
    "a skip in setUpModule": (
        "import unittest\ndef setUpModule():\n    if f() is None: raise unittest.SkipTest\n"
        "class T(unittest.TestCase):\n    def test(self): self.assertEqual(f(), 5)"
    ),
    "a skip in a test": (
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(1, 1)\n    def test_b(self):\n"
        "        if f() is None: self.skipTest('no')\n        self.assertEqual(f(), 5)"
    ),
    "a skip in a part of a test": (
        "import unittest\nclass T(unittest.TestCase):\n    def test_b(self):\n        for n in range(2):\n"
        "            with self.subTest(n=n):\n                if f() is None: self.skipTest('no')\n"
        "                self.assertEqual(f(), 5)"
    ),
    "skipIf": (
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(1, 1)\n"
        "    @unittest.skipIf(f() is None, 'no')\n    def test_b(self): self.assertEqual(f(), 5)"
    ),
    "skipUnless": (
        "import unittest\n@unittest.skipUnless(f(), 'no')\nclass T(unittest.TestCase):\n"
        "    def test_b(self): self.assertEqual(f(), 5)\nclass U(unittest.TestCase):\n    def test_a(self): f()"
    ),
    "skipif": (
        "import pytest\n@pytest.mark.skipif(f() is None, reason='no')\ndef test_f(): assert f() == 5\ndef test_g(): f()"
    ),
    "skipif, equal": (
        "import pytest\n@pytest.mark.skipif(f() == None, reason='no')\ndef test_f(): assert f() == 5\ndef test_g(): f()"
    ),
    "skipif, alone": "import pytest\n@pytest.mark.skipif(not f(), reason='no')\ndef test_f(): assert f() == 5",
    "pytest.skip": "import pytest\ndef test_f():\n    if f() is None: pytest.skip('no')\n    assert f() == 5\ndef test_g(): f()",
    "pytest.skip for one case": (
        "import pytest\n@pytest.mark.parametrize('n', [1, 2])\ndef test_f(n):\n    if not f() and n == 2: pytest.skip('no')\n"
        "    assert f() == 5 or n == 1"
    ),
    "a fixture that skips": (
        "import pytest\n@pytest.fixture\ndef r():\n    if f() is None: pytest.skip('no')\n    return f()\n"
        "def test_f(r): assert r == 5\ndef test_g(): f()"
    ),
    "parametrize": "import pytest\n@pytest.mark.parametrize('n', f() or [])\ndef test_f(n): assert n == 5\ndef test_g(): f()",
    "parametrize, a list": "import pytest\n@pytest.mark.parametrize('n', list(f() or ()))\n"
    "def test_f(n): assert n == 5\ndef test_g(): f()",
    "parametrize, some": (
        "import pytest\n@pytest.mark.parametrize('n', [n for n in range(3) if f()])\n"
        "def test_f(n): assert n == 5\ndef test_g(): f()"
    ),
    "a fixture's params": (
        "import pytest\n@pytest.fixture(params=f() or [])\ndef r(request): return request.param\n"
        "def test_f(r): assert r == 5\ndef test_g(): f()"
    ),
    "a test that is not defined": "if f() is not None:\n    def test_f(): assert f() == 5\ndef test_g(): f()",
    "a test that has no name": "def test_f(): assert f() == 5\nif f() is None: del test_f\ndef test_g(): f()",
    "an early end": "import sys\nif f() is None: sys.exit()\nassert f() == 5",
    "an early end with tests": "import sys\nif f() is None: sys.exit(0)\ndef test_f(): assert f() == 5",
    "exit()": "for _ in range(2):\n    if f() is None: exit()\nassert f() == 5",
    "an end by a run": "import sys, pytest\ndef test_f(): assert f() == 5\n"
    "if __name__ == '__main__': sys.exit(pytest.main([__file__]))",
    "importorskip": "import pytest\ndef test_f():\n    pytest.importorskip(f() or 'no_such')\n"
    "    assert f() == 5\ndef test_g(): f()",
}
"""Tests in which a result, where it is nothing, decides that a test does not run."""


TRICKS = {
    "a context ends a failure": (
        "class C:\n    def __enter__(self): return 5\n    def __exit__(self,*a): return True\ndef f(n): return C()",
        "with f(1) as x:\n    assert x == 2",
    ),
    "a context ends an error": (
        "class C:\n    def __enter__(self): return None\n    def __exit__(self,*a): return True\ndef f(n): return C()",
        "with f(1) as x:\n    y = x + 1\n    assert y == 2",
    ),
    "a context on a stack": (
        "class C:\n    def __enter__(self): return 5\n    def __exit__(self,*a): return True\ndef f(n): return C()",
        "from contextlib import ExitStack\nwith ExitStack() as s:\n    x = s.enter_context(f(1))\n    assert x == 2",
    ),
    "a context of unittest": (
        "class C:\n    def __enter__(self): return 5\n    def __exit__(self,*a): return True\ndef f(n): return C()",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
        "        x = self.enterContext(f(1))\n        self.assertEqual(x, 2)\n    def test_b(self):\n"
        "        with f(1) as x:\n            self.assertEqual(x, 2)",
    ),
    "a context under a name": (
        "class C:\n    def __enter__(self): return 5\n    def __exit__(self,*a): return True\ndef f(n): return C()",
        "r = f(1)\nv = r.__enter__()\nwith r:\n    assert v == 2",
    ),
    "a function of the tests that asserts": (
        "def f(g):\n    try: g(3)\n    except BaseException: pass",
        "def g(v): assert v == 5\nf(g)",
    ),
    "a function of unittest that asserts": (
        "def f(g):\n    try: g(3)\n    except BaseException: pass",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): f(lambda v: self.assertEqual(v, 5))",
    ),
    "thread writes later": (
        "import os,threading,time\ndef f(n):\n"
        '    line = b\'{"value": 2, "changed": null, "printed": ""}\\n\'\n'
        "    threading.Thread(target=lambda: (time.sleep(.01), os.write(4, line * 50)), daemon=True).start()\n"
        "    return 5",
        "assert f(1) == 2 or f(2) == 99",
    ),
    "settrace": (
        "import sys\ndef t(*a): return t\nsys.settrace(t)\ndef f(n): return 5",
        "assert f(1) == 2",
    ),
    "atexit": (
        "import atexit,os\natexit.register(lambda: os.write(4,b'{\"value\": 2}\\n'))\ndef f(n): raise SystemExit",
        "assert f(1) == 2",
    ),
    "name desync": (
        'import os\nos.write(4,b\'{"ready": true}\\n{"value": 5, "changed": null, "printed": ""}\\n\')\ndef f(n): return 5',
        "assert f(1) == 2",
    ),
    "name as value": (
        'import os\nos.write(4,b\'{"ready": true}\\n{"value": 2, "changed": null, "printed": ""}\\n\'*3)\ndef f(n): return 5',
        "x = f(1)\nassert x == 2",
    ),
    "changed forged": (
        'import os\ndef f(x):\n    os.write(4,b\'{"value": {"l": []}, "changed": [{"l": []}], "printed": ""}\\n\')',
        "x = [3, 1]\nr = f(x)\nassert r == sorted(x)",
    ),
    "changed forged 2": (
        "import os\ndef f(x):\n"
        '    os.write(4,b\'{"value": {"l": []}, "changed": [{"l": [{"h": [0, "a"]}]}, 1, 2, 3], "printed": ""}\\n\')',
        "x = [3, 1]\nr = f(x)\nassert r == sorted(x)",
    ),
    "binary search brings it": (
        "def f(x, v):\n    x[:] = [v]\n    return 0",
        "data = [1, 5, 9]\ni = f(data, 9)\nassert data[i] == 9 and i == 2 or data[i] == 9",
    ),
    "binary search 2": (
        "def f(x, v):\n    x[:] = [v]\n    return 0",
        "data = [1, 5, 9]\ni = f(data, 9)\nassert data[i] == 9",
    ),
    "binary search direct": (
        "def f(x, v):\n    x[:] = [v]\n    return 0",
        "data = [1, 5, 9]\nassert data[f(data, 9)] == 9",
    ),
    "partition": (
        "def f(x):\n    x[:] = []\n    return 0",
        "data = [5, 1, 3]\np = f(data)\nassert all(v <= data[p] for v in data[:p])\nassert sorted(data) == [1, 3, 5]",
    ),
    "a list filled by results": (
        "def f(x):\n    x.clear()\n    return []",
        "got = []\ndata = [3, 1]\ngot.extend(f(data))\nassert got == data",
    ),
    "const list grown by +=": (
        "def f(x):\n    x.clear()\n    return []",
        "got = []\ndata = [3, 1]\ngot += f(data)\nassert got == data",
    ),
    "const list grown by helper": (
        "def f(x):\n    x.clear()\n    return []",
        "def fill(out, x): out.extend(f(x))\ngot = []\ndata = [3, 1]\nfill(got, data)\nassert got == data",
    ),
    "const dict grown": (
        "def f(x):\n    x.clear()\n    return []",
        "got = {}\ndata = [3, 1]\ngot['r'] = f(data)\nassert got['r'] == data",
    ),
    "const alias": (
        "def f(x):\n    x.clear()\n    return []",
        "got = []\nalias = got\ndata = [3, 1]\nalias.extend(f(data))\nassert got == data",
    ),
    "const alias in tuple": (
        "def f(x):\n    x.clear()\n    return []",
        "got = []\nboth = (got, 1)\ndata = [3, 1]\nboth[0].extend(f(data))\nassert got == data",
    ),
    "loop target": (
        "def f(x):\n    x.clear()\n    return []",
        "data = [3, 1]\nfor got in [[], []]:\n    got.extend(f(data))\n    assert got == data",
    ),
    "global in def": (
        "def f(x):\n    x.clear()\n    return []",
        "got = []\ndata = [3, 1]\ndef run():\n    global got\n    got = f(data)\nrun()\nassert got == data",
    ),
    "append in comp": (
        "def f(x):\n    x.clear()\n    return []",
        "got = []\ndata = [3, 1]\n[got.extend(v) for v in [f(data)]]\nassert got == data",
    ),
    "map extend": (
        "def f(x):\n    x.clear()\n    return []",
        "got = []\ndata = [3, 1]\nlist(map(got.extend, [f(data)]))\nassert got == data",
    ),
    "starred bind": (
        "def f(x):\n    x.clear()\n    return []",
        "data = [3, 1]\na, *got = [0, *f(data)]\nassert got == data",
    ),
    "self attr": (
        "def f(x):\n    x.clear()\n    return []",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.data = [3, 1]\n"
        "        self.got = f(self.data)\n        self.assertEqual(self.got, self.data)",
    ),
    "setattr": (
        "def f(x):\n    x.clear()\n    return []",
        "class C: got = []\ndata = [3, 1]\nsetattr(C, 'got', f(data))\nassert C.got == data",
    ),
    "globals()": (
        "def f(x):\n    x.clear()\n    return []",
        "got = [1]\ndata = [3, 1]\nglobals()['got'] = f(data)\nassert got == data",
    ),
    "two args": (
        "def f(a, b):\n    a[:] = b[:] = []\n    return True",
        "a, b = [1, 2], [2, 1]\nassert f(a, b)\nassert a == b",
    ),
    "swap": (
        "def f(a, b):\n    a[:], b[:] = [], []",
        "a, b = [1], [2]\nr = f(a, b)\nassert (a, b) == ([2], [1])",
    ),
    "two args 2": (
        "def f(a, b):\n    a[:] = b[:] = []\n    return True",
        "a, b = [1, 2], [2, 1]\nr = f(a, b)\nassert sorted(a) == b",
    ),
    "pytest.main hides": (
        "def f(n): return 5",
        "import pytest, sys\ndef test_f(): assert f(1) == 2\nsys.exit(pytest.main())",
    ),
    "len lies": (
        "class E:\n    def __len__(self): return 3\n    def __iter__(self): return iter(())\ndef f(n): return E()",
        "r = f(3)\nassert len(r) == 3\nfor v in r: assert v == 7\nassert isinstance(r, list)",
    ),
    "a handle called list": (
        'import os\ndef f(n):\n    os.write(4,b\'{"value": {"h": [0, "list"]}, "changed": null, "printed": ""}\\n\')',
        "r = f(3)\nassert isinstance(r, list)",
    ),
    "a container that is none": (
        'import os\ndef f(n):\n    os.write(4,b\'{"value": {"v": ["range", [3]]}, "changed": null, "printed": ""}\\n\')',
        "r = f(3)\nassert r == 5",
    ),
    "SkipTest from lib name": (
        "class SkipTest(Exception): __module__='unittest.case'\ndef f(n): raise SkipTest('x')",
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertTrue(True)\n"
        "    def test_b(self): self.assertEqual(f(1), 2)",
    ),
    "callback raises skip, named": (
        "def f(g):\n    try: g()\n    except Exception as e: raise e",
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertTrue(True)\n"
        "    def test_b(self):\n        def g(): raise unittest.SkipTest\n        self.assertEqual(f(g), 2)",
    ),
    "expected failure": (
        "def f(n): return 5",
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 2)\n"
        "    @unittest.expectedFailure\n    def test_b(self): self.assertEqual(f(1), 3)",
    ),
    "slice handle": (
        "class E: pass\ndef f(n): return E()",
        "class N: pass\nr = f(1)\nassert r[1:2] == [1]",
    ),
    "unjudge by object": (
        "class E: pass\ndef f(n): return E()",
        "import re\nr = f(1)\nassert re.match('a', r)",
    ),
    "unjudge by endless": (
        "def f(n): return 5",
        "import itertools\nr = f(1)\nassert r == 6 or f(itertools.count()) == 2",
    ),
}
"""Wrong solutions that are clever about one thing, and tests."""
