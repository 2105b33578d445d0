"""Programs that a person calls right, in the habits of contests and data sets, and the wrong twins of some."""

import pytest


def io(given, wanted):
    return {"inputs": [given], "outputs": [wanted]}


def calls(*cases, name="f"):
    return {"fn_name": name, "inputs": [args for args, _ in cases], "outputs": [wanted for _, wanted in cases]}


READS = {
    "exit()": ("print(2)\nexit()", io("", "2")),
    "quit()": ("n = int(input())\nif n == 1:\n    print('one')\n    quit()\nprint('many')", io("1", "one")),
    "sys.exit() without import": ("print(2)\nsys.exit()", io("", "2")),
    "exit in a function": ("def main():\n    print(2)\n    exit(0)\nmain()", io("", "2")),
    "/dev/stdin": ("print(int(open('/dev/stdin').read()) + 1)", io("1", "2")),
    "/dev/stdin twice": ("open('/dev/stdin').read()\nprint(int(open('/dev/stdin').read()) + 1)", io("1", "2")),
    "/dev/stdout": ("open('/dev/stdout', 'w').write('2\\n')", io("", "2")),
    "descriptor 0": ("print(sum(map(int, open(0))))", io("1\n2\n", "3")),
    "the size of the input": ("import os\nprint(os.read(0, os.fstat(0).st_size).decode().upper())", io("ab", "AB")),
    "io over descriptor 0": (
        "import os, io\ninput = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\nprint(int(input()) * 2)",
        io("4\n", "8"),
    ),
    "buffers": ("import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())", io("x y\n", "x y")),
    "mmap of the input": ("import mmap\nprint(mmap.mmap(0, 0, access=mmap.ACCESS_READ)[:2].decode())", io("ab", "ab")),
    "main": ("def main():\n    print(input())\nif __name__ == '__main__':\n    main()", io("a", "a")),
    "a class of its own": ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nprint(P(1).x)", io("", "1")),
    "annotations that wait": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nprint(P(1).x)",
        io("", "1"),
    ),
    "deep recursion": ("def f(n): return n and 1 + f(n - 1)\nprint(f(5000))", io("", "5000")),
    "deeper recursion in a thread": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\ndef f(n): return n and 1 + f(n - 1)\n"
        "t = threading.Thread(target=lambda: print(f(50000)))\nt.start()\nt.join()",
        io("", "50000"),
    ),
    "many names without imports": (
        "d = defaultdict(int)\nfor x in input().split():\n    d[x] += 1\nh = []\nheappush(h, gcd(4, 6))\n"
        "print(d['a'], h[0], floor(sqrt(17)), sum(accumulate([1, 2])), Counter('aab')['a'], bisect_left([1, 2], 2), inf)",
        io("a b a", "2 2 4 4 2 1 inf"),
    ),
    "modules without imports": ("print(math.floor(1.5), collections.deque([1])[0], re.sub('a', 'b', 'a'))", io("", "1 1 b")),
    "its own name for a usual one": ("def gcd(a, b): return 7\ncount = 1\nprint(gcd(4, 6), count)", io("", "7 1")),
    "a float": ("print(0.1 + 0.2)", io("", "0.3")),
    "a float for an integer": ("print(6 / 2)", io("", "3")),
    "an integer for a float": ("print(3)", io("", "3.0")),
    "an exponent": ("print(1e-7)", io("", "0.0000001")),
    "a copied file": (
        "import shutil, os\nopen('a', 'w').write('x')\nshutil.copy('a', 'b')\nshutil.copy2('a', 'c')\nprint(open('c').read())",
        io("", "x"),
    ),
    "a temporary file": (
        "import tempfile\nwith tempfile.TemporaryFile('w+') as f:\n    f.write('x')\n    f.seek(0)\n    print(f.read())",
        io("", "x"),
    ),
    "a file that it appends to": (
        "for n in range(200):\n    with open('log', 'a') as f: f.write('x')\nprint(len(open('log').read()))",
        io("", "200"),
    ),
    "a database": (
        "import sqlite3\nc = sqlite3.connect('d.db')\n"
        "c.execute('create table t (x)')\nc.execute('insert into t values (3)')\nc.commit()\n"
        "print(c.execute('select x from t').fetchone()[0])",
        io("", "3"),
    ),
    "a pool of threads": (
        "from multiprocessing.pool import ThreadPool\nwith ThreadPool(4) as p:\n    print(sum(p.map(int, ['1', '2'])))",
        io("", "3"),
    ),
    "a pool of as many as there are": (
        "from multiprocessing.pool import ThreadPool\nwith ThreadPool() as p:\n    print(sum(p.map(int, ['1', '2'])))",
        io("", "3"),
    ),
    "many threads": (
        "from concurrent.futures import ThreadPoolExecutor as T\nimport time\nwith T(20) as p:\n"
        "    print(sum(p.map(lambda x: time.sleep(0.01) or x, range(100))))",
        io("", "4950"),
    ),
    "a pool of processes": (
        "from multiprocessing import Pool\ndef f(x): return x * x\n"
        "if __name__ == '__main__':\n    with Pool(3) as p: print(sum(p.map(f, [1, 2])))",
        io("", "5"),
    ),
    "an executor of processes": (
        "from concurrent.futures import ProcessPoolExecutor as P\n"
        "def f(x): return x * x\nwith P(2) as p: print(sum(p.map(f, [1, 2])))",
        io("", "5"),
    ),
    "a process, a queue and a lock": (
        "import multiprocessing as m\ndef f(q, l, v):\n    with l: v.value += 1\n    q.put(v.value)\n"
        "q, l, v = m.Queue(), m.Lock(), m.Value('i', 1)\n"
        "p = m.Process(target=f, args=(q, l, v))\np.start()\nprint(q.get())\np.join()",
        io("", "2"),
    ),
    "memory that processes share": (
        "import mmap, os\nm = mmap.mmap(-1, 4096)\npid = os.fork()\nif pid == 0:\n    m[0] = 7\n    os._exit(0)\n"
        "os.waitpid(pid, 0)\nprint(m[0])",
        io("", "7"),
    ),
    "a command": (
        "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'print(3)'], capture_output=True, text=True).stdout)",
        io("", "3"),
    ),
    "asyncio": ("import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    print(1)\nasyncio.run(f())", io("", "1")),
    "lines with spaces at their ends": ("print('1 ')\nprint('2')\nprint()", io("", "1\n2")),
    "a large input": ("import sys\nprint(len(sys.stdin.read().split()))", io("1 " * 300_000, "300000")),
    "an input with an end of line of Windows": ("print(int(input()) + int(input()))", io("1\r\n2\r\n", "3")),
}
CALLED = {
    "List without import": ("def f(xs: List[int]) -> int:\n    return sum(xs)", calls(([[1, 2]], 3))),
    "Optional of a name in quotes": (
        "class Solution:\n    def f(self, x: Optional['Node']) -> Dict[str, Any]: return {}",
        calls(([1], {})),
    ),
    "a float result": ("def f(n): return n * 0.1", calls(([3], 0.3))),
    "floats in lists": ("def f(n): return [n * 0.1, (n * 0.1,)]", calls(([3], [0.3, [0.3]]))),
    "a float in a dict": ("def f(n): return {'a': n * 0.1}", calls(([3], {"a": 0.3}))),
    "integer keys": ("def f(n): return {n: 1}", calls(([3], {"3": 1}))),
    "integer keys inside": (
        "def f(n): return [{n: {True: 2, None: 3, 0.5: 4}}]",
        calls(([3], [{"3": {"true": 2, "null": 3, "0.5": 4}}])),
    ),
    "a tuple": ("def f(n): return n, (n, [n])", calls(([3], [3, [3, [3]]]))),
    "a dict of tuples": ("def f(n): return {'a': (n,)}", calls(([3], {"a": [3]}))),
    "integer keys of an argument": ("def f(d): return d[1]", calls(([{"1": 5}], 5))),
    "text keys of an argument": ("def f(d): return d['1']", calls(([{"1": 5}], 5))),
    "a default dict": ("def f(n):\n    d = defaultdict(list)\n    d['a'].append(n)\n    return d", calls(([3], {"a": [3]}))),
    "a result in a list of its own": ("def f(n): return n", calls(([3], [3]))),
    "a fraction": ("def f(): return Fraction(1, 2)", calls(([], 0.5))),
    "not a number": ("def f(): return nan", calls(([], float("nan")))),
    "exit at the end": ("def f(n): return n\nprint(f(3))\nexit()", calls(([3], 3))),
    "helpers and caches": (
        "@lru_cache(None)\ndef g(n): return n if n < 2 else g(n-1) + g(n-2)\ndef f(n): return g(n)",
        calls(([30], 832040)),
    ),
    "a method": ("class Solution:\n    def f(self, x): return self.g(x)\n    def g(self, x): return x + 1", calls(([1], 2))),
    "a pool of threads": (
        "from multiprocessing.pool import ThreadPool\ndef f(xs):\n    with ThreadPool(4) as p: return p.map(str, xs)",
        calls(([[1, 2]], ["1", "2"])),
    ),
    "a pool of processes": (
        "from multiprocessing import Pool\ndef g(x): return x + 1\ndef f(xs):\n    with Pool(2) as p: return p.map(g, xs)",
        calls(([[1, 2]], [2, 3])),
    ),
    "prints": ("def f(n):\n    print('x' * n)\n    return n", calls(([3], 3))),
    "writes to the buffer": ("import sys\nsys.stdout.buffer.write(b'x')\ndef f(n): return n", calls(([3], 3))),
    "a dataclass": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int\ndef f(n): return P(n).x",
        calls(([3], 3)),
    ),
}
WRONG = {
    "a float too far": ("print(0.3001)", io("", "0.3")),
    "an integer too far": ("print(3.0000001)", io("", "3")),
    "leading zeros": ("print('007')", io("", "7")),
    "underscores": ("print('1_0')", io("", "10.0")),
    "anything for infinity": ("print(5.0)", io("", "1e999")),
    "a word for a number": ("print('nan')", io("", "0.5")),
    "a line too many": ("print(1)\nprint(2)", io("", "1")),
    "an exit code": ("print(2)\nexit(1)", io("", "2")),
    "an exit message": ("print(2)\nexit('no')", io("", "2")),
    "a called float too far": ("def f(n): return 0.3001", calls(([3], 0.3))),
    "a called integer too far": ("def f(n): return 3.0000001", calls(([3], 3))),
    "the first of several": ("def f(n): return 5", calls(([3], [5, 7]))),
    "the first of a list where others are not in one": ("def f(n): return 5", calls(([3], [5]), ([4], 5))),
    "a text for a number": ("def f(n): return '3'", calls(([3], 3))),
    "a number for a text": ("def f(n): return 3", calls(([3], "3"))),
    "a set for a list": ("def f(n): return {1, 2}", calls(([3], [1, 2]))),
    "keys that are others": ("def f(n): return {4: 1}", calls(([3], {"3": 1}))),
    "a key too many": ("def f(n): return {3: 1, 4: 1}", calls(([3], {"3": 1}))),
    "nothing": ("def f(n): pass", calls(([3], 3))),
    "exit in the function": ("def f(n): exit()", calls(([3], 3))),
    "exit with an error while it is loaded": ("def f(n): return n\nexit(1)", calls(([3], 3))),
    "infinity": ("def f(n): return 5", calls(([3], float("inf")))),
    "more than the first case": ("def f(n): return 3", calls(([3], 3), ([4], 4))),
}


@pytest.mark.parametrize(
    ("code", "tests"), [*READS.values(), *CALLED.values()], ids=[*READS, *(f"called {name}" for name in CALLED)]
)
def test_right_programs_are_right(judge, code, tests):
    assert judge(code, tests).value == 1.0


@pytest.mark.parametrize(("code", "tests"), WRONG.values(), ids=WRONG)
def test_wrong_programs_are_wrong(judge, code, tests):
    assert judge(code, tests).value == 0.0
