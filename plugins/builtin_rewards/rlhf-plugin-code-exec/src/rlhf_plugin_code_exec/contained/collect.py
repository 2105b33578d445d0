"""Runs the tests of a file in the forms of ``unittest`` and ``pytest``, after the file itself."""

import inspect
import io
import sys
from contextlib import ExitStack, contextmanager, redirect_stdout
from types import SimpleNamespace
from typing import Any, NamedTuple

from . import remote
from .remote import end


def run(space, called):
    """Runs the tests. Returns test → number of its cases, and of those that ran and did not skip themselves.

    Args:
        space: the names that the file defines.
        called: test functions that the file calls itself.
    """
    ran: dict[str, list[int]] = {}
    for name in ("setup_module", "setUpModule"):
        if name in space:
            _call(space[name], sys.modules["__main__"])
    for name, value in list(space.items()):
        if isinstance(value, type) and value.__module__ == "__main__":
            if "unittest" in sys.modules and issubclass(value, sys.modules["unittest"].TestCase):
                ran |= _run_case(value)
            elif name.startswith("Test"):
                ran |= _run_class(value, space)
        elif inspect.isfunction(value) and name.startswith("test") and value.__module__ == "__main__" and name not in called:
            ran[name] = _run_function(value, space)
    return ran


def _run_case(kind):
    import unittest

    result = unittest.TestResult()
    tests: list[Any] = list(unittest.defaultTestLoader.loadTestsFromTestCase(kind))
    unittest.TestSuite(tests).run(result)
    for _, text in () if remote.REHEARSAL else result.failures + result.errors:
        end(failed=text.strip().rpartition("\n")[2][:500], wrong=bool(result.failures))
    if result.unexpectedSuccesses and not remote.REHEARSAL:
        end(failed="a test that is expected to fail does not", wrong=True)
    skipped = {getattr(test, "test_case", test).id() for test, _ in result.skipped}
    all_of_it = any(not isinstance(test, unittest.TestCase) for test, _ in result.skipped)
    return {test.id(): [1, int(not (all_of_it or test.id() in skipped))] for test in tests}


def _run_class(kind, space):
    if hasattr(kind, "setup_class"):
        kind.setup_class()
    functions = inspect.getmembers(kind, inspect.isfunction)
    return {f"{kind.__name__}.{name}": _run_function(each, space, kind) for name, each in functions if name.startswith("test")}


def _run_function(function, space, kind=None):
    """Runs a function with all its parameters. Returns the number of its cases, and of those that ran."""
    from .pytest_tests import Skipped

    said = [*getattr(function, "said", []), *getattr(kind, "said", [])]
    if any(each.name in ("skip", "xfail") or (each.name == "skipif" and each.args[0]) for each in said):
        return [1, 0]
    rows = _with_fixtures(_rows([each for each in said if each.name == "parametrize"]), _several(function, space, kind))
    times = 0
    for values in rows:
        with _going_on(), ExitStack() as stack:
            owner = [kind()] if kind else []
            _around("setup_method", owner, function)
            skipped = False
            try:
                _Given(stack, space, owner, values).call(function)
            except Skipped:
                skipped = True
            finally:
                times += not skipped
            _around("teardown_method", owner, function)
    return [len(rows), times]


@contextmanager
def _going_on():
    """Ignores failures of a rehearsal."""
    try:
        yield
    except Exception:
        if not remote.REHEARSAL:
            raise


def _call(function, about):
    """Calls a function that may take the tested object as an argument."""
    function(*[about] * len(inspect.signature(function).parameters))


def _around(name, owner, function):
    """Runs what a class does before or after each test."""
    for each in owner:
        if hasattr(each, name):
            _call(getattr(each, name), function)


