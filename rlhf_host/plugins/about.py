"""Plugins as their source describes them, which is read and not imported."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import resolve_name
from pathlib import Path

from rlhf_host.plugins.discovery import PluginInfo, locate, preset_file

_SENTENCE_END = re.compile(r"(?<=[.!])(?<!Dr\.)\s+(?=[A-Z`])")


def about(info: PluginInfo) -> str:
    """Returns a sentence: the first of the docstring of the class or the command (or of the command's ``help``), else of its
    module's, else the distribution's summary; of presets the first comment."""
    try:
        text = _comment(info) if info.kind == "preset" else _docstring(info.module, info.attribute)
    except (OSError, ValueError, SyntaxError):  # whoever chooses the plugin is told
        text = ""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return _SENTENCE_END.split(paragraph)[0].replace("``", "`") or info.summary


def help_group(info: PluginInfo) -> str:
    """Returns where ``rlhf --help`` lists a command: the text of ``HELP_GROUP`` in its module; empty where there is none."""
    try:
        tree = _tree(info.module)
    except (OSError, ValueError, SyntaxError):
        return ""
    for node in tree.body if tree else ():
        if isinstance(node, ast.Assign) and any(
            isinstance(name, ast.Name) and name.id == "HELP_GROUP" for name in node.targets
        ):
            return node.value.value if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else ""
    return ""


def groups_nothing(info: PluginInfo) -> bool:
    """Returns True for a command whose source shows that it is no ``CommandGroup``: its decorator has no class for one."""
    try:
        node, _, _ = _definition(info.module, info.attribute)
    except (OSError, ValueError, SyntaxError):
        return False
    makers = [call for call in _decorators(node) if _name(call.func) in ("command", "group")]
    classes = [_name(keyword.value) for call in makers for keyword in call.keywords if keyword.arg in ("cls", None)]
    return bool(makers) and all(_name(call.func) == "command" and "Group" not in name for call in makers for name in classes)


def _docstring(module: str, attribute: str) -> str:
    """Returns that of a class or function, or the help that a command's decorator gives; else that of the module."""
    node, tree, _ = _definition(module, attribute)
    given = [
        keyword.value.value
        for call in _decorators(node)
        for keyword in call.keywords
        if keyword.arg == "help" and isinstance(keyword.value, ast.Constant) and _name(call.func) in ("command", "group")
    ]
    own = ast.get_docstring(node) if isinstance(node, ast.ClassDef | ast.FunctionDef) else None
    return str(given[0]) if given and given[0] else own or (ast.get_docstring(tree) if tree else None) or ""


def class_in(file: Path, name: str) -> str | None:
    """Returns ``name`` if the file's source shows a class with hooks or options, its own or those of a base, or has no such name;
    without a name, that of the only such class. None: it is something else, or the source cannot be read."""
    try:
        if (tree := _tree(str(file))) is None:
            return None
        if name and not {name, "*"} & _names_in(tree):
            return name
        names = [name] if name else [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        classes = [each for each in names if _is_plugin(str(file), each)]
    except (OSError, ValueError, SyntaxError, RecursionError):  # importing it says what is wrong
        return None
    return classes[0] if len(classes) == 1 else None


def _names_in(tree: ast.Module) -> set[str]:
    """Returns the names that a module may define or import somewhere."""
    return {getattr(node, field, "") for node in ast.walk(tree) for field in ("name", "asname", "id")}


def _is_plugin(module: str, attribute: str) -> bool:
    node, _, home = _definition(module, attribute)
    if not isinstance(node, ast.ClassDef):
        return False
    own = (getattr(each, "name", None) == "Options" or _is_hook(each) for each in node.body)
    return any(own) or any(_is_plugin(home, base.id) for base in node.bases if isinstance(base, ast.Name))


def _is_hook(node: ast.AST) -> bool:
    marks = getattr(node, "decorator_list", ())
    return any(_name(mark.func if isinstance(mark, ast.Call) else mark) == "hookimpl" for mark in marks)


def _definition(module: str, attribute: str) -> tuple[ast.AST | None, ast.Module | None, str]:
    """Returns a class or function, and the module that defines it, which may be one that its own module imports it from, with its
    name."""
    spec, tree = locate(module), _tree(module)
    nodes = tree.body if spec is not None and tree is not None else []
    for node in (one for each in nodes for one in (each.body if isinstance(each, ast.If) else [each])):  # if TYPE_CHECKING
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == attribute:
            return node, tree, module
        if isinstance(node, ast.ImportFrom) and spec is not None:
            names = {alias.asname or alias.name: alias.name for alias in node.names}
            if attribute in names:
                return _definition(_home(node, module, spec), names[attribute])
    return None, tree, module


def _home(node: ast.ImportFrom, module: str, spec: ModuleSpec) -> str:
    """Returns the module that a statement imports from; for a file that may be one beside it."""
    if module.endswith(".py"):
        beside = Path(module).with_name(f"{node.module}.py")
        return str(beside) if beside.is_file() else node.module or ""
    package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
    return resolve_name("." * node.level + (node.module or ""), package)


def _decorators(node: ast.AST | None) -> list[ast.Call]:
    return [call for call in getattr(node, "decorator_list", ()) if isinstance(call, ast.Call)]


def _name(node: ast.AST) -> str:
    """Returns the last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _tree(module: str) -> ast.Module | None:
    """Returns a module's source, parsed; ``None`` where there is none."""
    spec = locate(module)
    return _parsed(spec.origin, Path(spec.origin).stat().st_mtime_ns) if spec is not None and spec.origin else None


@cache
def _parsed(path: str, changed_ns: int) -> ast.Module:
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def _comment(info: PluginInfo) -> str:
    file = preset_file(info)
    lines = file.read_text(encoding="utf-8").splitlines()[:12] if file else []
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
