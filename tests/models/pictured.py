"""Every vision-language family that transformers ships, as a tiny model with the inputs of its tower."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch.nn.functional import one_hot
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature
from transformers.image_utils import SizeDict
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.models.fuyu.image_processing_pil_fuyu import FuyuImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from .miniatures import WIDTH, field_names, small

VOCABULARY = 100
PICTURE = 90
"""The token that stands for one feature of a picture. The other special tokens of a family come after it."""

TILE, SAM_TILE, PATCH = 28, 64, 14
"""Pixels of a tower's square input, of the square input of those after SAM, and of one patch."""

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
"""Settings of the parts of a family: ``text``, ``vision``, the ``model`` itself, its image ``processor``, or another."""

QWEN: Parts = {"text": {"rope_parameters": MROPE}, "processor": {"min_pixels": TILE * TILE}}
GLM: Parts = QWEN | {"processor": {"size": {"shortest_edge": 2 * TILE * TILE, "longest_edge": 128 * TILE * TILE}}}
SQUARE = {"size": {"height": TILE, "width": TILE}}
CROPPED = {"size": {"shortest_edge": TILE}, "crop_size": {"height": TILE, "width": TILE}}
TILES = SQUARE | {"crop_to_patches": True, "max_patches": 4}
PINPOINTS = {"image_grid_pinpoints": [[TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE], [TILE, 3 * TILE]]}
CLIP: Parts = {"processor": CROPPED}
PIXTRAL: Parts = {"processor": {"patch_size": PATCH, "size": {"longest_edge": 4 * TILE}}}
PIXELS: Parts = {"processor": QWEN["processor"]}
LLAVA_NEXT: Parts = {"model": PINPOINTS, "processor": CROPPED | PINPOINTS}
IDEFICS3: Parts = {
    "text": {"pad_token_id": 0},
    "processor": {"size": {"longest_edge": 2 * TILE}, "max_image_size": {"longest_edge": TILE}},
}
INTERN: Parts = {"vision": {"image_size": (TILE, TILE), "patch_size": (PATCH, PATCH)}, "processor": TILES}
GEMMA3: Parts = {
    "vision": {"image_size": 2 * TILE},
    "model": {"mm_tokens_per_image": 4},
    "processor": {"size": {"height": 2 * TILE, "width": 2 * TILE}},
}
MINICPM: Parts = {
    "text": {"rope_parameters": MROPE},
    "vision": {"image_size": 4 * TILE, "insert_layer_id": 0},
    "model": {"image_size": 4 * TILE, "insert_layer_id": 0},
    "processor": {"scale_resolution": 4 * TILE, "patch_size": PATCH},
}
SAM: Parts = {
    "vision": {"image_size": SAM_TILE, "patch_size": 4, "output_channels": 16, "global_attn_indexes": [1], "window_size": 4},
    "processor": {"size": {"height": SAM_TILE, "width": SAM_TILE}},
}

