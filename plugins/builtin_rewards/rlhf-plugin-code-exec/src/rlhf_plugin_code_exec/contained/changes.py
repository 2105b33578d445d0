"""Changes that calls of the solution make in the lists, sets and dicts of a test.

A solution works on copies. Tests never see what it changes, or they would compare a result with an expectation that it has
emptied. There are two exceptions: a call that is a statement of its own works in place, and what a test compares with a constant
may be the argument as the call left it. The solution itself sees its changes in later calls.
"""

from itertools import chain, islice

from .remote import Remote
from .values import CHANGEABLE

MANY = 10_000
"""Maximum number of items of an iterator that a loop takes as they were at its beginning."""
ITERATORS = {"zip", "map", "filter", "enumerate", "reversed", "generator", "chain", "islice", "starmap", "zip_longest"}
ITERATORS |= {
    f"{kind}{end}"
    for kind in ("list_", "set_", "dict_key", "dict_value", "dict_item")
    for end in ("iterator", "reverseiterator")
}
ITERATORS |= {"dict_keys", "dict_values", "dict_items"}


class Changes:
    def __init__(self, record):
        self.record = record
        """Returns the name of the class of a task's record, or ``None``."""
        self.left = {}
        """Container of the tests → itself, its content at the last call with it, and its content as that call left it."""

    def sent(self, value):
        """Returns an argument as the solution last left it, unless the test has changed it since."""
        if id(value) not in self.left:  # which keeps it, so that no other has its number
            return value
        mine, before, after = self.left[id(value)]
        if _content(mine) != before:
            del self.left[id(value)]
            return value
        return after

    def note(self, given, after):
        """Notes the end of a call. ``after``: each argument as the call left it, or ``None`` if it left it as it was."""
        for mine, theirs in zip(given, after or ()):  # noqa: B905
            both = isinstance(mine, CHANGEABLE) and isinstance(theirs, CHANGEABLE)
            if (both and isinstance(mine, dict) == isinstance(theirs, dict)) or (self.record(mine) and self.record(theirs)):
                self.left[id(mine)] = (mine, _content(mine), theirs)

    def alone(self, function, /, *args, **kwargs):
        """Makes the call of a statement that is nothing else: if it is one of the solution's, it works in place."""
        value = function(*args, **kwargs)
        if isinstance(function, Remote):
            for each in (*args, *kwargs.values()):
                theirs = self.sent(each)
                if self.left.pop(id(each), None) is not None:
                    _fill(each, _content(theirs))
        return value

    def sides(self, tested, left, right):
        """Returns both sides of a comparison with constants. The ``tested`` one, ``left``, ``right`` or, where both are constants
        that the solution may have changed, ``either``, is as the solution left its arguments.
        """
        mine, theirs = left(), right()
        if not self.left:
            return mine, theirs
        if tested == "either":
            tested = "left" if self._after(right) == theirs else "right"
        return (self._after(left), theirs) if tested == "left" else (mine, self._after(right))

    def equal(self, tested, left, right):
        mine, theirs = self.sides(tested, left, right)
        return mine == theirs

    def _after(self, side):
        """Returns the value of an expression where all arguments are as the solution left them."""
        live = [each for each in self.left.values() if _content(each[0]) == each[1]]
        try:
            for mine, _, theirs in live:
                _fill(mine, _content(theirs))
            return _copied(side())
        finally:
            for mine, before, _ in live:
                _fill(mine, before)

    def fixed(self, items):
        """Returns the items of a loop, as they are now."""
        if isinstance(items, CHANGEABLE):
            return list(items)
        if type(items).__name__ in ITERATORS:
            first = list(islice(iter(items), MANY))
            return first if len(first) < MANY else chain(first, islice(items, 0, None))
        return items


def _content(value):
    return value.copy() if isinstance(value, CHANGEABLE) else vars(value).copy()


def _fill(mine, theirs):
    """Gives a container, or the attributes of a record, other content."""
    mine = mine if isinstance(mine, CHANGEABLE) else vars(mine)
    mine.clear()
    if isinstance(mine, (dict, set)):
        mine.update(theirs)
    else:
        mine.extend(theirs)


def _copied(value):
    """Returns a copy of plain values, which do not change any more."""
    if type(value) in (list, tuple, set):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return value.copy() if isinstance(value, CHANGEABLE) else value
