"""Judgements in JSON, read strictly: what is left out, there twice or of another type is no judgement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_plugin_llm_judge.judge import Unreadable
from rlhf_plugin_llm_judge.verdict import after_thoughts, values


def object_with(key: str, said: str, cut: bool) -> Mapping[str, Any]:
    """Returns the object that has the key. Raises ``Unreadable`` if there is none, or more than one."""
    if cut:
        raise Unreadable(f"'s answer was cut by max_tokens: {said[-100:]!r}")
    found = [value for value in values(after_thoughts(said), once_each) if isinstance(value, dict) and key in value]
    if len(found) != 1:
        raise Unreadable(f" gave {len(found) or 'no'} JSON objects with {key!r}, not one: {said[-200:]!r}")
    return found[0]


def finite(value: Any) -> bool:
    """Returns True for a number that a float can hold."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object. Raises ``ValueError`` if it has a key twice."""
    if len(whole := dict(pairs)) < len(pairs):
        raise ValueError("a key twice")
    return whole


def items_by_id(key: str, said: str, cut: bool, count: int) -> list[Mapping[str, Any]]:
    """Returns the items of the list under the key, by their ``id`` from 1 to ``count``. Raises ``Unreadable`` unless each is
    there once.
    """
    listed = object_with(key, said, cut)[key]
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise Unreadable(f"'s {key!r} is no list of objects: {said[-200:]!r}")
    by_id: dict[int, Mapping[str, Any]] = {}
    for item in listed:
        number = item.get("id")
        if isinstance(number, str) and number.isdecimal() and len(number) < 9:
            number = int(number)
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= count:
            raise Unreadable(f" gave the id {item.get('id')!r}, and ids are 1 to {count}")
        if number in by_id:
            raise Unreadable(f" gave the id {number} twice")
        by_id[number] = item
    if missing := [number for number in range(1, count + 1) if number not in by_id]:
        raise Unreadable(f" left out the id {missing[0]} of {count}")
    return [by_id[number] for number in range(1, count + 1)]


def words(item: Mapping[str, Any]) -> str | None:
    """Returns the explanation, if there is one."""
    text = item.get("explanation")
    return text.strip() or None if isinstance(text, str) else None


def schema_of(**fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema of an object that has these fields and no others."""
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def list_schema(key: str, field: str, kind: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of ``{key: [{"id", "explanation", field}, ...]}``."""
    item = schema_of(id={"type": "integer"}, explanation={"type": "string"}, **{field: kind})
    return schema_of(**{key: {"type": "array", "items": item}})


def choice(value: Any, choices: Sequence[str]) -> str:
    """Returns the choice, whatever its letters' case. Raises ``Unreadable`` for anything else."""
    known = {one.casefold(): one for one in choices}
    if not isinstance(value, str) or value.strip().casefold() not in known:
        raise Unreadable(f" said {value!r}, which is none of {', '.join(choices)}")
    return known[value.strip().casefold()]
