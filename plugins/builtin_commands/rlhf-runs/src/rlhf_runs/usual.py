"""The defaults of a run's settings."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from rlhf_host import RunDirectory, UserError
from rlhf_host.installed import find, load, options_model
from rlhf_host.runs import flat
from rlhf_host.settings import RunConfig

OTHERS = ("engine", "backend", "runtime")
"""Kinds of plugins that ``plugins.json`` does not have: each run has one of each, named in its settings."""


def usual_settings(run: RunDirectory) -> dict[str, Any]:
    """Returns the defaults of all settings, and of the options of installed plugins."""
    found = flat(RunConfig().model_dump(mode="json"))
    sections = {"reward": "reward", "extension": "with", "tracker": "tracker"}
    kinds = ({"kind": kind, "alias": "", "name": run.settings[kind]["name"]} for kind in OTHERS if kind in run.settings)
    for plugin in (*run.plugins, *kinds):
        kind, alias = plugin["kind"], plugin["alias"]
        section = f"{sections[kind]}.{alias}." if kind in sections else f"{kind}."
        with suppress(UserError):
            spec = ":".join(filter(None, (plugin.get("distribution"), plugin["name"])))
            model = options_model(load(find(kind, spec)), kind)
            found |= flat(model.model_construct().model_dump(mode="json"), section)
    return found
