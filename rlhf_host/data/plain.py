"""Values of rows in the types of JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

_OF_JSON = (str, int, float, bool, type(None))
_LONGEST = 4300
"""Maximum digits of a number that Python reads from a text."""


def plain_rows(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields rows with texts, numbers, lists and mappings in place of decimals, dates and arrays.

    A table of Arrow, such as a dataset, gives every mapping in a column the same keys, and fills them with nulls: these are
    removed. The null of a whole column stays, because the row has that column; nulls of values that are kept as JSON stay too.
    Pictures stay files, as bytes or by their paths.
    """
    table = hasattr(rows, "column_names")
    forms = (getattr(rows, "features", None) or {}) if table else {}
    if _has_pictures(forms):
        stream: Any = rows.to_iterable_dataset() if hasattr(rows, "to_iterable_dataset") else rows
        rows = stream.decode(False)
    for row in rows:
        yield {
            name: value if type(value) in _OF_JSON else plain(value, forms.get(name, True) if table else None)
            for name, value in row.items()
        }


def plain(value: Any, form: Any = None) -> Any:
    """Converts one value of a row, see ``plain_rows``; a value that JSON has no form for stays unchanged.

    Args:
        form: the feature of a dataset, or True for some mapping of a table; ``None``: nulls stay.
    """
    if type(value) in _OF_JSON:
        return value
    if type(form).__name__ == "Json":
        form = None
    if isinstance(value, Mapping):
        filled = form is not None
        forms = form if isinstance(form, Mapping) else {}
        return {
            key: plain(item, forms.get(key, True) if filled else None)
            for key, item in value.items()
            if not (filled and item is None)
        }
    if isinstance(value, list | tuple):
        inner = form[0] if isinstance(form, list) else getattr(form, "feature", form)
        return [plain(item, inner) for item in value]
    if isinstance(value, Decimal):
        return _number(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return str(value)
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # of numpy
        return plain(value.tolist(), form)
    return value


def _has_pictures(form: Any) -> bool:
    """Returns True for features of a dataset that it would decode to pictures."""
    inner = form.values() if isinstance(form, Mapping) else form if isinstance(form, list) else [getattr(form, "feature", None)]
    return type(form).__name__ == "Image" or any(map(_has_pictures, filter(None, inner)))


def _number(value: Decimal) -> int | float | str:
    """Returns the number, or its digits if no JSON number is as exact."""
    if not value.is_finite() or abs(value.adjusted()) > _LONGEST:
        return str(value)
    if value == value.to_integral_value():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)