def _rows(parametrised):
    """Returns names and values for each run."""
    rows: list[dict] = [{}]
    for each in parametrised:
        names, cases = [*each.args, *(each.kwargs[key] for key in ("argnames", "argvalues") if key in each.kwargs)][:2]
        alone = isinstance(names, str) and "," not in names
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        cases = [_values(case) if type(case).__name__ == "param" else [case] if alone else case for case in cases]
        rows = [{**row, **dict(zip(names, case))} for row in rows for case in cases]  # noqa: B905
    return rows


def _values(case):
    return case.values


def _with_fixtures(rows, fixtures):
    """Returns each run with each value of the fixtures that have several."""
    for fixture in fixtures:
        values = [_values(value)[0] if type(value).__name__ == "param" else value for value in fixture.params]
        rows = [{**row, fixture: value} for row in rows for value in values]
    return rows


def _fixture(name, space, kind):
    """Returns the fixture of that name, of a class or of the file."""
    places = [*(vars(base).get(name) for base in (kind.__mro__ if kind else ())), space.get(name), *space.values()]
    return next((each for each in places if type(each).__name__ == "Fixture" and each.name == name), None)


def _several(function, space, kind):
    """Returns fixtures with several values that a function needs, directly or by others."""
    found, todo = [], list(inspect.signature(function).parameters)
    for name in todo:
        fixture = _fixture(name, space, kind)
        if fixture is not None:
            todo += [each for each in inspect.signature(fixture.function).parameters if each not in todo]
            found += [fixture] if fixture.params is not None else []
    return found


class _Given:
    """Values of a test's parameters: parametrized ones, and fixtures."""

    def __init__(self, stack, space, owner, values):
        self.stack, self.space, self.owner, self.values = stack, space, owner, dict(values)

    def call(self, function):
        for fixture in [*self.space.values(), *(getattr(type(each), name) for each in self.owner for name in dir(type(each)))]:
            if type(fixture).__name__ == "Fixture" and fixture.autouse:
                self.value(fixture.name)
        for name in (name for said in getattr(function, "said", []) if said.name == "usefixtures" for name in said.args):
            self.value(name)
        names = list(inspect.signature(function).parameters.values())[len(self.owner) :]
        told = function(*self.owner, **{each.name: self.value(each.name) for each in names if self.needs(each)})
        if inspect.iscoroutine(told):
            import asyncio

            asyncio.run(told)

    def needs(self, parameter):
        return parameter.name in self.values or parameter.default is parameter.empty

    def value(self, name):
        if name not in self.values:
            self.values[name] = self.made(name)
        return self.values[name]

    def made(self, name):
        if name in ("tmp_path", "capsys"):
            return self.stack.enter_context({"tmp_path": _folder, "capsys": _captured}[name]())
        fixture = _fixture(name, self.space, type(self.owner[0]) if self.owner else None)
        if fixture is None:
            end(unusable=f"a test needs the fixture {name!r}, which code_exec does not have")
        names = list(inspect.signature(fixture.function).parameters)
        given = {each: self.value(each) for each in names if each not in ("self", "cls", "request")}
        if "request" in names:
            given["request"] = SimpleNamespace(param=self.values.get(fixture), addfinalizer=self.stack.callback)
        made = fixture.function(*(self.owner if names[:1] in (["self"], ["cls"]) else ()), **given)
        if inspect.isgenerator(made):
            generator, made = made, next(made)
            self.stack.callback(next, generator, None)
        return made


@contextmanager
def _folder():
    import pathlib
    import tempfile

    yield pathlib.Path(tempfile.mkdtemp())


@contextmanager
def _captured():
    captured = _Captured()
    with redirect_stdout(captured.buffer):
        yield captured


class Printed(NamedTuple):
    out: str
    err: str


class _Captured:
    """Result with the printed text in its buffer."""

    def __init__(self):
        self.buffer = io.StringIO()

    def readouterr(self):
        text = self.buffer.getvalue()
        self.buffer.seek(0)
        self.buffer.truncate()
        return Printed(text, "")
