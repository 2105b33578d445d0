"""Changes that calls of the solution make in the lists, sets and dicts of a test. A change is made when the statement with the
call is over, and the state before it is kept: so a test's own expectation cannot be changed during the comparison.
"""

from itertools import chain, islice

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
    def __init__(self):
        self.pending = []
        self.last = {}
        """Container that the last call with it changed: itself, and its content before and after."""

    def note(self, args, kwargs, after):
        """Notes the end of a call. ``after``: each argument as the call left it, or ``None`` if unchanged."""
        given = (*args, *kwargs.values())
        for value in given:
            self.last.pop(id(value), None)
        self.pending += zip(given, after or ())  # noqa: B905

    def settle(self, meant=False, value=None):
        """Makes the changes, after a statement. ``meant``: the statement does nothing else, so the earlier content is not
        needed.
        """
        pending, self.pending = self.pending, []
        for mine, theirs in pending:
            if isinstance(mine, CHANGEABLE) and isinstance(theirs, CHANGEABLE) and mine != theirs:
                before = mine.copy()
                self._make(mine, theirs)
                if not meant:
                    self.last[id(mine)] = (mine, before, mine.copy())
        return value

    def _make(self, mine, theirs):
        if isinstance(mine, dict) != isinstance(theirs, dict):
            return
        mine.clear()
        if isinstance(mine, (dict, set)):
            mine.update(theirs)
        else:
            mine.extend(theirs)

    def before(self, value):
        """Returns a value as it was before the last call that it was passed to."""
        if not self.last:
            return value
        container, before, after = self.last.get(id(value), (None, None, None))
        if container is value and value == after:  # else the test has changed it, too
            return before
        if type(value) in (list, tuple, set):
            return type(value)(map(self.before, value))
        if type(value) is dict:
            return {key: self.before(each) for key, each in value.items()}
        return value

    def fixed(self, items):
        """Returns the items of a loop, as they are now."""
        if isinstance(items, CHANGEABLE):
            return list(items)
        if type(items).__name__ in ITERATORS:
            first = list(islice(iter(items), MANY))
            return first if len(first) < MANY else chain(first, islice(items, 0, None))
        return items
