"""What a plugin does, in a sentence: from its source, which is read and not imported."""

from __future__ import annotations

import ast
import re
from importlib.util import resolve_name
from pathlib import Path

from rlhf_host.plugins.discovery import PluginInfo, locate, preset_file

_SENTENCE_END = re.compile(r"(?<=[.!])(?<!Dr\.)\s+(?=[A-Z`])")


def about(info: PluginInfo) -> str:
    """The first sentence of the class's docstring, else of its module's, else the distribution's summary; of presets the first
    comment."""
    try:
        text = _comment(info) if info.kind == "preset" else _docstring(info.module, info.attribute)
    except (OSError, ValueError, SyntaxError):  # whoever chooses the plugin is told
        text = ""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return _SENTENCE_END.split(paragraph)[0].replace("``", "`") or info.summary


def _docstring(module: str, attribute: str) -> str:
    """Of a class where it is defined, which may be a module that its own one imports it from."""
    spec = locate(module)
    if spec is None or not spec.origin:
        return ""
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == attribute:
            return ast.get_docstring(node) or ast.get_docstring(tree) or ""
        if isinstance(node, ast.ImportFrom):
            names = {alias.asname or alias.name: alias.name for alias in node.names}
            if attribute in names:
                package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
                return _docstring(resolve_name("." * node.level + (node.module or ""), package), names[attribute])
    return ast.get_docstring(tree) or ""


def _comment(info: PluginInfo) -> str:
    file = preset_file(info)
    lines = file.read_text(encoding="utf-8").splitlines()[:12] if file else []
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
