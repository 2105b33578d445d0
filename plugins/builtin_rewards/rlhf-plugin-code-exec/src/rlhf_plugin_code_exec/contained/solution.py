"""The solution's side. Its code comes by the standard input, requests of the tests by descriptor 3, and answers go to 4. A
request is an operation and its arguments. Objects that are not plain values stay here, and tests have their numbers.
"""

import io
import json
import operator
import os
import sys
from itertools import chain, islice

from . import prelude
from .errors import lineage, made
from .values import (
    CHANGEABLE,
    CONTAINERS,
    Mixed,
    decode,
    decode_records,
    encode,
    encode_records,
    is_iterator,
    mixed,
    named_tuple,
)

FEW = 1000
"""Number of items of an iterator that are sent at once; others are sent when tests ask for them."""
PRINTED = 1 << 16
"""Maximum characters that one call may print; others are left out."""


class Missing(Exception):
    """The tests ask for a name that the solution does not have."""


class Side:
    def __init__(self, calls, answers, space):
        self.calls, self.answers, self.space = calls, answers, space
        self.objects, self.numbers, self.errors = [], {}, {}
        self.records = ()
        """Names of classes of the task whose instances are passed as values."""
        self.operations = {
            "name": self.named,
            "records": self.know,
            "call": lambda function, *args, **kwargs: function(*args, **kwargs),
            "more": lambda items: list(islice(items, FEW)),
            "getattr": getattr,
            "setattr": setattr,
            "isinstance": isinstance,
            **{kind.__name__: kind for kind in (bool, int, float, str)},
            **{function.__name__: function for function in (repr, len, iter, next, reversed, round, abs, dir)},
        }
        self.printed = sys.stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="replace", write_through=True)

    def answer(self, **told):
        self.answers.write(json.dumps(told) + "\n")
        self.answers.flush()

    def serve(self):
        """Executes the tests' requests. Returns the result of a function of theirs that the solution called."""
        for line in self.calls:
            name, args, kwargs = json.loads(line)
            if name == "result":
                return self.rebuilt(args[0])
            if name == "error":
                raise made(args[0], args[1], self.errors)
            try:
                given, named = [self.rebuilt(each) for each in args], {key: self.rebuilt(each) for key, each in kwargs.items()}
                value = self.plain(self.operation(name)(*given, **named))
                after = [self.changed(each) for each in (*given, *named.values())]
                changed = [new if new != old else None for new, old in zip(after, (*args, *kwargs.values()))]  # noqa: B905
                self.answer(value=value, changed=changed if any(changed) else None, printed=self.what_was_printed())
            except Exception as error:
                self.answer(raised=self.described(error), printed=self.what_was_printed())
        raise SystemExit(0)

    def operation(self, name):
        return self.operations.get(name) or getattr(operator, name)

    def named(self, name):
        if name in self.space:
            return self.space[name]
        if hasattr(owner := self.space.get("Solution"), name):  # as on LeetCode, a new one for each call
            return lambda *args, **kwargs: getattr(owner(), name)(*args, **kwargs)
        raise Missing(name)

    def know(self, *names):
        self.records = names

    def record(self, value):
        """Returns the name of a record's class, or ``None``."""
        name = type(value).__name__
        return name if name in self.records and type(value) is self.space.get(name) and hasattr(value, "__dict__") else None

    def changed(self, value):
        """Encodes what a call may have changed, with handles in it."""
        if isinstance(value, CHANGEABLE) or self.record(value):
            return encode(
                value, lambda each: encode_records(each, self.record, mixed) if self.record(each) else self.handle(each)
            )
        return None

    def plain(self, value):
        """Encodes a value as a whole, or as a handle of it."""
        try:
            return encode(value, lambda each: encode_records(each, self.record, mixed) if self.record(each) else mixed())
        except Mixed:
            return self.left(value)

    def left(self, value):
        """Returns the replacement of a value without a plain form."""
        kind = type(value)
        if kind.__name__ == "coroutine":
            import asyncio

            return {"a": self.plain(asyncio.run(value))}
        if isinstance(value, type) and issubclass(value, Exception):
            return {"e": [lineage(value), self.handle(value)["h"][0]]}
        if kind in CONTAINERS.values():
            items = value.items() if kind is dict else value
            return {"v": [kind.__name__, [self.plain(each) for each in items]]}
        if is_iterator(value) and id(value) not in self.numbers:
            return self.items(value)
        return self.handle(value)

    def items(self, value):
        """Returns the first items of an iterator and a handle of those that follow, or a handle if objects are among them."""
        first = list(islice(value, FEW + 1))
        rest = chain(first[FEW:], value)
        try:
            items = [encode(item, mixed, 1) for item in first[:FEW]]
        except Mixed:
            return self.handle(chain(first, value))
        return {"i": [items, self.handle(rest) if len(first) > FEW else None]}

    def handle(self, value):
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return {"h": [self.numbers[id(value)], type(value).__name__]}

    def rebuilt(self, value):
        return decode(value, self.meant, named=named_tuple)

    def meant(self, key, item):
        if key == "o":
            return decode_records(item, self.space, self.meant, named_tuple)
        if key == "h":
            return self.objects[item]
        if key == "b":
            module, _, path = item.partition(":")
            return operator.attrgetter(path)(__import__(module))
        if key == "c":
            return lambda *args, **kwargs: self.call_back(item, args, kwargs)
        raise ValueError(key)

    def call_back(self, number, args, kwargs):
        """Calls a function of the tests: they run it, and may call the solution meanwhile."""
        args, kwargs = [self.plain(each) for each in args], {name: self.plain(each) for name, each in kwargs.items()}
        self.answer(callback=[number, args, kwargs], printed=self.what_was_printed())
        return self.serve()

    def described(self, error):
        try:
            args = [self.plain(each) for each in error.args]
        except Exception:
            args = None
        return [lineage(type(error)), str(error)[:500], args]

    def what_was_printed(self):
        buffer = self.printed.buffer
        text = buffer.getvalue()[:PRINTED].decode("utf-8", "replace")
        buffer.seek(0)
        buffer.truncate()
        return text


def main():
    source = sys.stdin.read()
    calls, answers = os.fdopen(3, "r", encoding="utf-8"), os.fdopen(4, "w", encoding="utf-8")
    sys.stdin = open(os.devnull)  # noqa: SIM115
    side = Side(calls, answers, {})
    try:
        side.space = prelude.run(source, "solution.py", "solution").__dict__
    except SystemExit as error:
        side.space = sys.modules["solution"].__dict__
        if error.code not in (None, 0):
            side.answer(broken=f"SystemExit: {error.code}"[:500])
            return
    except BaseException as error:
        side.answer(broken=f"{type(error).__name__}: {error}"[:500])
        return
    side.what_was_printed()
    side.answer(ready=True)
    side.serve()


main()
