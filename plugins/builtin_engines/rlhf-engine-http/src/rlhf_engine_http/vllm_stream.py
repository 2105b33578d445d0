"""vLLM's end of a stream of weights. Runs in the workers of a server, and is imported by vLLM alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class StreamInitInfo(WeightTransferInitInfo):
    """Nothing: each update has its own connection."""


@dataclass
class StreamUpdateInfo(WeightTransferUpdateInfo):
    """Where the weights are, and what comes from there, one after the other."""

    host: str
    port: int
    word: str
    """What the sender wants to hear."""
    timeout_s: float
    """Longest time without a byte."""
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class StreamEngine(WeightTransferEngine[StreamInitInfo, StreamUpdateInfo]):  # type: ignore[misc]
    """Loads weights that are read from a connection. Each worker reads all of them, and keeps its part."""

    init_info_cls = StreamInitInfo
    update_info_cls = StreamUpdateInfo

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self._unfinished = False

    def init_transfer_engine(self, init_info: StreamInitInfo) -> None:
        """Does nothing."""

    def start_weight_update(self) -> None:
        if self._unfinished:  # else what came before the break would count as loaded now
            finalize_layerwise_reload(self.model, self.model_config)
        self._unfinished = True
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: StreamUpdateInfo) -> None:
        with socket.create_connection((update_info.host, update_info.port), update_info.timeout_s) as place:
            place.sendall(update_info.word.encode())
            self.model.load_weights(_received(place, update_info))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._unfinished = False

    def shutdown(self) -> None:
        """Does nothing."""


def _received(place: socket.socket, what: StreamUpdateInfo) -> Iterator[tuple[str, Tensor]]:
    for name, dtype, shape in zip(what.names, what.dtype_names, what.shapes, strict=True):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        left = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        while left:
            if not (count := place.recv_into(left)):
                raise ConnectionError(f"the weights ended before {name} was whole")
            left = left[count:]
        yield name, tensor
