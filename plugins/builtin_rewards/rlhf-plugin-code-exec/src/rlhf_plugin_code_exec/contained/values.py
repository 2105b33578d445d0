"""Values that are passed between a solution and its tests, as JSON. Received values are rebuilt only by the constructors named
here, so a solution cannot send code. Everything else stays where it is, and is replaced by a handle.

Plain values have nothing of the solution in them. Objects are handles, alone or in the containers of Python, whose methods are
Python's own; a named tuple with an object in it is a handle. Instances of subclasses are passed as values of the plain type.
"""

import collections
import importlib
import itertools
from collections.abc import Iterator

CHANGEABLE = (list, dict, set, bytearray, collections.deque)
"""Types that a function can change in place."""
DEEPEST = 200
BUILT_IN = ("builtins", "itertools")
"""Modules whose iterators are sent as their items."""


def _of(name):
    """Returns a constructor, whose module is imported when it is called."""
    module, _, path = name.partition(":")

    def made(*arguments):
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        return found(*arguments)  # type: ignore[operator]

    return made


def _array(items, kind):
    return importlib.import_module("numpy").array(items, dtype=kind)


CONTAINERS = {kind.__name__: kind for kind in (list, tuple, dict, set, frozenset, collections.deque)}
"""Containers that are passed with handles in them: what they do themselves is Python's own."""


class Mixed(Exception):
    """A value without a plain form within one that has one."""


def mixed(*_):
    raise Mixed


OF_PLAIN_VALUES = {name for kind in (str, bytes, int, float, complex, list, dict, set, tuple, range) for name in dir(kind)}


class Fields(tuple):
    """A named tuple of the solution, on the tests' side. Its fields are attributes, except under names of what plain values do."""

    _name: str
    _fields: tuple

    def __new__(cls, name, fields, items):
        value = super().__new__(cls, items)
        if len(fields) != len(value) or not all(type(field) is str for field in (name, *fields)):
            raise ValueError(fields)
        readable = {f: item for f, item in zip(fields, items) if f not in OF_PLAIN_VALUES and f[:1] != "_"}  # noqa: B905
        value.__dict__.update(readable, _name=name, _fields=tuple(fields))
        return value

    def _asdict(self):
        return dict(zip(self._fields, self))  # noqa: B905

    def __repr__(self):
        return f"{self._name}({', '.join(f'{name}={item!r}' for name, item in zip(self._fields, self))})"  # noqa: B905


TYPES: dict[str, tuple] = {  # name → its constructor's arguments, the constructor
    "builtins.slice": (lambda it: [it.start, it.stop, it.step], slice),
    "builtins.range": (lambda it: [it.start, it.stop, it.step], range),
    "builtins.complex": (lambda it: [it.real, it.imag], complex),
    "builtins.bytes": (lambda it: [it.hex()], bytes.fromhex),
    "builtins.bytearray": (lambda it: [it.hex()], bytearray.fromhex),
    "builtins.dict_keys": (lambda it: [list(it)], lambda items: dict.fromkeys(items).keys()),
    "builtins.dict_items": (lambda it: [list(it)], lambda items: dict(items).items()),
    "builtins.dict_values": (lambda it: [list(it)], lambda items: dict(enumerate(items)).values()),
    "collections.deque": (lambda it: [list(it), it.maxlen], _of("collections:deque")),
    "collections.Counter": (lambda it: [dict(it)], _of("collections:Counter")),
    "collections.OrderedDict": (lambda it: [list(it.items())], _of("collections:OrderedDict")),
    "datetime.date": (lambda it: [it.isoformat()], _of("datetime:date.fromisoformat")),
    "datetime.time": (lambda it: [it.isoformat()], _of("datetime:time.fromisoformat")),
    "datetime.datetime": (lambda it: [it.isoformat()], _of("datetime:datetime.fromisoformat")),
    "datetime.timedelta": (lambda it: [it.days, it.seconds, it.microseconds], _of("datetime:timedelta")),
    "decimal.Decimal": (lambda it: [str(it)], _of("decimal:Decimal")),
    "fractions.Fraction": (lambda it: [it.numerator, it.denominator], _of("fractions:Fraction")),
    "pathlib.PurePosixPath": (lambda it: [str(it)], _of("pathlib:PurePosixPath")),
    "pathlib.PosixPath": (lambda it: [str(it)], _of("pathlib:Path")),
    "uuid.UUID": (lambda it: [str(it)], _of("uuid:UUID")),
    "numpy.ndarray": (lambda it: [it.tolist(), it.dtype.str], _array),
}


