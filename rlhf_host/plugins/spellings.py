"""Spellings: what chooses a plugin instead of its name. Plugins declare them in their metadata, so the host knows none.

An entry point of the group ``GROUP.spellings``, where ``GROUP`` is that of the plugin's kind, is called like the form, and its
value is ``PLUGIN:OPTION.OPTION``, the options that are set by what was written:

- ``.py = "file:path.function"``: ``FILE.py:NAME`` and ``FILE.py``. The first option is the file, the second the name.
- ``http = "http_reward:urls"``: an address, ``http://...`` or ``https://...``, or several with commas. The option is a list.
- ``environment.tools = "multi_turn:tools"``: a part of a file for ``--config`` (``config.environments``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_host.errors import PluginError
from rlhf_host.plugins.about import class_in
from rlhf_host.plugins.catalogue import listed
from rlhf_host.plugins.discovery import GROUPS, discover

ENVIRONMENT = "environment."
"""Forms that begin so are parts of a file for ``--config``."""


class Spelling(NamedTuple):
    """The plugin that a form stands for, and the options that what was written sets."""

    plugin: str
    options: tuple[str, ...]


def spellings(kind: str) -> Mapping[str, Spelling]:
    """Form → what it stands for: of installed plugins, else of those that are disabled or could be installed, so that choosing one
    says what to do.

    Raises ``PluginError`` where two installed plugins claim a form.
    """
    forms: dict[str, Spelling] = {}
    for info in discover():
        for form, options in info.spellings if info.kind == kind else ():
            own = Spelling(info.name, tuple(options.split(".")))
            if forms.setdefault(form, own) != own:
                names = f"{forms[form].plugin!r} and {info.name!r}"
                raise PluginError(f"{kind} plugins {names} both answer to {form!r}: leave one out with --disable")
    left_out = [(info.name, dict(info.spellings)) for info in discover(disabled=True) if info.kind == kind]
    for name, own_forms in (*left_out, *((plugin["name"], plugin.get("spellings", {})) for plugin in listed(kind))):
        for form, options in own_forms.items():
            forms.setdefault(form, Spelling(name, tuple(options.split("."))))
    return forms


def written_out(kind: str, spec: str) -> tuple[str, dict[str, Any]]:
    """The plugin that a choice names, and the options that it implies: none where it is a name, or a class in a file, which is the
    plugin itself."""
    if "." not in spec and "://" not in spec:
        return spec, {}
    known = spellings(kind)
    before, named, member = spec.partition(".py:")
    file = Path(f"{before}.py" if named else spec).expanduser().absolute()
    if file.suffix == ".py" and (own := class_in(file, member) or (member if ".py" not in known else None)):
        return f"{file}:{own}", {}
    scheme, address, _ = spec.partition("://")
    if address and (spelling := known.get(_plain(scheme))):
        return spelling.plugin, {spelling.options[0]: spec.split(",")}
    for ending, spelling in _endings(known).items():
        path, colon, name = spec.partition(f"{ending}:")
        if colon or spec.endswith(ending):
            written = (path + ending, name) if colon else (spec,)
            return spelling.plugin, dict(zip(spelling.options, written, strict=False))
    return spec, {}


def written_short(kind: str, name: str, options: Mapping[str, Any]) -> str:
    """The inverse of ``written_out``, as far as it goes."""
    known = spellings(kind)
    for form, spelling in known.items():
        if spelling.plugin == name and not form.startswith(ENVIRONMENT):
            first, *others = (options.get(option) for option in spelling.options)
            return ":".join(map(str, filter(None, (first, *others)))) if form in _endings(known) else ",".join(first or ())
    return name


def schemes(kind: str) -> list[str]:
    """Returns the schemes of addresses that choose a plugin of the kind."""
    return [form for form in spellings(kind) if "." not in form]


def other_kinds(kind: str, spec: str) -> list[str]:
    """Kinds of which ``spec`` chooses a plugin without naming it."""
    return [other for other in GROUPS if other != kind and written_out(other, spec)[1]]


def _endings(known: Mapping[str, Spelling]) -> dict[str, Spelling]:
    return {form: spelling for form, spelling in known.items() if form.startswith(".")}


def _plain(scheme: str) -> str:
    """``http`` of ``https``: one form is for both."""
    return "http" if scheme == "https" else scheme
