"""A frozen role that is loaded alone, before a run, for its log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from rlhf_host import Batch, Needs, RoleNeed
from rlhf_host.commands import phase
from rlhf_host.internals import (
    PluginManager,
    content_hash,
    event_loop,
    find_model,
    role_settings,
    runtime_plugin,
    runtime_start,
)
from rlhf_host.models import weight_files, with_base
from rlhf_host.settings import RoleConfig, RunConfig

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class FrozenRole:
    """A role of a run."""

    config: RunConfig
    manager: PluginManager
    needs: Needs
    need: RoleNeed
    tokenizer: Any

    def settings(self) -> dict[str, Any]:
        """Returns everything that its log-probabilities of a row depend on, as JSON values."""
        config, role = self.config, self._role()
        return {
            "weights": _weights(role),
            "role": role.model_dump(mode="json", include={"dtype", "quantize", "attn_implementation"}),
            "train": config.train.model_dump(mode="json", include={"autocast", "shared_prefix"}),
            "kernels": config.kernels.model_dump(mode="json"),
            "libraries": (torch.__version__, transformers.__version__),
        }

    @contextmanager
    def loaded(self) -> Iterator[Callable[[Batch], Tensor]]:
        """Starts the runtime with this role alone. Gives a function that returns log-probabilities, ``[B, T]``, which raises
        ``KeyboardInterrupt`` if the run is asked to stop.
        """
        phase(f"Loading {self.need.name}, to compute its log-probabilities before the run")
        # Every runtime has an actor: here it is this role.
        texts = [text.partition("=") for text in self.config.placement]
        homes = [f"actor={devices}" for names, _, devices in texts if "actor" in names.split("+")]
        alone = self.config.model_copy(update={"roles": {"actor": self._role()}, "placement": homes})
        needs = Needs(data=self.needs.data, roles=(RoleNeed("actor", source=None),))
        start = runtime_start(alone, self.manager, needs, self.tokenizer, 0, {})
        runtime = runtime_plugin(alone).start(start)
        with event_loop(self.config.debug) as events:

            def logprobs(batch: Batch) -> Tensor:
                if events.stop_requested:
                    raise KeyboardInterrupt
                return runtime.trainer.outputs("actor", "logprobs", batch)

            try:
                yield logprobs
            finally:
                events.run(runtime.close(), interruptible=False)

    def _role(self) -> RoleConfig:
        return role_settings(self.config.roles, self.need, None, self.needs)


def _weights(role: RoleConfig) -> str:
    """Returns a digest of the model's files, with its adapter's."""
    role = with_base(role)
    files = weight_files(role)
    if not find_model(role.model).gguf:
        files.append(files[0].parent / "config.json")
    if role.adapter is not None:
        files += [Path(role.adapter).expanduser() / name for name in ADAPTER]
    return content_hash(files)
