"""What fits on which devices: the tables of ``docs/sizing.md``, computed from models' configurations. Nothing is loaded.

    python scripts/sizing.py                  # the tables
    python scripts/sizing.py MODEL_DIR ...    # the same for models of your own

``tests/docs/test_sizing.py`` compares the formulas with the bytes of a tiny model. GB are 10⁹ bytes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
MACHINE = 8
"""Devices of a machine."""

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

TORCH, TORCH_BF16 = "`torch`", "`torch`, passes in bfloat16"
TRAINED = {
    TORCH: (16, 0),
    TORCH_BF16: (18, 0),
    "`fsdp`": (0, 16),
    "`deepspeed`, ZeRO 1": (8, 12),
    "`deepspeed`, ZeRO 2": (4, 20),
    "`deepspeed`, ZeRO 3": (0, 24),
    "`deepspeed`, ZeRO 1, `--backend.precision bf16`": (8, 12),
    "`deepspeed`, ZeRO 2, `--backend.precision bf16`": (2, 16),
    "`deepspeed`, ZeRO 3, `--backend.precision bf16`": (0, 22),
}
"""Bytes per trained weight at their most, with gradients and optimizer: on every rank, and shared by all ranks."""
HELD = {
    TORCH: (12, 0),
    TORCH_BF16: (14, 0),
    "`fsdp`": (0, 12),
    "`deepspeed`, ZeRO 1": (4, 12),
    "`deepspeed`, ZeRO 2": (4, 12),
    "`deepspeed`, ZeRO 3": (0, 20),
    "`deepspeed`, ZeRO 1, `--backend.precision bf16`": (6, 12),
    "`deepspeed`, ZeRO 2, `--backend.precision bf16`": (2, 12),
    "`deepspeed`, ZeRO 3, `--backend.precision bf16`": (0, 18),
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
    """Settings on one device, and the bytes that they need."""

    name: str
    flags: str
    loaded: Callable[[Sizes], float]
    """While the model is loaded."""
    trained: Callable[[Sizes], float]
    """Weights, gradients, optimizer."""
    held: Callable[[Sizes], float]
    """The same between steps."""
    checkpointing: bool = True
    trains_head: bool = False

    def training(self, model: Sizes) -> float:
        """One pass over a micro-batch, forward and backward, beside what is trained."""
        logits = chunk_bytes(
            tokens=ROW,
            vocabulary=model.vocabulary,
            hidden=model.hidden,
            narrow=True,
            cast=False,
            trained=self.trains_head,
            device="cuda",
        )
        return self.trained(model) + logits + ROW * activations(model, self.checkpointing)


def _all_weights(name: str, flags: str, *, checkpointing: bool) -> Way:
    return Way(
        name,
        flags,
        lambda model: 4 * model.parameters,
        lambda model: per_weight(TRAINED[TORCH_BF16], 1) * model.parameters,
        lambda model: per_weight(HELD[TORCH_BF16], 1) * model.parameters,
        checkpointing,
        trains_head=True,
    )


def _adapters(name: str, flags: str, base: Callable[[Sizes], float]) -> Way:
    def held(model: Sizes) -> float:
        return base(model) + adapter(model)

    return Way(name, flags, base, held, held)


CHECKPOINTING = "--actor.gradient-checkpointing true"
LORA = f"--actor.lora.rank {RANK} --actor.dtype bfloat16 {CHECKPOINTING}"
WAYS = (
    _all_weights("all weights", "", checkpointing=False),
    _all_weights("all weights, checkpointing", CHECKPOINTING, checkpointing=True),
    _adapters("LoRA", LORA, lambda model: 2 * model.parameters),
    _adapters("LoRA over 4 bits", f"{LORA} --actor.quantize 4bit", quantized),
)
"""On one device, sampling with the trainer's own module; the plainest first."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model can be trained, and the bytes."""

    way: Way
    loaded: float
    training: float
    sampling: float

    def fits(self, memory: float) -> bool:
        return max(self.loaded, self.training, self.sampling) <= USABLE * memory


def alone(model: Sizes, memory: float) -> Plan | None:
    """The plainest way that fits; the engine is the trainer's own module."""
    plans = (
        Plan(way, way.loaded(model), way.training(model), way.held(model) + SIDE_BY_SIDE * ROW * cache(model)) for way in WAYS
    )
    return next((plan for plan in plans if plan.fits(memory)), None)


# --- tables ---------------------------------------------------------------------------------------


def backends_table() -> Iterator[str]:
    yield from _head("backend", "in a step", "between steps", "in a step, 8 ranks")
    for backend, parts in TRAINED.items():
        yield _row(backend, *map(_formula, (parts, HELD[backend])), f"{per_weight(parts, 8):.1f}")


def _formula(parts: tuple[int, int]) -> str:
    everywhere, shared = parts
    return " + ".join(filter(None, (str(everywhere) if everywhere else "", f"{shared}/N" if shared else "")))


