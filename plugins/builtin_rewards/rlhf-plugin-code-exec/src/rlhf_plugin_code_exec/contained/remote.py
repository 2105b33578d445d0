"""The solution as its tests see it: values are passed over, and handles in place of objects that are not plain values. So a
solution cannot affect a test.

A handle passes on operations, as long as they tell nothing about the test's expectation: ``abs(f(x) - 3.14) < 1e-6`` may not be
answered by an object of the solution. A handle is equal to nothing.
"""

import json
import os
import sys
from _thread import RLock

from .errors import class_of, lineage, made
from .values import CONTAINERS, decode, decode_records, encode, encode_items, encode_records, is_iterator, mixed

AMONG_ITS_OWN = "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor lt le gt ge"
"""Operators whose operands are handles, and nothing of the test's."""
ALONE = "neg pos invert getitem setitem delitem len iter next reversed repr str int float bool round abs dir"
QUESTIONS = {
    "startswith",
    "endswith",
    "isdisjoint",
    "issubset",
    "issuperset",
    *(name for name in dir(str) if name.startswith("is")),
}
"""Methods of plain values that answer yes or no."""
VERDICT = 5
MANY = 100_000
"""Maximum number of items of an iterator that a test passes."""
REHEARSAL = False
"""True without a solution. Only then is a task found to be unusable: a solution has no say in that."""


def end(unusable="", **what):
    """Ends with the verdict, from any place in the code: tests may catch every exception."""
    if unusable:
        what = {"unusable" if REHEARSAL else "failed": unusable}
    os.write(VERDICT, json.dumps(what).encode())
    os._exit(0)


class Remote:
    """An object that stays in the solution's process."""

    def __init__(self, side, number, kind):
        self.__dict__.update(_side=side, _number=number, _kind=kind)

    def __call__(self, *args, **kwargs):
        return self._side.request("call", self, *args, **kwargs)

    def __getattr__(self, name):
        if name in QUESTIONS:
            raise AttributeError(f"the solution gives a {self._kind}, which is no plain value: no {name}")
        return self._side.request("getattr", self, name)

    def __setattr__(self, name, value):
        self._side.request("setattr", self, name, value)

    def __instancecheck__(self, value):
        return self._side.request("isinstance", value, self)

    def __mro_entries__(self, bases):
        end(unusable="its tests make a class from one of the solution's, which is in another process")

    def __enter__(self):
        return self._side.request("getattr", self, "__enter__")()

    def __exit__(self, kind, error, trace):
        self._left(kind)

    def _left(self, kind):
        told = kind if kind is None or kind.__module__ == "builtins" else Exception
        return bool(self._side.request("getattr", self, "__exit__")(told, None, None))

    def __contains__(self, value):
        if isinstance(value, Remote):
            return self._side.request("contains", self, value)
        return any(each == value for each in iter(self))  # type: ignore[call-overload]

    def __hash__(self):
        return id(self)

    def __eq__(self, other):
        return False


def _alone(operation):
    return lambda self, *args: self._side.request(operation, self, *args)


def _among_its_own(operation):
    return lambda self, other: self._side.request(operation, self, other) if isinstance(other, Remote) else NotImplemented


for _name in ALONE.split():
    setattr(Remote, f"__{_name}__", _alone(_name))
for _name in AMONG_ITS_OWN.split():
    setattr(Remote, f"__{_name}__", _among_its_own(_name + "_" * (_name in ("and", "or"))))


class Context:
    """A context of the solution. It may end an exception only of a block that does not use the solution: it could end those of
    tests that fail.
    """

    def __init__(self, context, alone):
        self.context, self.alone = context, alone

    def __enter__(self):
        return self.context.__enter__()

    def __exit__(self, kind, error, trace):
        return self.context._left(kind) and self.alone and not issubclass(kind or object, AssertionError)


def context(value, alone):
    return Context(value, alone) if isinstance(value, Remote) else value


