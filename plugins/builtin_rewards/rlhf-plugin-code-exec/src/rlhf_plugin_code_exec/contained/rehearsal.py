"""Tests without a solution, in whose place is something that says *yes* to everything, and then something that says *no*.

So a task that cannot be used is found, and which of its tests run, before any solution has a say in that.
"""

import ast

from .remote import Remote, Side, end

MANY = 3
"""Number of items of everything."""
MOST = 200_000
"""Maximum number of uses of the solution."""


class Rehearsal(Side):
    def __init__(self, agrees):
        super().__init__(None, None)
        self.agrees, self.uses = agrees, 0
        self.answers_to = {
            "bool": agrees,
            "isinstance": agrees,
            "contains": agrees,
            "len": MANY * agrees,
            "int": MANY * agrees,
            "float": float(agrees),
            "str": "x" * agrees,
            "repr": "x" * agrees,
            "dir": [],
            "setattr": None,
            "setitem": None,
            "delitem": None,
        }

    def told(self):
        return {}

    def prepared(self, code):
        return ast.unparse(ast.fix_missing_locations(_GoingOn().visit(ast.parse(code))))

    def own_code_fails(self, error):
        if self.uses == 0 and not isinstance(error, OSError):
            end(unusable=f"the task's own code fails: {type(error).__name__}: {error}"[:500])

    def request(self, operation, *args, **kwargs):
        self.uses += operation not in ("name", "records")
        if self.uses > MOST:
            end(failed="its tests go on without end")
        for each in (*args, *kwargs.values()):
            self.plain(each)
        if operation in ("iter", "reversed"):
            return iter([Anything(self, 0, "object") for _ in range(MANY * self.agrees)])
        if operation == "next" and not self.agrees:
            raise StopIteration
        return self.answers_to[operation] if operation in self.answers_to else Anything(self, 0, "object")


class Anything(Remote):
    """Result of every call, in place of a solution's."""

    def __getattr__(self, name):
        if name[:2] == "__":
            raise AttributeError(name)
        return self._side.request("getattr", self, name)

    def __index__(self):
        return int(self)

    def __await__(self):
        return self
        yield

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False

    __hash__ = Remote.__hash__


def _said(self, *_):
    return self._side.request("bool", self)


def _anything(self, *args):
    return self._side.request("call", self, *args)


COMPARISONS = "eq ne lt le gt ge contains"
ARITHMETIC = "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor"
for _name in COMPARISONS.split():
    setattr(Anything, f"__{_name}__", _said)
for _name in ARITHMETIC.split():
    setattr(Anything, f"__{_name}__", _anything)
    setattr(Anything, f"__r{_name}__", _anything)


class _GoingOn(ast.NodeTransformer):
    """Goes on after assertions that fail, and other statements that are nothing for themselves."""

    def visit_Assert(self, node):
        return _tried(ast.Expr(node.test))

    def visit_Expr(self, node):
        return node if isinstance(node.value, (ast.Constant, ast.Yield, ast.YieldFrom)) else _tried(node)

    def visit_With(self, node):
        self.generic_visit(node)
        return _tried(node)


def _tried(statement):
    error = ast.Name("_rlhf_error", ast.Load())
    skips = ast.Compare(
        ast.Attribute(ast.Call(ast.Name("type", ast.Load()), [error], []), "__name__", ast.Load()),
        [ast.In()],
        [ast.Tuple([ast.Constant("SkipTest"), ast.Constant("Skipped")], ast.Load())],
    )
    again = ast.If(skips, [ast.Raise(None, None)], [])
    return ast.Try([statement], [ast.ExceptHandler(ast.Name("Exception", ast.Load()), "_rlhf_error", [again])], [], [])
