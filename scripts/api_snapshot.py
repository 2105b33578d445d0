"""The plugin API as data: every hook's signature, every noun's fields, every public name.

    python scripts/api_snapshot.py            # writes tests/api/snapshot.json

``tests/api`` holds the snapshot against the code, and the code against ``tests/api/first_api.json``, what was promised first and
is never written again: additions are free, anything else would break a plugin. Hooks and fields whose description begins with
"Provisional" are in the snapshot, and promised to nobody. The rules are in ``docs/stability.md``.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import rlhf_host
from rlhf_host import backends as backend_parts
from rlhf_host import (
    commands,
    functional,
    hookspecs,
    installed,
    internals,
    models,
    rollouts,
    runs,
    settings,
    testing,
    trackers,
    weight_sync,
)
from rlhf_host import engines as engine_parts
from rlhf_host.plugins.discovery import GROUPS, UNCHOSEN
from rlhf_host.protocols import backends, common, engines, kernels, runtimes, servers, step_models, syncs
from rlhf_host.records import endpoints, episodes, generations, messages, needs, tensors
from rlhf_host.runtimes import building

SNAPSHOT = Path(__file__).resolve().parent.parent / "tests/api/snapshot.json"

MODULES = (
    *(episodes, generations, messages, endpoints, needs, tensors),
    *(common, engines, syncs, backends, runtimes, kernels, servers, step_models),
)

HOST_MADE = frozenset(
    {
        *("Batch", "Distribution", "TopK", "Experience", "Outputs", "RunContext", "ScoreContext", "SyncTarget", "Outcome"),
        *(
            "Episode",
            "Group",
            "EngineStart",
            "BackendStart",
            "RuntimeStart",
            "WeightSyncStart",
            "PolicyLogprobs",
            "Use",
            "SharedRows",
        ),
    }
)
"""Nouns that plugins only ever receive: their new fields may stand anywhere. All others are made by plugins, by position too."""


def describe() -> dict[str, Any]:
    """The API of the imported ``rlhf_host``, as plain JSON values."""
    return {
        "hooks": {name: _hook(name) for name in hook_names()},
        "nouns": {name: _noun(value) for name, value in sorted(nouns().items())},
        "names": {
            "rlhf_host": sorted(rlhf_host.__all__),
            "rlhf_host.functional": sorted(functional.__all__),
            "rlhf_host.functional.policy_losses": sorted(functional.policy_losses),
            "rlhf_host.backends": sorted(backend_parts.__all__),
            "rlhf_host.commands": sorted(commands.__all__),
            "rlhf_host.engines": sorted(engine_parts.__all__),
            "rlhf_host.installed": sorted(installed.__all__),
            "rlhf_host.internals": sorted(internals.__all__),
            "rlhf_host.models": sorted(models.__all__),
            "rlhf_host.rollouts": sorted(rollouts.__all__),
            "rlhf_host.runs": sorted(runs.__all__),
            "rlhf_host.runtimes.building": sorted(building.__all__),
            "rlhf_host.settings": sorted(settings.__all__),
            "rlhf_host.testing": sorted(testing.__all__),
            "rlhf_host.trackers": sorted(trackers.__all__),
            "rlhf_host.weight_sync": sorted(weight_sync.__all__),
        },
        "functions": {
            name: _parameters(getattr(functional, name))
            for name in sorted(functional.__all__)
            if inspect.isfunction(getattr(functional, name))
        },
        "entry_points": sorted([*GROUPS.values(), *UNCHOSEN.values()]),
    }


def hook_names() -> list[str]:
    """Every hook, in the order of the contract."""
    return list(hookspecs.RULES)


def promised(api: Mapping[str, Any]) -> dict[str, Any]:
    """The API without what is provisional, and without what contract suites alone may import."""
    kept = json.loads(json.dumps(api))
    kept["names"].pop("rlhf_host.internals", None)
    for name in _provisional():
        owner, _, field = name.partition(".")
        if field:
            for noun, cls in nouns().items():
                if noun in kept["nouns"] and owner in (base.__name__ for base in cls.__mro__):
                    kept["nouns"][noun]["fields"].pop(field, None)
        else:
            kept["hooks"].pop(name, None)
    return kept


def _provisional() -> Iterator[str]:
    """``HOOK`` and ``CLASS.FIELD``."""
    yield from (name for name in hook_names() if "Provisional:" in (inspect.getdoc(getattr(hookspecs, name)) or ""))
    for module in MODULES:
        for node in ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8")).body:
            body = node.body if isinstance(node, ast.ClassDef) else []
            for item, after in itertools.pairwise(body):
                text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
                if isinstance(item, ast.AnnAssign) and str(text).startswith("Provisional:"):
                    yield f"{node.name}.{ast.unparse(item.target)}"  # type: ignore[attr-defined]


def signature(hook: str) -> str:
    """As documentation shows it: ``score(trajectories: Sequence[Trajectory], context: ScoreContext) -> ...``."""
    described = _hook(hook)
    arguments = ", ".join(f"{name}: {kind}" for name, kind in described["arguments"].items())
    return f"{hook}({arguments}) -> {described['returns']}"


def broken_promises(first: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What ``now`` lacks, has in another order, or demands anew, of what plugins written for ``first`` rely on."""
    now = promised(now)
    return [
        *_broken_hooks(first["hooks"], now["hooks"]),
        *_broken_nouns(first["nouns"], now["nouns"]),
        *_broken_names(first, now),
    ]


