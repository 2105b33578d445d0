"""The task source ``shell_lines``: small made tasks of one command, for tiny models, and answers that teach them to write some."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Task, hookimpl

LETTERS = "abcdefghijklmnopqrstuvwxyz"
HELD_OUT = 1 << 30
"""Added to the seeds of held-out tasks."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of task about the names ``x`` and ``y``."""

    prompt: str
    command: str
    """A right answer."""
    tests: str
    files: tuple[str, ...] = ("x",)
    """Names that are files at the beginning."""


KINDS = (
    Kind("make x", "touch x", "test -f x", ()),
    Kind("folder x", "mkdir x", "test -d x", ()),
    Kind("remove x", "rm x", "test ! -e x"),
    Kind("copy x to y", "cp x y", "cmp x y"),
    Kind("move x to y", "mv x y", 'test ! -e x && test "$(wc -l < y)" = 3'),
    Kind("sort x to y", "sort x > y", "diff y <(sort x)"),
)
CONTENT = "pear\nfig\napple\n"


def tasks(count: int, seed: int) -> list[Task]:
    """Returns made tasks, of all kinds in turn."""
    made = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        named = _named(random.Random(seed + number))
        columns = {"files": {named(name): CONTENT for name in kind.files}, "tests": named(kind.tests)}
        made.append(Task(f"{named(kind.prompt)}:", None, columns, index=number))
    return made


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Returns prompts with answers for supervised fine-tuning. One in three is the right command, the others are any: who learns
    from them writes commands, and rewards teach which.
    """
    made = []
    for number in range(count):
        dice = random.Random(seed + number)
        kind, named = dice.choice(KINDS), _named(dice)
        command = kind.command if dice.random() < 1 / 3 else dice.choice(KINDS).command
        made.append({"prompt": f"{named(kind.prompt)}:", "completion": named(command)})
    return made


def _named(dice: random.Random) -> Callable[[str], str]:
    """Returns a function that puts two names into a text for ``x`` and ``y``."""
    names = dict(zip("xy", dice.sample(LETTERS, 2), strict=True))
    return lambda text: re.sub(r"\b[xy]\b", lambda found: names[found[0]], text)


class ShellLines:
    """Made tasks of one command each, such as: copy a to b."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        size: int = Field(1200, ge=1, description="training tasks")
        eval_size: int = Field(60, ge=1, description="held-out tasks")

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def load_tasks(self, split: str, seed: int) -> Sequence[Task]:
        if split == "eval":
            return tasks(self.options.eval_size, HELD_OUT)
        return tasks(self.options.size, 0)
