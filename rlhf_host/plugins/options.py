"""A plugin's options: its pydantic model, validated with near matches, and described for help pages."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rlhf_host.errors import PluginError, asks_to_stop, in_one_line, near_matches

RESERVED = {
    "": ("name", "weight"),
    "weight_sync": ("verify", "adapter"),
    "tasks": ("path", "subset", "split", "prompt_key", "label_key", "max_samples"),
}
"""Kind (empty: any) → keys that the configuration has for itself, beside a plugin's options."""


WORD = re.compile(r"(?<!')\b(True|False|None)\b(?!')")
YAML = {"True": "true", "False": "false", "None": "null"}
"""Values as pydantic writes them, and as a configuration does."""


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


class Misfit(NamedTuple):
    """One mistake among options; the text of ``of_plugin`` goes on where the plugin is named: `` has no option 'x'``."""

    path: tuple[str | int, ...]
    text: str
    of_plugin: bool = False


Hint: TypeAlias = Callable[[tuple[str, ...], Any, str], str]
"""Path of an unknown option, its value, and near matches → what to say behind the mistake."""


def parse_options(model: type[BaseModel], options: Mapping[str, Any], who: str) -> BaseModel:
    """As ``check_options``. Raises ``PluginError``, beginning with ``who``, for options that do not fit."""
    parsed, misfits = check_options(model, options)
    if parsed is not None:
        return parsed
    values = [": ".join(filter(None, (".".join(map(str, m.path)), m.text))) for m in misfits if not m.of_plugin]
    lines = [f"{who}{each.text}" for each in misfits if each.of_plugin] + [f"{who}: {'; '.join(values)}"] * bool(values)
    raise PluginError("; ".join(lines))


def check_options(
    model: type[BaseModel], options: Mapping[str, Any], hint: Hint = lambda path, value, near: near
) -> tuple[BaseModel | None, list[Misfit]]:
    """An instance of ``model``, or what is wrong; keys may be written ``clip-eps`` or ``clip_eps``."""
    misfits: list[Misfit] = []
    cleaned = _known(model, options, (), hint, misfits)
    try:
        parsed = model.model_validate(cleaned)
    except ValidationError as error:
        return None, misfits + [Misfit(item["loc"], *_explained(item)) for item in error.errors(include_url=False)]
    except BaseException as error:  # a validator of the plugin's own that raises something else
        if asks_to_stop(error):
            raise
        return None, [*misfits, Misfit((), f": checking its options raised {in_one_line(error)}", of_plugin=True)]
    misfits += [Misfit(path, f"should be a finite number of 32 bits, not {value}") for path, value in _infinite(parsed)]
    return None if misfits else parsed, misfits


def _infinite(options: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Numbers that were set and are not finite in 32 bits; a default may be infinite, for what is off."""
    for name, field in type(options).model_fields.items():
        value = getattr(options, name)
        if isinstance(value, BaseModel):
            yield from _infinite(value, (*path, name))
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, float) and each != field.default and not abs(each) < 2.0**128:
                yield (*path, name), each


def describe_options(model: type[BaseModel], prefix: str = "") -> list[Option]:
    """Every option of ``model`` in order of definition."""
    rows: list[Option] = []
    for name, field in _fields(model):
        if (nested := nested_model(field.annotation)) is not None:
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


def members(annotation: Any) -> Iterator[Any]:
    """The alternatives of an annotation, ``Annotated`` and unions opened."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        yield from members(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from members(member)
    else:
        yield annotation


def nested_model(annotation: Any) -> type[BaseModel] | None:
    """The only model among the alternatives of an annotation."""
    models = [each for each in members(annotation) if isinstance(each, type) and issubclass(each, BaseModel)]
    return models[0] if len(models) == 1 else None


def _known(
    model: type[BaseModel], options: Mapping[str, Any], path: tuple[str, ...], hint: Hint, misfits: list[Misfit]
) -> dict[str, Any]:
    """The options that the model has, under its names; others are ``misfits``."""
    fields = dict(_fields(model))
    cleaned: dict[str, Any] = {}
    for key, value in options.items():
        name = key if key in fields else key.replace("-", "_")
        if name not in fields:
            if model.model_config.get("extra") == "allow":
                cleaned[key] = value
                continue
            said = hint((*path, key), value, near_matches(name, fields))
            said = said or ("; it has " + ", ".join(fields) if fields else "; it takes no options")
            under = f" under {'.'.join(path)!r}" if path else ""
            misfits.append(Misfit((*path, key), f" has no option {key!r}{under}{said}", of_plugin=True))
            continue
        if name in cleaned:
            twice = f": option {'.'.join((*path, name))!r} is given twice, once as {key!r}"
            misfits.append(Misfit((*path, name), twice, of_plugin=True))
        nested = nested_model(fields[name].annotation)
        if nested is not None and isinstance(value, Mapping):
            value = _known(nested, value, (*path, name), hint, misfits)
        cleaned[name] = value
    return cleaned


def _explained(item: ErrorDetails) -> tuple[str, bool]:
    if item["type"] == "missing":
        return f" needs {'.'.join(map(str, item['loc']))!r}", True
    return "no such key" if item["type"] == "extra_forbidden" else sentence(item), False


def sentence(item: ErrorDetails) -> str:
    """Returns what pydantic found, in the words of all messages: ``should be greater than 0, not -1``."""
    message = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ").split(", unable to parse")[0]
    shown = repr(item["input"])
    shown = shown if len(shown) <= 80 else f"{shown[:60]}… ({len(shown)} characters)"
    if item["type"] in ("model_type", "dict_type"):
        return f"is a mapping, such as '{{\"KEY\": VALUE}}', so it cannot be {shown}"
    if item["type"] == "string_too_short" and not item["input"]:
        return "should not be empty"
    if not message.startswith("Input should"):
        return message
    near = ""
    if item["type"] == "literal_error":
        message, expected = (WORD.sub(lambda word: YAML[word[0]], text) for text in (message, item["ctx"]["expected"]))
        near = near_matches(str(item["input"]), expected.replace(" or ", ", ").replace("'", "").split(", "))
    return f"{message.removeprefix('Input ')}, not {shown}{near}"


def _default(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    if field.default_factory is not None:
        try:
            return repr(field.get_default(call_default_factory=True, validated_data={}))
        except Exception:
            return "computed"
    return repr(field.default)
