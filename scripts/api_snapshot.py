"""The plugin API as data: every hook's signature, every noun's fields, every public name.

    python scripts/api_snapshot.py            # writes tests/api/snapshot.json

``tests/api`` holds the snapshot against the code, so that a change of the API is seen in its diff. The rules are in
``docs/contributing.md``.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import rlhf_host
from rlhf_host import backends as backend_parts
from rlhf_host import (
    batches,
    commands,
    comparison,
    distributed,
    functional,
    hookspecs,
    installed,
    internals,
    models,
    rendering,
    rollouts,
    runs,
    sampling,
    settings,
    testing,
    trackers,
)
from rlhf_host import engines as engine_parts
from rlhf_host.plugins.discovery import GROUPS, UNCHOSEN
from rlhf_host.protocols import (
    backends,
    common,
    data,
    engines,
    kernels,
    reward_forms,
    runtimes,
    servers,
    splits,
    step_models,
    syncs,
)
from rlhf_host.records import endpoints, episodes, generations, messages, needs, tensors
from rlhf_host.runtimes import building

SNAPSHOT = Path(__file__).resolve().parent.parent / "tests/api/snapshot.json"

MODULES = (
    *(episodes, generations, messages, endpoints, needs, tensors),
    *(common, engines, syncs, backends, splits, runtimes, kernels, servers, data, step_models, reward_forms),
)


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
            "rlhf_host.batches": sorted(batches.__all__),
            "rlhf_host.commands": sorted(commands.__all__),
            "rlhf_host.comparison": sorted(comparison.__all__),
            "rlhf_host.distributed": sorted(distributed.__all__),
            "rlhf_host.engines": sorted(engine_parts.__all__),
            "rlhf_host.installed": sorted(installed.__all__),
            "rlhf_host.internals": sorted(internals.__all__),
            "rlhf_host.models": sorted(models.__all__),
            "rlhf_host.rendering": sorted(rendering.__all__),
            "rlhf_host.rollouts": sorted(rollouts.__all__),
            "rlhf_host.runs": sorted(runs.__all__),
            "rlhf_host.runtimes.building": sorted(building.__all__),
            "rlhf_host.sampling": sorted(sampling.__all__),
            "rlhf_host.settings": sorted(settings.__all__),
            "rlhf_host.testing": sorted(testing.__all__),
            "rlhf_host.trackers": sorted(trackers.__all__),
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


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else SNAPSHOT
    path.write_text(json.dumps(describe(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