class Side:
    """The wire to the solution."""

    def __init__(self, calls, answers):
        self.calls, self.answers = calls, answers
        self.turn = RLock()
        """Held for a request: tests may call the solution in threads, one after the other."""
        self.functions, self.errors, self.remotes, self.given = [], {}, {}, {}
        self.changes = None
        """Record of changes of the tests' own values."""
        self.classes = {}
        """Name → class of the task whose instances are passed as values."""

    def prepared(self, code):
        """Returns the code of tests, as it runs."""
        return code

    def own_code_fails(self, error):
        """Ends if an exception shows that the tests cannot be used."""

    def told(self):
        """Returns one line of the solution, or ends."""
        line = ""
        try:
            line = self.answers.readline(1 << 24)
            answer = json.loads(line)
        except (ValueError, RecursionError):
            end(failed="the solution's answer cannot be read" if line else "the solution ended")
        return answer if isinstance(answer, dict) else end(failed="the solution's answer cannot be read")

    def send(self, *request):
        try:
            self.calls.write(json.dumps(request) + "\n")
            self.calls.flush()
        except OSError:
            end(failed="the solution ended")

    def request(self, operation, *args, **kwargs):
        """Makes the solution's process do something. Raises its exceptions."""
        with self.turn:
            return self._requested(operation, args, kwargs)

    def _requested(self, operation, args, kwargs):
        changes = self.changes if operation == "call" else None
        sent = changes.sent if changes else lambda value: value
        given, named = [self.plain(sent(each)) for each in args], {key: self.plain(sent(each)) for key, each in kwargs.items()}
        self.send(operation, given, named)
        while "callback" in (answer := self.told()):
            sys.stdout.write(str(answer.get("printed", "")))
            self.called_back(answer["callback"])
        sys.stdout.write(str(answer.get("printed", "")))
        if "raised" in answer:
            raise self.error(answer["raised"], operation)
        try:
            value = self.rebuilt(answer["value"])
            after = None if answer["changed"] is None else [decode(each, self.arrived) for each in answer["changed"]]
        except Exception:
            end(failed="the solution's answer cannot be read")
        if changes:
            changes.note((*args, *kwargs.values()), after)
        return value

    def error(self, told, operation):
        try:
            names, text, args = told
            args = [text] if args is None else [self.rebuilt(each) for each in args]
            error = made(names, args, self.errors)
        except Exception:
            return RuntimeError("the solution raised an exception that cannot be read")
        # Inside of ``map`` and the like it would end the test early, as if all had passed.
        if isinstance(error, (StopIteration, StopAsyncIteration)) and operation != "next":
            return RuntimeError(f"the solution raised {type(error).__name__}")
        return error

    def called_back(self, told):
        try:
            number, args, kwargs = told
            function, args = self.functions[number], [self.rebuilt(each) for each in args]
            kwargs = {str(name): self.rebuilt(each) for name, each in kwargs.items()}
            if not 0 <= number < len(self.functions):
                raise IndexError
        except Exception:
            end(failed="the solution's answer cannot be read")
        try:
            result = function(*args, **kwargs)
        except AssertionError as error:  # the solution could go on as if nothing had failed
            end(failed=f"AssertionError: {error}"[:500], wrong=True)
        except Exception as error:
            self.errors[type(error).__name__] = type(error)
            self.send("error", [lineage(type(error)), list(map(str, error.args))], {})
        except BaseException as error:
            end(failed=f"{type(error).__name__} in a function that the test passes")
        else:
            self.send("result", [self.plain(result)], {})

    def plain(self, value):
        return encode(value, self.sent)

    def record(self, value):
        """Returns the name of a record's class, or ``None``."""
        name = type(value).__name__
        return name if self.classes.get(name) is type(value) else None

    def sent(self, value):
        if isinstance(value, Remote):
            return {"h": value._number}
        if self.record(value):
            return encode_records(value, self.record, self.sent)
        if id(value) in self.given:
            return self.given[id(value)][1]
        if is_iterator(value):
            return encode_items(value, self.sent, self.endless, MANY)
        module = getattr(value, "__module__", None)
        if isinstance(value, type) and module in ("builtins", "collections", "decimal", "fractions", "datetime"):
            return {"b": f"{module}:{value.__qualname__}"}
        kind = type(value).__name__
        if kind == "builtin_function_or_method" and module in ("builtins", "math", "_operator"):
            return {"b": f"{module}:{value.__qualname__}"}
        if kind in ("method_descriptor", "wrapper_descriptor"):
            return {"b": f"builtins:{value.__qualname__}"}
        if kind == "function":
            self.functions.append(value)
            return {"c": len(self.functions) - 1}
        end(unusable=f"a test passes a {kind}, which cannot be sent to the solution")

    def endless(self, rest):
        end(unusable=f"a test passes an iterator of more than {MANY:,} items")

    def rebuilt(self, value):
        """Returns a value of the solution: plain as a whole, or a handle."""
        return decode(value, self.arrived, self.arrived_within)

    def arrived_within(self, key, item):
        return decode_records(item, self.classes, mixed) if key == "o" else mixed()

    def arrived(self, key, item):
        if key == "o":
            return decode_records(item, self.classes, mixed)
        if key == "h":
            number, kind = item
            return self.remotes.setdefault(number, Remote(self, number, str(kind)))
        if key == "v":
            kind, items = item
            return CONTAINERS[kind](map(self.rebuilt, items))
        if key == "e":
            names, number = item
            return self.kept(class_of(names, self.errors), {"h": number})
        if key == "a":
            return self.kept(_ready(self.rebuilt(item)), item)
        if key == "rest":
            return self.kept(self.items(*item), item[1])
        raise ValueError(key)

    def kept(self, value, form):
        """Returns a value that the solution gave, and remembers how it is passed back."""
        self.given[id(value)] = (value, form)
        return value

    def items(self, first, rest):
        yield from first
        rest = self.rebuilt(rest)
        while more := self.request("more", rest):
            yield from more


async def _ready(value):
    """Returns a coroutine whose result is already available."""
    return value
