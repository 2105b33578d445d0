"""Cases on which kernels are tried: a model that suits, around which the plugin makes a twin, and how near the two are."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlhf_authoring.contracts.subject import Broken, Subject, Unusable, expect
from rlhf_authoring.tensors import model_inputs
from rlhf_host.internals import beyond, decoder_of, enable_shared_rows
from rlhf_host.protocols import Use

CLOSE = 1e-4
"""Relative distance in 32 bits; elsewhere as far again as three times what the model itself is away from 32 bits."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRECISIONS = ((torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16))
"""Types of weights, and of products under autocast."""
Purpose = Literal["train", "sample"]
PROMPTS = [[3, 1, 4, 1, 5], [2, 7], [3, 1, 4, 1, 5], [2, 7], [9], [2, 7]]
COMPLETIONS = [[(5 * place + 11 * length) % 29 + 1 for place in range(length)] for length in (0, 3, 2, 41, 17, 1)]
"""Shared and single prompts, an empty completion, short rows and long ones."""


def tiny_models() -> dict[str, Callable[[], nn.Module]]:
    """Returns models of several families: biases, a tied head, norms of heads, norms with an offset, a scalar head, layer norms."""
    import transformers as hf

    sizes: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    gpt2: dict[str, Any] = {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
    return {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)),
        "llama with a scalar head": lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**sizes | {"num_labels": 1})),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes, tie_word_embeddings=True)),
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes, head_dim=8)),
        "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**sizes, head_dim=8)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)),
    }


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a use that the plugin takes for it, and the twin; the model is given padded rows, or a shared-prefix line."""

    name: str
    model: Any
    use: Use
    twin: Any
    shared: bool = False

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.use.device.type, self.use.autocast, enabled=self.use.autocast is not None)

    def call(self, module: Any, **inputs: Any) -> Any:
        with self.autocast():
            return module(**inputs)

    def hidden(self, module: Any) -> Tensor:
        """``[P, H]`` of the places of all rows."""
        inputs, places = model_inputs(PROMPTS, COMPLETIONS, shared=self.shared, device=DEVICE)
        return self.call(decoder_of(module), **inputs, use_cache=False).last_hidden_state.flatten(0, 1)[places]

    def layouts(self) -> list[Case]:
        """The case in every layout that the model itself takes."""
        padded = replace(self, name=f"{self.name}, padded rows")
        line = replace(self, name=f"{self.name}, a shared-prefix line", shared=True)
        with contextlib.suppress(TypeError, ValueError, RuntimeError, IndexError), torch.no_grad():
            line.hidden(self.model)
            return [padded, line]
        return [padded]

    def compare(self, compute: Compute, what: str) -> None:
        """Expect that ``compute`` gives for the twin what it gives for the model."""
        own, exact = compute(self, self.model), None
        try:
            twins = compute(self, self.twin)
        except Exception as error:
            raise Broken(f"{self.name}, {what}: the twin raises {type(error).__name__}: {error}") from error
        expect(twins.keys() == own.keys(), f"{self.name}, {what}: the twin gives {sorted(twins)}, the model {sorted(own)}")
        if self.use.dtype != torch.float32 or self.use.autocast is not None:
            use = replace(self.use, dtype=torch.float32, autocast=None)
            case = replace(self, model=copy.deepcopy(self.model).float(), use=use)
            exact = compute(case, case.model)
        least = 1e-2 * max(float(tensor.double().norm()) for tensor in own.values())
        for name, tensor in own.items():
            shape = tuple(twins[name].shape)
            expect(shape == tensor.shape, f"{self.name}, {what}: {name} has shape {shape}, not {tuple(tensor.shape)}")
            gap, most = distance(twins[name], tensor, least), CLOSE + (3 * distance(tensor, exact[name], least) if exact else 0)
            expect(gap <= most, f"{self.name}, {what}: {name} differs from the model's by {beyond(gap, most)}")


Compute = Callable[[Case, Any], dict[str, Tensor]]
"""Computes what one of a case's modules gives, by name."""


def hidden_states(case: Case, module: Any) -> dict[str, Tensor]:
    return {"hidden states": case.hidden(module)}


def distance(value: Tensor, own: Tensor, least: float) -> float:
    gap = (value.double() - own.double()).norm() / max(float(own.double().norm()), least, 1e-12)
    return float(gap) if gap.isfinite() else float("inf")


def served(
    subject: Subject,
    purpose: Purpose,
    *,
    every_precision: bool = False,
    even_passes: bool = False,
    prepare: Callable[[Any], object] = nn.Module.eval,
) -> Iterator[Case]:
    """Every model that suits, with a module to train or a decoder to sample, in the first precision that suits or in every one.

    Raises ``Unusable`` when there is none.
    """
    reasons, suited = [], False
    for name, make in (subject.models or tiny_models()).items():
        for dtype, autocast in PRECISIONS:
            use = Use(purpose=purpose, device=DEVICE, dtype=dtype, autocast=autocast, even_passes=even_passes)
            plugin: Any = subject.build()
            model = make_model(make, dtype)
            prepare(model)
            if reason := plugin.unsuited(model, use):
                reasons.append(str(reason))
                continue
            twin = plugin.twin(model, use)
            if isinstance(twin, nn.Module) == (purpose == "train"):
                suited = True
                yield Case(f"{name}, {autocast or dtype}", model, use, twin)
            if not every_precision:
                break
    if not suited:
        why = "; ".join(dict.fromkeys(reasons)) or "it makes no decoder"
        raise Unusable("served", f"there is nothing to {purpose} with: {why}")


def make_model(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> Any:
    """Weights far from uniform, so that a wrong mask, position, activation or norm shows."""
    enable_shared_rows()
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = make()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.3 * torch.randn_like(weight)) if weight.dim() == 1 else weight.mul_(5)
    return model.to(device=DEVICE, dtype=dtype).eval()


def change_weights(model: nn.Module) -> None:
    for number, weight in enumerate(model.parameters()):
        weight.data.add_(0.05 * (number % 3 - 1) + 0.02)  # as fused optimizers do: no counter of the tensor tells
