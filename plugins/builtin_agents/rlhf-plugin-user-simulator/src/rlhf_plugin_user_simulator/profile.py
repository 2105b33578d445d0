"""The user of a row: the goal, who it is, and how success is judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import regex

from rlhf_host import Message, Task, UserError

JudgedBy: TypeAlias = Literal["user", "rewards"]
FIELDS = ("goal", "persona", "success")
CHECKS = ("contains", "matches")
FORM = '{"goal": "...", "persona": "...", "success": ...}'
PATTERN_S = 1.0
"""Most seconds of a search for a pattern: some take for ever on some texts."""

INSTRUCTIONS = """You play a user who talks to an assistant. Stay in this role: write what the user writes next, and nothing else.
You are not the assistant: never answer for it and never help it.

What the user wants:
{goal}

Who the user is:
{persona}

- Begin with what a user would say first, and tell the rest when it is asked for or needed. Invent no facts.
- One message at a time, in the user's own words.
- When the assistant has done what the user wants, write {done} at the end of your message.
- When it is clear that it will not, write {give_up} at the end of your message."""
PLACES = ("goal", "persona", "done", "give_up")
ANYBODY = "(anybody)"
"""A user of whom the row says nothing."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The user of one row."""

    goal: str
    persona: str
    success: JudgedBy | Mapping[str, tuple[str, ...]]
    """``user``: whether the user says that it is done; ``rewards``: those of the run; or texts that the policy's answers contain
    (``contains``) and patterns that they match (``matches``), all of them."""

    def filled(self, instructions: str, done: str, give_up: str) -> str:
        """Returns the user's system message, filled in in one pass: values are not searched for places."""
        values = {"goal": self.goal, "persona": self.persona or ANYBODY, "done": done, "give_up": give_up}
        return regex.sub(r"\{(" + "|".join(PLACES) + r")\}", lambda found: values[found[1]], instructions)

    def met(self, answers: Sequence[str]) -> tuple[bool | None, int]:
        """Returns True if one of the answers, or another, has each text and pattern of ``success``, None if others judge; and the
        number of searches that took too long, which find nothing.
        """
        if isinstance(self.success, str):
            return None, 0
        texts = (any(text.casefold() in answer.casefold() for answer in answers) for text in self.success.get("contains", ()))
        if not all(texts):
            return False, 0
        late = 0
        for pattern in self.success.get("matches", ()):
            found = False
            for answer in answers:
                try:
                    found = found or regex.search(pattern, answer, timeout=PATTERN_S, concurrent=True) is not None
                except TimeoutError:
                    late += 1
            if not found:
                return False, late
        return True, late


def profile_of(task: Task, column: str, judge: JudgedBy) -> Profile:
    """Returns the profile in a task's column: a text is the goal. Raises ``ValueError`` for what is none."""
    value: Any = task.metadata.get(column)
    if task.tools:
        raise ValueError("it has tools, and user_simulator runs none: leave the column unread (data.ignore)")
    if value is None:
        raise ValueError(f"it has no column {column!r} with a user's goal (--agent.column)")
    if isinstance(value, str):
        value = {"goal": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"column {column!r} is a {type(value).__name__}; write a goal, or {FORM}")
    given = {name: each for name, each in value.items() if each is not None}  # columns of tables have nulls
    if odd := [name for name in given if name not in FIELDS]:
        raise ValueError(f"column {column!r} has {odd[0]!r}; it may have {', '.join(FIELDS)}")
    goal, persona = given.get("goal"), given.get("persona", "")
    if not isinstance(goal, str) or not goal.strip():
        raise ValueError(f"column {column!r} has no goal, which is a text")
    if not isinstance(persona, str):
        raise ValueError(f"column {column!r}: persona is a text, not a {type(persona).__name__}")
    return Profile(goal.strip(), persona.strip(), _success(given.get("success", judge), column))


def read_instructions(path: str) -> str:
    """Returns the text of a file. Raises ``UserError`` if it is none, or has no place for the goal or for the mark of the end."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no text in UTF-8"
        raise UserError(f"user_simulator: the instructions {path}: {why}") from error
    if lacking := next((place for place in ("goal", "done") if "{" + place + "}" not in text), None):
        rule = f"it may have {{{'}, {'.join(PLACES)}}}"
        raise UserError(f"user_simulator: the instructions {path} have no {{{lacking}}}; {rule}")
    return text


def opening(task: Task) -> list[Message]:
    """Returns the prompt as messages."""
    return [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else [dict(each) for each in task.prompt]


def _success(value: Any, column: str) -> JudgedBy | dict[str, tuple[str, ...]]:
    if value in ("user", "rewards"):
        judge: JudgedBy = value
        return judge
    form = f"column {column!r}: success is user, rewards, or an object with {' and '.join(CHECKS)}"
    if not isinstance(value, Mapping):
        raise ValueError(f"{form}, not {value!r}")
    given = {name: each for name, each in value.items() if each is not None}
    if not given or (odd := [name for name in given if name not in CHECKS]):
        raise ValueError(f"{form}, and has {odd[0]!r}" if given else f"{form}, and is empty")
    checks = {}
    for name, texts in given.items():
        several = (texts,) if isinstance(texts, str) else tuple(texts) if isinstance(texts, list | tuple) else ()
        if not several or not all(isinstance(text, str) and text for text in several):
            raise ValueError(f"column {column!r}: {name} is a text or a list of texts, not {texts!r}")
        checks[name] = several
    for pattern in checks.get("matches", ()):
        try:
            regex.compile(pattern)
        except (regex.error, RecursionError) as error:
            raise ValueError(f"column {column!r}: {pattern[:100]!r} is no regular expression: {error}") from error
    return checks
