"""Names of flags: those that the schema has, and what somebody meant who typed another one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress

from rlhf_host.config.schema import RoleConfig, RunConfig
from rlhf_host.config.tree import MANY, NAMED, ROLES, SHORT, SHORTHANDS, SINGLE, Names, Path, annotation_at
from rlhf_host.errors import PluginError, a, closest, near_matches
from rlhf_host.plugins.discovery import PluginInfo, discover
from rlhf_host.plugins.hints import of_flag, of_nobody
from rlhf_host.plugins.options import Option, describe_options, options_model
from rlhf_host.plugins.selection import find, load, parse_choice

CHOICES = {kind: key for key, kind in {**MANY, **SINGLE, "data": "tasks", "config": "preset"}.items()}
"""Plugin kind → the flag that chooses one."""


def known_flags() -> dict[str, Option]:
    """Every flag of the schema, without dashes in front and without plugins' own options → what the schema says of it."""
    flags: dict[str, Option] = {}
    for option in describe_options(RunConfig):
        name = option.name.removesuffix(".sources").replace("extensions", "with")
        name = name.removesuffix(".name") if name.removesuffix(".name") in SINGLE else name
        if name == "roles":
            own = describe_options(RoleConfig)
            flags |= {f"{role}.{option.name}": option for role in SHORTHANDS for option in own}
        else:
            flags[name] = option
    return {name.replace("_", "-"): option for name, option in flags.items()}


def what_is_meant(
    typed: str, value: str | None, path: Path, names: Names, control: Collection[str], chosen: Sequence[tuple[str, str]]
) -> str:
    """Returns what to say of a flag that does not exist, after its text.

    Args:
        typed: its name, without dashes in front.
        path: where its settings would be.
        control: the command's own flags.
        chosen: key and name of the plugins that flags choose.
    """
    name = typed.replace("_", "-")
    settings = [*known_flags(), *control, *SHORT]
    if inside := next((flag for flag in settings if flag.startswith(f"{name}.")), None):
        return f" is a section: set its keys, such as --{inside}"
    options = [flag for key, text in chosen for flag in _option_flags(key, text)]

    def fits(flags: str) -> bool:
        """Returns False if some are options that a chosen plugin does not have."""
        heads = {key for key, _ in chosen if key in SINGLE}
        words = [word.removeprefix("--") for word in flags.split() if word.startswith("--")]
        return all(word in options for word in words if word.partition(".")[0] in heads and "." in word)

    def near() -> str:
        return _or(closest(name, [*_like(name, value, path, names, settings), *options]))

    def meant() -> str:
        return of_last_part(typed.rpartition(".")[2], value, fits) or ("" if "." in name else of_plugin(name))

    # A mistyped section is likelier than another project's name for one of its settings.
    mistyped_head = "." in name and annotation_at(path[:1]) is None
    ways = [
        lambda: _or([flag for flag in options if _dashed(name) in (_dashed(flag), flag.rpartition(".")[2])]),
        lambda: _or([flag for flag in settings if _dashed(flag) == _dashed(name)]) + of_flag(typed, value, fits),
        lambda: _option_of_a_choice(name, names) if mistyped_head else "",
        *((near, meant) if mistyped_head else (meant, near)),
        of_nobody,
    ]
    return f": no such flag{next(filter(None, (way() for way in ways)), '')}"


def _like(name: str, value: str | None, path: Path, names: Names, settings: list[str]) -> list[str]:
    """Returns the flags among which a flag that does not exist may be found mistyped, those of plugins' options left out."""
    head, dot, rest = name.partition(".")
    if head == "roles" and len(path) > 2 and path[1] not in ROLES:
        return [f"roles.{path[1]}.{key}".replace("_", "-") for key in RoleConfig.model_fields]
    if annotation_at(path[:1]) is None and (rest or value is None):  # a plugin's name, perhaps mistyped
        plugins = [plugin.replace("_", "-") for plugin in names.plugins]
        return [*settings, *(plugin + dot + rest for plugin in plugins if not rest or near_matches(head, [plugin]))]
    return settings


def _option_of_a_choice(name: str, names: Names) -> str:
    plugin, _, option = name.partition(".")
    flag = names.option_flag(plugin, option)
    return f"; the options of {plugin!r} are set with {flag}" if flag is not None else ""


def _dashed(flag: str) -> str:
    return flag.replace(".", "-")


def of_last_part(part: str, value: object = None, fits: Callable[[str], bool] = bool) -> str:
    """``; did you mean ...?`` with the flags that end so, else what the name of another project is here; ``fits`` as in
    ``of_flag``."""
    ending = f".{part.replace('_', '-')}"
    return _or([name for name in known_flags() if f".{name}".endswith(ending)]) or of_flag(part, value, fits)


def _or(flags: list[str]) -> str:
    shown = [f"'--{flag}'" for flag in flags[:3]]
    return f"; did you mean {' or '.join(shown)}?" if shown else ""


def _options(info: PluginInfo) -> list[Option]:
    """The options of a plugin; none for one that cannot be imported."""
    with suppress(PluginError):
        return describe_options(options_model(load(info)))
    return []


def _option_flags(key: str, text: str) -> Iterator[str]:
    """Yields flags of the options of a plugin that the flag ``key`` chooses, as far as these can be had."""
    if (kind := SINGLE.get(key) or MANY.get(key)) is None:
        return
    with suppress(PluginError):
        alias, spec = ("", text) if key in SINGLE else parse_choice(text)
        for option in _options(find(kind, spec)):
            yield ".".join(filter(None, (key, alias, option.name))).replace("_", "-")


def of_plugin(name: str) -> str:
    """Returns what to type for an installed plugin's name, ``wandb``, or for one of its options behind a dash, ``kl-coef``."""
    hints = []
    for info in discover():
        own, key = info.name.replace("_", "-"), CHOICES.get(info.kind)
        if key is None or not f"{name}-".startswith(f"{own}-"):
            continue
        options = [] if info.kind == "preset" else _options(info)
        choice, option = f"--{key} {info.name}", name.removeprefix(f"{own}-")
        prefix = f"{choice} --{key}" if key in SINGLE else f"{choice} --{key}.{info.name}"
        if info.kind in NAMED and Names().place(info.name.replace("-", "_"))[1]:
            prefix = f"--{own}"
        if name == own and not any(each.default is None for each in options):
            hints.append(f"; {info.name!r} is {a(info.kind)}: {choice}")
        elif any(each.name.replace("_", "-") == option for each in options):
            hints.append(f"; did you mean '{prefix}.{option}'?")
    return "".join(hints[:2])


def of_others(own: PluginInfo, name: str) -> str:
    """Returns the one or two other plugins of the kind that have an option, ``; engine 'http' has it``, or nothing."""
    kin, option = [info for info in discover() if info.kind == own.kind], name.replace("-", "_")
    have = [repr(info.name) for info in kin if option in [each.name for each in _options(info)]]
    return f"; {own.kind} {' or '.join(have)} has it" if 0 < len(have) < 3 else ""


def option_examples(plugin: str, flag: str) -> str:
    """``--kl.coef VALUE`` for each option that an extension or runtime must have, or for those that it may."""
    kind = Names().plugins[plugin]
    options = [each for info in discover() if (info.kind, info.name) == (kind, plugin) for each in _options(info)]
    shown = [option for option in options if option.default is None] or options
    return " or ".join(f"{flag}.{option.name.replace('_', '-')} VALUE" for option in shown[:3]) or f"{flag}.OPTION VALUE"
