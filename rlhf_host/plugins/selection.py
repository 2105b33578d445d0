"""Selection: from a name to a plugin's class and, with its options, to the plugin itself."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_host.errors import PluginError, UserError, a, asks_to_stop, failing_as, in_one_line, near_matches
from rlhf_host.plugins.catalogue import install_line, offered
from rlhf_host.plugins.discovery import DISABLE, GROUPS, PROTOCOLS, PluginInfo, discover, normalised, unchosen
from rlhf_host.plugins.hints import UnknownName, of_packages
from rlhf_host.plugins.python_files import describe_class, import_file, is_in_file
from rlhf_host.plugins.requirements import lacking
from rlhf_host.plugins.spellings import other_kinds, schemes

if TYPE_CHECKING:
    import click
    from pydantic import BaseModel

    from rlhf_host.config.schema import RunConfig
    from rlhf_host.protocols.data import DataPlugin
    from rlhf_host.records.needs import Needs

PYTHON = "python"
"""Stands where a distribution's name does for plugins that are Python objects (``plugins.python_objects``)."""


def parse_choice(text: str) -> tuple[str, str]:
    """``strict=math_verifier`` → ``("strict", "math_verifier")``; without ``=`` the plugin's name is the alias.

    Raises ``PluginError`` for an alias that flags could not spell.
    """
    alias, equals, spec = text.partition("=")
    if not equals or "://" in alias:
        return _alias(text), text
    if not spec:
        raise PluginError(f"{text!r} names no plugin: write ALIAS=NAME")
    if not re.fullmatch(r"[A-Za-z_][\w-]*", alias):
        raise PluginError(f"{alias!r} cannot be an alias: use letters, digits, '_' and '-', beginning with a letter")
    return alias, spec


def split_names(text: str) -> list[str]:
    """The choices of a flag, with commas between. Addresses that follow one another are one choice."""
    names: list[str] = []
    for name in map(str.strip, text.split(",")):
        if names and "://" in names[-1] and name.startswith(("http://", "https://")):
            names[-1] += f",{name}"
        else:
            names.append(name)
    return names


def _alias(spec: str) -> str:
    """Returns the alias of a plugin that is chosen without one."""
    if "://" in spec:
        return "http"
    path, _, name = spec.partition(".py:") if ".py:" in spec else (spec.removesuffix(".py"), "", "")
    if spec.endswith(".py") or name:
        return name or re.sub(r"\W", "_", path.rpartition("/")[2])
    return spec.partition(":")[2] or spec


def find(kind: str, spec: str, plugins: Sequence[PluginInfo] | None = None) -> PluginInfo:
    """The plugin that ``spec``, a ``name`` or ``distribution:name``, means among ``plugins`` (default: all installed), or the class
    that ``FILE.py:NAME`` means.

    Raises ``PluginError``: nobody provides the name, or two distributions do and ``spec`` does not say which.
    """
    known = discover() if plugins is None else plugins
    if is_object(spec):
        raise PluginError(object_missing(kind, spec))
    distribution, name = _split(spec)
    if not name:
        raise PluginError(f"{spec!r} names no {kind}: write NAME or DISTRIBUTION:NAME")
    if is_in_file(spec):
        return describe_class(kind, spec)
    if spec.endswith(".py"):
        raise PluginError(f"{spec!r} is no file with one class that has hooks or options: write {spec}:NAME")
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", spec) and (scheme := next(iter(schemes(kind)), None)):
        raise PluginError(f"no {kind} named {spec!r} is installed; an address begins with {scheme}://, as in {scheme}://{spec}")
    if kinds := other_kinds(kind, spec):
        raise PluginError(f"{spec!r} is written for {', '.join(kinds)}, not for {kind}: give the name of {a(kind)}")
    named = [info for info in known if info.kind == kind and info.name == name]
    chosen = [info for info in named if info.goes_by(spec)]
    if len(chosen) == 1:
        return chosen[0]
    choices = " or ".join(f"{info.distribution}:{name}" for info in named)
    if chosen:
        owners = " and ".join(info.source for info in chosen)
        raise PluginError(f"{kind} {name!r} is provided by {owners}; choose with {choices}")
    if named:
        owners = " and ".join(info.distribution for info in named) + (" does" if len(named) == 1 else " do")
        raise PluginError(f"{distribution!r} provides no {kind} {name!r}; {owners}: {choices}")
    raise PluginError(_not_found(kind, name, known))


