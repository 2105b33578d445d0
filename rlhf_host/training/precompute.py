"""``--ROLE.precompute``: log-probabilities of a frozen role over a data set, computed before the run, which then does not load
that model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from rlhf_host.config.schema import RoleConfig, RunConfig
from rlhf_host.directories import content_hash
from rlhf_host.models import adapter_files
from rlhf_host.models.loading import weight_files
from rlhf_host.models.places import find_model, with_base
from rlhf_host.phases import counted, phase
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.episodes import Group
from rlhf_host.records.needs import Needs, RoleNeed
from rlhf_host.records.tensors import Batch
from rlhf_host.training import assemble
from rlhf_host.training.events import event_loop
from rlhf_host.training.inputs import Inputs
from rlhf_host.training.kept_logprobs import VERSION, KeptLogprobs, find_logprobs, keep_logprobs
from rlhf_host.training.role_settings import role_settings
from rlhf_host.training.row_evaluation import chunks
from rlhf_host.training.row_source import RowBatches


def precomputed(config: RunConfig, manager: PluginManager, needs: Needs, inputs: Inputs) -> dict[str, KeptLogprobs]:
    """Returns role → its log-probabilities, for roles with ``precompute``: stored by an earlier run, or computed now."""
    wanted = [need for need in needs.roles if need.name in config.roles and config.roles[need.name].precompute]
    return {need.name: _Precompute(config, manager, needs, inputs, need).logprobs() for need in wanted}


@dataclass(frozen=True, slots=True)
class _Precompute:
    """Log-probabilities of one role."""

    config: RunConfig
    manager: PluginManager
    needs: Needs
    inputs: Inputs
    need: RoleNeed

    def logprobs(self) -> KeptLogprobs:
        role = role_settings(self.config.roles, self.need, None, self.needs)
        key = self._key(role)
        if (known := find_logprobs(key)) is not None:
            phase(f"Using the log-probabilities of {self.need.name} that an earlier run stored")
            return known
        phase(f"Loading {self.need.name}, to compute its log-probabilities before the run")
        # Every runtime has an actor: here it is this role.
        texts = [text.partition("=") for text in self.config.placement]
        homes = [f"actor={devices}" for names, _, devices in texts if "actor" in names.split("+")]
        alone = self.config.model_copy(update={"roles": {"actor": role}, "placement": homes})
        needs = Needs(data=self.needs.data, roles=(RoleNeed("actor", source=None),))
        start = assemble.runtime_start(alone, self.manager, needs, self.inputs.tokenizer, 0, {})
        runtime = assemble.runtime_plugin(alone).start(start)
        with event_loop(self.config.debug) as events:

            def computed() -> Iterator[tuple[Batch, Tensor]]:
                for batch in self._batches():
                    if events.stop_requested:
                        raise KeyboardInterrupt
                    yield batch, runtime.trainer.outputs("actor", "logprobs", batch)

            try:
                line = f"log-probabilities of {self.need.name}: {{task.completed:,.0f}} rows"
                return keep_logprobs(key, counted(computed(), line, lambda pair: len(pair[0])))
            finally:
                events.run(runtime.close(), interruptible=False)

    def _batches(self) -> Iterator[Batch]:
        """Yields every row that the run will see."""
        batches = RowBatches(self.manager, self.needs, None, self.config.rollout.temperature, self.inputs.tokenizer)
        for groups in self._groups(batches):
            yield batches.rows(groups, 0, 0)

    def _groups(self, batches: RowBatches) -> Iterator[Sequence[Group]]:
        """Yields all units; if a plugin makes rows of whole batches, the run's batches in their order."""
        units, held_out = self.inputs.units, self.inputs.held_out_units
        assert units is not None
        if self.manager.has("make_rows"):
            source = assemble.row_source(self.config, self.manager, units, batches)
            for step in range(1, self.inputs.steps(self.config) + 1):
                yield source.groups(step)
        else:
            for name in units.sources:
                yield from chunks(units, name, batches)
        for name in held_out.sources if held_out is not None else ():
            assert held_out is not None
            yield from chunks(held_out, name, batches)

    def _key(self, role: RoleConfig) -> str:
        """Returns a key of everything that the numbers depend on."""
        config, inputs = self.config, self.inputs
        sets = (inputs.units, inputs.held_out_units)
        parts: dict[str, Any] = {
            "version": VERSION,
            "rows": [None if units is None else units.fingerprint for units in sets],
            "weights": _weights(role),
            "role": role.model_dump(mode="json", include={"dtype", "quantize", "attn_implementation"}),
            "train": config.train.model_dump(mode="json", include={"autocast", "shared_prefix"}),
            "kernels": config.kernels.model_dump(mode="json"),
            "temperature": config.rollout.temperature,
            "libraries": (torch.__version__, transformers.__version__),
        }
        if self.manager.has("make_rows"):
            order = config.seed, config.data.shuffle, config.train.batch_size, inputs.steps(config)
            makers = [str(self.manager.by_key[key]) for key in self.manager.names("make_rows")]
            parts["made"] = makers, order, config.algo.model_dump(mode="json") if config.algo else None
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def without(needs: Needs, roles: Collection[str]) -> Needs:
    """Returns the needs of a run that does not load these roles."""
    return replace(needs, roles=tuple(need for need in needs.roles if need.name not in roles))


def _weights(role: RoleConfig) -> str:
    """Returns a digest of the model's files, with its adapter's."""
    role = with_base(role)
    files = weight_files(role)
    if not find_model(role.model).gguf:
        files.append(files[0].parent / "config.json")
    if role.adapter is not None:
        files += [Path(role.adapter).expanduser() / name for name in (adapter_files.CONFIG, adapter_files.WEIGHTS)]
    return content_hash(files)
