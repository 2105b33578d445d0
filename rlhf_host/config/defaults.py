"""Defaults that follow from the traits of the chosen engine, backend and runtime. Knows no plugin by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlhf_host.config.schema import PluginChoice, RunConfig
from rlhf_host.config.tree import SINGLE
from rlhf_host.errors import PluginError
from rlhf_host.plugins.discovery import PluginInfo, discover
from rlhf_host.plugins.libraries import traits_of
from rlhf_host.plugins.recommended import recommended
from rlhf_host.plugins.selection import build, find
from rlhf_host.plugins.specs import PluginSpec
from rlhf_host.protocols import BackendTraits, EngineTraits, RuntimeTraits, WeightSyncPlugin
from rlhf_host.records.needs import Needs
from rlhf_host.records.sampling import MOST

log = logging.getLogger(__name__)

KINDS = ("engine", "backend", "runtime")
AUTO, NONE = WORDS = ("auto", "none")
"""Choices of kernels that name no plugin."""
LONG_S = 7 * 24 * 3600.0
"""Longer than any debugging session."""


@dataclass(frozen=True, slots=True)
class RunTraits:
    """Traits of the plugins that a configuration chooses."""

    engine: EngineTraits
    backend: BackendTraits
    runtime: RuntimeTraits

    @classmethod
    def of(cls, config: RunConfig, known: Sequence[PluginInfo] | None = None) -> RunTraits:
        """Raises ``PluginError`` for plugins and options that cannot be used, and for libraries that are missing."""
        return cls(*(plugin_spec(config, kind, known).build(known).traits for kind in KINDS))

    @property
    def in_place(self) -> bool:
        """Engines sample from the trainer's own module; else they have weights of their own, which a sync must bring."""
        return self.engine.takes == "module" and not self.runtime.remote

    def in_flight(self, config: RunConfig) -> bool:
        """Returns True if new weights come while requests are answered."""
        able = bool(config.async_depth) and self.engine.in_flight and not self.in_place and config.pipeline.schedule == "free"
        return able and config.in_flight_updates is not False

    @property
    def sync(self) -> str:
        """The weight sync of a run that chooses none."""
        usual = self.runtime.sync_in_place if self.in_place else self.runtime.sync
        return usual if not self.engine.syncs or usual in self.engine.syncs else self.engine.syncs[0]


def plugin_spec(config: RunConfig, key: str, known: Sequence[PluginInfo] | None = None) -> PluginSpec:
    """The plugin that is chosen under a key of ``tree.SINGLE``. Raises ``PluginError`` where there is none."""
    choice: PluginChoice = getattr(config, key)
    return PluginSpec.of(find(SINGLE[key], choice.name, known), choice.options)


def weight_sync_plugin(config: RunConfig) -> WeightSyncPlugin:
    """Builds the chosen weight sync. Raises ``PluginError`` where it cannot be used."""
    plugin: WeightSyncPlugin = plugin_spec(config, "sync").build()
    return plugin


def kernels_to_try(choice: PluginChoice, known: Sequence[PluginInfo] | None = None) -> list[PluginSpec]:
    """The kernels of a run, in the order in which models are offered to them.

    Raises:
        PluginError: the chosen ones cannot be used here. Of all that are installed (``auto``), those are left out,
            and those that are ``only_by_name``.
    """
    known = discover() if known is None else known
    if choice.name not in WORDS:
        spec = PluginSpec.of(find("kernels", choice.name, known), choice.options)
        spec.build(known)
        return [spec]
    specs = []
    for spec in [PluginSpec.of(info, {}) for info in known if info.kind == "kernels" and choice.name == AUTO]:
        try:
            if not spec.build(known).traits.only_by_name:
                specs.append(spec)
        except PluginError as error:
            log.info("left out: %s", error)
    return specs


