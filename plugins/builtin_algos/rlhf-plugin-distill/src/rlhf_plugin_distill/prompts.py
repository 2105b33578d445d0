"""Prompts with a hint: a solution of the task, or feedback on an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_host import Message, UserError
from rlhf_plugin_distill.options import SDPOOptions

THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Hints:
    """Texts that the teacher is told; empty: nothing."""

    solution: str = ""
    feedback: str = ""

    def __bool__(self) -> bool:
        return bool(self.solution.strip() or self.feedback.strip())


def hinted(prompt: str | Sequence[Message], hints: Hints, options: SDPOOptions) -> str | list[Message]:
    """Returns the prompt with the hints in its last message, which must be the user's text. Raises ``UserError`` for another."""
    if isinstance(prompt, str):
        return _filled(prompt, hints, options)
    *before, last = prompt
    if last["role"] != "user" or not isinstance(last.get("content"), str):
        raise UserError(
            f"algo sdpo writes its hints into the user's last message, and a prompt ends with the role {last['role']!r}, or with"
            " content that is no text"
        )
    return [*before, {**last, "content": _filled(str(last["content"]), hints, options)}]


def _filled(prompt: str, hints: Hints, options: SDPOOptions) -> str:
    solution = THOUGHT.sub("", hints.solution).strip() if options.remove_thinking else hints.solution
    parts = {
        "{prompt}": prompt,
        "{solution}": options.solution_template.replace("{solution}", solution) if hints.solution.strip() else "",
        "{feedback}": options.feedback_template.replace("{feedback}", hints.feedback) if hints.feedback.strip() else "",
    }
    # In one pass, because an answer may contain braces of its own.
    return re.sub("|".join(map(re.escape, parts)), lambda found: parts[found[0]], options.template)
