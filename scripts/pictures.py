"""Write ``docs/assets/report.png``: the page of ``rlhf report`` with three runs of the quickstart task, in a browser.

    python scripts/pictures.py

It needs Chromium and ``pip install playwright``, and takes about ten minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).resolve().parent.parent / "docs/assets/report.png"
RLHF = [str(Path(sys.executable).parent / "rlhf")]
ALGORITHMS = ("rloo", "grpo", "ppo")
TRAIN = "--reward math_verifier --train.steps 300 --eval.every 25 --train.threads 1"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for algo in ALGORITHMS:
            subprocess.run([*RLHF, "train", "--algo", algo, *TRAIN.split(), "--run-dir", algo], cwd=folder, check=True)
        subprocess.run([*RLHF, "report", *ALGORITHMS], cwd=folder, check=True)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            tab = browser.new_page(viewport={"width": 1200, "height": 740})
            tab.goto((Path(folder) / "report.html").as_uri())
            for metric in ("eval/pass@1", "reward/mean", "groups/no_variance"):
                tab.wait_for_selector(f'.plot[data-metric="{metric}"] canvas')
            tab.locator("#smooth").fill("0.8")
            tab.locator("#smooth").blur()
            tab.wait_for_timeout(1000)
            tab.screenshot(path=PICTURE)
            browser.close()


if __name__ == "__main__":
    main()
