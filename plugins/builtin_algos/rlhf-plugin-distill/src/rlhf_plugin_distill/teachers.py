"""Teachers with their own tokenizers: the batch's rows in their tokens, and the pieces of text that both models have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rlhf_rows import Answer, OtherTokens

from rlhf_host import Experience, RoleHandle, RunError, Segment, Trajectory, UserError
from rlhf_plugin_distill.alignment import read_ends, said, spans
from rlhf_plugin_distill.token_bytes import TokenBytes

if TYPE_CHECKING:
    from torch import Tensor

UNREAD = [0]
"""Tokens of a row that a teacher does not teach: one, of any model."""


class Tokens:
    """A role's tokens and how it reads texts."""

    def __init__(self, config: Mapping[str, Any], role: str, tokenizer: Any):
        self.bytes = TokenBytes(tokenizer, f"the role {role!r}")
        self.texts = OtherTokens(config, role, tokenizer)
        self.ends = {self.texts.end, tokenizer.eos_token_id} - {None}


def shared_tokens(teacher: Tokens, student: Tokens) -> list[tuple[int, int]]:
    """Returns the teacher's and the student's number of each token of both: the same bytes, special tokens of one name, and the
    tokens that end answers.
    """
    ends = teacher.texts.end, student.texts.end
    ours = student.bytes.ids()
    pairs = [
        pair
        for piece, numbers in teacher.bytes.ids().items()
        for pair in zip(numbers, ours.get(piece, ()), strict=False)
        if pair[0] != ends[0] and pair[1] != ends[1]
    ]
    return sorted([*pairs, *([] if None in ends else [ends])])  # type: ignore[list-item]


class OwnTokens:
    """A teacher with its own tokens."""

    def __init__(self, role: RoleHandle, name: str, config: Mapping[str, Any], student: Tokens):
        self.name, self.student = name, student
        self.teacher = Tokens(config, name, role.tokenizer)
        self.room = role.context_length
        self.shared = shared_tokens(self.teacher, student)

    def read(self, batch: Experience, taught: Sequence[bool]) -> tuple[list[Trajectory], Tensor]:
        """Returns the rows in the teacher's tokens, and ``[B, T, 3]``: at the first token of each piece of text that both have as
        whole tokens, the number of the student's tokens, the teacher's first one, and how many these are; zeros elsewhere.

        Args:
            taught: whether it teaches the row.
        """
        import torch

        table = torch.zeros((*batch.action_mask.shape, 3), dtype=torch.int64)
        chosen = [number for number, own in enumerate(taught) if own]
        answers = [self._answer(batch.trajectories[number]) for number in chosen]
        read = self.teacher.texts.rows([batch.trajectories[number].task for number in chosen], answers)
        rows = [_row(trajectory, UNREAD, UNREAD) for trajectory in batch.trajectories]
        for number, row in zip(chosen, read, strict=True):
            if row is None or len(row.prompt_ids) >= self.room:
                continue
            trajectory, ids = batch.trajectories[number], [*row.completion_ids][: self.room - len(row.prompt_ids)]
            rows[number] = _row(trajectory, [*row.prompt_ids], ids)
            for begin, one in self._pieces(trajectory, ids, row.trained):
                table[number, begin] = torch.tensor(one)
        return rows, table

    def _answer(self, row: Trajectory) -> Answer | None:
        """Returns what was sampled; ``None``: the row is of a data set. Raises ``RunError`` for a row of several turns."""
        if not row.sampled:
            return None
        task = row.task
        if task.prompt_ids is not None and tuple(task.prompt_ids) != tuple(row.prompt_ids):
            raise RunError(
                f"the teacher {self.name!r} has its own tokens and reads the prompt of the task, and the agent began with another:"
                " take an agent that begins with the task's own"
            )
        if [part.kind for part in row.completion].count("action") != 1 or row.completion[0].kind != "action":
            raise RunError(
                f"the teacher {self.name!r} has its own tokens and reads rows of one answer, and the agent's have several turns:"
                " take the agent single_turn, or a teacher with the actor's tokenizer"
            )
        own = said(row.completion[0].token_ids, self.student.bytes)
        return Answer(own.text, own.last in self.student.ends)

    def _pieces(
        self, row: Trajectory, ids: Sequence[int], trained: Sequence[tuple[int, int]]
    ) -> list[tuple[int, tuple[int, int, int]]]:
        """Returns each piece's first token and its numbers, as in ``read``. Raises ``UserError`` for a conversation whose answers
        the teacher's chat template does not keep apart.
        """
        edges = accumulate((len(part.token_ids) for part in row.completion), initial=0)
        answers = [(place, part.token_ids) for place, part in zip(edges, row.completion, strict=False) if part.kind == "action"]
        if len(trained) < len(answers):
            raise UserError(
                f"the teacher {self.name!r} reads {len(trained)} answers in a row where the actor reads {len(answers)}: give"
                " conversations of one answer"
            )
        found = []
        for (place, tokens), (begin, end) in zip(answers, trained, strict=False):
            own, theirs = said(tokens, self.student.bytes), ids[begin:end]
            ends = read_ends(own.text, theirs, self.teacher.bytes)
            for span in spans(own, ends):
                found.append((place + span.begin, (span.count, begin + span.other_begin, span.other_count)))
            length = len(own.text.encode())
            whole = (own.ends[-1:] or (0,))[0] == (ends[-1:] or [0])[0] == length
            if whole and own.last in self.student.ends and [*theirs[len(ends) : len(ends) + 1]] == [self.teacher.texts.end]:
                found.append((place + len(own.ends), (1, begin + len(ends), 1)))
        return found


def _row(row: Trajectory, prompt: Sequence[int], completion: Sequence[int]) -> Trajectory:
    return replace(row, segments=[Segment("prompt", prompt), Segment("action", completion)])
