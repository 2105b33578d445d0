"""The part of ``pytest`` that tests of single functions and classes use; interpreters need not have it installed."""

import contextlib
import math
import re
from typing import Any

from .remote import end


class Skipped(Exception):
    """Raised by a test that skips itself."""


class Failed(AssertionError):
    pass


class _Raised:
    def __init__(self):
        self.value = self.type = None

    def match(self, pattern):
        assert re.search(pattern, str(self.value)), f"{str(self.value)!r} does not match {pattern!r}"
        return True


@contextlib.contextmanager
def _raising(expected, match):
    told = _Raised()
    try:
        yield told
    except expected as error:
        told.value, told.type = error, type(error)
        if match is not None:
            told.match(match)
        return
    raise Failed(f"DID NOT RAISE {expected}")


def raises(expected, function=None, *args, match=None, **kwargs):
    context = _raising(expected, match)
    if function is None:
        return context
    with context as told:
        function(*args, **kwargs)
    return told


class approx:
    """Equal to numbers near it, in lists and dicts, too."""

    def __init__(self, expected, rel=None, abs=None, nan_ok=False):
        self.expected, self.nan_ok = expected, nan_ok
        self.rel, self.abs = 1e-6 if rel is None and abs is None else rel or 0.0, 1e-12 if abs is None else abs

    def __eq__(self, other):
        return self._near(other, self.expected)

    __hash__ = None  # type: ignore[assignment]

    def _near(self, value, wanted):
        if type(value).__name__ == "ndarray":
            value = value.tolist()
        if isinstance(wanted, dict):
            return (
                isinstance(value, dict)
                and value.keys() == wanted.keys()
                and all(self._near(value[k], wanted[k]) for k in wanted)
            )
        if isinstance(wanted, (list, tuple)):
            pairs = zip(value, wanted) if isinstance(value, (list, tuple)) else ()  # noqa: B905
            return isinstance(value, (list, tuple)) and len(value) == len(wanted) and all(self._near(*pair) for pair in pairs)
        if isinstance(wanted, float) and math.isnan(wanted):
            return self.nan_ok and value != value
        try:
            return bool(value == wanted or math.isclose(value, wanted, rel_tol=self.rel, abs_tol=self.abs))
        except (TypeError, OverflowError):
            return False

    def __repr__(self):
        return f"approx({self.expected!r})"


class Fixture:
    """A value that tests ask for by a parameter's name."""

    def __init__(self, function, autouse=False, params=None, name=None):
        self.function, self.autouse, self.params, self.name = function, autouse, params, name or function.__name__

    def __get__(self, owner, kind=None):
        return self


def fixture(function=None, *, scope=None, params=None, autouse=False, ids=None, name=None):
    if function is None:
        return lambda inner: Fixture(inner, autouse, params, name)
    return Fixture(function)


class param:
    def __init__(self, *values, id=None, marks=()):
        self.values = values


class _Mark:
    """Notes a mark on its test."""

    def __getattr__(self, name):
        return _Said(name)


class _Said:
    def __init__(self, name, args=(), kwargs=None):
        self.name, self.args, self.kwargs = name, args, kwargs or {}

    def __call__(self, *args, **kwargs):
        subject: Any = args[0] if len(args) == 1 and not kwargs else None
        if not (isinstance(subject, type) or type(subject).__name__ == "function"):
            return _Said(self.name, args, kwargs)
        subject.said = [self, *getattr(subject, "said", [])]
        return subject


mark = _Mark()


def fail(reason="", **_):
    raise Failed(reason)


def skip(reason="", **_):
    raise Skipped(reason)


def importorskip(name, **_):
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        end(unusable=f"its tests need a module that is not there: {error}")


def main(*_, **__):
    """Runs the tests of a file when the file is over."""
    return 0
