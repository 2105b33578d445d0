"""The two ways of weights into vLLM: all of them, bucket by bucket, or an adapter beside the weights of the base."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from rlhf_host.engines.vllm_startup import first_line
from rlhf_host.errors import RunError
from rlhf_host.models.adapter_files import write_for_engine
from rlhf_host.protocols import Buckets

log = logging.getLogger(__name__)


class WholeWeights:
    """Replaces all weights of vLLM's ``LLMEngine``.

    Args:
        scratch: a directory for files on their way to other processes.
        multiprocess: vLLM's core runs in processes of its own.
    """

    adapter: Any = None

    def __init__(self, scratch: Path, multiprocess: bool):
        self._scratch, self._multiprocess = scratch, multiprocess
        self._parameters: set[str] | None = None

    def load(self, llm: Any, buckets: Buckets) -> None:
        names: set[str] = set()
        llm.collective_rpc("begin_weights")
        try:
            for bucket in buckets:
                names.update(name for name, _ in bucket)
                if bucket:
                    self._send(llm, bucket)
        finally:
            llm.collective_rpc("end_weights")
        self._check_complete(llm.vllm_config.model_config.hf_config, names)

    def _send(self, llm: Any, bucket: list[tuple[str, torch.Tensor]]) -> None:
        if not self._multiprocess:
            llm.collective_rpc("load_bucket", args=(bucket,))
            return
        from safetensors.torch import save_file

        path = str(self._scratch / "bucket.safetensors")
        # A tied weight comes twice, which a file may not hold: the copy is its own.
        save_file({name: tensor.detach().cpu().clone() for name, tensor in bucket}, path)
        llm.collective_rpc("load_bucket_file", args=(path,))
        os.unlink(path)

    def _check_complete(self, config: Any, names: set[str]) -> None:
        """Raises an error for layers that got no weights, such as a tied head: vLLM only warns, and keeps their old weights."""
        if self._parameters is None:
            self._parameters = _parameter_names(config)
        missing = sorted(self._parameters - names)
        if missing:
            tied = " (tied embeddings are sent under both names)" if "lm_head.weight" in missing else ""
            raise RunError(f"no weights came for {missing[0]} (and {len(missing) - 1} more){tied}")


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
        write_for_engine(weights, path)
        old, self.adapter = self.adapter, LoRARequest(path.name, number, str(path))
        if not llm.add_lora(self.adapter):
            raise RunError("vLLM does not take the adapter")
        if old is not None:
            llm.remove_lora(old.lora_int_id)
            shutil.rmtree(old.lora_path, ignore_errors=True)


def _parameter_names(config: Any) -> set[str]:
    """Returns the names of the weights of a model with this config; nothing if transformers does not know the architecture."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        log.warning("syncs are not checked for missing weights: %s", first_line(error))
        return set()
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}
