"""Every vision-language family that transformers ships, as a tiny model with the inputs of its tower."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from models.miniatures import WIDTH, field_names, small
from PIL import Image
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.image_processing_utils import BaseImageProcessor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

VOCABULARY = 100
PICTURE = 90
"""The token that stands for one feature of a picture. The other special tokens of a family come after it."""

TILE, PATCH = 28, 14
"""Pixels of a tower's square input, and of one patch."""

MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
"""Positions in time, height and width, of all four pairs in a head."""

TOWER: dict[str, Any] = {
    "image_size": TILE,
    "patch_size": PATCH,
    "out_hidden_size": WIDTH,
    "num_position_embeddings": 16,
    "num_channels": 3,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "window_size": 4 * PATCH,
}
"""Sizes of a tower, by the names that configurations have for them."""

Parts = dict[str, dict[str, Any]]
"""Settings of the parts of a family: ``text``, ``vision``, the ``model`` itself, its image ``processor``, or a configuration."""

QWEN: Parts = {"text": {"rope_parameters": MROPE}, "processor": {"min_pixels": TILE * TILE}}
GLM: Parts = QWEN | {"processor": {"size": {"shortest_edge": 2 * TILE * TILE, "longest_edge": 128 * TILE * TILE}}}
SQUARE = {"size": {"height": TILE, "width": TILE}}
CROPPED = {"size": {"shortest_edge": TILE}, "crop_size": {"height": TILE, "width": TILE}}
TILES = SQUARE | {"crop_to_patches": True, "max_patches": 4}
PINPOINTS = {"image_grid_pinpoints": [[TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE], [TILE, 3 * TILE]]}
IDEFICS3: Parts = {
    "text": {"pad_token_id": 0},
    "processor": {"size": {"longest_edge": 2 * TILE}, "max_image_size": {"longest_edge": TILE}},
}

