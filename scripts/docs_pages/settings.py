"""The page of settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from docs_pages.catalogue import KINDS
from docs_pages.markdown import code, table
from rlhf_host.config.schema import RewardChoice, RunConfig, SyncChoice, defaults
from rlhf_host.config.tree import MANY, ROLES, SINGLE, fields_of, role_flag
from rlhf_host.plugins.options import type_name


def page() -> str:
    parts = [
        "# Settings",
        "Every setting is a flag of `rlhf train`, a key of the YAML file, and a field of the configuration: `--rollout.n 4` is"
        " `rollout: {n: 4}`. Flags override what `--config` names, and a later `--config` an earlier one. Dashes and"
        " underscores are the same. `--print-config` prints the whole configuration of a run, with the options of its plugins."
        " [Each plugin's page](plugins/index.md) has these options.",
        "## Plugins",
        table(("flag", "YAML", "default", ""), _choices()),
        "In YAML, write the name of a plugin, or a mapping of `name` and its options: `algo: {name: rloo, clip_eps: 0.2}`. Where"
        " several may be chosen, each has an alias. The alias is the name unless you choose another one: `with: [tis]`,"
        " `reward: {strict: {name: math_verifier, weight: 0.5}}`. The flags of options are `--algo.OPTION`,"
        " `--reward.ALIAS.OPTION` and so on.",
        "An extension or a runtime can also be set by its own name, which chooses it: `--tis.cap 2` is short for"
        " `--with tis --with.tis.cap 2`, `kl: {coef: 0.01}` for `with: {kl: {coef: 0.01}}`, and `ray: {num_cpus: 4}` for"
        " `runtime: {name: ray, num_cpus: 4}`.",
        "These keys beside a plugin's options belong to the host:",
        table(SETTING, [*_own_rows(RewardChoice, "reward.ALIAS"), *_own_rows(SyncChoice, "sync")]),
    ]
    alone = []
    for name, field in fields_of(RunConfig).items():
        if name in SINGLE or name in MANY:
            continue
        inner = _model(field.annotation)
        if name == "roles":
            parts += [
                "## roles",
                f"One section per model: {', '.join(code(f'--{role_flag(role)}.*') for role in ROLES)} are short for"
                " `--roles.NAME.*`.",
                settings_table(inner, "actor"),
            ]
        elif inner is None:
            alone.append((name, field))
        else:
            parts += [f"## {name}", *_section(name, inner)]
    rows = [_row(name, field, "") for name, field in alone]
    parts[2:2] = ["## The run", table(SETTING, rows)]
    return "\n\n".join(parts)


SETTING = ("setting", "type", "default", "")


def _own_rows(model: type[BaseModel], prefix: str) -> list[tuple[str, str, str, str]]:
    return [_row(name, field, f"{prefix}.") for name, field in model.model_fields.items() if name != "name"]


def _section(name: str, model: type[BaseModel]) -> Iterator[str]:
    yield settings_table(model, name)
    for key, field in model.model_fields.items():
        inner = _model(field.annotation)
        if key == "sources" and inner is not None:
            yield (
                "Settings of each source (`--data.SOURCE.KEY`; in YAML a list under `sources`, or only paths). Options of a"
                " task plugin are written beside them:"
            )
            yield settings_table(inner, f"{name}.SOURCE")


def settings_table(model: type[BaseModel], prefix: str) -> str:
    rows = []
    for name, field in model.model_fields.items():
        inner = _model(field.annotation)
        if inner is not None and name == "data":
            rows.append((code(f"--{prefix}.data.*"), "", "", "as `--data.*`"))
        elif inner is not None and name == "reward":
            rows.append((code(f"--{prefix}.reward"), "", "", field.description or ""))
        elif inner is not None and name == "sources":
            rows.append((code(f"--{prefix}"), "", "", "PATH[@WEIGHT]: a file, directory, hub name or task plugin; repeatable"))
        elif inner is not None:
            rows += [_row(key, own, f"{prefix}.{name}.") for key, own in inner.model_fields.items()]
        else:
            rows.append(_row(name, field, f"{prefix}."))
    return table(SETTING, rows)


def _row(name: str, field: Any, prefix: str) -> tuple[str, str, str, str]:
    default = "required"
    if not field.is_required():
        default = code(repr(field.get_default(call_default_factory=True, validated_data={})))
    return code(f"--{prefix}{name.replace('_', '-')}"), code(type_name(field.annotation)), default, field.description or ""


def _choices() -> Iterator[tuple[str, str, str, str]]:
    for key, kind in {**SINGLE, **MANY}.items():
        chosen = defaults().get(key, {})
        default = code(chosen.get("name") or ", ".join(chosen)) or (
            "follows from engine and runtime" if key == "sync" else "none"
        )
        yield code(f"--{key}"), code(f"{key}:"), default, f"[{KINDS[kind]}](plugins/index.md#{kind})"


def _model(annotation: Any) -> type[BaseModel] | None:
    """The settings model that an annotation is, or holds as list items or values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in getattr(annotation, "__args__", ()) if (model := _model(inner))), None)
