"""What fits on which devices: the tables of ``docs/sizing.md``, computed from models' configurations. Nothing is loaded.

    python scripts/sizing.py                  # the tables
    python scripts/sizing.py MODEL_DIR ...    # the same for models of your own

``tests/docs/test_sizing.py`` compares the formulas with the bytes of a tiny model. GB are 10⁹ bytes.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from click.testing import CliRunner
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config

from rlhf_host.commands import main as main_command
from rlhf_host.models.logprobs import chunk_bytes

GB = 1e9
ROW = 4096
"""Tokens of the longest row, and of a micro-batch."""
SIDE_BY_SIDE = 32
"""Answers of that length that an engine must hold at once."""
USABLE = 0.9
"""Part of a device's memory that is planned with; the rest is for the driver, kernels' workspaces and fragments."""
RANK = 16
BUCKETS = 2 * 256 * 2**20
"""Two buckets of ``--sync.bucket-mb`` under way."""

MODELS: dict[str, Any] = {
    "Qwen2.5-0.5B": Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-1.5B": Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-7B": Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    ),
    "Qwen2.5-32B": Qwen2Config(
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
    ),
    "Llama-3.1-70B": LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
}
"""As in the ``config.json`` of each model."""


# --- a model --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts of numbers, not bytes."""

    parameters: int
    linear: int
    """Those in linear maps below the head: what autocast copies, adapters stand beside, and 4 bits are for."""
    adapter: int
    """Per rank of LoRA on all linear maps."""
    layers: int
    hidden: int
    inner: int
    """Width of the MLP."""
    heads: int
    queries: int
    """Width of all heads together."""
    keys: int
    """Width of all key heads together, which is that of the values too."""
    vocabulary: int


def sizes(config: Any) -> Sizes:
    """Of a decoder with gated MLPs, such as Llama and Qwen."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    linear = [each for each in model.modules() if isinstance(each, nn.Linear) and each is not head]
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Sizes(
        parameters=sum(weight.numel() for weight in model.parameters()),
        linear=sum(each.in_features * each.out_features for each in linear),
        adapter=sum(each.in_features + each.out_features for each in linear),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=config.num_attention_heads,
        queries=config.num_attention_heads * width,
        keys=config.num_key_value_heads * width,
        vocabulary=config.vocab_size,
    )


# --- bytes ----------------------------------------------------------------------------------------

TORCH, TORCH_BF16, ZERO_2 = "`torch`", "`torch`, passes in bfloat16", "`deepspeed`, ZeRO 2"
ZERO_3_BF16 = "`deepspeed`, ZeRO 3, `--backend.precision bf16`"
TRAINED = {
    TORCH: (16, 0),
    TORCH_BF16: (18, 0),
    "`deepspeed`, ZeRO 1": (8, 12),
    ZERO_2: (4, 20),
    "`deepspeed`, ZeRO 3": (0, 24),
    "`deepspeed`, ZeRO 1, `--backend.precision bf16`": (8, 12),
    "`deepspeed`, ZeRO 2, `--backend.precision bf16`": (2, 16),
    ZERO_3_BF16: (0, 22),
}
"""Bytes per trained weight at their most, with gradients and optimizer: on every rank, and shared by all ranks."""
HELD = {
    TORCH: (12, 0),
    TORCH_BF16: (14, 0),
    "`deepspeed`, ZeRO 1": (4, 12),
    ZERO_2: (4, 12),
    "`deepspeed`, ZeRO 3": (0, 20),
    "`deepspeed`, ZeRO 1, `--backend.precision bf16`": (6, 12),
    "`deepspeed`, ZeRO 2, `--backend.precision bf16`": (2, 12),
    ZERO_3_BF16: (0, 18),
}
"""The same between two steps."""

NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""4 bits, a byte per 64 weights, and 4 bytes per 256 of these (arXiv:2305.14314)."""


def per_weight(parts: tuple[int, int], ranks: int) -> float:
    everywhere, shared = parts
    return everywhere + shared / ranks


def quantized(model: Sizes) -> float:
    """Frozen weights: linear maps in 4 bits, all others in bfloat16."""
    return NF4 * model.linear + 2 * (model.parameters - model.linear)


