"""Interface of packages that have the models of a run's steps, beside its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class StepModels(Protocol):
    """An object that an entry point of the group ``rlhf.step_models`` names. It is asked when somebody wants the model of a step
    that has no checkpoint, as in ``rlhf chat RUN@137``, and imported no earlier.
    """

    def steps(self, run: Path) -> Sequence[int]:
        """Return the steps whose models it can write; none for a run that it knows nothing of."""

    def write(self, run: Path, step: int, directory: Path) -> None:
        """Write the model after one of these steps into an empty directory, with its tokenizer, as ``save_pretrained`` does.

        Raises:
            UserError: it cannot be written, because a file is damaged, say.
        """
