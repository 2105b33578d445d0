"""Extension of vLLM's workers: they receive weights bucket by bucket, under the checkpoint's own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from rlhf_host.engines.vllm_process import EndsWithHost


class WeightLoading(EndsWithHost):
    """Methods that vLLM mixes into its worker (``worker_extension_cls``); ``collective_rpc`` calls them.

    The model's own ``load_weights`` is not enough: on a CPU weights are packed for oneDNN after the first load, and packed
    weights cannot be written to. vLLM's layer-wise reload unpacks, loads and packs again; a layer is rebuilt once all its parts
    have arrived.
    """

    vllm_config: Any
    model_runner: Any

    def shared_memory(self) -> list[str]:
        """Returns the files by which vLLM's processes share memory, as far as this process maps them."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        paths = {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}
        return [path for path in paths if path.startswith("/dev/shm/psm_") or "-cpushm" in path]

    def begin_weights(self) -> None:
        model = self.model_runner.get_model()
        if current_platform.is_cpu():
            # Experts are packed only where their kernel is made: an old one would read the new weights, unpacked, as packed.
            for layer in model.modules():
                if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
                    layer.quant_method.moe_kernel = None
        initialize_layerwise_reload(model)

    def load_bucket(self, bucket: list[tuple[str, Tensor]]) -> None:
        """Loads a part of the state dict. The tensors may change once this returns."""
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            model.load_weights(iter(bucket))
        # Layers that still wait for a part hold on to what has come.
        borrowed = {tensor.untyped_storage().data_ptr() for _, tensor in bucket}
        for layer in model.modules():
            for _, call in get_layerwise_info(layer).loaded_weights:
                call.arguments.update({name: _owned(value, borrowed) for name, value in call.arguments.items()})

    def load_bucket_file(self, path: str) -> None:
        """Loads the same from a safetensors file, which may be removed once this returns."""
        from safetensors.torch import load_file

        self.load_bucket(list(load_file(path).items()))

    def end_weights(self) -> None:
        """Ends loading, complete or not. After an incomplete load the weights are unusable, but the next load starts clean."""
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()


def _owned(value: Any, borrowed: set[int]) -> Any:
    if isinstance(value, Tensor):
        return value.clone() if not value.is_meta and value.untyped_storage().data_ptr() in borrowed else value
    if isinstance(value, tuple | list):
        return type(value)(_owned(item, borrowed) for item in value)
    if isinstance(value, dict):
        return {key: _owned(item, borrowed) for key, item in value.items()}
    return value
