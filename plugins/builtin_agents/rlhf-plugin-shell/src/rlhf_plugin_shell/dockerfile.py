"""Dockerfiles of tasks, as far as a shell without Docker can do what they say."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

WITHOUT_EFFECT = ("LABEL", "MAINTAINER", "CMD", "EXPOSE")
"""Instructions that change nothing of what a task's commands find: its container is started with another command."""
PLAIN = re.compile(r"(?:docker\.io/)?(?:library/)?(?:ubuntu|debian|bash|buildpack-deps)(?:[:@].*)?$")
"""Base images with what a Linux machine has anyway."""
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
"""A name of an environment variable."""
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", re.ASCII)
RESERVED = ("usr", "bin", "lib", "lib64", "sbin", "etc", "dev", "proc", "sys", "tmp", "tests", "logs", "solution")


MOST_EXPANDED = 100_000
"""Most characters of a word with its variables in place, and of all values of ENV."""
MOST_STEPS = 1000


class Unsupported(ValueError):
    """Something in a task that cannot be done here."""


@dataclass(slots=True)
class Built:
    """Steps and settings that a Dockerfile states."""

    image: str = ""
    folder: str = ""
    """The last WORKDIR."""
    variables: dict[str, str] = field(default_factory=dict)
    copies: list[tuple[list[str], str]] = field(default_factory=list)
    """Sources below the folder of the Dockerfile, and an absolute path."""
    commands: list[str] = field(default_factory=list)
    """RUN lines, each where and with what it is run."""

    @property
    def is_plain(self) -> bool:
        return bool(PLAIN.match(self.image))


def read_dockerfile(text: str) -> Built:
    """Reads a Dockerfile. Raises ``Unsupported`` with the instruction that is not supported."""
    built = Built()
    folder = "/"
    for step, (name, rest) in enumerate(_instructions(text)):
        if step >= MOST_STEPS:
            raise Unsupported(f"Dockerfile: more than {MOST_STEPS:,} instructions")
        match name:
            case "FROM":
                words = rest.split()
                if built.image or len(words) not in (1, 3) or words[0].startswith("--"):
                    raise Unsupported(f"Dockerfile: FROM {rest}: only one image, without flags")
                built.image = words[0]
            case "WORKDIR" if not re.search(r"[\"'\\]", rest):
                folder = posixpath.normpath(posixpath.join(folder, _expanded(rest, built.variables)))
                built.folder = folder
            case "ENV":
                built.variables |= _variables(rest, built.variables)
                if sum(map(len, built.variables.values())) > MOST_EXPANDED:
                    raise Unsupported(f"Dockerfile: values of ENV have more than {MOST_EXPANDED:,} characters")
            case "COPY":
                words = [_expanded(word, built.variables) for word in _words(rest)]
                if len(words) < 2 or any(word.startswith("--") for word in words):
                    raise Unsupported(f"Dockerfile: COPY {rest}: only sources and a target, without flags")
                *sources, target = words
                ends = "/" if target.endswith(("/", ".")) or len(sources) > 1 else ""
                built.copies.append((sources, posixpath.normpath(posixpath.join(folder, target)) + ends))
            case "RUN":
                if not rest or rest.startswith(("--", "[", "<<")):
                    raise Unsupported(f"Dockerfile: RUN {rest}: only a command as a text")
                exports = "".join(f"export {key}={shlex.quote(value)}; " for key, value in built.variables.items())
                built.commands.append(f"(cd -- {shlex.quote(folder)} && {exports}{rest}\n)")
            case "USER" if rest.strip() in ("root", "0"):
                pass
            case _ if name in WITHOUT_EFFECT:
                pass
            case _:
                raise Unsupported(f"Dockerfile: {name} {rest}".strip())
    if not built.image:
        raise Unsupported("Dockerfile: it has no FROM")
    return built


def check_folder(folder: str) -> None:
    """Raises ``Unsupported`` for a working folder that cannot be one here."""
    parts = folder.split("/")
    odd = not folder.isprintable() or len(folder.encode("utf-8", "replace")) > 200
    if odd or parts[0] or len(parts) < 2 or any(part in ("", ".", "..") for part in parts[1:]) or parts[1] in RESERVED:
        where = folder or "none"
        raise Unsupported(
            f"the working folder is {where}; it is a path of its own, such as /app (WORKDIR, or environment.workdir)"
        )


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = iter(text.splitlines())
    for line in lines:
        whole = line.strip()
        if not whole or whole.startswith("#"):
            continue
        parts = [whole]
        while parts[-1].endswith("\\"):
            parts[-1] = parts[-1][:-1]
            parts.append(next((each for each in lines if not each.strip().startswith("#")), "").rstrip())
        whole = "".join(parts)
        name, *rest = whole.split(maxsplit=1)
        yield name.upper(), rest[0].strip() if rest else ""


def _words(rest: str) -> list[str]:
    try:
        return [str(word) for word in json.loads(rest)] if rest.startswith("[") else shlex.split(rest)
    except ValueError as error:
        raise Unsupported(f"Dockerfile: {rest}: {error}") from error


def _variables(rest: str, known: dict[str, str]) -> dict[str, str]:
    if "$" in rest and ("\\" in rest or "'" in rest):
        raise Unsupported(f"Dockerfile: ENV {rest}: a $ that may stand for itself")
    words = _words(rest)
    if words and "=" not in words[0]:  # the old form: one variable and the rest of the line
        words = ["=".join(rest.split(maxsplit=1))]
    pairs = [word.partition("=") for word in words]
    if not pairs or not all(equals and NAME.fullmatch(name) for name, equals, _ in pairs):
        raise Unsupported(f"Dockerfile: ENV {rest}")
    return {name: _expanded(value, known) for name, _, value in pairs}


def _expanded(text: str, known: dict[str, str]) -> str:
    if "$" in _VARIABLE.sub("", text) or any((one or other) not in known for one, other in _VARIABLE.findall(text)):
        raise Unsupported(f"Dockerfile: {text}: a variable that no ENV sets")
    if len(text) + sum(len(known[one or other]) for one, other in _VARIABLE.findall(text)) > MOST_EXPANDED:
        raise Unsupported(f"Dockerfile: {text[:40]}: with its variables it has more than {MOST_EXPANDED:,} characters")
    return _VARIABLE.sub(lambda found: known[found[1] or found[2]], text)