def models_table(models: dict[str, Sizes]) -> Iterator[str]:
    yield from _head("model", "weights, 10⁹", "all, `torch`, GB", "in bfloat16", "in 4 bits", f"LoRA of rank {RANK}, 10⁶")
    for name, model in models.items():
        count, lora = model.parameters, RANK * model.adapter
        whole = [f"{size / GB:.1f}" for size in (18 * count, 2 * count, quantized(model))]
        yield _row(name, f"{count / 1e9:.2f}", *whole, f"{lora / 1e6:.1f}")


def tokens_table(models: dict[str, Sizes]) -> Iterator[str]:
    yield from _head("model", "kept, kB", "with checkpointing", "cache", "logits")
    for name, model in models.items():
        kept = [f"{activations(model, each) / 1e3:,.0f}" for each in (False, True)]
        yield _row(name, *kept, f"{cache(model) / 1e3:.0f}", f"{4 * model.vocabulary / 1e3:.0f}")


def ways_table() -> Iterator[str]:
    yield from _head("way", "flags")
    for way in WAYS:
        if way.flags:
            yield _row(way.name, f"`{way.flags}`")


def plans_table(models: dict[str, Sizes]) -> Iterator[str]:
    yield from _head("device", "model", "way", "loaded", "training", "sampling")
    for memory in (24, 80):
        for name, model in models.items():
            if (plan := alone(model, memory * GB)) is not None:
                amounts = (f"{size / GB:.1f}" for size in (plan.loaded, plan.training, plan.sampling))
                yield _row(f"{memory} GB", name, plan.way.name, *amounts)


FSDP, ZERO_2 = ("`fsdp`", "--backend fsdp"), ("`deepspeed`, ZeRO 2", "--backend deepspeed")
ZERO_3 = ("`deepspeed`, ZeRO 3", "--backend deepspeed --backend.zero-stage 3")
ADAPTERS = ("`torch`, LoRA", f"--actor.lora.rank {RANK} --actor.quantize 4bit")
PLANNED = [
    ("Qwen2.5-7B", 8, 1, *FSDP),
    ("Qwen2.5-7B", 8, 1, *ZERO_2),
    ("Qwen2.5-7B", 32, 1, *FSDP),
    ("Qwen2.5-32B", 8, 2, *ADAPTERS),
    ("Qwen2.5-32B", 32, 2, *FSDP),
    ("Llama-3.1-70B", 8, 8, *ADAPTERS),
    ("Llama-3.1-70B", 32, 8, *FSDP),
    ("Llama-3.1-70B", 32, 8, *ZERO_3),
]
"""Model, number of devices, those of an engine, way and its flags, of the plans on the page."""
TRAINER = ("weights", "gradients", "optimizer")
"""What a trainer holds between steps, while weights are sent."""


def planned(name: str, devices: int, parts: int, flags: str) -> dict[str, dict[str, Any]]:
    """What ``rlhf plan`` says of each phase."""
    with tempfile.TemporaryDirectory() as directory:
        MODELS[name].save_pretrained(directory)
        placed = ["--runtime", "ray", "--placement", f"actor+rollout={devices}", *flags.split()]
        engine = ["--engine", "vllm", "--engine.sleep", "true", "--engine.tensor-parallel-size", str(parts)]
        model = ["--actor.model", directory, "--actor.gradient-checkpointing", "true"]
        tokens = ["--train.max-tokens-per-microbatch", str(ROW)]
        words = ["plan", "--algo", "grpo", *model, *tokens, *placed, *engine, "--device", "cuda", "--json"]
        result = CliRunner().invoke(main_command, words)
    assert result.exit_code == 0, result.output
    return {phase["phase"]: phase for phase in json.loads(result.stdout)["phases"]}


def planned_table() -> Iterator[str]:
    phases = ("models are loaded", "training", "weights are sent", "sampling")
    yield from _head("N", "model", "backend", "TP", "loaded", "training", "sync", "sampling", "CPU memory")
    for name, devices, parts, way, flags in PLANNED:
        plan = planned(name, devices, parts, flags)
        sent, left = (plan[phase]["bytes"] for phase in ("weights are sent", "sampling"))
        asleep = sum(sent.get(part, 0) - left.get(part, 0) for part in TRAINER)
        on_machine = (size * min(MACHINE, devices) for size in (asleep, asleep + sent["engine"]))
        amounts = (f"{plan[phase]['sum'] / GB:.1f}" for phase in phases)
        yield _row(f"{devices}", name, way, f"{parts}", *amounts, " / ".join(f"{size / GB:.0f}" for size in on_machine))


def tables(models: dict[str, Sizes]) -> dict[str, list[str]]:
    """Heading → lines."""
    return {
        "Weights, gradients, optimizer": list(backends_table()),
        "Models": list(models_table(models)),
        "A token": list(tokens_table(models)),
        "Ways": list(ways_table()),
        "What fits on one device": list(plans_table(models)),
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
        found["What fits on several"] = list(planned_table())
    for heading, lines in found.items():
        print(f"{heading}\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
