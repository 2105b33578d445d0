"""Rows in the tokens of another model, with its own chat template: the same texts for a teacher or a judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_host import Task, UserError
from rlhf_host.internals import Malformed, RowContext
from rlhf_host.models import stop_tokens
from rlhf_host.rendering import Prompts, for_chat
from rlhf_host.settings import DataConfig, RoleConfig
from rlhf_rows.encoding import Encoder
from rlhf_rows.examples import Example
from rlhf_rows.load_units import marker_of
from rlhf_rows.spans import MarkedText
from rlhf_rows.texts import ROW, where_of
from rlhf_rows.units import Row


@dataclass(frozen=True, slots=True)
class Answer:
    """The text that was sampled for a task."""

    text: str
    ended: bool
    """True if the policy ended it, with the token that ends its answers."""


class OtherTokens:
    """Renders and tokenises rows for a role as the run does it for its actor.

    Args:
        config: the run's settings, as ``check_run`` and ``RunContext`` have them.
        role: name of the role.
        tokenizer: the role's own.
    """

    def __init__(self, config: Mapping[str, Any], role: str, tokenizer: Any):
        data = DataConfig.model_validate({**config["data"], "sources": [], "condition": None})
        self.role, self.tokenizer = role, tokenizer
        self._marker = marker_of(data, tokenizer, stop_tokens(RoleConfig.model_validate(config["roles"][role])))
        self._prompts = Prompts(for_chat(tokenizer, data), data.system_prompt, data.template)
        self._encoder = Encoder(tokenizer)

    @property
    def end(self) -> int | None:
        """Token that ends an answer."""
        return self._marker.end

    def rows(self, tasks: Sequence[Task], answers: Sequence[Answer | None]) -> list[Row | None]:
        """Returns a row for each task with its answer, sampled or (``None``) that of its row in a data set; ``None`` for one that
        the tokenizer has no tokens for. ``Row.trained`` has the places of the answers.

        Raises ``UserError`` for a prompt that the role's chat template refuses, and for a row of a data set without a text or
        with another number of answers in the role's template.
        """
        asked = zip(tasks, answers, strict=True)
        texts = [self._given(task) if answer is None else self._sampled(task, answer) for task, answer in asked]
        found = self._encoder.encode([replace(text, rest="x", trained=((0, 1),)) if not text.rest else text for text in texts])
        rows: list[Row | None] = []
        for text, row in zip(texts, found, strict=True):
            if isinstance(row, Malformed):
                row = None
            elif not text.rest:  # nothing but its end
                row = None if text.end is None else replace(row, completion_ids=[text.end], trained=((0, 1),))
            rows.append(row)
        return rows

    def _sampled(self, task: Task, answer: Answer) -> MarkedText:
        try:
            prompt = self._prompts.text(task.prompt, RowContext(None, task.tools, task.template_kwargs))
        except UserError as error:
            raise UserError(f"{where_of(task)}: the role {self.role!r} cannot read the prompt: {error}") from None
        end = self.end if answer.ended else None
        return MarkedText(prompt, answer.text, ((0, len(answer.text)),), self._prompts.chat, end)

    def _given(self, task: Task) -> MarkedText:
        about = task.metadata.get(ROW)
        if not about or about["tokens"]:
            raise UserError(f"{where_of(task)}: the row has tokens and no text, which the role {self.role!r} needs: give texts")
        beside = RowContext(about["system"], task.tools, task.template_kwargs)
        prompt = task.prompt if isinstance(task.prompt, str) else list(task.prompt)
        example = Example(prompt, (task.ground_truth,), own_turns=about["own_turns"], beside=beside)
        try:
            units = self._marker.mark(example)
        except Malformed as fault:
            raise UserError(f"{where_of(task)}: the role {self.role!r} cannot read the row: {fault}") from None
        if len(units) != about["parts"]:
            raise UserError(
                f"{where_of(task)}: the chat template of the role {self.role!r} makes {len(units)} rows of the conversation, and"
                f" the actor's {about['parts']}, because one changes earlier turns: give conversations of one answer"
            )
        return units[about["part"]][0]
