"""Actions in answers, and observations as text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class NoAction(Exception):
    """The answer has no action; the message is for the policy."""


def action_of(space: Any, text: str, names: Sequence[str] = ()) -> Any:
    """Returns the action that an answer means in a space.

    Args:
        names: names of a discrete space's actions, in order.

    Raises:
        NoAction: the answer means none.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        text = text.strip()
        if not space.contains(text):
            raise NoAction(
                f"it should have {space.min_length} to {space.max_length} characters, of {''.join(sorted(space.character_set))}"
            )
        return text
    if isinstance(space, spaces.Discrete):
        return _discrete(space, text, names)
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box):
        found = NUMBER.findall(text)
        size = int(np.prod(space.shape))
        if len(found) < size:
            raise NoAction(f"it should have {size} number{'s' * (size > 1)}, and has {len(found)}")
        numbers = np.array([float(number) for number in found[-size:]])
        if isinstance(space, spaces.Box) and not np.issubdtype(space.dtype, np.integer):
            with np.errstate(over="ignore"):
                value = numbers.reshape(space.shape).astype(space.dtype)
            if not np.all(np.isfinite(value)):  # an unbounded space has room for them
                raise NoAction("it should have finite numbers")
        elif not np.all(np.isfinite(numbers)):
            raise NoAction("it should have finite numbers")
        elif np.any(numbers % 1):
            raise NoAction("it should have whole numbers")
        else:
            value = numbers.clip(-(2**62), 2**62).astype(np.int64).reshape(space.shape).astype(space.dtype)
            if not np.array_equal(value.ravel(), numbers):  # the type cannot hold it
                raise NoAction(f"it should lie in {space}")
        if not space.contains(value):
            raise NoAction(f"it should lie in {space}")
        return value
    try:
        value = _of_json(space, _last_json(text))
        inside = space.contains(value)
    except Exception:  # what a space raises at a value of another form is its own affair
        inside = False
    if not inside:
        raise NoAction(f"it should be JSON that lies in {space}")
    return value


def _of_json(space: Any, value: Any) -> Any:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {key: _of_json(inner, value[key]) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_of_json(inner, one) for inner, one in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.Text):
        return value
    action = space.from_jsonable([value])[0]
    if isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        numbers = np.asarray(value, np.float64)
        whole = not isinstance(space, spaces.Box) or np.issubdtype(space.dtype, np.integer)
        if not np.all(np.isfinite(numbers)) or not np.all(np.isfinite(action)) or (whole and np.any(numbers % 1)):
            raise ValueError("numbers that it has no room for")
    return action


def _discrete(space: Any, text: str, names: Sequence[str]) -> int:
    if names:
        numbers = {name.casefold(): number for number, name in enumerate(names)}
        either = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        # Letters that ignore case may be no letter of the name: re finds i in the Turkish letter without a dot.
        words = [word.casefold() for word in re.findall(rf"(?<!\w)(?:{either})(?!\w)", text, re.I)]
        if said := [numbers[word] for word in words if word in numbers]:
            return int(space.start) + said[-1]
        raise NoAction(f"it should be one of {', '.join(names)}")
    found = NUMBER.findall(text)
    first, last = int(space.start), int(space.start) + int(space.n) - 1
    if not found or not first <= (number := float(found[-1])) <= last or number % 1:
        raise NoAction(f"it should be a whole number from {first} to {last}")
    return int(number)


def _last_json(text: str) -> Any:
    decoder = json.JSONDecoder()
    starts = [match.start() for match in re.finditer(r"[\[{]", text)]
    best: tuple[int, Any] = (-1, None)
    for start in starts[:-65:-1]:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if end >= best[0]:  # the outermost of those that end last
            best = end, value
    return best[1]


def shown(observation: Any) -> str:
    """Returns an observation as text: itself, or JSON."""
    if isinstance(observation, str):
        return observation
    return json.dumps(_plain(observation), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = np.round(value, 4) if np.issubdtype(value.dtype, np.floating) else value
        return value.tolist()
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
