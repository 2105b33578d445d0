"""The page of ``rlhf report`` with 10,000 answers: how large it is, and how soon a browser shows something.

python benchmarks/report.py --json      # needs chromium and: pip install playwright
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright
from rlhf_runs.report import page

from rlhf_host.config.schema import RunConfig
from rlhf_host.config.yaml_file import write_yaml
from rlhf_host.runs.directory import RunDirectory

STEPS, GROUPS, N, WORDS = 10, 125, 8, 150
METRICS = 80
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync")


def make_run(run: Path) -> None:
    """Of 10 steps with 125 groups × 8 answers of 150 words, and 1,000 rows of 80 metrics."""
    dice = random.Random(0)
    words = ["".join(dice.choice("etaoinshrdlucmfwypvbgkqjxz") for _ in range(dice.randint(2, 9))) for _ in range(5000)]
    (run / "trajectories").mkdir(parents=True)
    (run / "config.yaml").write_text(write_yaml(RunConfig().model_dump(mode="json", by_alias=True)))
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1000):
            row = {f"group{name % 8}/metric{name}": dice.random() for name in range(METRICS)}
            file.write(
                json.dumps(row | {"step": step, "reward/mean": step / 1000 + dice.random(), "time/wall": float(step)}) + "\n"
            )
    for step in range(STEPS):
        with (run / f"trajectories/train-step-{step:06d}.jsonl").open("w") as file:
            for place in range(GROUPS * N):
                row = {
                    "step": step,
                    "episode_id": f"e{place}",
                    "group_id": f"g{place // N}",
                    "task": place // N,
                    "sample": place % N,
                }
                row |= {"prompt": f"question {place // N}", "text": " ".join(dice.choices(words, k=WORDS)), "length": WORDS}
                file.write(json.dumps(row | {"reward": dice.random(), "advantage": dice.gauss(0, 1)}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object, with or without it")
    parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        make_run(Path(folder, "run"))
        started = time.perf_counter()
        text, _ = page([RunDirectory(Path(folder, "run"))], ["run"])
        result = {"made_s": time.perf_counter() - started, "mb": len(text.encode()) / 1e6}
        file = Path(folder, "page.html")
        file.write_text(text)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(QUIET))
        for name, size in (("wide", (1300, 900)), ("phone", (390, 844))):
            tab = browser.new_page(viewport={"width": size[0], "height": size[1]})
            started = time.perf_counter()
            tab.goto(file.as_uri())
            tab.locator(".plot").first.scroll_into_view_if_needed()
            tab.wait_for_selector(".plot canvas", timeout=120_000)
            result[f"{name}/plots_s"] = time.perf_counter() - started
            paints = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            result[f"{name}/first_paint_s"] = tab.evaluate(paints) / 1000
            started = time.perf_counter()
            tab.click("nav >> text=Answers")
            tab.wait_for_selector("#group .row")
            result[f"{name}/answers_s"] = time.perf_counter() - started
            tab.close()
        browser.close()
    for name, value in result.items():
        print(f"{name}: {value:.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