def swap_for_debugging(config: RunConfig, known: Sequence[PluginInfo]) -> list[str]:
    """Replace those of engine, backend and runtime whose code runs elsewhere by the default ones, and lengthen deadlines; in place.

    Returns:
        What was changed, for people.
    """
    lines = []
    for kind in KINDS:
        spec = plugin_spec(config, kind, known)
        if not traits_of(spec.info, build(spec.info, spec.options)).debug:
            default = getattr(RunConfig(), kind)
            lines.append(
                f"--debug: a debugger cannot follow {kind} {getattr(config, kind).name}; {default.name} is used instead"
            )
            setattr(config, kind, default)
            config.placement = []
    if config.async_depth:
        lines.append("--debug: one thread does one thing after the other; async_depth is 0")
        config.async_depth = 0
    config.rollout.score_timeout_s = max(config.rollout.score_timeout_s, LONG_S)
    return lines


def refusals(config: RunConfig, traits: RunTraits, needs: Needs) -> Iterator[str]:
    """Yields why the chosen engine, backend, runtime and sync cannot train together; each with what to do."""
    engine, backend, runtime, sync = (getattr(config, key).name for key in (*KINDS, "sync"))
    if config.placement and not traits.runtime.places:
        yield f"runtime {runtime} has one process and takes no placement: choose another --runtime, or leave --placement out"
    if talking := [need.name for need in needs.roles if need.generates and not traits.runtime.generates]:
        other = recommended("runtime", "generates")
        yield f"the role {talking[0]} generates, and runtime {runtime} has engines for the actor only: use --runtime {other}"
    if traits.engine.takes != "module" and (mixed := [need.name for need in needs.roles if need.mixes is not None]):
        yield (
            f"the role {mixed[0]} samples from its mixture with the actor, which engine {engine} cannot: its weights are its own;"
            " choose an engine that samples from the trainer's module"
        )
    if not needs.samples:
        return
    if traits.in_place and traits.backend.sharded:
        yield (
            f"backend {backend} splits the actor's weights, but engine {engine} samples from them and needs them complete: choose"
            " options of the backend that do not split weights (--backend.*), or an engine with its own weights (--engine)"
        )
    most, drawn = traits.engine.support, config.rollout
    if (cut := drawn.truncated_by) and config.from_trajectories is None and most < MOST and not 0 < drawn.top_k <= most:
        name, off = next(iter(cut.items()))
        tells = f"tells up to {most}: set --rollout.top-k from 1 to {most}, too, or" if most else "does not tell them:"
        yield (
            f"rollout.{name} is {getattr(drawn, name):g}: training has to know which tokens could be drawn, and engine {engine}"
            f" {tells} choose another --engine, or set --rollout.{name.replace('_', '-')} {off:g} (eval.{name} may be set)"
        )
    if config.sync.adapter == "adapter":
        merged = "leave --sync.adapter out, and engines get merged weights"
        if traits.in_place or not traits.engine.adapters:
            why = "samples from the trainer's own module" if traits.in_place else "takes no adapters"
            yield f"sync.adapter is adapter, and engine {engine} {why}: {merged}"
        elif traits.backend.sharded:
            yield f"sync.adapter is adapter, and backend {backend} splits the adapter's weights: {merged}"
    only_in_place = weight_sync_plugin(config).traits.in_place
    if only_in_place and not traits.in_place:
        apart = f"runtime {runtime}" if traits.runtime.remote else f"engine {engine}"
        yield (
            f"sync {sync} is for engines that sample from the trainer's own module, but with {apart} they have their own weights:"
            " leave --sync out, or choose one that sends weights"
        )
    if only_in_place is False and traits.in_place:
        yield (
            f"sync {sync} sends weights, but engine {engine} samples from the trainer's own module and needs none:"
            " leave --sync out"
        )
    if traits.engine.syncs and sync.rpartition(":")[2] not in traits.engine.syncs:
        yield f"engine {engine} does not work with sync {sync}: leave --sync out, or set it to {' or '.join(traits.engine.syncs)}"
