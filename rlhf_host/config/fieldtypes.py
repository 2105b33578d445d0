"""What a field's annotation says of how the text of a flag becomes its value."""

from __future__ import annotations

import collections.abc
import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

_LISTS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Set)


class Repeated(list):
    """The values of a flag given several times, where it is not known yet whether it takes a list."""


def members(annotation: Any) -> Iterator[Any]:
    """The alternatives of an annotation, ``Annotated`` and unions opened."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from members(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from members(member)
    else:
        yield annotation


def takes_bool(annotation: Any) -> bool:
    return any(
        member in (bool, Any) or (get_origin(member) is Literal and True in get_args(member)) for member in members(annotation)
    )


def takes_list(annotation: Any) -> bool:
    return any((get_origin(member) or member) in _LISTS for member in members(annotation))


def section_model(annotation: Any) -> type[BaseModel] | None:
    """The section an annotation holds, if it holds one."""
    return next((m for m in members(annotation) if isinstance(m, type) and issubclass(m, BaseModel)), None)


def coerce(annotation: Any, value: Any) -> Any:
    """Text from a flag, brought near ``annotation``; pydantic does the rest. Values that are no text pass unchanged.

    Lists come from repetition, commas or JSON; mappings from JSON. ``null``, and ``none`` where it is no word of its own,
    is None.
    """
    options = list(members(annotation))
    if isinstance(value, Repeated):
        if takes_list(annotation):
            return [item for text in value for item in _items(annotation, text)]
        value = value[-1]
    if not isinstance(value, str):
        return value
    words = [word for option in options if get_origin(option) is Literal for word in get_args(option)]
    if value in words:
        return value
    if type(None) in options and (value == "null" or (value == "none" and str not in options and Any not in options)):
        return None
    for word in words:
        if not isinstance(word, str) and str(word).lower() == value.lower():
            return word
    if takes_list(annotation) and (str not in options or "," in value):
        return _items(annotation, value)
    if value.startswith("{") and (section_model(annotation) or dict in [get_origin(option) or option for option in options]):
        return _json(value)
    return value


def _items(annotation: Any, text: str) -> list[Any]:
    if text.startswith("["):
        value = _json(text)
        return value if isinstance(value, list) else [text]
    inner = next((get_args(member) for member in members(annotation) if (get_origin(member) or member) in _LISTS), ())
    parts = text.split(",")
    if not any(parts):  # "," itself, or an empty text
        parts = [text] if text else []
    return [coerce(inner[0], part) if inner else part for part in parts]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
