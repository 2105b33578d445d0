"""Runs the tests of a file in the forms of ``unittest`` and ``pytest``, after the file itself."""

import inspect
import io
import sys
from contextlib import ExitStack, contextmanager, redirect_stdout
from types import SimpleNamespace
from typing import NamedTuple

from .remote import end


class Tally:
    ran = skipped = 0
    """Number of tests that ran, and of tests that skipped themselves while they ran."""


def run(space, called):
    """Runs the tests.

    Args:
        space: the names that the file defines.
        called: test functions that the file calls itself.
    """
    tally = Tally()
    for name in ("setup_module", "setUpModule"):
        if name in space:
            _call(space[name], sys.modules["__main__"])
    for name, value in list(space.items()):
        if isinstance(value, type) and value.__module__ == "__main__":
            if "unittest" in sys.modules and issubclass(value, sys.modules["unittest"].TestCase):
                _run_case(value, tally)
            elif name.startswith("Test"):
                _run_class(value, space, tally)
        elif inspect.isfunction(value) and name.startswith("test") and value.__module__ == "__main__" and name not in called:
            _run_function(value, space, tally)
    if tally.skipped and not tally.ran and not called:
        end(failed="all tests are skipped as they run")
    if not tally.ran and not called:
        end(unusable="no test of its file runs: all are marked to be skipped")


def _run_case(kind, tally):
    import unittest

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
    for _, text in result.failures + result.errors:
        end(failed=text.strip().rpartition("\n")[2][:500], wrong=bool(result.failures))
    if result.unexpectedSuccesses:
        end(failed="a test that is expected to fail does not", wrong=True)
    tally.ran += result.testsRun - len(result.skipped)


def _run_class(kind, space, tally):
    if hasattr(kind, "setup_class"):
        kind.setup_class()
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("test"):
            _run_function(function, space, tally, kind)


def _run_function(function, space, tally, kind=None):
    """Runs a function with all its parameters."""
    from .pytest_tests import Skipped

    said = [*getattr(function, "said", []), *getattr(kind, "said", [])]
    if any(each.name in ("skip", "xfail") or (each.name == "skipif" and each.args[0]) for each in said):
        return
    rows = _rows([each for each in said if each.name == "parametrize"])
    for values in _with_fixtures(rows, _several(function, space, kind)):
        with ExitStack() as stack:
            owner = [kind()] if kind else []
            _around("setup_method", owner, function)
            try:
                _Given(stack, space, owner, values).call(function)
                tally.ran += 1
            except Skipped:
                tally.skipped += 1
            _around("teardown_method", owner, function)


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
    """Yields each run with each value of the fixtures that have several."""
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