SPECIAL: dict[str, Parts] = {
    **dict.fromkeys(("qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), QWEN),
    **dict.fromkeys(("glm4v", "glm4v_moe"), GLM),
    **dict.fromkeys(("idefics3", "smolvlm"), IDEFICS3),
    "aya_vision": {"processor": TILES},
    "cohere2_vision": {"processor": TILES, "model": {"alignment_intermediate_size": 2 * WIDTH}},
    "gemma3": {
        "vision": {"image_size": 2 * TILE},
        "model": {"mm_tokens_per_image": 4},
        "processor": {"size": {"height": 2 * TILE, "width": 2 * TILE}},
    },
    "gemma4": {
        "vision": {"position_embedding_size": 256},
        "model": {"audio_config": None},
        "processor": {"patch_size": PATCH, "pooling_kernel_size": 3, "max_soft_tokens": 70},
    },
    "idefics2": {
        "perceiver_config": {"resampler_n_latents": 3, "resampler_n_heads": 4, "resampler_head_dim": 8},
        "processor": {"size": {"shortest_edge": TILE, "longest_edge": 2 * TILE}},
    },
    "internvl": {
        "vision": {"image_size": (TILE, TILE), "patch_size": (PATCH, PATCH)},
        "processor": TILES,
    },
    "lfm2_vl": {"model": {"projector_hidden_size": WIDTH}, "processor": {"patch_size": PATCH, "max_num_patches": 64}},
    "llama4": {
        "vision": {
            "vision_output_dim": WIDTH,
            "projector_input_dim": WIDTH,
            "projector_output_dim": WIDTH,
            "intermediate_size": 4 * WIDTH,
        },
        "processor": TILES,
    },
    "llava": {"processor": CROPPED},
    "llava_next": {"model": PINPOINTS, "processor": CROPPED | PINPOINTS},
    "llava_onevision": {"model": PINPOINTS, "processor": SQUARE | PINPOINTS},
    "mistral3": {"processor": {"patch_size": PATCH, "size": {"longest_edge": 4 * TILE}}},
    "mllama": {
        "text": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
        "vision": {
            "num_global_layers": 1,
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 3 * WIDTH,
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
        },
        "processor": SQUARE | {"max_image_tiles": 4},
    },
    "ovis2": {
        "vision": {"vocab_size": 50},
        "model": {"visual_indicator_token_ids": [91, 92, 93, 94, 95]},
        "processor": TILES,
    },
    "paligemma": {"model": {"projection_dim": WIDTH}, "processor": SQUARE},
    "qwen2_vl": QWEN | {"vision": {"hidden_size": WIDTH}},
}
"""What single families need beside: of their text part, their tower, themselves and their image processor."""

PROCESSORS: dict[str, str] = {
    "cohere2_vision": "GotOcr2ImageProcessorPil",
    "glm4v_moe": "Glm4vImageProcessorPil",
    "lfm2_vl": "Siglip2ImageProcessorPil",
    "llama4": "GotOcr2ImageProcessorPil",
    "qwen3_vl_moe": "Qwen2VLImageProcessorPil",
}
"""For families whose processor transformers does not name, or that have none without torchvision: one of the same form."""


OUTSIDE: dict[str, str] = {
    "blip": "its text decoder reads pictures by cross-attention and has no tokens for them",
    "diffusion_gemma": "writes text by diffusion",
    "evolla": "reads proteins",
    "florence2": "an encoder-decoder",
    "git": "puts its pictures before the text, without tokens for them",
    "mistral4": "reads no pictures",
    "pi0": "writes the actions of a robot",
    "pix2struct": "an encoder-decoder",
    "pp_formulanet": "an encoder-decoder",
    "t5gemma2": "an encoder-decoder",
    "udop": "an encoder-decoder",
    "vision-encoder-decoder": "an encoder-decoder",
}
"""Families that are no decoder over tokens and pictures, and why."""

NESTED = ("idefics", "idefics2", "idefics3", "mllama", "smolvlm")
"""Families whose pixels have a dimension for samples before the one for pictures."""

CROSS = ("idefics", "mllama")
"""Families that read pictures by cross-attention: one token says where a picture is."""

AROUND = {"ovis2": ([91], [95])}
"""Tokens before and after a picture that the tower gives features for too."""


class Unbuildable(Exception):
    """A family that cannot be built here, and why."""


@dataclass
class Pictured:
    """A tiny model that reads pictures."""

    name: str
    model: PreTrainedModel
    processor: BaseImageProcessor
    counts: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def picture(self) -> int:
        """The token that stands for one feature of a picture."""
        return int(self.model.config.image_token_id)

    def inputs(self, images: list[Image.Image]) -> dict[str, torch.Tensor]:
        """What the tower reads for these pictures of one sample."""
        pictures: Any = [images] if self.name in NESTED else images
        given = self.processor(images=pictures, return_tensors="pt")
        taken = inspect.signature(self.model.forward).parameters
        return {name: value for name, value in given.items() if name in taken}

    def tokens(self, image: Image.Image) -> list[int]:
        """The tokens that stand for this picture in a prompt."""
        if self.name in CROSS:
            return [self.picture]
        if image.size not in self.counts:
            with torch.no_grad():
                features = features_of(self.model, self.inputs([image]))
            self.counts[image.size] = sum(len(rows) for rows in features)
        first, last = AROUND.get(self.name, ([], []))
        return [*first, *[self.picture] * self.counts[image.size], *last]

    def kinds(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """What ``forward`` takes beside about each token: 1 for a picture, 0 for text."""
        taken = inspect.signature(self.model.forward).parameters
        names = ("mm_token_type_ids", *(["token_type_ids"] if self.name in SAME_BLOCK else []))
        return {name: (input_ids == self.picture).long() for name in names if name in taken}


SAME_BLOCK = ("gemma3", "shieldgemma2")
"""Families whose ``token_type_ids`` mark pictures, whose tokens see each other. For paligemma they mark the answer."""


def features_of(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The features of all pictures, as tensors ``[rows, H]``."""
    source: Any = model if hasattr(model, "get_image_features") else model.base_model
    given = source.get_image_features(**inputs)
    features = given.last_hidden_state if given.pooler_output is None else given.pooler_output
    return [part.flatten(0, -2) for part in (features if isinstance(features, list | tuple) else [features])]


def families() -> list[str]:
    """Model types that read pictures and text and write text."""
    beside = [name for name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES if name in IMAGE_PROCESSOR_MAPPING_NAMES]
    return list(dict.fromkeys([*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *beside]))


def pictured(name: str, **settings: Any) -> Pictured:
    """A model of the family with these settings beside its own, and weights that make its pictures matter."""
    if name in OUTSIDE:
        raise Unbuildable(OUTSIDE[name])
    special = SPECIAL.get(name, {})
    names = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    processor = PROCESSORS.get(name) or (IMAGE_PROCESSOR_MAPPING_NAMES.get(name) or {}).get("pil")
    if processor is None:
        raise Unbuildable("its image processor needs torchvision")
    config = configuration(CONFIG_MAPPING[name], special, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            model = getattr(transformers, names[name])._from_config(config).eval()
        except ImportError as error:
            raise Unbuildable(str(error).strip().splitlines()[0].partition(" but ")[0]) from error
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
                if name in CROSS and parameter.numel() == 1:  # a gate, closed at first
                    parameter.fill_(1)
    return Pictured(name, model, getattr(transformers, processor)(**special.get("processor", {})))


def configuration(cls: type[PreTrainedConfig], special: Parts, **settings: Any) -> PreTrainedConfig:
    changes: dict[str, Any] = {}
    for part, part_cls in cls.sub_configs.items():
        if part_cls is AutoConfig:
            part_cls = type(getattr(cls(), part))
        fields = field_names(part_cls)
        if part == "vision_config":
            sizes = {name: value for name, value in TOWER.items() if name in fields} | special.get("vision", {})
        elif part == "text_config":
            sizes = {"vocab_size": VOCABULARY} | special.get("text", {})
        else:
            sizes = special.get(part, {})
        changes[part] = small(part_cls, **sizes)
    return small(cls, **{**changes, **markers(cls), **special.get("model", {}), **settings})


def markers(cls: type[PreTrainedConfig]) -> dict[str, int]:
    """Ids inside the vocabulary for the special tokens that a configuration names."""
    named = {name for name in getattr(cls, "__dataclass_fields__", ()) if name.endswith(("_token_id", "_token_index"))}
    pictures = {"image_token_id", "image_token_index"}
    others = sorted(named - pictures - {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"})
    return {name: PICTURE for name in named & pictures} | {name: PICTURE + 1 + i for i, name in enumerate(others)}
