"""The example notebooks run from beginning to end, in kernels of their own."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = EXAMPLES / "first_run.ipynb"


def test_the_first_run_works_as_a_notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = {cell.source.splitlines()[-1]: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    assert "Run(finished at step 8" in text(shown["run"])
    assert text(shown['run.generate(["12+30=", "48+51="], n=3)']).count("'") == 12, "six answers"
    assert int(text(shown['replay.summary()["rewards_changed"]']).splitlines()[-1]) > 0
    rewards = json.loads(text(shown['[round(row["reward/right"], 3) for row in own.metrics if "reward/right" in row]']))
    assert len(rewards) == 8
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_grpo_by_hand_learns(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(EXAMPLES / "grpo_by_hand.ipynb", as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    (curve,) = (text(cell.outputs) for cell in notebook.cells if cell.source.startswith("[round(share"))
    shares = json.loads(curve)
    assert shares[-1] > shares[0] + 0.1
    longest = max((cell.source for cell in notebook.cells if "trainable_session" in cell.source), key=len)
    assert len(longest.strip().splitlines()) <= 26


@pytest.mark.parametrize("name", ["first_run", "grpo_by_hand"])
def test_they_are_kept_without_outputs(name):
    cells = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4).cells
    assert [cell.outputs for cell in cells if cell.cell_type == "code" and cell.outputs] == []


def text(outputs) -> str:
    """The value of the cell's last line."""
    return "".join(output.data["text/plain"] for output in outputs if output.output_type == "execute_result")
