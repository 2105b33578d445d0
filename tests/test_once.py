"""Facts that a command looks up once, and anybody else every time."""

from __future__ import annotations

import threading

import pytest

from rlhf_host.models.locations import find_model
from rlhf_host.once import looked_up_once, once


@pytest.fixture
def asked():
    return []


@pytest.fixture
def length(asked):
    @once
    def length(text, *, twice=False):
        asked.append(text)
        if not text:
            raise ValueError("no text")
        return len(text) * (2 if twice else 1)

    return length


def test_an_answer_is_one_inside_and_another_outside(length, asked):
    for _ in range(2):
        with looked_up_once():
            assert [length("a"), length("a"), length("a", twice=True), length("bc"), length("bc")] == [1, 1, 2, 2, 2]
        assert asked == ["a", "a", "bc"]
        asked.clear()
    assert [length("a"), length("a")] == [1, 1]
    assert asked == ["a", "a"]


def test_an_error_is_no_answer(length, asked):
    with looked_up_once():
        for _ in range(2):
            with pytest.raises(ValueError, match="no text"):
                length("")
    assert asked == ["", ""]


def test_other_threads_look_for_themselves(length, asked):
    with looked_up_once():
        length("a")
        thread = threading.Thread(target=length, args=("a",))
        thread.start()
        thread.join()
    assert asked == ["a", "a"]


def test_a_command_asks_for_a_model_once(rlhf_here, tiny_model, tmp_path, monkeypatch):
    """The cell is that in which ``once`` keeps the function."""
    monkeypatch.chdir(tmp_path)
    look, places = find_model.__wrapped__, []
    cell = next(cell for cell in find_model.__closure__ if cell.cell_contents is look)
    monkeypatch.setattr(cell, "cell_contents", lambda name, **how: places.append((name, *how.items())) or look(name, **how))
    run = ["train", "--algo", "rloo", "--kl.coef", "0.1", "--reward", "math_verifier", "--data", "arithmetic"]
    done = rlhf_here(*run, "--model", tiny_model, "--dry-run")
    assert done.exit_code == 0, done.output
    assert places
    assert len(places) == len(set(places)), "with weights and without, each once"
