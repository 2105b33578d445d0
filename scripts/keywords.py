"""Generates ``rlhf_host/keywords.pyi``: the sections of the settings as types of keyword arguments, for editors and type checkers.

    python scripts/keywords.py

``tests/api/test_keywords.py`` compares it with the schema.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from rlhf_host.config.schema import RoleConfig, RunConfig
from rlhf_host.config.tree import SHORTHANDS, fields_of

FILE = Path(__file__).resolve().parent.parent / "rlhf_host/keywords.pyi"
HEAD = '''"""Sections of the settings, as types of arguments. Generated from ``config/schema.py`` by ``scripts/keywords.py``."""

from typing import Any, Literal, TypedDict
'''


def sections() -> dict[str, type[BaseModel]]:
    """The schema's sections that functions have as arguments, roles among them → model."""
    own = {name: field.annotation for name, field in fields_of(RunConfig).items()}
    plain = {name: model for name, model in own.items() if isinstance(model, type) and issubclass(model, BaseModel)}
    settings = {name: model for name, model in plain.items() if model.model_config.get("extra") == "forbid"}
    return {**dict.fromkeys(SHORTHANDS, RoleConfig), **settings}


def name_of(model: type[BaseModel]) -> str:
    return model.__name__.removesuffix("Config").removesuffix("Options") + "Settings"


def written(annotation: Any) -> str:
    """Returns the annotation as source; a model of settings as its type, and ``Any`` for what plugins define."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return written(parts[0])
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(written, parts)))
    if origin is Literal:
        return f"Literal[{', '.join(json.dumps(part) if isinstance(part, str) else repr(part) for part in parts)}]"
    if origin in (list, dict, tuple):
        inner = ", ".join("..." if part is ... else written(part) for part in parts)
        return f"{origin.__name__}[{inner}]"
    if annotation is type(None):
        return "None"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return name_of(annotation) if annotation.model_config.get("extra") == "forbid" else "Any"
    return "str | Path" if annotation is Path else getattr(annotation, "__name__", "Any")


def inside(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yields the settings' models in a model's annotations."""
    waiting: list[Any] = [field.annotation for field in model.model_fields.values()]
    while waiting:
        annotation = waiting.pop()
        waiting += get_args(annotation)
        if (
            isinstance(annotation, type)
            and issubclass(annotation, BaseModel)
            and annotation.model_config.get("extra") == "forbid"
        ):
            yield annotation


def text() -> str:
    models: dict[type[BaseModel], None] = {}
    waiting = [*sections().values()]
    while waiting:
        model = waiting.pop()
        if model not in models:
            models[model] = None
            waiting += inside(model)
    blocks = []
    for model in sorted(models, key=name_of):
        lines = [f"    {name}: {written(field.annotation)}" for name, field in fields_of(model).items()]
        blocks.append("\n".join([f"class {name_of(model)}(TypedDict, total=False):", *lines]))
    return "\n\n\n".join([HEAD, *blocks]) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    print(f"wrote {FILE}")
