"""Interfaces of plugins that tell, before anything is loaded, how much memory they will need, and where. Bytes are those of one
device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from rlhf_host.protocols.runtimes import RuntimeStart

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model that a backend will train: numbers, without its weights."""

    trained: int
    """Numbers that are trained; they are float32."""
    frozen: int
    """Numbers that are not."""
    frozen_bytes: float
    """Their bytes, as they are loaded."""
    block: int
    """Numbers of the largest block (``_no_split_modules``); all numbers, if the model has none."""
    outside: int
    """Numbers outside of blocks: embeddings, the last norm, the head."""
    trained_block: int
    """The numbers of ``block`` that are trained."""
    trained_outside: int
    """The numbers of ``outside`` that are trained."""
    processes: int
    """Number of processes of the role, each with a device."""
    device: DeviceKind
    experts: int = 0
    """Numbers of ``block`` in tensors of which each row is an expert's."""
    trained_experts: int = 0
    """The numbers of ``experts`` that are trained."""
    rounded: bool = False
    """Passes have weights in 16 bits, and trained ones a master in float32 (``BackendTraits.masters``)."""

    @property
    def numbers(self) -> int:
        return self.trained + self.frozen

    @property
    def bytes(self) -> float:
        """Bytes of the whole model."""
        return 4 * self.trained + self.frozen_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """Memory of one trained role on each device."""

    weights: float
    gradients: float
    """With the buffers in which they are reduced, at their most: in a step."""
    optimizer: float
    between: float = 0.0
    """The part of the gradients that stays between steps."""
    gathered: float = 0.0
    """Weights and gradients that are whole during a pass, beside ``weights``."""
    ending: float = 0.0
    """The same when a backward pass ends, where nothing else is left of it."""
    stays: float | None = None
    """The rest of all this after ``offload``; None: everything that is there between steps."""
    width: Literal[2, 4] | None = None
    """Bytes of a weight in passes; None: as it is loaded. With 2 there is no autocast."""


@runtime_checkable
class CountsTraining(Protocol):
    """Optional interface of a backend's plugin that counts memory."""

    savers: Sequence[Mapping[str, Any]]
    """Options that need less memory on devices than the defaults, in the order in which they are recommended."""

    def memory(self, model: TrainedModel) -> TrainingMemory:
        """Return the memory of training this model. Raises ``UserError`` for a model or options that do not go together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that an engine will serve, and what is asked of it."""

    numbers: int
    """Numbers of the weights."""
    cached: int
    """Numbers that the cache has for each token: keys and values of all layers."""
    rows: int
    """Answers that are sampled at once by one engine."""
    tokens: int
    """The longest of them, with its prompt."""
    in_place: bool
    """The engine samples from the trainer's own module."""
    rounded: bool
    """That module has weights in 16 bits."""
    device: DeviceKind
    device_bytes: float | None
    """Memory of a device; None: unknown."""
    linear: int = 0
    """The numbers of linear layers in blocks, which an engine may keep in fewer bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMemory:
    """Memory of an engine on each of its devices."""

    weights: float
    cache: float
    share: float = 0.0
    """Share of a device that it takes, whatever it needs, with what its kernels need; 0: only what is counted."""
    autocast: bool = False
    """It computes under autocast, which keeps copies of float32 weights in 16 bits."""


@runtime_checkable
class CountsServing(Protocol):
    """Optional interface of an engine's plugin that counts memory."""

    savers: Sequence[Mapping[str, Any]]
    """The same as in ``CountsTraining``."""

    def memory(self, model: ServedModel) -> ServingMemory:
        """Return the memory of serving this model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Devices of a run that hold the same."""

    name: str
    roles: tuple[str, ...]
    devices: int
    engines: int = 0
    """Number of engines on these devices."""
    device: DeviceKind | None = None
    """Kind of the devices; None: those of the machine."""


@runtime_checkable
class Grouping(Protocol):
    """Optional interface of a runtime's plugin that tells what shares devices."""

    def groups(self, start: RuntimeStart) -> Sequence[DeviceGroup]:
        """Return the groups of devices. Raises ``UserError`` for an impossible placement."""
