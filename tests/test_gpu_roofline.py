"""What a GPU is asked to do may not grow: launches, bytes and reads of the device are counted at full size, without one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from .scripts_as_modules import load_script

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 0.01
"""Of a layer's figures, or of those beside the layers: one more cast per layer is 1.5 % of its launches or more."""
KEPT = json.loads((ROOT / "benchmarks/gpu_roofline.json").read_text(encoding="utf-8"))
HOW = "python benchmarks/gpu_roofline.py --write"


@pytest.fixture(scope="module")
def roofline():
    return load_script("benchmarks/gpu_roofline.py")


def compare(kept, counted) -> None:
    """Compares figures with those that are kept."""
    problems = []
    for part in ("beside", "layer"):
        for what in ("launches", "gb"):
            before, now = kept[part][what], getattr(getattr(counted, part), what)
            if now > before * (1 + TOLERANCE):
                problems.append(f"{what} ({part}) grew from {before:g} to {now:g}")
            elif now < before * (1 - TOLERANCE):
                problems.append(f"{what} ({part}) fell from {before:g} to {now:g}: keep that: {HOW}")
    for what in ("reads", "writes"):
        if (now := getattr(counted, what)) != kept[what]:
            problems.append(
                f"{what} of the device: {now:g}, and {kept[what]:g} before" + f": keep that: {HOW}" * (now < kept[what])
            )
    assert not problems, "; ".join(problems)


@pytest.mark.parametrize("key", KEPT["training"])
def test_a_training_pass_asks_for_no_more_than_before(roofline, key):
    row = next(row for row in roofline.TRAINING if row.key == key)
    compare(KEPT["training"][key], roofline.training(row))


@pytest.mark.parametrize("key", KEPT["decoding"])
def test_a_step_of_decoding_asks_for_no_more_than_before(roofline, key):
    row = next(row for row in roofline.DECODING if row.key == key)
    compare(KEPT["decoding"][key], roofline.decoding(row))


def test_kernels_keep_a_pass_of_3b_below_what_was_set_for_it(roofline):
    """4,500 launches, 1.05 TB and an MFU of 38 % on an H100; a read of the device in 8 steps of decoding."""
    row = next(row for row in roofline.TRAINING if row.key == "3b, kernels triton")
    whole = roofline.whole_of(row, KEPT["training"][row.key])
    assert whole.launches <= 4500
    assert whole.gb <= 1050
    assert roofline.mfu(row, KEPT["training"][row.key], "H100") >= 0.38
    assert all(kept["reads"] <= 1 / 8 for kept in KEPT["decoding"].values())


def test_three_percent_more_are_noticed_and_less_is_to_be_kept(roofline):
    kept = KEPT["training"]["3b, no kernels"]
    same = roofline.Figures(roofline.Amount(**kept["beside"]), roofline.Amount(**kept["layer"]), kept["reads"], kept["writes"])
    compare(kept, same)
    for what in ("launches", "gb"):
        more, less = (
            replace(same, layer=replace(same.layer, **{what: factor * kept["layer"][what]})) for factor in (1.03, 0.97)
        )
        with pytest.raises(AssertionError, match=rf"{what} \(layer\) grew"):
            compare(kept, more)
        with pytest.raises(AssertionError, match=f"keep that: {re.escape(HOW)}"):
            compare(kept, less)
    with pytest.raises(AssertionError, match="reads of the device: 2, and 1 before"):
        compare(kept, replace(same, reads=2))


def test_a_whole_model_is_what_its_layers_say(roofline):
    row = roofline.Row("3b", "all of it", roofline.PLAIN)
    shape = roofline.SHAPES["3b"]
    whole = roofline.Amount.of(roofline.count_update(shape, row.flags).training.launches)
    told = roofline.training(row).whole(shape.layers)
    assert (whole.launches, whole.gb) == pytest.approx((told.launches, told.gb))
    assert whole.ms == pytest.approx(told.ms)


def test_the_page_has_the_tables_of_these_figures(roofline):
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert page == roofline.with_tables(page, KEPT)
    assert page.count(roofline.BEGIN) == page.count(roofline.END) == 1


def test_the_page_is_two_screens(roofline):
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert sum(1 for word in page.split() if word.strip("|-")) <= 900
