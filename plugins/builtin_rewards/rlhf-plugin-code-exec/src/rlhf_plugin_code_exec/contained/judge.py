"""The tests' side. The code that it calls is in another process, and only values come back."""

import builtins
import json
import os
import sys
from importlib.machinery import PathFinder

from .changes import Changes
from .compare import same
from .names import BEFORE, FIXED, SETTLE
from .prelude import MISSING, usual
from .remote import VERDICT, Side, end


def loaded(side):
    """Waits until the solution is loaded."""
    first = side.told()
    if "broken" in first:
        end(failed=str(first["broken"])[:500])


def compiled(code, name):
    try:
        return compile(code, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        end(unusable=f"the task's tests cannot be compiled: {type(error).__name__}: {error}"[:500])


class Absent:
    """A name that the solution does not have."""

    def __init__(self, name):
        self.name = name

    def __getattr__(self, attribute):
        raise NameError(f"name {self.name!r} is not defined")

    def __call__(self, *args, **kwargs):
        raise NameError(f"name {self.name!r} is not defined")

    def __mro_entries__(self, bases):
        raise NameError(f"name {self.name!r} is not defined")

    def __eq__(self, other):
        return False

    __hash__ = object.__hash__


def named(side, name):
    """Returns a function, a class or a constant of the solution."""
    try:
        return side.request("name", name)
    except Exception:
        return Absent(name)


def run_tests(job, side):
    """Runs code whose assertions are the tests."""
    changes = side.changes = Changes()
    module = sys.modules["__main__"] = type(sys)("__main__")
    space = module.__dict__
    space.update({"__builtins__": builtins, SETTLE: changes.settle, BEFORE: changes.before, FIXED: changes.fixed})
    setup, tests = compiled(job["setup"], "setup.py"), compiled(job["tests"], "tests.py")
    if job["modules"]:
        from . import imports

        imports.install(job["modules"], job["names"], lambda name: named(side, name))
    loaded(side)
    try:
        exec(setup, space)
    except Exception as error:
        whose = "failed" if side.calls_made else "unusable"
        end(**{whose: f"the task's own code fails: {type(error).__name__}: {error}"[:500]})
    for name in job["usual"]:
        if (value := usual(name)) is not MISSING:
            space.setdefault(name, value)
    space.update({name: named(side, name) for name in job["names"]})
    if job["collect"] and "unittest" in job["tests"]:
        import unittest

        unittest.main = lambda *args, **kwargs: None  # type: ignore[assignment, misc]
    try:
        exec(tests, space)
        if job["collect"]:
            from .collect import run

            run(space, job["called"])
    except SystemExit as error:
        if error.code not in (None, 0):
            end(failed=f"SystemExit: {error.code}"[:500])
    except BaseException as error:
        end(failed=f"{type(error).__name__}: {error}"[:500], wrong=isinstance(error, AssertionError))
    end(passed=1, of=1)


def run_cases(job, side):
    """Calls one function with the arguments of each case: with text keys, as JSON has them, or with integers in their place."""
    loaded(side)
    function = named(side, job["function"])
    passed = 0
    failed = ""
    for args, wanted in job["cases"]:
        told = ""
        for each in (args, with_integers(args)):
            if told and each == args:
                break
            try:
                value = function(**each) if isinstance(each, dict) else function(*each)
            except Exception as error:
                told = f"{type(error).__name__}: {error}"[:500]
                continue
            if same(value, wanted) or (job["wrapped"] and same(value, wanted[0])):
                told = ""
                break
            told = f"AssertionError: {type(value).__name__} instead of {repr(wanted)[:200]}"
        passed += not told
        failed = failed or told
        if failed and job["first_only"]:
            break
    end(passed=passed, of=len(job["cases"]), failed=failed, wrong=failed.startswith("AssertionError"))


def with_integers(value):
    """Converts JSON's text keys to integers, in dicts where all of them are integers."""
    if isinstance(value, list):
        return [with_integers(each) for each in value]
    if not isinstance(value, dict):
        return value
    whole = bool(value) and all(key.removeprefix("-").isdecimal() for key in value)
    return {int(key) if whole else key: with_integers(each) for key, each in value.items()}


class Library:
    """Finds modules where they were at the start: tests may share a folder with the solution, and add it to ``sys.path``."""

    path = tuple(sys.path)

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return PathFinder.find_spec(name, path or cls.path, target)


def main():
    sys.meta_path[:] = [Library if finder is PathFinder else finder for finder in sys.meta_path]
    for end_of_wire in (3, 4, VERDICT):
        os.set_inheritable(end_of_wire, False)  # tests may start programs
    job = json.load(sys.stdin)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    side = Side(os.fdopen(3, "w", encoding="utf-8"), os.fdopen(4, "r", encoding="utf-8"))
    (run_cases if "cases" in job else run_tests)(job, side)


main()