def is_object(spec: str) -> bool:
    """Returns True if a choice means a Python object, which only a caller from Python has."""
    return spec.startswith(f"{PYTHON}:")


def object_missing(kind: str, spec: str) -> str:
    """Returns what to do about such a choice where the object is not at hand, as in a resume from the command line."""
    name = spec.partition(":")[2]
    if kind in PROTOCOLS:
        return f"{kind} {name!r} is a Python object, and {a(kind)} is chosen by its name: install it as a plugin"
    argument = {"reward": "rewards", "extension": "extensions", "tracker": "trackers"}.get(kind, kind)
    return (
        f"{kind} {name!r} is a Python object, which cannot be saved in a file: continue from Python with "
        f"rlhf_host.train(resume=RUN_DIR, {argument}=...), or choose an installed {kind}"
    )


def find_all(spec: str, plugins: Sequence[PluginInfo], kind: str | None = None) -> list[PluginInfo]:
    """Every plugin ``spec`` could mean, of one kind or any, and in conflict too. Raises ``PluginError`` when there is none."""
    chosen = [info for info in plugins if info.goes_by(spec) and kind in (None, info.kind)]
    if chosen:
        return chosen
    _, name = _split(spec)
    if kind is not None:
        raise PluginError(_not_found(kind, name, plugins))
    kind = next((kind for kind, names in offered().items() if name in names), "")
    raise PluginError(_not_found(kind, name, plugins, any_kind=True))


def load(info: PluginInfo) -> type:
    """Returns the plugin's class. Raises ``PluginError`` as ``imported`` does."""
    if info.kind == "preset":
        raise PluginError(f"{info} is a file, not a class")
    value = imported(info)
    if not isinstance(value, type):
        raise PluginError(f"{info}: {info.value} is {a(type(value).__name__)}, not a class")
    return value


def load_command(info: PluginInfo) -> click.Command:
    """Returns the command that the entry point names. Raises ``PluginError`` as ``imported`` does."""
    import click

    command = imported(info)
    if not isinstance(command, click.Command):
        raise PluginError(f"{info}: {info.value} is {a(type(command).__name__)}, not a click.Command")
    return command


def find_data(config: RunConfig, needs: Needs) -> DataPlugin:
    """Returns what reads the data of a run that samples nothing. Raises ``PluginError``, which says what to install, where nothing
    does.
    """
    name = "trajectories" if needs.samples else str(needs.data)
    try:
        plugin: DataPlugin = imported(find("data", name))
    except PluginError as error:
        raise PluginError(f"the run trains on {config.from_trajectories or f'{name} data'}: {error}") from error
    return plugin


def imported(info: PluginInfo) -> Any:
    """Returns what the plugin's entry point names; its stated API range is judged before the import.

    Raises ``PluginError`` naming plugin, distribution and cause.
    """
    if info.status in ("incompatible", "disabled"):
        raise PluginError(f"{info}: {info.problem}")
    if not info.module or not info.attribute:
        raise PluginError(f"{info}: {info.problem}")
    value: Any
    if is_in_file(info.value):
        value = import_file(info.module, str(info))
    else:
        try:
            with failing_as(PluginError, f"{info}: importing {info.module} failed", own=()):
                value = importlib.import_module(info.module)
        except PluginError as error:
            if not isinstance(error.__cause__, ImportError) or not (absent := lacking(info.distribution)):
                raise
            raise PluginError(f"{info} needs {', '.join(absent)}: {install_line(*absent)}") from error.__cause__
    for part in info.attribute.split("."):
        try:
            value = getattr(value, part)
        except Exception as error:
            near = near_matches(part, (name for name in dir(value) if not name.startswith("_")))
            raise PluginError(f"{info}: {info.module} has no {info.attribute!r}{near}") from error
    return value