def adapter(model: Sizes, rank: int = RANK) -> float:
    """A trained LoRA adapter, in bfloat16, with masters, gradients and AdamW's moments in float32."""
    return 18 * rank * model.adapter


def layer(model: Sizes, autocast: bool) -> int:
    """What one layer keeps for the backward pass, for each token: inputs of linear maps and norms, queries, keys, values, the
    result of attention, the MLP."""
    h, q, k, i = model.hidden, model.queries, model.keys, model.inner
    if autocast:
        return 26 * h + 4 * q + 4 * k + 4 * model.heads + 8 * i + 8
    return 24 * h + 8 * q + 8 * k + 4 * model.heads + 16 * i + 8


def activations(model: Sizes, checkpointing: bool, autocast: bool = True) -> int:
    """For each token. With checkpointing: the input of every layer, and all that one layer keeps."""
    one = layer(model, autocast)
    return 4 * model.hidden * model.layers + one if checkpointing else one * model.layers


def cache(model: Sizes, number: float = 2.0) -> float:
    """Keys and values of a token; ``number``: bytes of each number."""
    return 2 * model.layers * model.keys * number


# --- ways to train --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """Settings, and the bytes that they need on each of some devices."""

    name: str
    flags: str
    loaded: Callable[[Sizes, int], float]
    """While the model is loaded, on each of so many devices."""
    trained: Callable[[Sizes, int], float]
    """Weights, gradients, optimizer, on each of so many devices."""
    held: Callable[[Sizes, int], float]
    """The same between steps."""
    stays: Callable[[Sizes, int], float]
    """Its part on the device while engines sample."""
    checkpointing: bool = False
    copies: bool = False
    """Autocast keeps a copy of each float32 matrix for a pass."""
    trains_head: bool = True

    def training(self, model: Sizes, devices: int) -> float:
        """One pass over a micro-batch, forward and backward, beside what is trained."""
        copies = 2 * model.linear if self.copies else 0
        logits = chunk_bytes(
            tokens=ROW,
            vocabulary=model.vocabulary,
            hidden=model.hidden,
            narrow=True,
            cast=self.copies,
            trained=self.trains_head,
            device="cuda",
        )
        return self.trained(model, devices) + copies + logits + ROW * activations(model, self.checkpointing)


def sharded(model: Sizes, devices: int) -> float:
    """A model of one block on which kernels are tried, and then a rank's share and a block, in float32."""
    block = model.linear / model.layers + 2 * model.hidden
    outside = model.parameters - model.layers * block
    return 4 * (block + max(outside, model.parameters / devices))


def _all_weights(name: str, flags: str, backend: str, *, checkpointing: bool = True, copies: bool = True) -> Way:
    return Way(
        name,
        flags,
        sharded if backend == ZERO_3_BF16 else (lambda model, _: 4 * model.parameters),
        lambda model, devices: per_weight(TRAINED[backend], devices) * model.parameters,
        lambda model, devices: per_weight(HELD[backend], devices) * model.parameters,
        lambda model, devices: per_weight(HELD[backend], devices) * model.parameters if backend == TORCH_BF16 else 0,
        checkpointing,
        copies,
    )


def _adapters(name: str, flags: str, base: Callable[[Sizes], float]) -> Way:
    def held(model: Sizes, _: int) -> float:
        return base(model) + adapter(model)

    return Way(name, flags, lambda model, _: base(model), held, held, held, checkpointing=True, trains_head=False)


CHECKPOINTING = "--actor.gradient-checkpointing true"
LORA = f"--actor.lora.rank {RANK} --actor.dtype bfloat16 {CHECKPOINTING}"
ZERO = f"--backend deepspeed {CHECKPOINTING} --backend.zero-stage"

WITH_ADAPTERS = (
    _adapters("LoRA", LORA, lambda model: 2 * model.parameters),
    _adapters("LoRA over 4 bits", f"{LORA} --actor.quantize 4bit", quantized),
)
ALONE = (
    _all_weights("all weights", "", TORCH_BF16, checkpointing=False, copies=False),
    _all_weights("all weights, checkpointing", CHECKPOINTING, TORCH_BF16, copies=False),
    *WITH_ADAPTERS,
)
"""On one device, sampling with the trainer's own module; the plainest first."""
TOGETHER = (
    _all_weights("ZeRO 2", f"{ZERO} 2", ZERO_2),
    _all_weights("ZeRO 3", f"{ZERO} 3 --backend.precision bf16", ZERO_3_BF16, copies=False),
    *WITH_ADAPTERS,
)
"""On several devices, which vLLM uses too, one after the other."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model can be trained, and the bytes on each device."""

    way: Way
    loaded: float
    training: float
    sampling: float
    engine: str = ""

    def fits(self, memory: float) -> bool:
        return max(self.loaded, self.training, self.sampling) <= USABLE * memory


