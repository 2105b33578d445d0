"""Flags: ``--rollout.n 4``, ``--reward strict=math_verifier``, ``--algo.clip-eps 0.2`` as a layer of settings.

Every flag takes the text that follows it; without any it stands for ``true``. There are no positional arguments, so a flag's
value is whatever does not begin with ``--`` (``--flag=--value`` gives such a one). Kebab and snake case are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from rlhf_host.config.fieldtypes import Repeated, coerce, section_model, takes_bool
from rlhf_host.config.friendly import choose, source
from rlhf_host.config.layers import Layer
from rlhf_host.config.schema import DataConfig, DataSource, RoleConfig, RunConfig
from rlhf_host.config.sections import MANY, ROLES, SHORTHANDS, SINGLE, SPELLINGS, spelled
from rlhf_host.config.yaml_file import At
from rlhf_host.errors import UserError, near_matches

SWITCHES = ("help", "print-config", "dry-run", "json")
"""Control flags that take no value."""

REPEATED = ("preset", "disable")
"""Control flags that may be given several times."""


@dataclass(frozen=True, slots=True)
class Flag:
    name: str
    """As typed, without the dashes and the value."""
    value: str | None

    @property
    def text(self) -> str:
        return f"--{self.name}"

    @property
    def parts(self) -> list[str]:
        return [part.replace("-", "_") for part in self.name.split(".")]


def parse(argv: Sequence[str]) -> list[Flag]:
    """Split the command line into flags.

    Raises:
        UserError: something stands where a flag should.
    """
    flags: list[Flag] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "-h":
            token = "--help"
        if not token.startswith("--") or len(token) < 3:
            hint = f"; did you mean '--{token.lstrip('-')}'?" if token.startswith("-") and token.lstrip("-") else ""
            raise UserError(f"unexpected argument {token!r}: flags look like --rollout.n 8{hint}")
        name, equals, value = token[2:].partition("=")
        if equals:
            flags.append(Flag(name, value))
        elif name in SWITCHES or not rest or rest[0].startswith("--"):
            flags.append(Flag(name, None))
        else:
            flags.append(Flag(name, rest.pop(0)))
    return flags


def take(flags: Sequence[Flag], control: Collection[str]) -> tuple[dict[str, list[str | None]], list[Flag]]:
    """The command's own flags (``config``, ``dry-run``, ...) with their values, and all others."""
    found: dict[str, list[str | None]] = {}
    others = []
    for flag in flags:
        name = flag.name.replace("_", "-")
        if name in control:
            found.setdefault(name, []).append(flag.value)
        else:
            others.append(flag)
    for name, values in found.items():
        if name in SWITCHES:
            if any(value not in (None, "true") for value in values):
                raise UserError(f"--{name} takes no value")
        elif None in values:
            raise UserError(f"--{name} needs a value")
        elif len(values) > 1 and name not in REPEATED:
            raise UserError(f"--{name} can be given once")
    return found, others