def python_name(name: str) -> PluginInfo | None:
    """Returns what a package adds to the names of ``rlhf_host`` by this one. Raises ``PluginError`` where two do."""
    found = [info for info in unchosen("python") if info.name == name and info.status != "conflict"]
    if len(found) > 1:
        both, out = " and ".join(info.distribution for info in found), f"{DISABLE}={found[0].distribution}:{name}"
        raise PluginError(f"{both} both add {name!r} to rlhf_host: leave one out with {out}")
    return found[0] if found else None


def build(info: PluginInfo, options: Mapping[str, Any], alias: str | None = None) -> object:
    """The plugin, made from its class and the options that these are. Raises ``PluginError`` as ``read_options`` and ``make``."""
    cls = load(info)
    return make(info, cls, read_options(info, cls, options, alias), alias)


def make(info: PluginInfo, cls: type, options: BaseModel, alias: str | None = None) -> object:
    """``cls(options)``. Raises ``PluginError`` for whatever stands in the way; ``alias`` is how messages call it."""
    who = _who(info, alias)
    takes_options = cls.__init__ is not object.__init__  # type: ignore[misc]
    if not takes_options and type(options).model_fields:
        raise PluginError(f"{who}: {info.value} has Options and takes none; give it def __init__(self, options)")
    if takes_options and not _fits(cls):
        raise PluginError(f"{who}: {info.value} is made with its options alone; write def __init__(self, options)")
    try:
        return cls(options) if takes_options else cls()
    except UserError as error:
        raise PluginError(f"{who}: {error}") from error
    except BaseException as error:
        if asks_to_stop(error):
            raise
        raise PluginError(f"{who}: building it failed: {in_one_line(error)}") from error


def _fits(cls: type) -> bool:
    """Returns False if the class cannot be called with one argument."""
    try:
        inspect.signature(cls).bind(None)
    except TypeError:
        return False
    except ValueError:  # nothing says what it takes
        return True
    return True


def read_options(info: PluginInfo, cls: type, options: Mapping[str, Any], alias: str | None = None) -> BaseModel:
    """``options`` as an instance of the class's model: what ``build`` passes, and what engines, backends and runtimes take.

    Raises ``PluginError`` for unknown keys, with near matches, and values that do not fit.
    """
    # Options need pydantic, which listing and finding plugins must not wait for.
    from rlhf_host.plugins.options import options_model, parse_options

    return parse_options(options_model(cls, info.kind), options, _who(info, alias))


def _split(spec: str) -> tuple[str, str]:
    distribution, colon, name = spec.partition(":")
    return (distribution, name) if colon else ("", spec)


def _who(info: PluginInfo, alias: str | None) -> str:
    return f"{info.kind} {alias!r} ({info.name} from {info.source})" if alias and alias != info.name else str(info)


def _not_found(kind: str, name: str, known: Sequence[PluginInfo], any_kind: bool = False) -> str:
    """One line: near matches among the installed and the listed, the same name in another kind, an install line."""
    installed = [info.name for info in known if any_kind or info.kind == kind]
    offers = offered().get(kind, {})
    message = (
        f"no {kind if kind and not any_kind else 'plugin'} named {name!r} {'are' if kind == 'kernels' else 'is'} installed"
    )
    offer = offers.get(name)
    off = [info for info in discover(disabled=True) if info.status == "disabled" and info.name == name]
    if any(any_kind or info.kind == kind for info in off):
        return f"{off[0].kind if any_kind else kind} {name!r} is disabled: {off[0].problem}"
    if offer is not None:
        if all(normalised(info.distribution) != normalised(offer.distribution) for info in known):
            return f"{message}; {offer.line}"
        return f"{message}, though {offer.distribution} is: upgrade it"
    others = sorted({info.kind for info in known if info.name == name}, key=list(GROUPS).index)
    if others:
        kinds = " and ".join(map(a, others))
        return f"{message}; {name!r} is the name of {kinds}"
    near = of_packages(UnknownName("choice", name)) or near_matches(
        name, sorted({*installed, *(offers if not any_kind else ())})
    )
    return message + (near or "; rlhf plugins lists what is installed")