def alone(model: Sizes, memory: float) -> Plan | None:
    """The plainest way that fits; the engine is the trainer's own module."""
    plans = (
        Plan(
            way,
            way.loaded(model, 1),
            way.training(model, 1),
            way.held(model, 1) + SIDE_BY_SIDE * ROW * cache(model),
        )
        for way in ALONE
    )
    return next((plan for plan in plans if plan.fits(memory)), None)


def together(model: Sizes, memory: float, devices: int) -> Plan | None:
    """The plainest way that fits, with an engine over as few devices as can hold it."""
    for way, parts in product(TOGETHER, (1, 2, 4, 8)):
        share = math.floor((USABLE - way.stays(model, devices) / memory) * 100) / 100
        flags = f"--engine.tensor-parallel-size {parts} --engine.gpu-memory-utilization {share:.2f}"
        _, _, training, *others = (sum(amounts) for _, *amounts in phases(model, way, devices, parts))
        plan = Plan(way, way.loaded(model, devices), training, max(others), flags)
        if plan.fits(memory):
            return plan
    return None


def phases(model: Sizes, way: Way, devices: int, parts: int) -> list[tuple[str, float, float, float, float]]:
    """Bytes on each of some devices that trainer and engines share, phase by phase: the trainer's, the engine's weights, buckets
    of a sync, the cache.
    """
    weights, cached = 2 * model.parameters / parts, SIDE_BY_SIDE * ROW * cache(model) / parts
    stays = way.stays(model, devices)
    return [
        ("the engine starts, alone", 0, weights, 0, cached),
        ("it sleeps without weights; the model is loaded", way.loaded(model, devices), 0, 0, 0),
        ("training", way.training(model, devices), 0, 0, 0),
        ("the engine's weights wake, and a sync brings them", way.held(model, devices), weights, BUCKETS, 0),
        ("the trainer's data leaves", stays, weights, 0, 0),
        ("the cache wakes, and the engine samples", stays, weights, 0, cached),
    ]


# --- tables ---------------------------------------------------------------------------------------


def backends_table() -> Iterator[str]:
    yield from _head("backend", "in a step", "between steps", "in a step, 8 ranks", "64 ranks")
    for backend, parts in TRAINED.items():
        yield _row(backend, *map(_formula, (parts, HELD[backend])), *(f"{per_weight(parts, ranks):.1f}" for ranks in (8, 64)))


def _formula(parts: tuple[int, int]) -> str:
    everywhere, shared = parts
    return " + ".join(filter(None, (str(everywhere) if everywhere else "", f"{shared} / N" if shared else "")))


def models_table(models: dict[str, Sizes]) -> Iterator[str]:
    yield from _head(
        "model", "weights", "all weights, `torch`", "in bfloat16", "in 4 bits", f"LoRA of rank {RANK}", "its training"
    )
    for name, model in models.items():
        count, lora = model.parameters, RANK * model.adapter
        whole = [f"{size / GB:.1f} GB" for size in (18 * count, 2 * count, quantized(model))]
        yield _row(name, f"{count / 1e9:.2f}·10⁹", *whole, f"{lora / 1e6:.1f}·10⁶", f"{adapter(model) / GB:.2f} GB")


def tokens_table(models: dict[str, Sizes]) -> Iterator[str]:
    yield from _head("model", "kept for the backward pass", "with checkpointing", "cache", "logits")
    for name, model in models.items():
        kept = [f"{activations(model, each) / 1e3:,.0f} kB" for each in (False, True)]
        yield _row(name, *kept, f"{cache(model) / 1e3:.0f} kB", f"{4 * model.vocabulary / 1e3:.0f} kB")


