"""The rule by which a result is right, printed or returned: numbers by their value, floats within 1e-6, tuples as lists, keys
as JSON writes them, and everything else exactly.
"""

import math
import re
from decimal import Decimal

TOLERANCE = 1e-6
"""Tolerance of a number that the test gives as a float: relative or, below 1, absolute."""
NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")


def same(value, wanted) -> bool:
    """Returns True if a result equals the value from JSON."""
    if isinstance(value, bool) or isinstance(wanted, bool) or wanted is None or isinstance(wanted, str):
        return bool(value == wanted)
    if isinstance(wanted, (int, float)):
        return _is_number(value) and _same_number(value, wanted)
    if isinstance(wanted, (list, tuple)):
        items = value.tolist() if type(value).__name__ == "ndarray" else value
        return isinstance(items, (list, tuple)) and len(items) == len(wanted) and all(map(same, items, wanted))
    if isinstance(wanted, dict):
        return isinstance(value, dict) and _same_items(value, wanted)
    return bool(value == wanted)


def same_output(said: str, wanted: str) -> bool:
    """Returns True if a printed text is the same, line by line, without space at the ends of lines."""
    mine, theirs = [[line.split() for line in text.strip().splitlines()] for text in (said, wanted)]
    if mine == theirs:
        return True
    if [len(line) for line in mine] != [len(line) for line in theirs]:
        return False
    return all(_same_word(a, b) for line, other in zip(mine, theirs) for a, b in zip(line, other))  # noqa: B905


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) or type(value).__name__ in ("Decimal", "Fraction")


def _same_number(value, wanted) -> bool:
    if value == wanted or not isinstance(wanted, float):
        return bool(value == wanted)
    try:
        value = float(value)
    except OverflowError:
        return False
    return math.isclose(value, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE) or (math.isnan(value) and math.isnan(wanted))


def _same_items(value: dict, wanted: dict) -> bool:
    """Returns True if items are the same. Keys are equal unchanged, or as JSON writes them: integers there are texts."""
    if len(value) != len(wanted):
        return False
    written = {_written(key): each for key, each in value.items()}
    if len(written) != len(value):
        written = value
    return all(_written(key) in written and same(written[_written(key)], each) for key, each in wanted.items())


def _written(key) -> str:
    if isinstance(key, str):
        return key
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return repr(key)


def _same_word(said: str, wanted: str) -> bool:
    if said == wanted:
        return True
    if not (NUMBER.fullmatch(said) and NUMBER.fullmatch(wanted)):
        return False
    is_integer = wanted.lstrip("+-").isdigit()
    if is_integer and said.lstrip("+-").isdigit():
        return False  # 007 is not 7
    try:
        return Decimal(said) == Decimal(wanted) if is_integer else _same_number(float(said), float(wanted))
    except ArithmeticError:  # an exponent beyond all bounds
        return False
