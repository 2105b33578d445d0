"""The tests' side: runs inside a cell of its own, after values.py, as ``python -I -c``. What it calls is in another process. Values
are all that comes back, so nothing that a solution does can touch a test or its verdict."""

import builtins
import json
import os
import sys
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rlhf_plugin_code_exec.values import decode, encode

VERDICT = 5


def end(**what):
    """The verdict, from wherever it is known: tests may catch every exception."""
    os.write(VERDICT, json.dumps(what).encode())
    os._exit(0)


class Other:
    """A function or a class of the solution's; equal to nothing."""

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"<{self.name}>"

    def __call__(self, *args, **kwargs):
        end(unusable=f"the tests call a {self.name} that the solution gives; it is in another process")


def unsendable(value):
    end(unusable=f"a test passes a {type(value).__name__}, which cannot be sent to the solution")


def arrived(key, name):
    if key == "o":
        end(unusable=f"the solution gives an object of its own class {name}, which cannot be compared from outside")
    if key == "u":
        end(unusable=f"the solution gives a {name}, which cannot be sent to the tests")
    return Other(name)


def restored(kept, told):
    """What the call did to the test's own lists, dicts and sets."""
    for mine, theirs in zip(kept, told, strict=False):
        if isinstance(mine, list | bytearray) and isinstance(theirs, list | bytearray):
            mine[:] = theirs
        elif isinstance(mine, deque) and isinstance(theirs, deque):
            mine.clear()
            mine.extend(theirs)
        elif (isinstance(mine, dict) and isinstance(theirs, dict)) or (isinstance(mine, set) and isinstance(theirs, set)):
            mine.clear()
            mine.update(theirs)


def error_of(name, text):
    """The exception that the solution raised, or its built-in parent."""
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RuntimeError(text)
    try:
        return kind(text)
    except TypeError:  # it needs more than a text
        return kind.__new__(kind) if issubclass(kind, UnicodeError) else RuntimeError(text)


def main():
    job = json.load(sys.stdin)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    calls, answers = os.fdopen(3, "w", encoding="utf-8"), os.fdopen(4, "r", encoding="utf-8")

    def told():
        line = answers.readline(1 << 24)
        try:
            answer = json.loads(line)
            assert isinstance(answer, dict)
            return answer
        except (ValueError, AssertionError, RecursionError):
            end(failed="the solution ended" if not line else "the solution's answer cannot be read")

    def plain(value):
        return encode(value, unsendable)

    def rebuilt(value):
        return decode(value, arrived)

    def proxy(name):
        def function(*args, **kwargs):
            call = json.dumps([name, plain(list(args)), plain(kwargs)])
            try:
                calls.write(call + "\n")
                calls.flush()
            except OSError:
                end(failed="the solution ended")
            answer = told()
            if "raised" in answer:
                raise error_of(str(answer["raised"]), str(answer.get("text")))
            try:
                value, after = rebuilt(answer["value"]), rebuilt(answer["args"])
                restored(args, after)
                restored(list(kwargs.values()), list(rebuilt(answer["kwargs"]).values()))
            except Exception:
                end(failed="the solution's answer cannot be read")
            return value

        function.__name__ = name
        return function

    first = told()
    if "broken" in first:
        end(failed=str(first["broken"])[:500])
    space: dict = {"__name__": "__main__", "__builtins__": builtins}
    try:
        exec(compile(job["setup"], "setup.py", "exec"), space)
    except Exception as error:
        end(unusable=f"the task's own code fails: {type(error).__name__}: {error}"[:500])
    space.update({name: proxy(name) for name in job["names"]})
    try:
        tests = compile(job["tests"], "tests.py", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        end(unusable=f"the task's tests cannot be compiled: {type(error).__name__}: {error}"[:500])
    try:
        exec(tests, space)
    except Exception as error:
        end(failed=f"{type(error).__name__}: {error}"[:500])
    end(passed=True)


main()