def known_flags(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every flag of the schema, without dashes and without plugins' own options."""
    for name, field in model.model_fields.items():
        flag = prefix + name.replace("_", "-")
        inner = section_model(field.annotation)
        if name in SINGLE or name in MANY:
            yield prefix + spelled(name)
        elif name == "roles":
            yield from (f"{name.replace('_', '-')}.{key}" for name in SHORTHANDS for key in known_flags(RoleConfig))
        elif inner is DataConfig:
            yield flag
            yield from (f"{flag}.{key}" for key in known_flags(DataConfig) if key != "sources")
        elif inner is not None and name != "sources":
            yield from known_flags(inner, f"{flag}.")
        else:
            yield flag


def from_flags(flags: Sequence[Flag], errors: list[str], control: Collection[str] = ()) -> Layer:
    """The flags as a layer. Mistakes are appended to ``errors``; ``control`` joins the near matches."""
    layer: Layer = {}
    texts: dict[tuple[str, ...], list[Flag]] = {}
    fields: dict[tuple[str, ...], Any] = {}
    for flag in flags:
        try:
            path, annotation = _place(flag, layer, errors, control)
        except UserError as error:
            errors.append(str(error))
            continue
        if path:
            texts.setdefault(path, []).append(flag)
            fields[path] = annotation
    for path, given in texts.items():
        annotation = fields[path]
        if given[-1].value is None and annotation is not None and not takes_bool(annotation):
            errors.append(f"{given[-1].text} needs a value")
            continue
        values = Repeated("true" if flag.value is None else flag.value for flag in given)
        value: Any = values if len(values) > 1 else values[0]
        _put(layer, path, At(value if annotation is None else coerce(annotation, value), given[-1].text))
    return layer


def _put(layer: Layer, path: tuple[str, ...], value: At) -> None:
    for part in path[:-1]:
        inner = layer.setdefault(part, {})
        if not isinstance(inner, dict):  # --algo.a 1 --algo.a.b 2: the later one stands
            inner = layer[part] = {}
        layer = inner
    layer[path[-1]] = value


def _place(flag: Flag, layer: Layer, errors: list[str], control: Collection[str]) -> tuple[tuple[str, ...], Any]:
    """Where the flag's value goes and its annotation (``None``: a plugin's option); ``()`` when it is dealt with."""
    parts = flag.parts
    parts[0] = SPELLINGS.get(parts[0], parts[0])
    if parts[0] in SHORTHANDS:
        parts[:1] = ["roles", SHORTHANDS[parts[0]]]
    head, depth = parts[0], 1
    if head == "eval" and len(parts) > 1 and parts[1] in ("data", "reward"):
        head, depth = parts[1], 2
    if head in SINGLE:
        return _single(flag, parts)
    if head in MANY:
        return _many(flag, head, tuple(parts[:depth]), parts[depth:], layer, errors)
    if head == "data":
        found = _data(flag, tuple(parts[:depth]), parts[depth:], layer)
    elif head == "roles":
        field = RoleConfig.model_fields.get(parts[2]) if len(parts) == 3 else None
        found = (tuple(parts), field.annotation) if field else None
    else:
        found = _field(RunConfig, parts)
    if found is None:
        _refuse(flag, parts, control)
    return found or ((), None)


def _field(model: type[BaseModel], parts: Sequence[str]) -> tuple[tuple[str, ...], Any] | None:
    inner: type[BaseModel] | None = model
    for index, part in enumerate(parts):
        field = inner.model_fields.get(part) if inner else None
        if field is None:
            return None
        inner = section_model(field.annotation)
        if index == len(parts) - 1:
            return None if inner else (tuple(parts), field.annotation)
    return None


def _refuse(flag: Flag, parts: Sequence[str], control: Collection[str]) -> None:
    name = flag.name.replace("_", "-")
    known = [*known_flags(), *control]
    inside = [f"--{other}" for other in known if other.startswith(f"{name}.")]
    if inside:
        raise UserError(f"{flag.text} is a section: set its keys, such as {inside[0]}")
    if len(parts) > 2 and parts[0] == "roles" and parts[1] not in ROLES:
        known = [f"roles.{parts[1].replace('_', '-')}.{key.replace('_', '-')}" for key in RoleConfig.model_fields]
    raise UserError(f"{flag.text}: no such flag{near_matches(f'--{name}', [f'--{other}' for other in known])}")


def _single(flag: Flag, parts: Sequence[str]) -> tuple[tuple[str, ...], Any]:
    if len(parts) > 1:
        return (parts[0], "options", *parts[1:]), None
    if not flag.value:
        raise UserError(f"{flag.text} needs a plugin's name")
    return (parts[0], "plugin"), str


def _many(
    flag: Flag, section: str, prefix: tuple[str, ...], rest: Sequence[str], layer: Layer, errors: list[str]
) -> tuple[tuple[str, ...], Any]:
    if len(rest) > 1:
        if rest[1] == "weight" and section == "reward":
            return (*prefix, rest[0], "weight"), float
        return (*prefix, rest[0], "options", *rest[1:]), None
    if rest:
        option = ".".join([*map(spelled, prefix), "NAME", rest[0].replace("_", "-")])
        raise UserError(f"{flag.text}: give the plugin's name and the option: --{option}")
    if not flag.value:
        raise UserError(f"{flag.text} needs a plugin's name")
    for text in flag.value.split(","):
        alias, spec = choose(text.strip(), flag.text, errors)
        chosen = layer
        for part in prefix:
            chosen = chosen.setdefault(part, {})
        if "plugin" in chosen.get(alias, {}):
            errors.append(f"{flag.text} {text}: {alias!r} is chosen twice; give one its own name: {flag.text} OTHER={spec}")
        _put(layer, (*prefix, alias, "plugin"), At(spec, flag.text))
    return (), None


def _data(flag: Flag, prefix: tuple[str, ...], rest: Sequence[str], layer: Layer) -> tuple[tuple[str, ...], Any] | None:
    if not rest:
        if not flag.value:
            raise UserError(f"{flag.text} needs a path")
        for part in prefix:
            layer = layer.setdefault(part, {})
        layer.setdefault("sources", At([], flag.text)).value.append(source(flag.value, f"{flag.text} {flag.value}"))
        return (), None
    if len(rest) == 1:
        field = DataConfig.model_fields.get(rest[0])
        return ((*prefix, rest[0]), field.annotation) if field and rest[0] != "sources" else None
    # --data.SOURCE.key: the source's own setting, or an option of the task plugin it names.
    known = DataSource.model_fields.get(rest[1]) if len(rest) == 2 else None
    if known is not None and rest[1] != "options":
        return (*prefix, "source_options", rest[0], rest[1]), known.annotation
    return (*prefix, "source_options", rest[0], "options", *rest[1:]), None
