"""Sandboxes: places where the commands of an episode run. Packages bring more by entry point (``rlhf.sandboxes``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from pydantic import BaseModel, ValidationError
from rlhf_plugin_code_exec.shells import File, Ran, ShellLimits
from rlhf_plugin_code_exec.shells import JailFailed as SandboxFailed

from rlhf_plugin_shell.work import Work

GROUP = "rlhf.sandboxes"


class Sandbox(Protocol):
    """The sandbox of one episode. Every method raises ``SandboxFailed`` if the sandbox itself fails, which no command may cause:
    that would be a way out of a bad episode.
    """

    async def put(self, files: Mapping[str, File], into: str = "work") -> None:
        """Makes files below the working folder, or in a folder of this name that was not there before, such as ``tests``."""
        ...

    async def logs(self, folders: Sequence[str] = ()) -> None:
        """Makes the folder ``logs`` anew, with these folders."""
        ...

    async def read(self, path: str, most: int = 1 << 16) -> bytes | None:
        """Returns the beginning of a file below ``work`` or ``logs``, such as ``logs/verifier/reward.txt``. ``None`` without one,
        and for a link.
        """
        ...

    async def run(
        self,
        command: str,
        seconds: float,
        *,
        fresh: bool = False,
        sees: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> Ran:
        """Runs a command with ``bash`` and ends all its processes, in ``seconds`` at the latest. Raises ``ValueError`` for one that
        is too long or has a zero byte.

        Args:
            fresh: it has nothing of earlier commands but files, and the next one has nothing of it.
            sees: the folders of ``put`` and ``logs`` that it needs; the variables ``NAME_DIR`` lead there.
            variables: environment variables beside the usual ones.
        """
        ...

    async def close(self) -> None:
        """Ends it and removes everything. May be called any number of times."""
        ...


class Sandboxes(Protocol):
    """A kind of sandboxes, as a run uses it. ``Options`` are the run's ``sandbox_options``."""

    Options: type[BaseModel]

    def __init__(self, options: Any, limits: ShellLimits):
        """
        Args:
            options: of the class ``Options``.
            limits: most that a sandbox may use. A task may ask for less.
        """

    def misfit(self, work: Work) -> str:
        """Returns why a task cannot be played here, or nothing."""
        ...

    async def start(self) -> None:
        """Raises ``UserError`` if there can be no sandboxes on this machine. May be called any number of times."""
        ...

    async def prepare(self, works: Sequence[Work]) -> None:
        """Makes ready what tasks need, before the run samples anything. Raises ``UserError`` for what cannot be had."""
        ...

    async def open(self, work: Work) -> Sandbox:
        """Returns a sandbox for a task, without its files. Raises ``SandboxFailed``."""
        ...

    async def close(self) -> None:
        """Ends all sandboxes."""
        ...


def kind_named(name: str) -> type[Sandboxes]:
    """Returns a kind of sandboxes. Raises ``ValueError`` if none has this name."""
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise ValueError(f"there is no sandbox {name!r}; installed: {', '.join(sorted(found))}")
    kind: type[Sandboxes] = found[name].load()
    return kind


def options_of(kind: type[Sandboxes], name: str, given: Mapping[str, Any]) -> BaseModel:
    """Returns the options of a kind. Raises ``ValueError`` with the first that is wrong."""
    try:
        return kind.Options(**given)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"]))
        why = "no such option" if wrong["type"] == "extra_forbidden" else wrong["msg"]
        known = ", ".join(kind.Options.model_fields) or "none"
        raise ValueError(f"sandbox_options.{where}: {why}; options of {name}: {known}") from error


__all__ = ["File", "Ran", "Sandbox", "SandboxFailed", "Sandboxes", "ShellLimits", "Work", "kind_named", "options_of"]
