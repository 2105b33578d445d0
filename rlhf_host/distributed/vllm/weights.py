"""The two ways of weights into vLLM: all of them, bucket by bucket, or an adapter beside the weights of the base."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlhf_host.distributed.bits import BITS, note_bits
from rlhf_host.distributed.vllm.startup import first_line
from rlhf_host.errors import RunError
from rlhf_host.models.adapter_files import CONFIG, WEIGHTS
from rlhf_host.protocols import Bucket, Buckets

log = logging.getLogger(__name__)


class WholeWeights:
    """Replaces all weights of vLLM's ``LLMEngine`` in this process."""

    adapter: Any = None

    def load(self, llm: Any, buckets: Buckets) -> dict[str, int] | None:
        came: dict[str, int] | None = llm.collective_rpc("replace_weights", args=(buckets,))[0]
        return came


class AdapterWeights:
    """Replaces the adapter of vLLM's ``LLMEngine``. Requests in flight must start again, because they would keep the old one."""

    def __init__(self, scratch: Path):
        self._scratch = scratch
        self.adapter: Any = None
        """vLLM's ``LoRARequest`` of the latest adapter."""

    def load(self, llm: Any, buckets: Buckets) -> None:
        """Loads the new adapter under a new name: under the same name vLLM would go on with its cached one."""
        from vllm.lora.request import LoRARequest

        weights = {name: tensor.detach().cpu().clone() for bucket in buckets for name, tensor in bucket}
        number = 1 if self.adapter is None else self.adapter.lora_int_id + 1
        path = self._scratch / f"adapter-{number}"
        write_adapter(weights, path)
        old, self.adapter = self.adapter, LoRARequest(path.name, number, str(path))
        if not llm.add_lora(self.adapter):
            raise RunError("vLLM does not take the adapter")
        if old is not None:
            llm.remove_lora(old.lora_int_id)
            shutil.rmtree(old.lora_path, ignore_errors=True)


def write_adapter(weights: dict[str, torch.Tensor], directory: Path) -> None:
    """Writes the result of ``adapters.engine_weights`` as files that vLLM reads. Raises ``ValueError`` without weights."""
    if not weights:
        raise ValueError("no weights of an adapter came")
    rank = next(tensor.shape[0] for name, tensor in weights.items() if ".lora_A." in name)
    targets = sorted({name.rsplit(".", 3)[1] for name in weights})
    directory.mkdir(parents=True)
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (directory / CONFIG).write_text(json.dumps(settings))


class WeightLoader:
    """Loader of vLLM in this process (``protocols.Loader``), and of adapters. Workers in processes of their own have theirs."""

    def __init__(self, engine: Any, device: torch.device):
        self.engine, self.rank, self.size = "vllm", 0, 1
        self.device = device
        self.state: dict[str, Any] = {BITS: {}} if engine.options.quantization else {}
        self._engine = engine

    @property
    def weight_types(self) -> tuple[str, tuple[str, ...]] | None:
        engine = self._engine
        if engine._adapter_rank:
            return None  # an adapter comes in its own type
        kept: tuple[str, tuple[str, ...]] | None = engine._submit(lambda: engine.llm.collective_rpc("weight_types")[0]).result()
        return kept

    def load(self, buckets: Buckets, version: int) -> None:
        engine = self._engine
        work = lambda: note_bits(self.state, engine._weights.load(engine.llm, buckets))  # noqa: E731
        engine._submit(lambda: engine._load(work, version)).result()


def check_complete(expected: set[str], names: set[str]) -> None:
    """Raises an error for layers that got no weights, such as a tied head: vLLM only warns, and keeps their old weights."""
    missing = sorted(expected - names)
    if missing:
        tied = " (tied embeddings are sent under both names)" if "lm_head.weight" in missing else ""
        raise RunError(f"no weights came for {missing[0]} (and {len(missing) - 1} more){tied}")


def outline_of(config: Any) -> Any:
    """Returns transformers' model with this config, without weights; None if it does not know the architecture."""
    from rlhf_host.models.classes import model_class

    try:
        with torch.device("meta"):
            return model_class("lm", config).from_config(config)
    except ValueError as error:
        log.warning("syncs are not checked for missing weights: %s", first_line(error))
        return None


def parameter_names(config: Any) -> set[str]:
    """Returns the names of the weights of a model with this config; nothing if transformers does not know the architecture."""
    return names_of(outline_of(config))


def names_of(model: Any) -> set[str]:
    """Returns the names of the weights of a model, or nothing of None."""
    return set() if model is None else {name for name, _ in model.named_parameters(remove_duplicate=False)}


def as_in_files(model: Any, bucket: Bucket) -> Bucket:
    """Returns the weights as the model's files have them, which vLLM's loaders read: transformers keeps all experts of a layer in
    one tensor, and some models under other names.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return bucket if model is None else [*revert_weight_conversion(model, dict(bucket)).items()]