def ways_table() -> Iterator[str]:
    yield from _head("way", "flags")
    for way in dict.fromkeys((*ALONE, *TOGETHER)):
        yield _row(way.name, f"`{way.flags}`" if way.flags else "")


def plans_table(models: dict[str, Sizes]) -> Iterator[str]:
    yield from _head("devices", "model", "way", "loaded", "training", "sampling, or sync", "engine")
    groups: list[tuple[str, Callable[[Sizes], Plan | None]]] = [
        ("1 × 24 GB", lambda model: alone(model, 24 * GB)),
        ("1 × 80 GB", lambda model: alone(model, 80 * GB)),
        ("8 × 80 GB", lambda model: together(model, 80 * GB, 8)),
        ("4 × 8 × 80 GB", lambda model: together(model, 80 * GB, 32)),
    ]
    for devices, plan_of in groups:
        for name, model in models.items():
            if (plan := plan_of(model)) is None:
                yield _row(devices, name, "does not fit", "", "", "", "")
            else:
                amounts = (f"{size / GB:.1f} GB" for size in (plan.loaded, plan.training, plan.sampling))
                yield _row(devices, name, plan.way.name, *amounts, f"`{plan.engine}`" if plan.engine else "`transformers`")


def phases_table(models: dict[str, Sizes]) -> Iterator[str]:
    name = list(models)[len(models) // 2]
    yield from _head(f"phase, {name}", "trainer", "engine's weights", "buckets", "cache", "together")
    for phase, *amounts in phases(models[name], TOGETHER[0], 8, 1):
        yield _row(phase, *(f"{size / GB:.1f} GB" for size in (*amounts, sum(amounts))))


PLANNED = [("Qwen2.5-7B", 8, 1), ("Qwen2.5-32B", 16, 4), ("Llama-3.1-70B", 48, 8), ("Llama-3.1-70B", 64, 8)]
"""Model, number of devices, and those of an engine, of the plans on the page."""


def planned(name: str, devices: int, parts: int) -> list[dict[str, Any]]:
    """What ``rlhf plan`` says of each phase."""
    with tempfile.TemporaryDirectory() as directory:
        MODELS[name].save_pretrained(directory)
        placed = ["--runtime", "ray", "--placement", f"actor+rollout={devices}", "--backend", "fsdp"]
        engine = ["--engine", "vllm", "--engine.sleep", "true", "--engine.tensor-parallel-size", str(parts)]
        model = ["--actor.model", directory, "--actor.gradient-checkpointing", "true"]
        words = ["plan", "--algo", "grpo", *model, *placed, *engine, "--device", "cuda", "--json"]
        result = CliRunner().invoke(main_command, words)
    assert result.exit_code == 0, result.output
    phases: list[dict[str, Any]] = json.loads(result.stdout)["phases"]
    return phases


def planned_table() -> Iterator[str]:
    parts = ("weights", "gradients", "optimizer", "gathered", "activations", "logits", "engine", "cache", "sync")
    yield from _head("devices, model", "phase", *parts, "sum")
    for name, devices, tensor_parallel in PLANNED:
        for phase in planned(name, devices, tensor_parallel):
            amounts = (f"{phase['bytes'][part] / GB:.1f}" if part in phase["bytes"] else "" for part in parts)
            yield _row(f"{devices}, {name}", phase["phase"], *amounts, f"{phase['sum'] / GB:.1f}")


def tables(models: dict[str, Sizes]) -> dict[str, list[str]]:
    """Heading → lines."""
    return {
        "Weights, gradients, optimizer": list(backends_table()),
        "Models": list(models_table(models)),
        "A token": list(tokens_table(models)),
        "Ways": list(ways_table()),
        "What fits": list(plans_table(models)),
        "Phases, ZeRO 2 on 8 devices": list(phases_table(models)),
    }


def _head(*cells: str) -> Iterator[str]:
    yield _row(*cells)
    yield "|" + "---|" * len(cells)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main(directories: Sequence[str]) -> None:
    configs = {path: AutoConfig.from_pretrained(path) for path in directories} or MODELS
    found = tables({name: sizes(config) for name, config in configs.items()})
    if not directories:
        found["Plans"] = list(planned_table())
    for heading, lines in found.items():
        print(f"{heading}\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
