"""Pictures: gradients and speed beside plain transformers, and a run whose model learns to see."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rlhf_host
from gpu_parts.machine import GB, SIZES, TINY, Machine, Report, require
from gpu_parts.sampling import SPREAD
from gpu_parts.throughput import median_pass
from rlhf_host.models.passes import Passes
from rlhf_host.models.precision import without_tf32
from rlhf_host.records.pictures import Picture, png

ANSWERS = 8
"""Answers to one prompt."""
WORDS = 1000
"""Tokens of texts are below it, so that none stands for a picture."""


class Reader:
    """The processor of Qwen2.5-VL, without its tokenizer."""

    def __init__(self, config: Any):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self._placeholder, self._merged = config.image_token_id, config.vision_config.spatial_merge_size**2
        self._processor = Qwen2VLImageProcessorPil()

    def tokens(self, picture: Picture) -> Sequence[int]:
        return [self._placeholder] * (int(self.tensors([picture])["image_grid_thw"].prod()) // self._merged)

    def tensors(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        return dict(self._processor([picture.load() for picture in pictures], return_tensors="pt"))


def gradient(machine: Machine, report: Report) -> None:
    """Relative distance of the gradient from plain transformers' in float32, of the tower or of the decoder, whichever is larger:
    a group with a picture in its prompt, and another in each answer, as a tool brings it.
    """
    model = _model(machine, layers=4)
    group = _Group(machine, model, second=True)
    with without_tf32():
        found = group.ours(Passes(model, reader=group.reader, shared_prefix="on"))
        own = group.gradients(model, found)
        expected = group.plain(model)
        plain, distances = group.gradients(model, expected), {}
    for name, tower in (("tower", True), ("decoder", False)):
        names = [each for each in plain if ("visual" in each) == tower]
        ours, theirs = (torch.cat([each[name] for name in names]) for each in (own, plain))
        distances[name] = float((ours - theirs).norm() / theirs.norm())
    gap = float((found - expected).detach().abs().max())
    report(max(distances.values()), {**distances, "largest_gap": gap, "picture_tokens": group.picture_tokens})


def gain(machine: Machine, report: Report) -> None:
    """Seconds of forward and backward of plain transformers, whose tower sees the picture once for every answer, over those of
    the host; in bfloat16, with gradient checkpointing.
    """
    model = _model(machine)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    group = _Group(machine, model)
    shared, padded = (Passes(model, reader=group.reader, shared_prefix=each, autocast=torch.bfloat16) for each in ("on", "off"))
    ways = {
        "shared": lambda: group.ours(shared),
        "padded": lambda: group.ours(padded),
        "plain": lambda: group.plain(model, torch.bfloat16),
    }
    seconds: dict[str, float] = {}
    details: dict[str, Any] = {"picture_tokens": group.picture_tokens}
    for name, way in ways.items():
        seconds[name], peak = median_pass(machine, model, lambda way=way: group.backward(way()), machine.size(4, 2))
        details |= {f"{name}_s": seconds[name], f"{name}_peak_gb": peak / GB}
    report(seconds["plain"] / seconds["shared"], details)


def learns(machine: Machine, report: Report) -> None:
    """Share of right held-out answers after 60 steps of RLOO on drawn pictures. Details have the largest gap of a token's
    log-probability between sampler and trainer.
    """
    for distribution in ("rlhf-plugin-rloo", "rlhf-plugin-shapes"):
        require(distribution)
    from rlhf_plugin_shapes import Shapes
    from rlhf_plugin_shapes.model import Training, make_model

    tasks = Shapes(Shapes.Options(tasks=machine.size(2000, 8), eval_tasks=machine.size(200, 4)))
    rows = {
        split: [{"prompt": task.prompt, "label": task.ground_truth} for task in tasks.load_tasks(split, seed=0)]
        for split in ("train", "eval")
    }
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder, "model"), training=None if machine.dry else Training(target=0.4))
        run = rlhf_host.train(
            algo="rloo",
            rewards=right,
            model=model,
            data=rows["train"],
            eval_data=rows["eval"],
            run_dir=Path(folder, "run"),
            steps=machine.size(60, 2),
            batch_size=machine.size(16, 2),
            n=machine.size(8, 2),
            max_new_tokens=4,
            lr=1e-3,
            eval={"every": machine.size(20, 1)},
            actor={"device": machine.device.type, "weight_decay": 0.0},
        )
        metrics = run.metrics
    curve = [row["eval/reward/mean"] for row in metrics if "eval/reward/mean" in row]
    report(curve[-1], {"curve": curve, "mismatch_max": max(row.get("mismatch/max", 0.0) for row in metrics)})


def right(completion: str, label: str) -> float:
    return float(completion.strip() == label)


class _Group:
    """Answers to one prompt with a picture, in the forms of the host and of plain transformers.

    Args:
        second: every answer has another picture in its middle.
    """

    def __init__(self, machine: Machine, model: Any, *, second: bool = False):
        self.machine, self.reader = machine, Reader(model.config)
        side = machine.size(896, 112)
        pictures = [_noise(number, side, side) for number in range(1 + second)]
        first, *more = (list(self.reader.tokens(each)) for each in pictures)
        self.picture_tokens = len(first)
        dice, own = torch.Generator().manual_seed(1), machine.size(256, 6)
        words = [torch.randint(WORDS, (own,), generator=dice).tolist() for _ in range(1 + ANSWERS)]
        start, end = model.config.vision_start_token_id, model.config.vision_end_token_id
        around = [[start, *each, end] for each in (first, *more)]
        self.prompt = [*words[0], *around[0], *words[0]]
        self.answers = torch.tensor([[*each, *itertools.chain(*around[1:]), *each[::-1]] for each in words[1:]])
        self.images = [[(0, each) for each in pictures]] * ANSWERS
        self.weights = torch.randn(self.answers.shape, generator=dice).to(machine.device)
        self._tensors = self.reader.tensors(pictures)

    def ours(self, passes: Passes) -> Tensor:
        """``[ANSWERS, T]`` log-probabilities by the host's passes."""
        passes.prepare(len(self.prompt) + self.answers.shape[1], pictured=True)
        mask = torch.ones_like(self.answers, dtype=torch.bool)
        logprobs = passes.forward([self.prompt] * ANSWERS, self.answers, mask, images=self.images).logprobs
        assert logprobs is not None
        return logprobs.to(self.machine.device)

    def plain(self, model: Any, autocast: torch.dtype | None = None) -> Tensor:
        """The same by transformers, which gets the pictures once for every answer."""
        prompt = torch.tensor([self.prompt] * ANSWERS)
        ids = torch.cat([prompt, self.answers], dim=1).to(self.machine.device)
        tensors = {name: torch.cat([value] * ANSWERS).to(self.machine.device) for name, value in self._tensors.items()}
        kept = self.answers.shape[1] + 1
        with torch.autocast(self.machine.device.type, autocast, enabled=autocast is not None):
            logits = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == model.config.image_token_id).int(),
                logits_to_keep=kept,
                use_cache=False,
                **tensors,
            ).logits[:, :-1]
        return torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1 - kept :, None])[..., 0]

    def backward(self, logprobs: Tensor) -> None:
        (logprobs * self.weights).mean().backward()

    def gradients(self, model: Any, logprobs: Tensor) -> dict[str, Tensor]:
        self.backward(logprobs)
        found = {name: weight.grad.flatten() for name, weight in model.named_parameters() if weight.grad is not None}
        model.zero_grad()
        return found


