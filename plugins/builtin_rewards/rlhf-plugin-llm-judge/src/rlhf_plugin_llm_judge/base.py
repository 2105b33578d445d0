"""What the rewards of this package share: a judge that starts and ends with the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from rlhf_host import Metric, Outcome, RunContext, hookimpl
from rlhf_plugin_llm_judge.judge import Judge
from rlhf_plugin_llm_judge.options import ChatOptions
from rlhf_plugin_llm_judge.serving import words_of

log = logging.getLogger(__name__)


class Judged:
    """A reward with a judge. ``name`` is that of its entry point."""

    name: ClassVar[str]
    corrects: ClassVar[bool] = True

    def __init__(self, options: ChatOptions):
        self.judge = Judge(self.name, options, corrects=self.corrects)
        self.seed = 0

    @hookimpl
    def check_run(self, config: Mapping[str, Any]) -> None:
        if self.judge.options.serve is not None:
            words_of(self.judge.options)

    @hookimpl
    async def run_started(self, context: RunContext) -> None:
        """Raises ``UserError`` if the judge's server is not reached, refuses the key, or does not start."""
        self.seed = 0 if context is None else context.seed
        await self.judge.start(context)

    @hookimpl
    async def run_finished(self, outcome: Outcome) -> None:
        log.info("%s: %s", self.name, self.judge.costs.told())
        await self.judge.finish()

    @hookimpl
    def step_metrics(self) -> list[Metric]:
        return [Metric(name, value) for name, value in self.judge.costs.step().items()]
