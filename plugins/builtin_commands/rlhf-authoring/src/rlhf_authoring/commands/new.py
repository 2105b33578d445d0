"""``rlhf plugins new``: a project for a plugin that works at once, made from the template that the wheel carries."""

from __future__ import annotations

import keyword
import re
import shlex
import shutil
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import click

import rlhf_authoring
from rlhf_host import UserError
from rlhf_host.commands import near_matches, rlhf, tool, write_file
from rlhf_host.installed import discover, normalised, offered, recommended

KINDS = ("algo", "reward", "agent", "extension", "tasks", "tracker", "weight-sync", "engine", "backend", "runtime", "command")
"""Kinds that there is a template for."""

ENVIRONMENT = "environment"
"""It is one file, and no package."""

LONGEST = 50
"""Characters of a name."""


def _known_kind(ctx: click.Context, param: click.Parameter, value: str) -> str:
    kind = value.replace("_", "-")
    known = (*KINDS, ENVIRONMENT)
    if kind not in known:
        raise UserError(f"no template for kind {value!r}{near_matches(kind, known)} (there are {', '.join(known)})")
    return kind


def _complete_kind(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [kind for kind in (*KINDS, ENVIRONMENT) if kind.startswith(incomplete)]


@click.command(short_help="Write a new one.")
@click.argument("kind", callback=_known_kind, shell_complete=_complete_kind)
@click.argument("name")
@click.option(
    "--output",
    "-o",
    default=".",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Directory for the new folder; default: here.",
)
@click.option("--description", metavar="TEXT", help="What it is, in one line.")
@click.option("--author", default="", metavar="NAME", help="The author.")
def new(kind: str, name: str, output: Path, description: str | None, author: str) -> None:
    """Write a new plugin called NAME: a small working plugin of its KIND, with tests, for you to edit.

    KIND is algo, reward, agent, extension, tasks, tracker, weight-sync, engine, backend, runtime or command. The folder is called
    rlhf-plugin-NAME. Or KIND is environment: tasks, rewards and tools in one file, NAME.py.
    """
    check_name(kind, name)
    if kind == ENVIRONMENT:
        file = write_environment(name, output)
        algo = recommended("algo", "prompts")
        train = rlhf("train", "--algo", algo, "--config", file, "--actor.model", "DIR", "--dry-run")
        click.echo(f"Wrote {file}, an environment that works. Next:\n  {train}")
        return
    texts = {"author": _one_line("--author", author)}
    if description is not None:
        texts["description"] = _one_line("--description", description)
        if not texts["description"]:
            raise UserError("--description is empty: say in one line what the plugin is, or leave the flag out")
    project, use = write_project(kind, name, output, texts)
    click.echo(
        f"Wrote {project}, a plugin that works. Next:\n"
        f"  cd {shlex.quote(str(project))}\n"
        f"  {tool('pip', 'install', '-e', '.', 'rlhf-host[testing]', cwd=project)}\n"
        f"  {tool('pytest', cwd=project)}\n"
        f"  {rlhf(*shlex.split(use), *(['--dry-run'] if use.startswith('train ') else []), cwd=project)}\n"
        f"Then edit src/{project.name.replace('-', '_')}/__init__.py: changes take effect at once."
    )


def write_environment(name: str, output: Path) -> Path:
    """The file. Raises ``UserError`` for one that is there, or cannot be written."""
    file = output / f"{name.replace('-', '_')}.py"
    if file.exists():
        raise UserError(f"{file} already exists: remove it, or choose another name or --output DIR")
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_file(file, (template_folder() / "environment.py").read_bytes())
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from error
    return file


def check_name(kind: str, name: str) -> None:
    """Raises ``UserError`` for a name that cannot be one, or that is somebody else's."""
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        proper = re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()).strip("-")
        hint = f", such as {proper!r}" if re.match(r"[a-z]", proper) else ""
        raise UserError(f"{name!r} cannot be a plugin's name: use lower-case letters and digits, words joined by '-'{hint}")
    if len(name) > LONGEST:
        raise UserError(f"{name!r} has {len(name)} characters: a plugin's name has at most {LONGEST}")
    plugin = name.replace("-", "_")
    if keyword.iskeyword(plugin) or keyword.iskeyword(plugin.title()):
        raise UserError(f"{name!r} is a word of Python itself: choose another name, such as 'my-{name}'")
    if plugin.startswith("rlhf_"):
        rest = re.sub(r"rlhf_(plugin_)?", "", plugin).replace("_", "-") or "my-plugin"
        raise UserError(f"the folder's name begins with 'rlhf-plugin-' by itself: rlhf plugins new {kind} {rest}")
    distribution, group = f"rlhf-plugin-{normalised(name)}", kind.replace("-", "_")
    owners = {(info.kind, info.name): info.distribution for info in discover()}
    listed = {(kind, name): offer.distribution for kind, names in offered().items() for name, offer in names.items()}
    own = name.replace("_", "-") if kind == "command" else plugin
    owner = (owners | listed).get((group, own), distribution)
    if distribution in map(normalised, listed.values()):
        raise UserError(f"{distribution} is published already: choose another name, such as 'my-{name}'")
    if normalised(owner) != distribution:
        raise UserError(f"{kind} {own!r} is the name of one from {owner}: choose another name, such as 'my-{name}'")


def write_project(kind: str, name: str, output: Path, texts: dict[str, str]) -> tuple[Path, str]:
    """The project's folder, there whole or not at all, and the words after ``rlhf`` that use its plugin.

    Args:
        texts: ``description`` and ``author``, each on one line; taken as they are, braces and quotes included.

    Raises:
        UserError: something is in the folder's place, or it cannot be written.
    """
    from cookiecutter.generate import generate_context, generate_files
    from cookiecutter.prompt import prompt_for_config

    template = template_folder()
    project = output / f"rlhf-plugin-{normalised(name)}"
    if project.exists() or project.is_symlink():
        raise UserError(f"{project} already exists: remove it, or choose another name or --output DIR")
    asked = generate_context(str(template / "cookiecutter.json"), extra_context={"kind": kind, "name": name})
    context: dict[str, Any] = prompt_for_config({"cookiecutter": asked["cookiecutter"]}, no_input=True)
    # Now, so that braces in them are not taken for the template's own.
    context.update(texts)
    aside = output / f".{project.name}.partial"
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="rlhf-new-") as folder:
            shutil.copytree(generate_files(template, {"cookiecutter": context}, folder, accept_hooks=False), aside)
        aside.rename(project)
    except OSError as error:
        raise UserError(f"{error.filename or output}: {error.strerror or error}; choose another --output DIR") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return project, context["__use"]


def template_folder() -> Path:
    """The template: inside the installed package, or at the top of the clone. Raises ``UserError`` where it is neither."""
    package = Path(rlhf_authoring.__file__).parent
    for folder in (package / "_plugin_template", *(clone / "plugin_template" for clone in package.parents[4:5])):
        if (folder / "cookiecutter.json").is_file():
            return folder
    raise UserError("this installation of rlhf-authoring has no plugin template: reinstall rlhf-authoring")


def _one_line(flag: str, text: str) -> str:
    """Without line breaks and double spaces. Raises ``UserError`` for what no file could hold."""
    line = " ".join(text.split())
    odd = next((char for char in line if unicodedata.category(char) in ("Cc", "Cs")), None)
    if odd is not None:
        raise UserError(f"{flag} holds {odd!r}, which is not text: leave it out")
    return line
