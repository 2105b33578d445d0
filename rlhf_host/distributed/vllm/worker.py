"""Extension of vLLM's workers: each replaces its own weights bucket by bucket, under the checkpoint's own names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from rlhf_host.distributed.bits import BITS, bits_of
from rlhf_host.distributed.vllm.arguments import quantizes_online
from rlhf_host.distributed.vllm.process import EndsWithHost
from rlhf_host.distributed.vllm.weights import as_in_files, check_complete, names_of, outline_of
from rlhf_host.distributed.vllm.worker_runs import WorkerRuns
from rlhf_host.protocols import Bucket, Buckets

if quantizes_online():  # before layers are made, because vLLM gets a way of rounding to int8 from it
    from rlhf_host.distributed.vllm.quantized import ReadBack


class WeightLoading(EndsWithHost):
    """Methods that vLLM mixes into its worker (``worker_extension_cls``); ``collective_rpc`` calls them."""

    vllm_config: Any
    model_runner: Any
    rank: int
    device: Any

    def shared_memory(self) -> list[str]:
        """Returns the files by which vLLM's processes share memory, as far as this process maps them."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        paths = {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}
        return [path for path in paths if path.startswith("/dev/shm/psm_") or "-cpushm" in path]

    def call_weight_runs(self, method: str, *arguments: Any) -> Any:
        """Calls a method of this worker's ``WorkerRuns``."""
        return getattr(self.weight_runs, method)(*arguments)

    @functools.cached_property
    def weight_runs(self) -> WorkerRuns:
        size = self.vllm_config.parallel_config.world_size
        runs = WorkerRuns("vllm", self.rank, size, torch.device(self.device), self.replace_weights, self.weight_types)
        if self.read_back:
            runs.state[BITS] = {}
        return runs

    @functools.cached_property
    def read_back(self) -> ReadBack | None:
        """The proof of quantized weights; None for others."""
        return ReadBack(self.model_runner.get_model()) if self.vllm_config.model_config.quantization == "online" else None

    def quantized_layers(self) -> dict[str, int]:
        """Returns the layers of this process whose weights are quantized, with their numbers of weights."""
        layers = self.read_back.layers if self.read_back else {}
        return {name: layer.input_size_per_partition * layer.output_size_per_partition for name, layer in layers.items()}

    @functools.cached_property
    def names_of_weights(self) -> set[str]:
        return names_of(self.outline)

    @functools.cached_property
    def outline(self) -> Any:
        """The model of transformers without its weights; None: transformers does not know it."""
        return outline_of(self.vllm_config.model_config.hf_config)

    def weight_types(self) -> tuple[str, tuple[str, ...]] | None:
        """Returns ``WeightTypes.weight_types``, under the checkpoint's names as far as they are known."""
        settings, model = self.vllm_config.model_config, self.model_runner.get_model()
        odd = [
            name for name, tensor in model.state_dict().items() if tensor.is_floating_point() and tensor.dtype != settings.dtype
        ]
        if settings.quantization is not None or (odd and getattr(model, "hf_to_vllm_mapper", None) is not None):
            return None
        fused = getattr(model, "packed_modules_mapping", None) or {}
        others: set[str] = set()
        for name in odd:
            parent, _, layer = name.rpartition(".")[0].rpartition(".")
            others.update(f"{parent}.{part}." for part in fused.get(layer, [layer]))
        return str(settings.dtype).removeprefix("torch."), tuple(sorted(others))

    def replace_weights(self, buckets: Buckets) -> dict[str, int] | None:
        """Replaces all weights. The tensors of a bucket may change once the next is asked for. Returns what ``compare_bits``
        compares, if log-probabilities cannot tell that all came right.

        The model's own ``load_weights`` is not enough: on a CPU weights are packed for oneDNN after the first load, and packed
        weights cannot be written to. vLLM's layer-wise reload unpacks, loads and packs again; a layer is rebuilt once all its
        parts have arrived. After an incomplete load the weights are unusable, but the next load starts clean.

        Raises:
            RunError: some weights did not come, or layers do not have them.
        """
        model, names, read_back = self.model_runner.get_model(), set[str](), self.read_back
        came = dict[str, int]()
        in_config: Callable[[], Any] = functools.partial(set_current_vllm_config, self.vllm_config)
        _synchronize()
        _begin(model)
        try:
            for bucket in buckets:
                names.update(name for name, _ in bucket)
                if read_back:
                    came.update((name, bits_of(tensor)) for name, tensor in bucket)
                with in_config():
                    model.load_weights(iter(as_in_files(self.outline, bucket)))
                _own_what_waits(model, bucket)
        finally:
            with in_config():
                finalize_layerwise_reload(model, self.vllm_config.model_config)
                _pack_heads(model)
            self.model_runner.reset_encoder_cache()
            self.model_runner.reset_mm_cache()
            _synchronize()
        check_complete(self.names_of_weights, names)
        if read_back is None:
            return None
        with in_config():
            read_back.check()
        return came


def _synchronize() -> None:
    """Waits for a GPU: functions beside the weights have another stream than the worker."""
    if not current_platform.is_cpu():
        torch.accelerator.synchronize()


def _begin(model: nn.Module) -> None:
    if current_platform.is_cpu():
        # Experts are packed only where their kernel is made: an old one would read the new weights, unpacked, as packed.
        for layer in model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
    initialize_layerwise_reload(model)


def _pack_heads(model: nn.Module) -> None:
    """Packs heads for CPUs again: vLLM up to 0.28 skips one that is tied to the embedding, and its packed copy would stay old."""
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


def _own_what_waits(model: nn.Module, bucket: Bucket) -> None:
    """Copies what layers that still wait for a part hold on to of the bucket."""
    borrowed = {tensor.untyped_storage().data_ptr() for _, tensor in bucket}
    for layer in model.modules():
        for _, call in get_layerwise_info(layer).loaded_weights:
            call.arguments.update({name: _owned(value, borrowed) for name, value in call.arguments.items()})


def _owned(value: Any, borrowed: set[int]) -> Any:
    if isinstance(value, Tensor):
        return value.clone() if not value.is_meta and value.untyped_storage().data_ptr() in borrowed else value
    if isinstance(value, tuple | list):
        return type(value)(_owned(item, borrowed) for item in value)
    if isinstance(value, dict):
        return {key: _owned(item, borrowed) for key, item in value.items()}
    return value
