"""Where parts run, and what they have in common: random models, rows to train on, time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from rlhf_authoring.contracts.reinforce import NEEDS, Reinforce, manager_of
from rlhf_authoring.tensors import make_batch
from transformers import AutoModelForCausalLM, Qwen2Config

from rlhf_host.backends.one_process import OneProcess
from rlhf_host.backends.torch import Torch
from rlhf_host.config.schema import RoleConfig, TrainConfig
from rlhf_host.plugins.discovery import discover
from rlhf_host.protocols import Kernels
from rlhf_host.records.tensors import Experience
from rlhf_host.training.role import Role
from rlhf_host.training.worker import Worker

GB = 1e9
EMPTY: Mapping[str, Any] = MappingProxyType({})


class Skipped(Exception):
    """Why a part cannot be measured here."""


@dataclass(frozen=True)
class Reading:
    """A value of a figure."""

    value: float
    details: dict[str, Any]
    figure: str = ""
    """Which of the part's figures; empty: its only one."""
    partial: bool = False
    """More repetitions come: the value stands for the figure only if the part is cut before the next reading."""


class Report:
    """What a part calls with each of its figures, and after each repetition with what it has so far."""

    def __init__(self, take: Callable[[Reading], None]):
        self._take = take

    def __call__(self, value: float, details: Mapping[str, Any] = EMPTY, figure: str = "") -> None:
        self._take(Reading(float(value), dict(details), figure))

    def so_far(self, value: float, details: Mapping[str, Any] = EMPTY, figure: str = "") -> None:
        self._take(Reading(float(value), dict(details), figure, partial=True))


def require(distribution: str) -> None:
    """Raises ``Skipped`` if a package of plugins, or the host, is not installed: a run finds its parts by their entry points."""
    if all(info.distribution != distribution for info in discover()):
        raise Skipped(f"{distribution} is not installed here: carry its wheel along")


@dataclass(frozen=True)
class Machine:
    """What a part runs on. ``dry``: on the CPU, with tiny sizes, so that every line runs."""

    dry: bool = False
    peak_tflops: float = 989.0
    """Of dense bfloat16 matrix products, by the datasheet."""
    peer_python: str | None = None
    """Python of an environment with ``trl``."""
    rounds: int = 2
    """Runs of each side of a comparison with TRL."""
    steps: int = 5
    """Steps of each of these runs."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    def size(self, whole: int, dry: int) -> int:
        return dry if self.dry else whole


@dataclass(frozen=True)
class Size:
    """Of a model of Qwen2's architecture."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int = 151_936


SIZES = {"1.5b": Size(1536, 8960, 28, 12), "3b": Size(2048, 11008, 36, 16)}
"""Those of Qwen2.5."""
TINY = Size(128, 512, 4, 4, vocabulary=2048)


def random_model(
    machine: Machine, size: str = "1.5b", *, layers: int | None = None, vocabulary: int | None = None, seed: int = 0
) -> Any:
    """A trainable model in float32 with random weights; ``layers`` and ``vocabulary`` instead of its own numbers."""
    chosen = TINY if machine.dry else SIZES[size]
    config = Qwen2Config(
        hidden_size=chosen.hidden,
        intermediate_size=chosen.intermediate,
        num_hidden_layers=layers or chosen.layers,
        num_attention_heads=chosen.heads,
        num_key_value_heads=2,
        vocab_size=vocabulary or chosen.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    with machine.device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def random_rows(model: Any, count: int, prompt: int, completion: int, *, group: int = 1) -> Experience:
    """Rows of equal lengths; neighbours, ``group`` at a time, have one prompt."""
    vocabulary, groups = model.config.vocab_size, [row // group for row in range(count)]
    rows = make_batch([completion] * count, groups=groups, vocabulary=vocabulary)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(vocabulary, (count, prompt), generator=generator).tolist()
    rows.prompt_ids = [prompts[number] for number in groups]
    rows.advantages = torch.randn(rows.action_mask.shape, generator=generator)
    return rows


def worker_of(model: Any, settings: TrainConfig, backend: Any = None, kernels: Kernels | None = None, **actor: Any) -> Worker:
    """The host's own worker with this model as its actor, trained by REINFORCE.

    Args:
        backend: default ``torch``.
        kernels: default: the plain path.
        actor: further settings of the role.
    """
    role = Role.of(
        "actor",
        model,
        settings,
        kernels=kernels,
        backend=backend or Torch(Torch.Options()),
        settings=RoleConfig(lr=1e-6, **actor),
        total_updates=1000,
        ranks=OneProcess(),
    )
    return Worker({"actor": role}, manager_of(algo=Reinforce()), settings, NEEDS)


def update(worker: Worker, rows: Experience) -> None:
    refused = worker.update(rows.batch()).refused
    if refused is not None:
        raise RuntimeError(f"the update was refused: {refused}")


class Watch:
    seconds = 0.0
    peak_bytes = 0
    """Most that tensors on the GPU took at once beyond what they took before; on the CPU 0."""


@contextmanager
def watched(machine: Machine) -> Iterator[Watch]:
    """Time and memory of what runs inside."""
    watch, before = Watch(), held_bytes(machine)
    if not machine.dry:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    yield watch
    finish(machine)
    watch.seconds = time.perf_counter() - started
    watch.peak_bytes = torch.cuda.max_memory_allocated() - before


def held_bytes(machine: Machine) -> int:
    """What tensors on the GPU take now; on the CPU 0."""
    finish(machine)
    return torch.cuda.memory_allocated()


def finish(machine: Machine) -> None:
    """Wait for the GPU."""
    if not machine.dry:
        torch.cuda.synchronize()
