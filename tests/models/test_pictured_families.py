"""Every vision-language model that transformers ships sees pictures as plain transformers has it, or is refused by name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from rlhf_host.errors import UserError
from rlhf_host.models.passes import Passes
from rlhf_host.records.pictures import Picture, png

from .pictured import Pictured, Unbuildable, families, pictured

TEMPERATURE = 0.7

OUTCOMES = {
    "shared": """
        aria aya_vision cohere2_vision cohere_compass cosmos3_omni deepseek_ocr2 deepseek_vl exaone4_5 gemma4 glm46v glm4v
        glm4v_moe glm_ocr glmga got_ocr2 granite4_vision hunyuan_vl hyperclovax_vision_v2 idefics2 idefics3 internvl janus
        kimi_k25 lighton_ocr llava llava_next llava_next_video llava_onevision mistral3 muse_glimmer paddleocr_vl
        pp_chart2table qianfan_ocr qwen2_5_vl qwen2_vl qwen3_vl qwen3_vl_moe smolvlm step3p7 video_llama_3 video_llava
        vipllava
    """,
    "padded": """
        gemma3 gemma4_unified glm5_next lfm2_vl minicpmv4_6 minicpmv4_7 qwen3_5 qwen3_5_moe qwen4_exp shieldgemma2
    """,
    "refused": """
        blip-2 chameleon cosmos3_edge deepseek_vl_hybrid emu3 ernie4_5_vl_moe fuyu idefics kosmos-2 kosmos-2.5 llama4
        minimax_m3_vl mllama ovis2 paligemma qwen2_5_omni_thinker qwen3_omni_moe_thinker
    """,
    "unbuildable": """
        blip diffusion_gemma evolla fast_vlm florence2 gemma3n git inkling_mm_model instructblip instructblipvideo mistral4
        nemotron_h_omni perception_lm phi4_multimodal pi0 pix2struct pp_formulanet qwen2_5_omni qwen3_omni_moe t5gemma2 udop
        vision-encoder-decoder
    """,
}
"""Layout of rows with pictures → families; ``refused`` by name, or ``unbuildable`` here."""
CASES = [name for names in OUTCOMES.values() for name in names.split()]
OUTCOME_OF = {name: outcome for outcome, names in OUTCOMES.items() for name in names.split()}
COMMON = (
    "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "gemma4", "internvl", "llava", "llava_next", "smolvlm", "ovis2",
    "paligemma", "mllama",
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("quiet")


class Reader:
    """The tiny processor of a family."""

    def __init__(self, family: Pictured):
        self._family = family

    def tokens(self, picture: Picture) -> list[int]:
        return self._family.tokens(picture.load())

    def tensors(self, pictures: list[Picture]) -> dict[str, Tensor]:
        return self._family.inputs([picture.load() for picture in pictures])


def picture(seed: int, size: tuple[int, int]) -> Picture:
    colours = torch.randint(256, (size[1], size[0], 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Picture.of_bytes(png(Image.fromarray(colours.numpy())))


ONE, TWO = picture(11, (56, 56)), picture(12, (84, 28))
"""A picture that rows share, and another of another form."""


def rows_of(family: Pictured) -> tuple[list[list[int]], list[list[int]], list[list[Picture]]]:
    """A shared prompt with a picture, an answer of several turns in which another one comes, two in one prompt, and none."""
    one, two = (family.tokens(each.load()) for each in (ONE, TWO))
    prompt = [5, 6, *one, 7, 8]
    prompts = [prompt, prompt, [9, *two, 10, 11, *one, 12], [13, 14, 15]]
    completions = [[21, 22, 23], [24, 25, *two, 26, 27], [28], [29, 30, 31, 32]]
    return prompts, completions, [[ONE], [ONE, TWO], [TWO, ONE], []]


def plain(family: Pictured, rows: Any) -> Tensor:
    """``[B, T]`` log-probabilities of plain transformers, row by row."""
    prompts, completions, images = rows
    out = torch.zeros(len(prompts), max(map(len, completions)))
    for row, (prompt, own, seen) in enumerate(zip(prompts, completions, images, strict=True)):
        ids = torch.tensor([[*prompt, *own]])
        given = family.inputs([each.load() for each in seen]) if seen else {}
        given = {"attention_mask": torch.ones_like(ids)} | family.kinds(ids) | given
        logits = family.model(input_ids=ids, use_cache=False, **given).logits[0, len(prompt) - 1 : -1]
        every = torch.log_softmax(logits.float() / TEMPERATURE, -1)
        out[row, : len(own)] = every.gather(-1, torch.tensor(own)[:, None]).squeeze(-1)
    return out


def gradients(model: Any, logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(3))
    model.zero_grad(set_to_none=True)
    (logprobs * weights)[mask].sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def outcome(name: str) -> str:
    """``shared``, ``padded`` or ``alone`` for the layout that is used, ``refused: why``, or ``unbuildable``."""
    try:
        family = pictured(name)
    except Unbuildable:
        return "unbuildable"
    rows = rows_of(family)
    prompts, completions, images = rows
    mask = torch.arange(max(map(len, completions))) < torch.tensor([[len(own)] for own in completions])
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    ids[mask] = torch.tensor([token for own in completions for token in own])
    try:
        passes = Passes(family.model, reader=Reader(family))
        passes.prepare(64, pictured=True)
    except UserError as error:
        return f"refused: {error}"
    found = passes.forward(
        prompts, ids, mask, temperature=TEMPERATURE, images=[[(0, each) for each in row] for row in images]
    ).logprobs
    assert found is not None
    expected = plain(family, rows)
    assert float((found - expected)[mask].abs().max()) < 1e-4
    own, theirs = gradients(family.model, found, mask), gradients(family.model, expected, mask)
    assert own.keys() == theirs.keys()
    tower = [name for name in theirs if "vis" in name or "image" in name or "tower" in name or "encoder" in name]
    for names in (tower, [name for name in theirs if name not in tower]):
        a, b = (torch.cat([each[name].flatten() for name in names]) for each in (own, theirs))
        assert float((a - b).norm() / b.norm()) < 1e-5, names[0]
    verdict = passes._verdict
    assert verdict is not None
    return "shared" if verdict.shared is not None else "padded" if verdict.padded is not None else "alone"


@pytest.mark.parametrize("name", [pytest.param(each, marks=() if each in COMMON else pytest.mark.slow) for each in CASES])
def test_a_family_computes_as_plain_transformers_or_is_refused(name):
    expected = OUTCOME_OF[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert outcome(name).partition(":")[0] == expected


def test_every_family_has_an_outcome():
    assert set(CASES) == set(families())


@pytest.mark.parametrize("name", ["got_ocr2", "qwen2_5_vl"])
def test_pictures_reach_a_model_in_16_bits_in_its_type(name):
    """Processors make them in float32, and not every tower casts them."""
    passes = Passes(pictured(name).model.bfloat16(), reader=Reader(pictured(name)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        passes.prepare(64, pictured=True)
    assert passes._verdict is not None
    assert passes._verdict.padded is not None
