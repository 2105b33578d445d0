"""``rlhf plugins``: every name and every word of its sentence, in the width that is there."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from rlhf_host.cli.plugins import WIDE, _listing, wrap
from rlhf_host.plugins.discovery import PluginInfo

WORDS = st.lists(st.text("abcdefghij漢字", min_size=1, max_size=14), max_size=30).map(" ".join)
NAMES = st.text("abcdefgh_", min_size=1, max_size=30)


def plugin(name="grpo", summary="Rewards normalised within their group.", kind="algo", problem=""):
    status = "broken" if problem else "ok"
    return PluginInfo(kind, name, f"rlhf-plugin-{name}", "1.0", ">=1,<2", status, summary, "module:Class", problem)


def listed(infos, width):
    return [re.sub(r"\x1b\[\d+m", "", line) for line in _listing(infos, width)]


@given(WORDS.filter(bool), st.integers(1, 90), st.sampled_from([("", ""), ("  ", "    "), ("    name  ", "          ")]))
@settings(max_examples=100, deadline=None)
def test_wrapped_lines_are_as_full_as_they_can_be(text, width, ends):
    head, indent = ends
    lines = wrap(text, width, head, indent)
    bare = [line.removeprefix((head if place == 0 else indent).rstrip()).split() for place, line in enumerate(lines)]
    assert [word for words in bare for word in words] == text.split(), "nothing is cut"
    for place, words in enumerate(bare):
        assert cell_len(lines[place]) <= width or len(words) <= 1, "only a single word, or the head, is wider"
        if place:
            before = f"{lines[place - 1]} " if bare[place - 1] else head
            assert cell_len(before + words[0]) > width, "it would have fitted"


@given(
    st.lists(st.tuples(st.sampled_from(["algo", "reward"]), NAMES, WORDS, WORDS), min_size=1, max_size=6), st.integers(20, 200)
)
@settings(max_examples=60, deadline=None)
@example([("algo", "a_name_that_is_wider_than_half", "It is below its name.", "")], 40)
def test_all_plugins_are_there_in_every_width(rows, width):
    infos = [plugin(name, summary, kind, problem) for kind, name, summary, problem in sorted(rows)]
    lines = listed(infos, width)
    for line in lines:
        assert cell_len(line) <= width or len(line.split()) == 1, "a word, or a name, is wider alone"
    shown = " ".join(" ".join(lines).split())
    wanted = []
    for kind in dict.fromkeys(info.kind for info in infos):
        of_kind = [info for info in infos if info.kind == kind]
        wanted.append(f"{kind} ({len(of_kind)})")
        for info in of_kind:
            wanted += [info.name, info.summary, f"({info.distribution} 1.0)" if width >= WIDE else ""]
            wanted.append(f"broken: {info.problem}" if info.problem else "")
    assert shown == " ".join(" ".join(wanted).split())


def test_sentences_stand_beside_the_names():
    infos = [plugin(), plugin("rather_long_a_name"), plugin("old", "Old.", problem="made for rlhf-host >=9, and this is 1.0")]
    assert listed(infos, 60) == [
        "algo (3)",
        "  grpo                Rewards normalised within their group.",
        "  rather_long_a_name  Rewards normalised within their group.",
        "  old                 Old.",
        "    broken: made for rlhf-host >=9, and this is 1.0",
    ]
    indent = " " * 16
    in_half = ["  rather_long_a_name  Rewards", f"{indent}normalised within", f"{indent}their group."]
    assert listed(infos[1:2], 36) == ["algo (1)", *in_half], "a long name takes no more than a third from the others"


def test_metadata_cannot_steer_the_terminal():
    assert listed([plugin(summary="Red \x1b[31m text.")], 80)[1] == "  grpo  Red \\x1b[31m text."


@pytest.mark.parametrize("kind", ["engine", "tracker"])
def test_in_a_pipe_a_plugin_is_a_line(rlhf_here, monkeypatch, kind):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)
    head, *lines = rlhf_here("plugins", "--kind", kind).stdout.splitlines()
    assert head == f"{kind} ({len(lines)})"
    assert all(re.fullmatch(r"  \w+ +\S.*\.? \(rlhf-\S+ [\d.]+\)", line) for line in lines), lines
