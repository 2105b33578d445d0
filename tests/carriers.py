"""Tiny bases whose files have weights that their class has no place for, and the account of what became of every one."""

from __future__ import annotations

from pathlib import Path

import torch
from rlhf_authoring.models import SYMBOLS, tiny_tokenizer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM


def write_glm(directory: Path) -> Path:
    """Writes a model with experts as GLM-4.5's: the layer behind its last one predicts a second token, and no class has it."""
    config = Glm4MoeConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Glm4MoeForCausalLM(config).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    own = load_file(directory / "model.safetensors")
    layer = {name.replace(".1.", ".2.", 1): tensor for name, tensor in own.items() if ".layers.1." in name}
    add_weights(directory, layer | {"model.layers.2.eh_proj.weight": torch.randn(128, 256), **ODD})
    return directory


ODD = {
    "model.layers.2.enorm.weight": torch.ones(128, dtype=torch.bfloat16),
    "model.layers.2.shared_head.scale": torch.ones(3).to(torch.float8_e4m3fn),
    "model.layers.2.steps": torch.tensor(7),
}
"""Weights of types that a norm cannot be taken of, and that no run has."""


def add_weights(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    file = directory / "model.safetensors"
    save_file(load_file(file) | {name: tensor.clone() for name, tensor in weights.items()}, file, metadata={"format": "pt"})


def weights_in(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            own = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert not found.keys() & own.keys()
        found |= own
    return found


def account(base: Path, written: Path, carried: set[str]) -> dict[str, str]:
    """Returns name of each weight of the base, or beyond it → what became of it."""
    before, after = weights_in(base), weights_in(written)
    kinds = dict.fromkeys(after.keys() - before.keys(), "new")
    for name, tensor in before.items():
        if name not in after:
            kinds[name] = "lost"
        elif name in carried:
            kinds[name] = "carried" if same(tensor, after[name]) else "carried, and changed"
        else:
            kinds[name] = "the model's" if after[name].shape == tensor.shape else "the model's, of another shape"
    return kinds


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = [tensor.flatten().view(torch.uint8) for tensor in (one, other)]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*bits)
