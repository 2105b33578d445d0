"""Puts the template for plugins, which is at the top of the repository, into the source distribution and the wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Template(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        # A source distribution has it beside this file, a clone three folders above.
        folder = next(path for path in (root / "plugin_template", root.parents[2] / "plugin_template") if path.is_dir())
        place = "plugin_template" if self.target_name == "sdist" else "rlhf_authoring/_plugin_template"
        build_data["force_include"][str(folder)] = place
