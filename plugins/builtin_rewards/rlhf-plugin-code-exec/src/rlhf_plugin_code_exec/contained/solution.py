"""The solution's side. Its code comes by the standard input, requests of the tests by descriptor 3, and answers go to 4. A
request is an operation and its arguments. Objects that are not plain values stay here, and tests have their numbers.
"""

import io
import json
import operator
import os
import sys
from itertools import islice

from . import prelude
from .errors import lineage, made
from .values import CHANGEABLE, decode, encode, encode_items, is_iterator

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
        self.operations = {
            "name": self.named,
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
                raise made(args[0], self.rebuilt(args[1]), self.errors)
            try:
                given, named = [self.rebuilt(each) for each in args], {key: self.rebuilt(each) for key, each in kwargs.items()}
                value = self.plain(self.operation(name)(*given, **named))
                after = [self.plain(each) if isinstance(each, CHANGEABLE) else None for each in (*given, *named.values())]
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

    def plain(self, value):
        return encode(value, self.left)

    def left(self, value):
        """Returns the replacement of a value without a plain form."""
        kind = type(value)
        if kind.__name__ == "coroutine":
            import asyncio

            return {"a": self.plain(asyncio.run(value))}
        if isinstance(value, type) and issubclass(value, Exception):
            return {"e": [lineage(value), self.handle(value)["h"][0]]}
        if is_iterator(value) and id(value) not in self.numbers:
            return encode_items(value, self.left, self.handle, FEW)
        return self.handle(value)

    def handle(self, value):
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return {"h": [self.numbers[id(value)], type(value).__name__]}

    def rebuilt(self, value):
        return decode(value, self.meant)

    def meant(self, key, item):
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
        self.answer(callback=[number, self.plain(list(args)), self.plain(kwargs)], printed=self.what_was_printed())
        return self.serve()

    def described(self, error):
        try:
            args = self.plain(list(error.args))
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