# --- describing ---------------------------------------------------------------------------------


def _hook(name: str) -> dict[str, Any]:
    found = inspect.signature(getattr(hookspecs, name))
    arguments = {argument: str(parameter.annotation) for argument, parameter in found.parameters.items()}
    rule = {key: value for key, value in dataclasses.asdict(hookspecs.RULES[name]).items() if key != "gives"}
    return {"arguments": arguments, "returns": str(found.return_annotation), **rule}


def nouns() -> dict[str, type]:
    """The classes that hooks receive and return, by name."""
    return {
        name: value
        for module in MODULES
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def _noun(cls: type) -> dict[str, Any]:
    if dataclasses.is_dataclass(cls):
        fields = {field.name: _field(field) for field in dataclasses.fields(cls)}
    else:
        annotations = {name: {"type": str(kind)} for name, kind in vars(cls).get("__annotations__", {}).items()}
        fields = annotations | _constructor(cls)
    members = {}
    for name, value in sorted(vars(cls).items()):
        if name.startswith("_") or name in fields:
            continue
        if isinstance(value, property):
            members[name] = "property"
        elif inspect.isfunction(value):
            members[name] = _parameters(value)
    return {"fields": fields, "members": members}


def _field(field: dataclasses.Field[Any]) -> dict[str, Any]:
    described = {"type": str(field.type)}
    if field.default is not dataclasses.MISSING:
        return {**described, "default": repr(field.default)}
    if field.default_factory is not dataclasses.MISSING:
        return {**described, "default": f"{getattr(field.default_factory, '__name__', 'made')}()"}
    return described


def _constructor(cls: type) -> dict[str, Any]:
    """Arguments of an ordinary class, as fields."""
    if "__init__" not in vars(cls) or getattr(cls, "_is_protocol", False):
        return {}
    fields = {}
    for name, parameter in list(inspect.signature(cls).parameters.items()):
        fields[name] = {"type": str(parameter.annotation)}
        if parameter.default is not inspect.Parameter.empty:
            fields[name]["default"] = repr(parameter.default)
    return fields


def _parameters(function: Any) -> list[str]:
    """``name: type = default`` each, with ``*`` before what goes by name only; then ``-> type``."""
    found = inspect.signature(function)
    described = []
    for name, parameter in found.parameters.items():
        text = name if parameter.annotation is inspect.Parameter.empty else f"{name}: {parameter.annotation}"
        if parameter.default is not inspect.Parameter.empty:
            text += f" = {parameter.default!r}"
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in described:
            described.append("*")
        described.append(text)
    return [*described, f"-> {found.return_annotation}"]


# --- comparing ----------------------------------------------------------------------------------


def _broken_hooks(first: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name, was in first.items():
        if name not in now:
            yield f"the hook {name} is gone"
            continue
        yield from _kept_in_order(f"argument of {name}", list(was["arguments"]), list(now[name]["arguments"]))
        for rule in ("calls", "where", "per"):
            if was[rule] != now[name][rule]:
                yield f"{name} had the rule {rule}={was[rule]!r}, and now has {now[name][rule]!r}"


def _broken_nouns(first: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name, was in first.items():
        if name not in now:
            yield f"{name} is gone"
            continue
        old, new = was["fields"], now[name]["fields"]
        yield from _kept_in_order(f"field of {name}", list(old), list(new))
        yield from (f"{name}.{member} is gone" for member in was["members"] if member not in now[name]["members"])
        lost = [
            field for field, about in old.items() if "default" in about and "default" not in new.get(field, {"default": ""})
        ]
        yield from (f"{name}.{field} had a default and has none" for field in lost)
        if name in HOST_MADE:
            continue
        added = [field for field in new if field not in old]
        yield from (f"{name}.{field} is new and has no default" for field in added if _demanded(name, new[field], now))
        if [field for field in new if field in old] != list(new)[: len(old)] and not set(old) - set(new):
            yield f"{name} has a new field before an old one: plugins make it by position, so new ones go last"


def _demanded(name: str, field: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    # What a protocol gains is the host's to provide.
    return "default" not in field and not getattr(nouns().get(name), "_is_protocol", False)


def _broken_names(first: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for module, names in first["names"].items():
        yield from (f"{module}.{name} is gone" for name in names if name not in now["names"].get(module, ()))
    for name, was in first["functions"].items():
        new = now["functions"].get(name)
        if new is None:
            continue
        before, after = ([_name_of(argument) for argument in arguments[:-1]] for arguments in (was, new))
        yield from _kept_in_order(f"argument of functional.{name}", before, after)
        extra = [a for a in new[:-1] if _name_of(a) not in before and "=" not in a and not a.startswith("*")]
        yield from (f"functional.{name} demands the new argument {_name_of(argument)!r}" for argument in extra)
    yield from (f"the entry-point group {group} is gone" for group in first["entry_points"] if group not in now["entry_points"])


def _name_of(argument: str) -> str:
    return argument.partition(":")[0].partition("=")[0].strip()


def _kept_in_order(what: str, old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    missing = [name for name in old if name not in new]
    yield from (f"the {what} {name!r} is gone" for name in missing)
    if not missing and [name for name in new if name in old] != list(old):
        kind, _, owner = what.partition(" of ")
        yield f"the {kind}s of {owner} stand in another order: {', '.join(old)} became {', '.join(new)}"


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else SNAPSHOT
    path.write_text(json.dumps(describe(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
