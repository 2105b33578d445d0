"""Parts of messages."""

import importlib.util

import pytest

from rlhf_host.errors import beyond, place_of


@pytest.mark.parametrize(
    ("value", "limit", "text"),
    [
        (0.4, 0.1, "0.4, more than 0.1"),
        (1.004e-4, 1e-4, "0.0001004, more than 0.0001"),
        (0.1000000001, 0.1, "0.1000000001, more than 0.1"),
        (0.0996, 0.0994, "0.1, more than 0.0994"),
        (float("nan"), 0.1, "nan, more than 0.1"),
        (float("inf"), 0.1, "inf, more than 0.1"),
    ],
)
def test_a_figure_has_as_many_digits_as_tell_it_from_its_limit(value, limit, text):
    assert beyond(value, limit) == text


@pytest.mark.parametrize(
    ("line", "place"),
    [("return {}[x]", "reward.py:3"), ("return json.loads('{')", "reward.py:3"), ("return missing(x)", "reward.py:3")],
)
def test_the_place_of_an_error_is_the_users_own_last_line(tmp_path, monkeypatch, line, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(f"import json\ndef helper(x):\n    {line}\ndef reward(x):\n    return helper(x)\n")
    spec = importlib.util.spec_from_file_location("reward", tmp_path / "reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(Exception) as raised:  # noqa: PT011
        module.reward("a")
    assert place_of(raised.value) == f" ({place})"


def test_errors_that_came_through_no_code_of_a_user_have_no_place():
    assert place_of(ValueError("never raised")) == ""
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        beyond("x", 0.1)
    assert place_of(raised.value) == ""
