"""Settings as a run used them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from rlhf_host import RunDirectory
from rlhf_host.runs import flat
from rlhf_host.settings import RunConfig

UNTOLD = ("name", "run_dir")
"""Settings that are another run's own in any case."""


def used_settings(run: RunDirectory) -> dict[str, Any]:
    """Returns the settings; where the configuration has none, the value that the run chose, as far as ``run.json`` has it."""
    about = run.about.get("used")
    chosen = flat(about) if isinstance(about, Mapping) else {}
    chosen["train.steps"] = run.steps
    stated = flat(run.settings)
    return {name: chosen.get(name) if value is None else value for name, value in (chosen | stated).items()}


def setting_helps(run: RunDirectory) -> dict[str, str]:
    """Returns what the host's own settings mean."""
    return {name: text for name, text in flat(dict(_helps(RunConfig, run.settings))).items() if isinstance(text, str)}


def written(value: Any) -> str:
    """Returns a setting's value as text; empty where there is none."""
    if isinstance(value, list):
        return ", ".join(map(written, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {written(item)}" for name, item in value.items() if item is not None)
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def _helps(model: type[BaseModel], settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        value = settings.get(name)
        inner = next((each for each in (field.annotation, *get_args(field.annotation)) if _is_section(each)), None)
        if inner is None or not isinstance(value, Mapping):
            yield name, field.description or ""
        elif inner is field.annotation:
            yield name, dict(_helps(inner, value))
        else:  # a dictionary of sections, such as roles
            yield name, {key: dict(_helps(inner, part)) for key, part in value.items() if isinstance(part, Mapping)}


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
