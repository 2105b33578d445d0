"""The pages of plugins: a list by kind, and a page for each distribution of the repository."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from rlhf_authoring.index import ListedDistribution, read_index
from rlhf_runs.metrics import table as metrics

from docs_pages.catalogue import FLAGS, KINDS, ROOT, folders, our_index, published, typed
from docs_pages.markdown import code, options_table, table
from rlhf_host import functional
from rlhf_host.plugins.about import about
from rlhf_host.plugins.catalogue import OTHERS
from rlhf_host.plugins.discovery import HOST, WITHOUT_OPTIONS, PluginInfo
from rlhf_host.plugins.options import describe_options, options_model
from rlhf_host.plugins.selection import load

GUIDES = {
    "algo": "algorithms.md",
    "reward": "rewards.md",
    "agent": "agents.md",
    "extension": "algorithms.md",
    "tasks": "data.md",
    "tracker": "runs.md",
    "weight_sync": "distributed.md",
    "preset": "algorithms.md",
    "engine": "engines.md",
    "backend": "engines.md",
    "runtime": "distributed.md",
    "kernels": "engines.md",
    "server": "serving.md",
    "data": "offline.md",
}
"""Kind → the page below ``docs/`` that shows how its plugins are used."""

OTHER_GUIDES = {
    "rlhf-host": "getting-started.md",
    "rlhf-authoring": "plugins/index.md",
    "rlhf-environments": "agents.md",
    "rlhf-gpu-metrics": "runs.md",
    "rlhf-plan": "sizing.md",
    "rlhf-profile": "performance.md",
    "rlhf-runs": "runs.md",
    "rlhf-samples": "python.md",
    "rlhf-server": "serving.md",
    "rlhf-session": "python.md",
    "rlhf-sweep": "runs.md",
    "rlhf-tinker": "serving.md",
    "rlhf-supervisor": "checkpoints.md",
    "rlhf-translate": "coming-from.md",
    "rlhf-xray": "choosing.md",
    "rlhf-kernels": "engines.md",
    "rlhf-plugin-dpo": "offline.md",
    "rlhf-plugin-kto": "offline.md",
    "rlhf-plugin-reward-model-training": "offline.md",
    "rlhf-plugin-sft": "offline.md",
    "rlhf-plugin-experts": "experts.md",
    "rlhf-plugin-league": "agents.md",
    "rlhf-sync-delta": "checkpoints.md",
}
"""Distributions whose kind does not tell their guide, or that have another one."""

SHARED = "[the options of the policy loss](../functional.md#PolicyLossOptions)"


def pages() -> dict[str, str]:
    """Returns path below ``docs/reference`` → page."""
    found: dict[str, list[PluginInfo]] = {name: [] for name in folders()}
    for info in published():
        found[info.distribution].append(info)
    listed = {entry.name: entry for entry in our_index().distributions}
    each = {f"plugins/{name}.md": _page(name, rows, listed.get(name)) for name, rows in found.items()}
    return {"plugins/index.md": _index(), **each}


def _index() -> str:
    rows, others = list(published()), read_index(str(OTHERS))
    kinds = {kind: [info for info in rows if info.kind == kind] for kind in KINDS}
    kinds = {kind: infos for kind, infos in kinds.items() if infos}
    parts = [
        "# Plugins",
        "Each plugin's page has its options and metrics. `rlhf plugins search WORD` searches this list, `rlhf plugins` lists what"
        " is installed, `rlhf plugins show NAME` prints the details of one.",
        our_index().note or "",
        ", ".join(f"[{KINDS[kind]}](#{kind})" for kind in kinds) + ", [plugins of others](#others).",
    ]
    for kind, infos in kinds.items():
        listed = [(_link(info), code(info.distribution), _about(info)) for info in infos]
        parts += [f"## {KINDS[kind]} {{ #{kind} }}", table(("name", "package", ""), listed)]
    parts += ["## Plugins of others { #others }"]
    parts += [_of_others(others.distributions) if others.distributions else "None is listed yet."]
    return "\n\n".join([*filter(None, parts), "[How to be listed](../../plugins/index.md#listed) says how yours gets here."])


def _link(info: PluginInfo) -> str:
    if info.kind == "command":
        first, *rest = info.name.split(".")
        return f"[`{typed(info)}`](../commands/{first}.md{'#rlhf-' + '-'.join((first, *rest)) if rest else ''})"
    return f"[`{typed(info)}`]({info.distribution}.md#{info.kind}-{info.name})"


def _of_others(entries: Sequence[ListedDistribution]) -> str:
    rows = []
    for entry in entries:
        name = f"[{entry.name}]({entry.homepage})" if entry.homepage else code(entry.name)
        plugins = ", ".join(f"{plugin.kind} {code(plugin.name)}" for plugin in entry.plugins)
        rows.append((name, entry.version, code(entry.api), plugins, code(entry.install)))
    return table(("distribution", "version", "for rlhf-host", "plugins", "install"), rows)


def _about(info: PluginInfo) -> str:
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", about(info))


def _page(name: str, rows: Sequence[PluginInfo], entry: ListedDistribution | None) -> str:
    """The page of a distribution; ``entry``: as it is listed, if it has plugins."""
    folder = folders()[name]
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    guides = [OTHER_GUIDES[name]] if name in OTHER_GUIDES else []
    guides += [guide for info in rows if name != HOST and (guide := GUIDES.get(info.kind))]
    named = ", ".join(f"[{_title(guide)}](../../{guide})" for guide in dict.fromkeys(guides))
    readme = (folder / "README.md").relative_to(ROOT).as_posix()
    parts = [
        f"# {name}",
        f"{project['description'].rstrip('.')}.",
        f"Guide: {named}. Methods, limits and figures: `{readme}` in the repository. [All plugins](index.md).",
    ]
    if entry is not None:
        parts += [f"```sh\n{entry.install}\n```"] if name != HOST else []
    commands = [info for info in rows if info.kind == "command"]
    if commands:
        parts += ["## Commands", table(("command", ""), [(_link(info), _about(info)) for info in commands])]
    for info in rows:
        if info.kind != "command":
            title = typed(info) if FLAGS[info.kind] else f"{info.kind} {info.name}"
            parts += [f"## {title} {{ #{info.kind}-{info.name} }}", _about(info)]
            parts += _options(info)
    if written := metrics_of(folder) if rows and len(commands) < len(rows) and name != HOST else ():
        parts += ["## Metrics", table(("metric", "meaning"), written)]
        parts += ["[Metrics](../metrics.md) has those of every run."]
    return "\n\n".join(parts)


def _title(guide: str) -> str:
    """Returns the name of a page in the navigation."""
    found = re.search(rf"^ +- (?:(.+): )?{guide}$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    if found is None:
        raise ValueError(f"mkdocs.yml has no page {guide}")
    return found[1] or "Write a plugin"


def _options(info: PluginInfo) -> Iterator[str]:
    if info.kind in WITHOUT_OPTIONS:
        return
    model = options_model(load(info))
    options = describe_options(model)
    if issubclass(model, functional.PolicyLossOptions):
        inherited = {option.name: option for option in describe_options(functional.PolicyLossOptions)}
        own = [option for option in options if inherited.get(option.name) != option]
        yield (options_table(own) + f"\n\nAlso {SHARED}." if own else f"Its options are {SHARED}.")
    else:
        yield options_table(options)


def metrics_of(folder: Path) -> list[tuple[str, str]]:
    """Returns names and meaning of the metrics that a distribution writes: the rows of its README's table, and those of every run's
    table (``metrics.toml``) that its source names. Raises ``ValueError`` for a metric that neither describes."""
    rows = _readme_rows(folder)
    own = [name for names, _ in rows for name in re.findall(r"`([^`]+)`", names)]
    for name in written_metrics(folder):
        described = any(_same(name, each) or each.endswith(f"/{name}") for each in own)
        if described and "NAME" not in name:
            continue
        found = [
            (", ".join(map(code, row.names)), row.help) for row in metrics() if any(_same(name, each) for each in row.names)
        ]
        if not found and not described:
            raise ValueError(f"{folder / 'README.md'}: its table of metrics has no row for {name}")
        rows += [row for row in found if row not in rows]
    return rows


def _same(name: str, described: str) -> bool:
    """Returns True if a name of a source may be a described one; words in capitals stand for anything."""
    return bool(_pattern(name).fullmatch(described) or _pattern(described).fullmatch(name))


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"[A-Z]+", ".+", re.escape(name)))


def _readme_rows(folder: Path) -> list[tuple[str, str]]:
    text = (folder / "README.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| metric \| meaning \|\n\|---\|---\|\n((?:\|.*\n)+)", text, re.M)
    return [(row[0], row[1]) for part in tables for row in re.findall(r"^\| (.*?) \| (.*) \|$", part, re.M)]


def written_metrics(folder: Path) -> list[str]:
    """Returns the metrics that a distribution's source names: of each ``Metric`` and of mappings called ``metrics``; ``NAME`` for
    what is known in a run only."""
    found: dict[str, None] = {}
    for file in sorted(folder.glob("src/**/*.py")):
        source = file.read_text(encoding="utf-8")
        for node in _walk(ast.parse(source)) if "etric" in source else ():
            for text in map(_text, _names(node)):
                if text is not None and not text.startswith("eval/"):  # the same, of held-out data
                    found[text] = None
    return list(found)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a node and those inside it, without ``batch_statistics``, whose numbers are for the loss and not logged."""
    yield node
    for each in ast.iter_child_nodes(node):
        if getattr(each, "name", "") != "batch_statistics":
            yield from _walk(each)


def _names(node: ast.AST) -> Iterator[ast.AST | None]:
    """Yields what may be names of metrics in a node."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Metric":
        yield from node.args[:1]
    if isinstance(node, ast.keyword) and node.arg == "metrics":
        yield from _keys(node.value)
    if isinstance(node, ast.FunctionDef) and node.name == "_metrics":
        for inner in ast.walk(node):
            yield from _keys(inner)
    if isinstance(node, ast.Assign | ast.AugAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            inside = target.value if isinstance(target, ast.Subscript) else target
            if getattr(inside, "attr", getattr(inside, "id", "")) == "metrics":
                yield from [target.slice] if isinstance(target, ast.Subscript) else _keys(node.value)


def _keys(node: ast.AST) -> Iterator[ast.AST | None]:
    for each in ast.walk(node):
        if isinstance(each, ast.Dict):
            yield from each.keys
        elif isinstance(each, ast.DictComp):
            yield each.key


def _text(node: ast.AST | None) -> str | None:
    """Returns a text that may be the name of a metric; words that are known in a run only are ``NAME``."""
    if isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "NAME" for part in node.values)
    else:
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return text if re.fullmatch(r"[\w@]+(/[\w@]+)*", text) and text.replace("NAME", "") else None
