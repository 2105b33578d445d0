"""The tensorboard tracker: scalars and sample text under ``tensorboard/`` in the run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from rlhf_host import Outcome, PluginError, RunContext, Trajectory, hookimpl
from rlhf_host.commands import visible
from rlhf_host.trackers import has_samples, numbers, reward_cell, sample_texts, spread

__all__ = ["TensorBoard"]


class TensorBoard:
    """Scalars and samples under ``tensorboard/`` in the run directory. A resumed run hides what was logged after the step it
    resumes from."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        every: PositiveInt = Field(10, description="steps between sample trajectories; how many: trajectories.show")

    def __init__(self, options: Options):
        self.options = options
        self._writer: Any = None
        self._show = 2
        self._tokenizer: Any = None

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        self._tokenizer = context.tokenizer
        self._show = (context.config.get("trajectories") or {}).get("show", 2)
        if context.run_dir is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            message = "tracker 'tensorboard' needs the package tensorboard: pip install tensorboard"
            raise PluginError(message) from error
        purge = context.resume_step + 1 if context.resumed else None
        self._writer = SummaryWriter(str(context.run_dir / "tensorboard"), purge_step=purge)

    @hookimpl
    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    @hookimpl
    def log_trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        if self._writer is None or not has_samples(split, step, self.options.every):
            return
        for place, trajectory in enumerate(spread(trajectories, self._show)):
            self._writer.add_text(f"{split}/sample_{place}", _markdown(trajectory, self._tokenizer), step)

    @hookimpl
    def run_finished(self, outcome: Outcome) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _markdown(trajectory: Trajectory, tokenizer: Any) -> str:
    """Returns text as indented blocks, so that nothing the model writes is rendered."""
    texts = (*sample_texts(trajectory, tokenizer), reward_cell(trajectory))
    parts = zip(("prompt", "completion", "label", "reward"), texts, strict=True)
    blocks = ((name, "\n".join(f"    {visible(line)}" for line in text.split("\n"))) for name, text in parts)
    return "\n\n".join(f"**{name}**\n\n{block}" for name, block in blocks)
