"""Messages where rows are wanted and nothing reads them, and for settings that have no place in a run over rows."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from rlhf_host.commands import main
from rlhf_host.installed import discover

ALGORITHM = """
from rlhf_host import hookimpl
from rlhf_rows import losses


class Pairs:
    Options = losses.PreferenceOptions

    def __init__(self, options):
        self.options = options

    @hookimpl
    def needs(self):
        return losses.preference_needs(self.options)

    @hookimpl
    def compute_loss(self, outputs, batch):
        return losses.preference_loss(outputs, batch, self.options)
"""


def train(tmp_path, *flags):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "2+3?", "chosen": "5", "rejected": "6"}\n')
    (tmp_path / "pairs.py").write_text(ALGORITHM)
    (tmp_path / "reward.py").write_text("def long(answer):\n    return len(answer)\n")
    data, algo = str(tmp_path / "pairs.jsonl"), f"{tmp_path / 'pairs.py'}:Pairs"
    arguments = ["train", "--algo", algo, "--model", "quickstart", "--data", data, "--run-dir", str(tmp_path / "run"), *flags]
    return CliRunner().invoke(main, arguments)


def test_a_run_over_rows_that_nothing_reads_says_what_to_install(tmp_path, monkeypatch):
    others = [info for info in discover() if info.distribution != "rlhf-rows"]
    monkeypatch.setattr("rlhf_host.plugins.selection.discover", lambda *args, **kwargs: others)
    done = train(tmp_path, "--dry-run")
    assert done.exit_code == 2
    told = (
        "the run trains on preference data: no data named 'preference' is installed; pip install -c dist/wheels.txt rlhf-rows"
    )
    assert told in done.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flags", [("--reward", "reward.py:long"), ("--train.epochs", "2"), ("--train.old-logprobs", "recompute")]
)
def test_what_only_samples_have_is_refused(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    done = train(tmp_path, "--dry-run", *flags)
    assert done.exit_code == 2
    assert "trains on preference data" in done.output
