"""Conversion of the policy's text to an action of the environment."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import regex

from rlhf_host import UserError
from rlhf_plugin_openenv.sessions import Refused

PATTERN_S = 1.0
"""Maximum seconds of a search for the pattern in one answer: some patterns take for ever on some texts."""

Form: TypeAlias = Mapping[str, Any] | None
"""An action in which ``{text}`` stands for the answer and ``{int}`` for its first number; ``None``: the answer has it as JSON."""


def form_of(option: str, schema: Mapping[str, Any] | None = None) -> Form:
    """Returns the form of actions.

    Args:
        option: as ``agent.action``.
        schema: the server's schema of actions, if known.

    Raises:
        UserError: the option is neither ``auto``, ``json`` nor a JSON object.
    """
    if option == "json":
        return None
    if option == "auto":
        fields = dict((schema or {}).get("properties") or {})
        fields.pop("metadata", None)
        needed = [name for name in (schema or {}).get("required", []) if name in fields] or list(fields)
        form = {"string": "{text}", "integer": "{int}"}.get(fields[needed[0]].get("type")) if len(needed) == 1 else None
        return None if form is None else {needed[0]: form}
    try:
        form = json.loads(option)
    except ValueError as error:
        raise UserError(f"openenv: agent.action {option!r} is neither auto, json nor a JSON object: {error}") from error
    if not isinstance(form, dict):
        raise UserError(f'openenv: agent.action {option!r} is no JSON object, such as {{"message": "{{text}}"}}')
    return form


def action_of(form: Form, answer: str, pattern: regex.Pattern[str] | None) -> dict[str, Any]:
    """Returns the action that an answer means. Raises ``Refused`` for one that means none."""
    text = answer.strip()
    if pattern is not None:
        try:
            found = list(pattern.finditer(answer, timeout=PATTERN_S, concurrent=True))
        except TimeoutError:
            found = []
        if not found:
            raise Refused(f"nothing in it fits {pattern.pattern}")
        text = (found[-1][1] if pattern.groups else found[-1][0]) or ""
    if form is not None:
        return {name: _filled(value, text) for name, value in form.items()}
    decoder, best = json.JSONDecoder(), None
    for place in (match.start() for match in re.finditer(r"\{", text)):
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and (best is None or end > best[1]):
            best = value, end
    if best is None:
        raise Refused("it has no JSON object")
    return best[0]


def _filled(value: Any, text: str) -> Any:
    if isinstance(value, str):
        if value == "{int}":
            number = re.search(r"-?\d+", text)
            if number is None:
                raise Refused("it has no number")
            return int(number[0])
        return value.replace("{text}", text)
    if isinstance(value, dict):
        return {name: _filled(item, text) for name, item in value.items()}
    return [_filled(item, text) for item in value] if isinstance(value, list) else value
