"""What an engine or a backend raises ends the run with one line that names it."""

import pytest

SOURCE = '''
from rlhf_host.backends.torch import Torch
from rlhf_host.engines.transformers import Transformers


def breaking(part, name):
    """``part``, whose method or function ``name`` raises."""
    def fails(*arguments, **settings):
        raise ValueError("out of order")

    async def fails_later(*arguments, **settings):
        raise ValueError("out of order")

    setattr(part, name, fails_later if name == "close" else fails)
    return part


class Engine(Transformers):
    """An engine that breaks."""

    def start(self, start):
        return breaking(super().start(start), "METHOD") if "METHOD" != "start" else breaking(self, "start").start()


class Backend(Torch):
    """A backend that breaks."""

    def start(self, start):
        return breaking(super().start(start), "METHOD") if "METHOD" != "start" else breaking(self, "start").start()
'''


@pytest.mark.parametrize(
    ("kind", "method"),
    [("engine", "start"), ("engine", "close"), *(("backend", method) for method in ("start", "step", "save_model", "save"))],
)
def test_an_engine_or_a_backend_that_breaks_is_named(here, small_run, rlhf_here, tmp_path, kind, method):
    lines = {"rlhf.engines": "breaks = cmd_parts:Engine", "rlhf.backends": "breaks = cmd_parts:Backend"}
    here.install("cmd-parts", lines, {"cmd_parts.py": SOURCE.replace("METHOD", method)})
    result = rlhf_here(*small_run, "--train.steps", "1", "--run-dir", tmp_path / "run", f"--{kind}", "breaks")
    assert result.exit_code == 1, result.output
    assert f"{kind} breaks failed in {method}: ValueError: out of order" in result.output
    assert "Traceback" not in result.output


def test_what_closes_badly_does_not_hide_how_the_run_ended(here, small_run, rlhf_here, tmp_path):
    here.install(
        "cmd-parts", {"rlhf.engines": "breaks = cmd_parts:Engine"}, {"cmd_parts.py": SOURCE.replace("METHOD", "close")}
    )
    flags = ["--train.steps", "1", "--run-dir", tmp_path / "run", "--engine", "breaks", "--reward", "broken"]
    result = rlhf_here(*small_run, *flags)
    assert result.exit_code == 1, result.output
    assert "the judge is down" in result.output
    assert "failed in close" not in result.output