def encode(value, other, depth=0):
    """Encodes as JSON. ``other``: returns the replacement of a value that has no plain form."""
    if depth > DEEPEST:
        raise RecursionError("nested too deeply")

    def inner(items):
        return [encode(item, other, depth + 1) for item in items]

    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float):
        return {"f": float.__repr__(value)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__index__(value)
    name = f"{kind.__module__}.{kind.__name__}"
    if name in TYPES:
        return {"x": [name, inner(TYPES[name][0](value))]}
    fields = getattr(value if kind is Fields else kind, "_fields", None)
    if isinstance(value, tuple) and isinstance(fields, tuple):
        return {"n": [getattr(value, "_name", "") if kind is Fields else kind.__name__, list(fields), inner(value)]}
    for plain, key in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z")):
        if isinstance(value, plain):
            return {key: inner(value)}
    if isinstance(value, dict):
        return {"d": [inner(pair) for pair in value.items()]}
    if kind.__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return encode(value.item(), other, depth + 1)
    return other(value)


def is_iterator(value):
    """Returns True for an iterator of Python's own functions, or a generator."""
    return isinstance(value, Iterator) and type(value).__module__ in BUILT_IN


def encode_items(value, other, rest, most):
    """Encodes an iterator as its items. ``rest``: returns the replacement of an iterator over those after the first ``most``."""
    items = list(itertools.islice(value, most + 1))
    more = rest(itertools.chain(items[most:], value)) if len(items) > most else None
    return {"i": [[encode(item, other, 1) for item in items[:most]], more]}


def decode(value, other, within=None, named=Fields):
    """Decodes JSON.

    Args:
        other: key and content of a value that has no plain form → its replacement here.
        within: the same for values within others; by default ``other``.
        named: name, fields and items of a named tuple → the tuple.
    """
    if not isinstance(value, dict):
        return value
    ((key, item),) = value.items()
    within = within or other

    def inner(each):
        return decode(each, within, within, named)

    if key == "f":
        return float(item)
    if key == "d":
        return {inner(name): inner(each) for name, each in item}
    if key == "x":
        name, arguments = item
        return TYPES[name][1](*map(inner, arguments))
    if key == "n":
        name, fields, items = item
        return named(name, fields, [inner(each) for each in items])
    if key == "i":
        items = iter([inner(each) for each in item[0]])
        return items if item[1] is None else other("rest", [items, item[1]])
    if key in PLAIN:
        return PLAIN[key]([inner(each) for each in item])
    return other(key, item)


def named_tuple(name, fields, items):
    return collections.namedtuple(name, fields)(*items)


def encode_records(value, name_of, other):
    """Encodes an instance of a class that both sides have, with all others that it leads to: a list or a tree of any size.

    Args:
        name_of: value → the name of its class, or ``None`` for other values.
        other: returns the replacement of an attribute that has no plain form.
    """
    found, numbers = [value], {id(value): 0}

    def inner(item):
        if name_of(item) is None:
            return other(item)
        if id(item) not in numbers:
            numbers[id(item)] = len(found)
            found.append(item)
        return {"r": numbers[id(item)]}

    return {"o": [[name_of(each), {name: encode(item, inner, 1) for name, item in vars(each).items()}] for each in found]}


def decode_records(items, classes, other, named=Fields):
    """Decodes records. ``classes``: name → class, whose constructor is not called."""
    made = [object.__new__(classes[name]) for name, _ in items]

    def inner(key, item):
        return made[item] if key == "r" else other(key, item)

    for value, (_, attributes) in zip(made, items):  # noqa: B905
        for name, item in attributes.items():
            if name[:2] == "__":
                raise ValueError(name)
            object.__setattr__(value, name, decode(item, inner, inner, named))
    return made[0]


PLAIN = {"l": list, "t": tuple, "s": set, "z": frozenset}
