"""A plugin's options: its pydantic model, validated with near matches, and described for help pages."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from rlhf_host.errors import PluginError, asks_to_stop, in_one_line, near_matches

RESERVED = {
    "": ("name", "weight"),
    "weight_sync": ("verify", "adapter"),
    "tasks": ("path", "subset", "split", "prompt_key", "label_key", "max_samples"),
}
"""Kind (empty: any) → keys that the configuration has for itself, beside a plugin's options."""


class NoOptions(BaseModel):
    """For plugins without ``Options``."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Option:
    """One option as help shows it; options of nested models have dotted names."""

    name: str
    type: str
    default: str | None
    """``None``: required."""
    description: str


def options_model(cls: type, kind: str = "") -> type[BaseModel]:
    """The class's ``Options``, or a model without fields. Raises ``PluginError`` when ``Options`` is something else, or has a
    reserved field."""
    model = getattr(cls, "Options", NoOptions)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise PluginError(f"{cls.__module__}.{cls.__qualname__}: Options must be a subclass of pydantic.BaseModel")
    for name, _ in _fields(model):
        if name in RESERVED[""] or name in RESERVED.get(kind, ()):
            raise PluginError(
                f"{cls.__module__}.{cls.__qualname__}: Options has the field {name!r}, a key that the configuration needs for"
                " itself: rename the field"
            )
    return model


def parse_options(model: type[BaseModel], options: Mapping[str, Any], who: str) -> BaseModel:
    """An instance of ``model``; keys may be written ``clip-eps`` or ``clip_eps``.

    Raises ``PluginError``, beginning with ``who``, for unknown keys (with near matches) and values that do not fit.
    """
    cleaned = _known(model, options, who, "")
    try:
        parsed = model.model_validate(cleaned)
    except ValidationError as error:
        raise PluginError(f"{who}: " + "; ".join(_explain(problem) for problem in error.errors())) from error
    except BaseException as error:  # a validator of the plugin's own that raises something else
        if asks_to_stop(error):
            raise
        raise PluginError(f"{who}: checking its options raised {in_one_line(error)}") from error
    if wrong := next(_infinite(parsed), None):
        raise PluginError(f"{who}: {wrong[0]}: should be a finite number of 32 bits, not {wrong[1]}")
    return parsed


def _infinite(options: BaseModel, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers that were set and are not finite in 32 bits; a default may be infinite, for what is off."""
    for name, field in type(options).model_fields.items():
        value = getattr(options, name)
        if isinstance(value, BaseModel):
            yield from _infinite(value, f"{prefix}{name}.")
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, float) and each != field.default and not abs(each) < 2.0**128:
                yield prefix + name, each


def describe_options(model: type[BaseModel], prefix: str = "") -> list[Option]:
    """Every option of ``model`` in order of definition."""
    rows: list[Option] = []
    for name, field in _fields(model):
        if (nested := _nested(field)) is not None:
            rows += describe_options(nested, f"{prefix}{name}.")
        else:
            rows.append(Option(prefix + name, type_name(field.annotation), _default(field), field.description or ""))
    return rows


def type_name(annotation: Any) -> str:
    """``float``, ``int | None``, ``'a' | 'b'``, ``list[str]``."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(args[0])
    if origin is typing.Literal:
        return " | ".join(repr(arg) for arg in args)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(arg) for arg in args)
    if annotation is type(None):
        return "None"
    if annotation is Ellipsis:
        return "..."
    if origin is not None:
        return f"{getattr(origin, '__name__', origin)}[{', '.join(type_name(arg) for arg in args)}]"
    return getattr(annotation, "__name__", str(annotation))


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Fields under the name that sets them."""
    by_name = model.model_config.get("populate_by_name") or model.model_config.get("validate_by_name")
    for name, field in model.model_fields.items():
        alias = field.validation_alias if isinstance(field.validation_alias, str) else None
        yield (alias if alias and not by_name else name), field


def _nested(field: FieldInfo) -> type[BaseModel] | None:
    union = typing.get_origin(field.annotation) in (typing.Union, types.UnionType)
    arguments = typing.get_args(field.annotation) if union else (field.annotation,)
    models = [arg for arg in arguments if isinstance(arg, type) and issubclass(arg, BaseModel)]
    return models[0] if len(models) == 1 else None


def _known(model: type[BaseModel], options: Mapping[str, Any], who: str, prefix: str) -> dict[str, Any]:
    fields = dict(_fields(model))
    cleaned: dict[str, Any] = {}
    for key, value in options.items():
        name = key if key in fields else key.replace("-", "_")
        if name not in fields:
            if model.model_config.get("extra") == "allow":
                cleaned[key] = value
                continue
            known = f"it has {', '.join(fields)}" if fields else "it takes no options"
            where = f" under {prefix[:-1]!r}" if prefix else ""
            raise PluginError(f"{who} has no option {key!r}{where}{near_matches(name, fields) or '; ' + known}")
        if name in cleaned:
            raise PluginError(f"{who}: option {prefix + name!r} is given twice, once as {key!r}")
        nested = _nested(fields[name])
        if nested is not None and isinstance(value, Mapping):
            value = _known(nested, value, who, f"{prefix}{name}.")
        cleaned[name] = value
    return cleaned


def _explain(problem: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"option {where!r} is required"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message} (got {problem['input']!r})" if where else message


def _default(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    if field.default_factory is not None:
        try:
            return repr(field.get_default(call_default_factory=True, validated_data={}))
        except Exception:
            return "computed"
    return repr(field.default)
