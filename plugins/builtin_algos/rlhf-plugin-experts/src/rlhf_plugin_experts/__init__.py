"""Mixtures of experts: replay of the experts that an engine took, and how evenly experts are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Batch, Experience, Metric, Outputs, RunContext, UserError, hookimpl

if TYPE_CHECKING:
    from torch import nn

    from rlhf_plugin_experts.passes import Pass

__all__ = ["ExpertMetrics", "RouterReplay"]

OPTION = "routed_experts"
"""Option of engines that tell which experts each token took, and the name of what they tell among a row's traces."""


def _refuse_other(config: Mapping[str, Any]) -> None:
    from rlhf_plugin_experts.routers import refuse_other

    refuse_other(config)


class RouterReplay:
    """Every token has the experts in the trainer's passes that it had in the engine (R3, arXiv:2510.11370)."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

    def __init__(self, options: Options):
        self._last: Pass | None = None
        self._in_run = False

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        self._in_run = True

    @hookimpl
    def check_run(self, config: Mapping[str, Any], tokenizers: Mapping[str, Any]) -> None:
        engine = config["engine"]
        if config["from_trajectories"] is None and not engine.get(OPTION):
            why = (
                "set --engine.routed-experts true"
                if OPTION in engine
                else f"the engine {engine['name']} does not tell them: choose one that has the option {OPTION}, or leave"
                " router_replay out"
            )
            raise UserError(f"router_replay replays which experts each token took in the engine: {why}")
        _refuse_other(config)

    @hookimpl
    def prepare_batch(self, experience: Experience) -> None:
        """Refuses rows of a run without experts, which would train as if nothing were replayed."""
        for row, trajectory in enumerate(experience.trajectories if self._in_run else ()):
            told = trajectory.traces.get(OPTION)
            length = sum(len(segment.token_ids) for segment in trajectory.segments)
            if trajectory.sampled and (told is None or len(told) != length - 1):
                has = "no experts" if told is None else f"experts of {len(told)} tokens"
                raise UserError(
                    f"row {row} (episode {trajectory.episode_id}) has {length} tokens, and {has}: rows that an agent"
                    " makes or changes itself, and those saved by a run without experts, cannot be replayed"
                )

    @hookimpl
    def around_pass(
        self, role: str, model: nn.Module, lengths: Sequence[int], traces: Sequence[Mapping[str, Any]] | None
    ) -> AbstractContextManager[Any] | None:
        from rlhf_plugin_experts.routers import routers_of

        if role != "actor" or traces is None:
            self._last = None
            return None
        return self._kept(routers_of(model).during(lengths, traces))

    @contextmanager
    def _kept(self, during: AbstractContextManager[Pass]) -> Iterator[None]:
        with during as own:
            yield
        self._last = own

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[Metric]:
        """Computes no loss; measures where other experts were replayed than the trainer would have chosen."""
        import torch

        if self._last is not None and self._last.changed:
            changed, replayed = torch.stack(self._last.changed), torch.stack(self._last.replayed)
            yield Metric("router_replay/changed", changed.float(), replayed)
            yield Metric("router_replay/changed_tokens", changed.any(0).float(), replayed.any(0))


class ExpertMetrics:
    """Evenness with which the layers of a mixture of experts use their experts."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        layers: bool = Field(True, description="metrics of each layer too, beside those over all layers")

    def __init__(self, options: Options):
        self.options = options
        self._passes: dict[bool, Pass] = {}
        """The last pass with gradients, and the last without."""

    @hookimpl
    def check_run(self, config: Mapping[str, Any], tokenizers: Mapping[str, Any]) -> None:
        _refuse_other(config)

    @hookimpl
    def around_pass(
        self, role: str, model: nn.Module, lengths: Sequence[int], traces: Sequence[Mapping[str, Any]] | None
    ) -> AbstractContextManager[Any] | None:
        from rlhf_plugin_experts.routers import routers_of

        return self._kept(routers_of(model).during(lengths, counts=True)) if role == "actor" else None

    @contextmanager
    def _kept(self, during: AbstractContextManager[Pass]) -> Iterator[None]:
        import torch

        with during as own:
            yield
        self._passes[torch.is_grad_enabled()] = own

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[Metric]:
        """Computes no loss; measures the pass that gave these outputs."""
        import torch

        trained = outputs.logprobs is not None and outputs.logprobs.requires_grad
        own = self._passes.get(trained)
        if own is None or not own.loads:
            return
        numbers, loads = zip(*sorted(own.loads.items()), strict=True)
        shares = torch.stack(loads)  # [layers, E]
        shares = shares / shares.sum(-1, keepdim=True).clamp(min=1)
        experts = shares.shape[-1]
        busiest = shares.amax(-1) * experts
        entropy = -(shares * shares.clamp(min=1e-30).log()).sum(-1) / torch.tensor(float(max(2, experts))).log()
        unused = (shares == 0).float().mean(-1)
        yield Metric("experts/busiest", busiest)
        yield Metric("experts/busiest_max", busiest, reduce="max")
        yield Metric("experts/entropy", entropy)
        yield Metric("experts/unused", unused)
        for place, number in enumerate(numbers if self.options.layers else ()):
            for name, values in (("busiest", busiest), ("entropy", entropy), ("unused", unused)):
                yield Metric(f"experts/{name}/layer_{number}", values[place])
