"""One line per mistake, with the place it was made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from rlhf_host.errors import UserError, near_matches

Path = tuple[str | int, ...]
Origins = Mapping[Path, str]
"""Where each value was set: ``--rollout.n``, or ``run.yaml:12: rollout.n``."""


def fail(lines: Iterable[str], kind: type[UserError] = UserError) -> None:
    """Raise one error holding all ``lines``, if there are any."""
    unique = list(dict.fromkeys(lines))
    if unique:
        raise kind("\n".join(unique))


def where(path: Path, origins: Origins) -> str:
    """The place that set ``path``, or the nearest around it; else the dotted path."""
    for end in range(len(path), 0, -1):
        near = path[:end]
        inside = (place for known, place in origins.items() if known[:end] == near)
        place = origins.get(near) or next(inside, None)
        if place:
            return place
    return ".".join(str(part) for part in path)


def validation_lines(
    error: ValidationError, origins: Origins, root: Path = (), model: type[BaseModel] | None = None
) -> list[str]:
    """``PLACE: what is wrong`` for each mistake; ``root`` is where the validated value sits in the configuration."""
    lines = []
    for item in error.errors(include_url=False):
        path = (*root, *item["loc"])
        if item["type"] == "extra_forbidden":
            known = model.model_fields if model is not None and len(item["loc"]) == 1 else ()
            lines.append(
                f"{where(path, origins)}: no option is called {item['loc'][-1]!r}{near_matches(str(item['loc'][-1]), known)}"
            )
        elif item["type"] == "missing":
            lines.append(f"{where(path, origins)}: {item['loc'][-1]} is required")
        else:
            lines.append(f"{where(path, origins)}: {_sentence(item)}")
    return lines


def _sentence(item: Any) -> str:
    message = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ").split(", unable to parse")[0]
    if not message.startswith("Input should"):
        return message
    near = ""
    if item["type"] == "literal_error" and isinstance(item["input"], str):
        near = near_matches(item["input"], item["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", "))
    return f"{message.removeprefix('Input ')}, not {item['input']!r}{near}"