def _model(machine: Machine, *, layers: int | None = None) -> Any:
    """Qwen2.5-VL of 3B with random weights in float32; ``layers`` of decoder and tower in place of its own numbers."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    size = TINY if machine.dry else SIZES["3b"]
    head = size.hidden // size.heads
    tower = {
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "depth": 32,
        "num_heads": 16,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
    tower |= {"hidden_size": 64, "intermediate_size": 128, "depth": 2, "num_heads": 4} if machine.dry else {}
    if layers is not None or machine.dry:
        tower |= {"depth": layers or 2, "fullatt_block_indexes": [1]}
    thirds = [head // 8, head // 2 - head // 8 - (head // 2 - head // 8) // 2, (head // 2 - head // 8) // 2]
    specials = range(size.vocabulary - 4, size.vocabulary)
    names = "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": size.hidden,
            "intermediate_size": size.intermediate,
            "num_hidden_layers": layers or size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": 2,
            "vocab_size": size.vocabulary,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": thirds},
            "bos_token_id": None,
            "eos_token_id": None,
        },
        vision_config={**tower, "out_hidden_size": size.hidden},
        tie_word_embeddings=True,
        **dict(zip(names, specials, strict=True)),
    )
    torch.manual_seed(0)
    with machine.device:
        model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        model.model.language_model.norm.weight.mul_(SPREAD)
    return model


def _noise(seed: int, width: int, height: int) -> Picture:
    from PIL import Image

    colours = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Picture.of_bytes(png(Image.fromarray(colours.numpy())))
