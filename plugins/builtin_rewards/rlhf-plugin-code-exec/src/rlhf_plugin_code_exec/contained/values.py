"""Values that are passed between a solution and its tests, as JSON. Received values are rebuilt only by the constructors named
here, so a solution cannot send code. Everything else stays where it is, and is replaced by a handle.
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


TYPES: dict[str, tuple] = {  # name → its constructor's arguments, the constructor
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
    fields = getattr(kind, "_fields", None)
    if isinstance(value, tuple) and isinstance(fields, tuple):
        return {"n": [kind.__name__, list(fields), inner(value)]}
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


def decode(value, other):
    """Decodes JSON. ``other``: key and content of a value that has no plain form → its replacement here."""
    if not isinstance(value, dict):
        return value
    ((key, item),) = value.items()
    if key == "f":
        return float(item)
    if key == "d":
        return {decode(name, other): decode(each, other) for name, each in item}
    if key == "x":
        name, arguments = item
        return TYPES[name][1](*(decode(each, other) for each in arguments))
    if key == "n":
        name, fields, items = item
        return collections.namedtuple(name, fields)(*(decode(each, other) for each in items))
    if key == "i":
        items = iter([decode(each, other) for each in item[0]])
        return items if item[1] is None else other("rest", [items, item[1]])
    if key in PLAIN:
        return PLAIN[key]([decode(each, other) for each in item])
    return other(key, item)


PLAIN = {"l": list, "t": tuple, "s": set, "z": frozenset}
