"""Process reward models whose head is not one number: classifiers with two labels, and language models that judge by tokens."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from rlhf_host import UserError

HEAD = re.compile(r"(?:^|\.)score\.(?:(\d+)\.)?(weight|bias)$")


def directory_of(name: str) -> Path:
    """Returns the model's directory, downloaded if it is on the hub. Raises ``UserError`` if there is none."""
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except Exception as error:  # no such name, no network, no access
        raise UserError(f"there is no directory {name}, and the hub has no such model for us: {error}") from error


def tokenizer_of(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


def token_of(tokenizer: Any, text: str) -> int:
    """Returns the only token of a text. Raises ``UserError`` if there are several."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise UserError(f"{text!r} is {len(ids)} tokens of the model that judges: good and bad are one token each")
    return int(ids[0])


def head_of(directory: Path) -> nn.Sequential:
    """Returns the head ``score`` of a token classifier with two labels: a layer, or several with ReLU between them.

    Raises ``UserError`` for a model without such a head.
    """
    found: dict[int, dict[str, Tensor]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if match := HEAD.search(name):
                    found.setdefault(int(match[1] or 0), {})[match[2]] = tensors.get_tensor(name)
    if not found or any("weight" not in layer for layer in found.values()):
        raise UserError(f"{directory} has no head called score: form labels takes token classifiers, form tags language models")
    layers = [layer for _, layer in sorted(found.items())]
    if (count := len(layers[-1]["weight"])) != 2:
        other = "; form scalar takes it" if count == 1 else ""
        raise UserError(f"the head of {directory} has {count} outputs, and form labels needs two, wrong and right{other}")
    modules: list[nn.Module] = []
    for layer in layers:
        linear = nn.Linear(layer["weight"].shape[1], layer["weight"].shape[0], bias="bias" in layer)
        linear.load_state_dict(layer)
        modules += [linear, nn.ReLU()]
    return nn.Sequential(*modules[:-1])


class Published:
    """A model of transformers beside the run, in the process that scores.

    Args:
        choice: tokens that say good and bad; None: the model is a token classifier with two labels.
        device: a device of torch; ``auto`` is the first GPU, else the CPU.

    Raises ``UserError`` for a model without a fitting head.
    """

    def __init__(self, directory: Path, choice: tuple[int, int] | None, device: str):
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        kind: Any = AutoModel if choice is None else AutoModelForCausalLM
        head = head_of(directory) if choice is None else None
        model, told = kind.from_pretrained(directory, dtype="auto", use_safetensors=True, output_loading_info=True)
        if missing := sorted(told["missing_keys"]):
            raise UserError(f"{directory} is no language model, or is incomplete: no {missing[0]} in its weights")
        self._model, self._choice, self._device = model.to(device).eval(), choice, device
        self._head = None if head is None else head.to(device, model.dtype).eval()
        self._lock = threading.Lock()
        self.context_length = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31)

    def probabilities(self, rows: Sequence[Sequence[int]], places: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the probability of *right* at the places of each row: ``softmax(z)[right]`` of two labels, or of the logits of
        two tokens after the place.
        """
        with self._lock, torch.inference_mode():
            width = max(map(len, rows))
            # Nothing after a token has an effect on it, so any number pads.
            ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self._device)
            mask = torch.arange(width, device=self._device) < torch.tensor([[len(row)] for row in rows], device=self._device)
            if self._head is not None:
                states = self._model(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
                each = [self._head(states[row, list(at)]) for row, at in enumerate(places)]
                return [logits.float().softmax(-1)[:, 1].tolist() for logits in each]
            assert self._choice is not None
            kept = {place: number for number, place in enumerate(sorted({place for at in places for place in at}))}
            keep = torch.tensor(list(kept), device=self._device)
            logits = self._model(input_ids=ids, attention_mask=mask.long(), use_cache=False, logits_to_keep=keep).logits
            two = logits[..., list(self._choice)].float().softmax(-1)[..., 0]
            return [two[row, [kept[place] for place in at]].tolist() for row, at in enumerate(places)]
