"""The tests' side. The code that it calls is in another process, and only values come back."""

import builtins
import json
import os
import sys
from importlib.machinery import PathFinder

from . import remote
from .changes import Changes
from .compare import same
from .names import ALONE, CONTEXT, EQUAL, FIXED, SIDES
from .prelude import MISSING, usual
from .remote import VERDICT, Side, context, end


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
    changes = side.changes = Changes(side.record)
    module = sys.modules["__main__"] = type(sys)("__main__")
    space = module.__dict__
    ours = {ALONE: changes.alone, FIXED: changes.fixed, EQUAL: changes.equal, SIDES: changes.sides, CONTEXT: context}
    space.update(ours, __builtins__=builtins)
    setup, tests = compiled(job["setup"], "setup.py"), compiled(side.prepared(job["tests"]), "tests.py")
    if job["modules"]:
        from . import imports

        imports.install(job["modules"], job["names"], lambda name: named(side, name))
    loaded(side)
    try:
        exec(setup, space)
    except Exception as error:
        side.own_code_fails(error)
        end(failed=f"the task's own code fails: {type(error).__name__}: {error}"[:500])
    side.classes = {name: space[name] for name in job["records"] if isinstance(space.get(name), type)}
    if side.classes:
        side.request("records", *side.classes)
    for name in job["usual"]:
        if (value := usual(name)) is not MISSING:
            space.setdefault(name, value)
    space.update({name: named(side, name) for name in job["names"]})
    if job["collect"] and "unittest" in job["tests"]:
        import unittest

        unittest.main = lambda *args, **kwargs: None  # type: ignore[assignment, misc]
    ran = {}
    try:
        try:
            exec(tests, space)
        except SystemExit as error:
            if error.code not in (None, 0) and not remote.REHEARSAL:
                end(failed=f"SystemExit: {error.code}"[:500])
            ran["its end, before its last line"] = [1, 0]
        if job["collect"]:
            from .collect import run

            ran |= run(space, job["called"])
    except BaseException as error:
        side.own_code_fails(error)
        end(failed=f"{type(error).__name__}: {error}"[:500], wrong=isinstance(error, AssertionError))
    if remote.REHEARSAL:
        end(plan=ran)
    if name := deviation(job["plan"] or {}, ran):
        end(failed=f"the solution decides whether a test runs, or how often: {name}"[:500])
    end(passed=1, of=1)


def deviation(plan, ran):
    """Returns a test that did not run as without the solution, if there is one.

    Args:
        plan: test → number of its cases, and of those that run, or ``None`` if their number is the solution's.
        ran: the same as it was.
    """
    for name in plan | ran:
        cases, times = ran.get(name, (None, 0))
        planned = plan.get(name, [cases, cases])
        if planned is None or times < planned[1] or (name in ran and cases != planned[0]):
            return name
    return None


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
            if right(value, wanted) or (job["wrapped"] and right(value, wanted[0])):
                told = ""
                break
            told = f"AssertionError: {type(value).__name__} instead of {repr(wanted)[:200]}"
        passed += not told
        failed = failed or told
        if failed and job["first_only"]:
            break
    end(passed=passed, of=len(job["cases"]), failed=failed, wrong=failed.startswith("AssertionError"))


def right(value, wanted):
    """Returns True if a result is right; one that cannot be compared is not."""
    try:
        return same(value, wanted)
    except Exception:
        return False


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
    sys.setrecursionlimit(10_000)  # as for solutions: tests compare long lists and deep trees
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    for end_of_wire in (3, 4, VERDICT):
        os.set_inheritable(end_of_wire, False)  # tests may start programs
    job = json.load(sys.stdin)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    if "rehearses" in job:
        from .rehearsal import Rehearsal

        remote.REHEARSAL = True
        run_tests(job, Rehearsal(job["rehearses"]))
    side = Side(os.fdopen(3, "w", encoding="utf-8"), os.fdopen(4, "r", encoding="utf-8"))
    (run_cases if "cases" in job else run_tests)(job, side)


main()