SPECIAL: dict[str, Parts] = {
    **dict.fromkeys(("cohere_compass", "exaone4_5", "hyperclovax_vision_v2"), PIXELS),
    **dict.fromkeys(
        ("cosmos3_omni", "qwen4_exp", "paddleocr_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), QWEN
    ),
    **dict.fromkeys(("gemma3", "shieldgemma2"), GEMMA3),
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga"), GLM),
    **dict.fromkeys(("got_ocr2", "pp_chart2table"), SAM),
    **dict.fromkeys(("idefics3", "smolvlm"), IDEFICS3),
    **dict.fromkeys(("internvl", "qianfan_ocr"), INTERN),
    **dict.fromkeys(("lighton_ocr", "mistral3"), PIXTRAL),
    **dict.fromkeys(("llava", "video_llava"), CLIP),
    **dict.fromkeys(("llava_next", "llava_next_video"), LLAVA_NEXT),
    **dict.fromkeys(("minicpmv4_6", "minicpmv4_7"), MINICPM),
    "aria": {
        "vision": {"image_size": 980, "patch_size": 70},
        "model": {"projector_patch_to_query_dict": {196: 8, 49: 2}},
        "processor": {"max_image_size": 490},
    },
    "aya_vision": {"processor": TILES},
    "blip-2": {"model": {"num_query_tokens": 3}, "processor": SQUARE},
    "chameleon": {
        "vq": {"resolution": TILE, "base_channels": 32, "channel_multiplier": [1, 1, 2], "num_embeddings": 32},
        "model": {
            "vocabulary_map": {f"IMGIMG{''.join('ABCDEFGHIJ'[int(digit)] for digit in str(i))}Z": 20 + i for i in range(32)}
            | {"<image>": PICTURE}
        },
        "processor": CROPPED,
    },
    "cohere2_vision": {"processor": TILES, "model": {"alignment_intermediate_size": 2 * WIDTH}},
    "cosmos3_edge": {
        "text": {"rope_parameters": MROPE},
        "model": {"projector_hidden_size": 2 * WIDTH},
        "processor": {"size": {"shortest_edge": TILE * TILE, "longest_edge": 128 * TILE * TILE}, "patch_size": PATCH},
    },
    "deepseek_ocr2": {
        "text": {"mlp_layer_types": ["dense", "sparse"]},
        "sam": SAM["vision"] | {"downsample_channels": [16, WIDTH]},
        "processor": {"size": {"height": SAM_TILE, "width": SAM_TILE}, "tile_size": 2 * SAM_TILE},
    },
    "deepseek_vl": {"processor": SQUARE},
    "deepseek_vl_hybrid": {
        "high_res_vision": SAM["vision"],
        "processor": SQUARE | {"high_res_size": {"height": SAM_TILE, "width": SAM_TILE}},
    },
    "emu3": {
        "vq": {"codebook_size": 32, "base_channels": 32, "channel_multiplier": [1, 1, 1, 1], "hidden_size": WIDTH},
        "model": {
            "vocabulary_map": {f"<|visual token {i:06}|>": 20 + i for i in range(32)}
            | {"<image>": PICTURE, "<|extra_200|>": PICTURE + 1}
        },
        "processor": {"min_pixels": TILE * TILE, "max_pixels": 4 * TILE * TILE, "spatial_factor": 8},
    },
    "ernie4_5_vl_moe": {
        "text": {"rope_parameters": MROPE | {"mrope_section": [1, 1, 2]}, "moe_intermediate_size": [16, 16]},
        "processor": {"size": {"shortest_edge": TILE * TILE, "longest_edge": 128 * TILE * TILE}},
    },
    "fuyu": {
        "model": {"patch_size": PATCH},
        "processor": {"size": {"height": 2 * TILE, "width": 3 * TILE}, "patch_size": {"height": PATCH, "width": PATCH}},
    },
    "gemma4": {
        "vision": {"position_embedding_size": 256},
        "model": {"audio_config": None},
        "processor": {"patch_size": PATCH, "pooling_kernel_size": 3, "max_soft_tokens": 70},
    },
    "gemma4_unified": {
        "vision": {"mm_embed_dim": WIDTH, "mm_posemb_size": 16, "output_proj_dims": WIDTH},
        "model": {"audio_config": None},
        "processor": {"patch_size": 3 * PATCH, "pooling_kernel_size": 1, "max_soft_tokens": 70},
    },
    "glm5_next": {
        "text": {"qk_rope_head_dim": 0, "head_dim": 0},
        "vision": {"projection_intermediate_size": 2 * WIDTH},
        "processor": {"min_image_tokens": 1},
    },
    "granite4_vision": {
        "vision": {"image_size": 2 * TILE},
        "qformer": {"encoder_hidden_size": WIDTH, "num_hidden_layers": 1},
        "model": {"image_grid_pinpoints": [[4 * TILE, 2 * TILE], [2 * TILE, 4 * TILE], [4 * TILE, 4 * TILE]]}
        | {"vision_feature_select_strategy": "full", "downsample_rate": "1/2"}
        | {"deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1]},
        "processor": {"size": {"shortest_edge": 2 * TILE}, "crop_size": {"height": 2 * TILE, "width": 2 * TILE}}
        | {"image_grid_pinpoints": [[4 * TILE, 2 * TILE], [2 * TILE, 4 * TILE], [4 * TILE, 4 * TILE]]},
    },
    "hunyuan_vl": {
        "vision": {"max_image_size": 8 * PATCH, "text_hidden_size": WIDTH},
        "text": {"rope_parameters": MROPE},
        "processor": {"min_pixels": TILE * TILE, "temporal_patch_size": 1},
    },
    "idefics": {
        "vision": {"embed_dim": WIDTH},
        "processor": SQUARE,
    },
    "idefics2": {
        "perceiver": {"resampler_n_latents": 3, "resampler_n_heads": 4, "resampler_head_dim": 8},
        "processor": {"size": {"shortest_edge": TILE, "longest_edge": 2 * TILE}},
    },
    "janus": {
        "vision": {"num_image_tokens": 4, "projection_dim": WIDTH},
        "vq": {"num_embeddings": 16, "latent_channels": 32, "base_channels": 32, "channel_multiplier": [1, 1]}
        | {"projection_dim": WIDTH, "image_token_embed_dim": WIDTH},
        "processor": SQUARE,
    },
    "kimi_k25": {
        "vision": {"pos_emb_height": 8, "pos_emb_width": 8},
        "model": {"projection_hidden_size": WIDTH},
        "processor": {"size": {"shortest_edge": TILE * TILE, "longest_edge": 128 * TILE * TILE}},
    },
    "kosmos-2": {"text": {"layers": 2}, "model": {"latent_query_num": 3}, "processor": CROPPED},
    "kosmos-2.5": {
        "text": {"layers": 2},
        "vision": {"patch_embed_hidden_size": 588, "max_num_patches": 16},
        "model": {"latent_query_num": 3},
        "processor": {"patch_size": {"height": PATCH, "width": PATCH}, "max_patches": 16},
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
    "llava_onevision": {"model": PINPOINTS, "processor": SQUARE | PINPOINTS},
    "minimax_m3_vl": QWEN | {"text": {}, "model": {"projector_hidden_size": WIDTH}},
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
    "muse_glimmer": {
        "vision": {"pos_emb_height": 4, "pos_emb_width": 4},
        "model": {"out_hidden_size": 4 * WIDTH, "projector_hidden_size": WIDTH},
        "processor": {"min_pixels": TILE * TILE},
    },
    "ovis2": {
        "vision": {"vocab_size": 50},
        "model": {"visual_indicator_token_ids": [91, 92, 93, 94, 95]},
        "processor": TILES,
    },
    "paligemma": {"model": {"projection_dim": WIDTH}, "processor": SQUARE},
    "qwen2_5_omni_thinker": QWEN | {"model": {"vision_start_token_id": 98, "vision_end_token_id": 99}},
    "qwen2_vl": QWEN | {"vision": {"hidden_size": WIDTH}},
    "qwen3_omni_moe_thinker": QWEN
    | {
        "audio": {"num_mel_bins": 8, "downsample_hidden_size": 8, "output_dim": WIDTH},
        "model": {"vision_start_token_id": 98, "vision_end_token_id": 99},
    },
    "step3p7": {"processor": {"size": {"shortest_edge": 4 * TILE}, "crop_size": {"height": 4 * TILE, "width": 4 * TILE}}},
    "vipllava": {"model": {"vision_feature_layers": [-1, -2]}, "processor": CROPPED},
}
"""What single families need beside: of their text part, their tower, themselves and their image processor."""

PROCESSORS: dict[str, str] = {
    "cohere2_vision": "GotOcr2ImageProcessorPil",
    "gemma4_unified": "Gemma4ImageProcessorPil",
    "glm4v_moe": "Glm4vImageProcessorPil",
    "glm_ocr": "Glm46VImageProcessorPil",
    "hunyuan_vl": "Qwen2VLImageProcessorPil",
    "kimi_k25": "PaddleOCRVLImageProcessorPil",
    "llama4": "GotOcr2ImageProcessorPil",
    "minimax_m3_vl": "Qwen2VLImageProcessorPil",
    "muse_glimmer": "Qwen2VLImageProcessorPil",
    "qwen2_5_omni_thinker": "Qwen2VLImageProcessorPil",
    "qwen3_omni_moe_thinker": "Qwen2VLImageProcessorPil",
    "qwen3_vl_moe": "Qwen2VLImageProcessorPil",
    "step3p7": "LlavaImageProcessorPil",
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
    "fast_vlm": "its tower needs timm",
    "gemma3n": "its tower needs timm",
    "perception_lm": "its tower needs timm",
    "instructblip": "its tower reads the question too",
    "instructblipvideo": "its tower reads the question too",
    "qwen2_5_omni": "its thinker is qwen2_5_omni_thinker",
    "qwen3_omni_moe": "its thinker is qwen3_omni_moe_thinker",
}
"""Families that are no decoder over tokens and pictures, and why."""

NESTED = ("idefics2", "idefics3", "mllama", "smolvlm")
"""Families whose pixels have a dimension for samples before the one for pictures."""

CROSS = ("idefics", "mllama")
"""Families that read pictures by cross-attention: one token says where a picture is."""

MASKED = ("cosmos3_edge", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
"""Families that without an attention mask count no rows and columns of pictures, or take a picture for the end of a row."""

SAME_BLOCK = ("gemma3", "shieldgemma2")
"""Families whose ``token_type_ids`` mark pictures, whose tokens see each other. For paligemma they mark the answer."""

TEXT: dict[str, type[PreTrainedConfig]] = {"granite4_vision": CONFIG_MAPPING["granite4_vision_text"]}
"""Decoders of families whose configuration has another family's by default."""

AROUND = {
    "ovis2": ([91], [95]),  # which the tower gives features for too
    "qwen2_5_omni_thinker": ([98], [99]),  # by which positions are counted
    "qwen3_omni_moe_thinker": ([98], [99]),
}
"""Tokens before and after a picture without which the model would read it in another way."""


class WholeTiles(Siglip2ImageProcessorPil):
    """Patches of pictures whose sides are whole tiles, which a tower with pixel shuffle can halve."""

    def __call__(self, images: Any, *args: Any, **settings: Any) -> BatchFeature:
        tiled = [image.resize(tuple(max(1, round(side / TILE)) * TILE for side in image.size)) for image in images]
        return super().__call__(tiled, *args, **settings, do_resize=False)


class FuyuPatches(FuyuImageProcessorPil):
    """The patches that transformers cuts while it writes the text."""

    def __call__(self, images: Any, *args: Any, **settings: Any) -> BatchFeature:
        pixels = super().__call__(images, *args, **settings)["images"]
        patches = [self.patchify_image(np.asarray(image), SizeDict(height=PATCH, width=PATCH)) for [image] in pixels]
        return BatchFeature({"image_patches": torch.as_tensor(np.concatenate(patches))[None]})


ADAPTED: dict[str, type[BaseImageProcessor]] = {"fuyu": FuyuPatches, "lfm2_vl": WholeTiles}
"""For families whose own processor needs torchvision or a tokenizer: what it would give."""


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
        return int(getattr(self.model.config, "image_token_id", PICTURE))

    def inputs(self, images: list[Image.Image]) -> dict[str, torch.Tensor]:
        """What the tower reads for these pictures of one sample."""
        pictures: Any = [images] if self.name in NESTED else images
        given: Any = self.processor(images=pictures, return_tensors="pt")
        taken = inspect.signature(self.model.forward).parameters
        named = {"pixel_values": given[None]} if self.name == "idefics" else given
        return {name: value for name, value in named.items() if name in taken and name != "attention_mask"}

    def tokens(self, image: Image.Image) -> list[int]:
        """The tokens that stand for this picture in a prompt."""
        if self.name in CROSS:
            return [self.picture]
        if image.size not in self.counts:
            with torch.no_grad():
                self.counts[image.size] = sum(len(rows) for rows in features_of(self.model, self.inputs([image])))
        first, last = AROUND.get(self.name, ([], []))
        return [*first, *[self.picture] * self.counts[image.size], *last]

    def kinds(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """What ``forward`` takes beside about each token: 1 for a picture, 0 for text."""
        taken = inspect.signature(self.model.forward).parameters
        names = ["mm_token_type_ids", "moe_mm_token_type_ids", "image_embeds_position_mask"]
        names += ["token_type_ids"] if self.name in SAME_BLOCK else []
        kinds = {name: (input_ids == self.picture).long() for name in names if name in taken}
        if self.name in MASKED:
            kinds["attention_mask"] = torch.ones_like(input_ids)
        if "image_attention_mask" in taken:  # the last picture before each token
            kinds["image_attention_mask"] = one_hot((input_ids == self.picture).cumsum(-1))[..., 1:]
        return kinds


def features_of(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The features of all pictures, as tensors ``[rows, H]``."""
    if hasattr(model.config, "latent_query_num"):
        return [torch.empty(model.config.latent_query_num, 0)] * len(next(iter(inputs.values())))
    source: Any = model if hasattr(model, "get_image_features") else model.base_model
    given = source.get_image_features(*inputs.values()) if "image_patches" in inputs else source.get_image_features(**inputs)
    features = given.last_hidden_state if given.pooler_output is None else given.pooler_output
    if features is None:  # one for each of several layers
        features = given.deepstack_features[0][1]
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
    processor = ADAPTED.get(name) or processor_of(name)
    config = configuration(CONFIG_MAPPING[name], special, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, names[name])._from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
                if name in CROSS and parameter.numel() == 1:  # a gate, closed at first
                    parameter.fill_(1)
    return Pictured(name, model, processor(**special.get("processor", {})))


def processor_of(name: str) -> type[BaseImageProcessor]:
    cls = PROCESSORS.get(name) or (IMAGE_PROCESSOR_MAPPING_NAMES.get(name) or {}).get("pil")
    if cls is None:
        raise Unbuildable("its image processor needs torchvision")
    return getattr(transformers, cls)


def configuration(cls: type[PreTrainedConfig], special: Parts, **settings: Any) -> PreTrainedConfig:
    changes: dict[str, Any] = {}
    for part, part_cls in cls.sub_configs.items():
        if part_cls is AutoConfig:
            part_cls = type(getattr(cls(), part))
        if part == "text_config":
            part_cls = TEXT.get(cls.model_type, part_cls)
        changes[part] = resized(part_cls, special, part.removesuffix("_config"))
    return small(cls, **{**changes, **vocabulary(cls), **markers(cls), **special.get("model", {}), **settings})


def resized(cls: type[PreTrainedConfig], special: Parts, part: str) -> PreTrainedConfig:
    """A part of a family, with its own parts."""
    fields = field_names(cls)
    sizes = {name: value for name, value in TOWER.items() if name in fields} if "text" not in part else vocabulary(cls)
    parts = {
        name: resized(part_cls, special, name.removesuffix("_config"))
        for name, part_cls in cls.sub_configs.items()
        if part_cls is not AutoConfig
    }
    return small(cls, **{**sizes, **parts, **special.get(part, {})})


def vocabulary(cls: type[PreTrainedConfig]) -> dict[str, int]:
    return {name: VOCABULARY for name in ("vocab_size", "vocab_size_per_layer_input") if name in field_names(cls)}


def markers(cls: type[PreTrainedConfig]) -> dict[str, int]:
    """Ids inside the vocabulary for the special tokens that a configuration names."""
    named = {name for name in getattr(cls, "__dataclass_fields__", ()) if name.endswith(("_token_id", "_token_index"))}
    pictures = {"image_token_id", "image_token_index"}
    others = sorted(named - pictures - {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"})
    return {name: PICTURE for name in named & pictures} | {name: PICTURE + 1 + i for i, name in enumerate(others)}
