"""Contrast of the page's colours in both themes, by the formula of WCAG 2."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

CSS = files("rlhf_runs").joinpath("page", "page.css").read_text("utf-8")
LINES = re.search(r"COLORS = \[(.*?)\]", files("rlhf_runs").joinpath("page", "elements.js").read_text("utf-8"))[1]
THEMES = dict(zip(("light", "dark"), re.findall(r"^:root.*?\{(.*?)\}", CSS, re.M), strict=True))


def luminance(colour):
    digits = colour.lstrip("#")
    parts = [
        int(part * 2 if len(digits) == 3 else part, 16) / 255 for part in re.findall("." if len(digits) == 3 else "..", digits)
    ]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_formula():
    assert contrast("#fff", "#000000") == 21
    assert contrast("#777777", "#fff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", THEMES)
def test_texts_and_lines_can_be_read(theme):
    colours = dict(re.findall(r"--(\w+): (#\w+)", THEMES[theme]))
    texts = {
        (name, on): contrast(colours[name], colours[on])
        for name in ("text", "dim", "accent", "alarm")
        for on in ("back", "soft")
    }
    assert {pair: ratio for pair, ratio in texts.items() if ratio < 4.5} == {}
    lines = {colour: contrast(colour, colours["back"]) for colour in re.findall(r"#\w+", LINES)}
    assert len(lines) == 8
    assert {colour: ratio for colour, ratio in lines.items() if ratio < 3} == {}
