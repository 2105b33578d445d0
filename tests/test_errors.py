"""Parts of messages."""

import importlib
import importlib.util
import inspect
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlhf_host
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


def exceptions() -> Iterator[type[BaseException]]:
    """Yields every exception class of the host, found by its source."""
    home = Path(rlhf_host.__file__).parent
    for file in sorted(home.rglob("*.py")):
        names = re.findall(
            r"^class (\w+)\(.*(?:Error|Exception|Failed|Gone|Lost)\b.*\):", file.read_text("utf-8"), re.MULTILINE
        )
        module = ".".join(("rlhf_host", *file.relative_to(home).with_suffix("").parts))
        yield from (getattr(importlib.import_module(module), name) for name in names)


@pytest.mark.parametrize("kind", list(exceptions()), ids=lambda kind: kind.__name__)
def test_an_exception_survives_pickling(kind):
    taken = list(inspect.signature(kind.__init__).parameters.values())[1:] if inspect.isfunction(kind.__init__) else []
    given = ["c" for parameter in taken[1:] if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    error = kind("a b", *given)
    error.noted = [1.5]
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.args, vars(again)) == (kind, str(error), error.args, vars(error))
    assert str(error) == "a b"
