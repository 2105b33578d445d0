"""``rlhf report``: what is on the page is what is in the files, also in a browser where there is one."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
from pathlib import Path

import pytest
from rlhf_runs.metrics import OTHERS
from rlhf_runs.names import names_of
from rlhf_runs.report import page

from rlhf_host.runs.directory import RunDirectory
from rlhf_host.settings import RunConfig, write_yaml


@pytest.fixture(scope="module")
def run(rlhf, tiny_model, prompts, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "first"
    small = ("--rollout.n", "2", "--rollout.max-new-tokens", "6", "--train.batch-size", "2", "--train.threads", "1")
    model = ("train", "--algo", "ppo", "--reward", "vowels", "--actor.model", tiny_model, "--data", prompts)
    log = ("--trajectories.tokens", "--eval.data", prompts, "--train.steps", "3", "--run-dir", run)
    log = (*log, "--train.old-logprobs", "recompute")
    rlhf.run(*model, *small, *log, "--kernels", "none")
    return run


@pytest.fixture(scope="module")
def killed(run):
    """A run of several turns with a branch, hostile texts, and nothing at the end."""
    other = run.parent / "second"
    shutil.copytree(run, other, ignore=shutil.ignore_patterns("model", "checkpoints", "trajectories"))
    about = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps(about | {"status": "running"}))
    (other / "trajectories").mkdir()

    def segment(kind, ids, text):
        more = {"logprobs": [-1.5] * len(ids), "versions": [*range(len(ids))]} if kind == "action" else {}
        return {"kind": kind, "token_ids": ids, "text": text, **more}

    stem = [segment("prompt", [4], "1+2?"), segment("action", [5, 6], "<script>alert(1)</script>")]
    whole = [*stem, segment("observation", [7], "seen </script>"), segment("action", [8], "3")]
    common = {
        "step": 2,
        "group_id": "g",
        "source": "sums",
        "task": 7,
        "label": "3",
        "prompt": "1+2?",
        "reward": 1.0,
        "length": 3,
    }
    rows = [
        common
        | {"episode_id": "e", "segments": whole, "full_text": "whole", "text": "x", "events": [{"kind": "call", "t": 0.5}]},
        common
        | {"episode_id": "e", "segments": stem, "tree": {"row": 1, "parent": 0, "branch": 3}, "final": False, "text": "y"},
        common | {"episode_id": "f", "reward": None, "unjudged": "no judge", "text": "plain"},
    ]
    (other / "trajectories/train-step-000002.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return other


def chunks(text):
    found = re.findall(r'<script type="text/plain" id="([^"]+)">([^<]*)</script>', text)
    return {name: json.loads(gzip.decompress(base64.b64decode(packed))) for name, packed in found}


def test_the_page_has_what_the_files_have(run, killed):
    found = [RunDirectory(run), RunDirectory(killed)]
    text, notices = page(found, names_of([run, killed]))
    assert not notices
    assert len(text) < 250_000, "what draws the charts is small beside the page of a small run"
    assert re.search(r"\d{4}-\d\d-\d\dT|toLocale(Date|Time)?String\(\)", text) is None, "moments are written one way"
    parts = chunks(text)
    first, second = parts["head"]
    assert (first["name"], first["status"], second["name"], second["status"]) == ("first", "finished", "second", "killed")
    assert first["curves"] == {name: [*map(list, curve)] for name, curve in found[0].curves.items()}
    assert first["places"] == [["eval", 0], ["train", 1], ["train", 2], ["eval", 3], ["train", 3]]
    settings = first["settings"]
    assert settings["rollout.n"] == {"value": "2", "changed": True, "usual": "8", "help": "samples per prompt"}
    assert not any("changed" in settings[name] for name in ("rollout.top_p", "algo.clip_eps", "run_dir", "actor.lr"))
    rates = {role: max(found[0].curve(f"{prefix}lr")[1]) for role, prefix in (("actor", ""), ("critic", "critic/"))}
    assert {role: float(settings[f"{role}.lr"]["value"]) for role in rates} == rates, "the file says null"
    assert found[0].settings["roles"]["actor"]["lr"] is None
    assert {*first["metrics"]} == {*first["curves"]}
    of_plugins = {name for name, metric in first["metrics"].items() if metric["question"] == OTHERS}
    assert of_plugins == {f"critic/{name}" for name in ("explained_variance", "return", "value")}
    saved = found[0].rows("train", 3)
    rows = [row for group in parts["run0-train-3"] for row in group["rows"]]
    assert [(row["reward"], row["length"]) for row in rows] == [(row["reward"], row["length"]) for row in saved]
    for row, file in zip(rows, saved, strict=True):
        [part] = row["segments"]
        assert part["versions"] == file["segments"][1]["versions"]
        assert part["logprobs"] == pytest.approx(file["segments"][1]["logprobs"], abs=5e-4)
        assert len(part["tokens"]) == file["length"]
        assert part["advantages"] == file["advantages"]
        assert part["trainer_logprobs"] == file["trainer_logprobs"]
        assert part["trainer_logprobs"] == pytest.approx(file["segments"][1]["logprobs"], abs=1e-4)
        assert sum(part["advantages"]) / file["length"] == pytest.approx(file["advantage"], rel=1e-3)
    assert any(len({*row["segments"][0]["advantages"]}) > 1 for row in rows), "GAE differs between tokens"


def test_turns_and_branches(run, killed):
    text, _ = page([RunDirectory(killed)], ["second"])
    assert "<script>alert(1)" not in text
    [group] = chunks(text)["run0-train-2"]
    whole, branch, unjudged = group["rows"]
    assert [part["kind"] for part in whole["segments"]] == ["action", "observation", "action"]
    assert whole["events"] == [{"kind": "call", "t": 0.5}]
    assert (branch["tree"]["parent"], branch["final"]) == (0, False)
    assert (unjudged["unjudged"], unjudged["text"]) == ("no judge", "plain")


def test_the_newest_answers_come_first_where_not_all_fit(run, monkeypatch):
    from rlhf_runs import report

    monkeypatch.setattr(report, "MOST", 3_000)
    text, [notice] = page([RunDirectory(run)], ["first"])
    head = chunks(text)["head"][0]
    assert ["train", 3] in head["places"]
    assert "eval 0" in head["left_out"]
    assert f"the answers of {len(head['left_out'])} steps are left out" in notice


def test_the_command(rlhf_process, rlhf_here, run, killed, tmp_path):
    done = rlhf_process.run("report", run, killed, "-o", tmp_path / "page.html")
    assert done.stdout.startswith(f"wrote {tmp_path}/page.html (")
    assert "://" not in re.sub(r"<script>.*?</script>", "", (tmp_path / "page.html").read_text(), flags=re.S)
    result = rlhf_here("report", run, "-o", tmp_path / "nowhere/page.html")
    assert result.exit_code == 2
    assert "there is no directory" in result.stderr
    assert rlhf_here("report", tmp_path, "-o", tmp_path / "page.html").exit_code == 2


@pytest.mark.parametrize("size", [(1300, 900), (390, 844)], ids=["wide", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it_without_an_error(browser, run, killed, tmp_path, size, scheme):
    file = tmp_path / "page.html"
    text, _ = page([RunDirectory(run), RunDirectory(killed)], ["first", "second"])
    file.write_text(text)
    tab = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    tab.set_default_timeout(120_000)
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: None if request.url.startswith(("file:", "data:", "blob:")) else said.append(request.url))
    tab.goto(file.as_uri())
    tab.locator(".plot").first.scroll_into_view_if_needed()
    tab.wait_for_selector(".plot canvas")
    rows = tab.eval_on_selector_all("#runs tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))")
    assert [row[:3] for row in rows] == [["first", "finished", "3 of 3"], ["second", "killed", "3 of 3"]]
    values = RunDirectory(run).curve("reward/mean")[1]
    tab.locator('.plot[data-metric="reward/mean"]').scroll_into_view_if_needed()
    tab.wait_for_selector('.plot[data-metric="reward/mean"] canvas')
    drawn = tab.eval_on_selector('.plot[data-metric="reward/mean"]', "plot => plot.chart.data.slice(1)")
    assert drawn == [values, values]
    folded = tab.eval_on_selector_all("[data-key='Is it fast?silent'] tbody tr", "rows => rows.map(row => row.textContent)")
    assert any(row.startswith("rollout/dropped0 at every step") for row in folded)
    tab.fill("#filter", "memory/")
    tab.wait_for_selector("details[open] .plot canvas")
    tab.click("nav >> text=Answers")
    tab.wait_for_selector("#group .row")
    saved = RunDirectory(run).rows("train", 3)
    assert tab.locator("#group .row .text").count() == 2
    assert tab.locator("#group mark").count() == sum(row["length"] for row in saved[:2])
    assert tab.locator("#group mark").first.get_attribute("style")
    tab.select_option("#run", label="second")
    tab.wait_for_selector("#group .row.branch")
    assert "plain" in tab.inner_text("#group")
    tab.fill("#find", "no such text")
    tab.wait_for_selector("#group >> text=Nothing found.")
    tab.click("nav >> text=Settings")
    tab.wait_for_selector("#settings tbody tr")
    assert tab.locator("#settings tr").count() > 3
    tab.click("nav >> text=Environment")
    tab.wait_for_selector("main h2:text-is('Plugins')")
    tab.click("#theme")
    assert tab.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert not said
    tab.close()


def test_a_link_to_a_step_opens_charts_and_answers_there(browser, run, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(page([RunDirectory(run)], ["first"])[0])
    tab = browser.new_page()
    tab.set_default_timeout(120_000)
    tab.goto(f"{file.as_uri()}#step=2")
    plot = '.plot[data-metric="reward/mean"]'
    tab.wait_for_selector(f"{plot} canvas")
    assert tab.eval_on_selector(plot, "plot => plot.marked") == 2
    values = RunDirectory(run).curve("reward/mean")[1]
    shown = tab.locator(f"figure:has({plot}) .value").inner_text()
    assert float(shown.removeprefix("step 2: ")) == pytest.approx(values[1], rel=5e-3)
    tab.click("#preview a")
    tab.wait_for_selector("#group .row")
    assert tab.locator("#place option:checked").inner_text() == "training, step 2"
    tab.click("nav >> text=Metrics")
    tab.click("#nostep")
    tab.wait_for_selector(f"{plot} canvas")
    assert tab.eval_on_selector(plot, "plot => plot.marked") is None
    tab.close()


def test_charts_are_read_zoomed_and_chosen_from(browser, run, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(page([RunDirectory(run)], ["first"])[0])
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.set_default_timeout(120_000)
    tab.goto(file.as_uri())
    plot = '.plot[data-metric="reward/mean"]'
    tab.locator(plot).scroll_into_view_if_needed()
    tab.wait_for_selector(f"{plot} canvas")
    box = tab.locator(f"{plot} .u-over").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def ends():
        return tab.eval_on_selector(plot, "plot => [plot.chart.scales.x.min, plot.chart.scales.x.max]")

    tab.mouse.move(x, y)
    value = RunDirectory(run).curve("reward/mean")[1][1]
    step, shown = tab.inner_text(f"{plot} .tip").splitlines()
    assert (step, float(shown)) == ("step 2", pytest.approx(value, rel=5e-3))
    tab.mouse.down()
    tab.mouse.move(x + box["width"] / 4, y, steps=3)
    tab.mouse.up()
    assert ends() == pytest.approx([2, 2.5], abs=0.05)
    tab.mouse.dblclick(x, y)
    tab.wait_for_timeout(500)
    assert ends() == [1, 3]
    assert "#step" not in tab.url, "neither of them chooses a step"
    tab.mouse.click(x, y)
    tab.wait_for_url("**#step=2")
    assert tab.eval_on_selector(plot, "plot => plot.marked") == 2
    tab.close()


@pytest.mark.parametrize("width", [390, 800, 1280, 1700])
def test_no_row_of_charts_has_a_hole(browser, run, tmp_path, width):
    file = tmp_path / "page.html"
    file.write_text(page([RunDirectory(run)], ["first"])[0])
    tab = browser.new_page(viewport={"width": width, "height": 900})
    tab.set_default_timeout(120_000)
    tab.goto(file.as_uri())
    tab.wait_for_selector(".plots figure", state="attached")
    holes = tab.eval_on_selector_all(
        ".plots",
        """grids => grids.filter(grid => grid.clientWidth).flatMap(grid => {
          const right = new Map();
          for (const { offsetTop, offsetLeft, offsetWidth } of grid.children) right.set(offsetTop, offsetLeft + offsetWidth);
          return [...right.values()].map(end => grid.offsetLeft + grid.clientWidth - end);
        })""",
    )
    assert holes
    assert max(map(abs, holes)) <= 1
    tab.close()


def test_figures_of_evaluations_have_their_interval(browser, tmp_path):
    (tmp_path / "config.yaml").write_text(write_yaml(RunConfig().model_dump()))
    rows = [
        {
            "step": step,
            "eval/pass@1": value,
            "eval/pass@1/stderr": error,
            "eval/reward/mean": 2 * value,
            "eval/reward/stderr": error,
        }
        for step, value, error in ((0, 0.5, 0.05), (10, 0.9, 0.02))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "page.html"
    file.write_text(page([RunDirectory(tmp_path)], ["first"])[0])
    tab = browser.new_page()
    tab.set_default_timeout(120_000)
    tab.goto(file.as_uri())
    tab.wait_for_selector(".plot canvas")
    told = {
        figure.locator("h3").text_content(): figure.locator(".value").text_content().replace("\xa0", " ")
        for figure in tab.locator("figure").all()
    }
    assert told["eval/pass@1"] == "0.5 ± 0.098 → 0.9 ± 0.039 (95 %)"
    assert told["eval/reward/mean"] == "1 ± 0.098 → 1.8 ± 0.039 (95 %)"
    band = tab.eval_on_selector('.plot[data-metric="eval/pass@1"]', "plot => plot.chart.data")
    assert band == [[0, 10], [0.5, 0.9], pytest.approx([0.598, 0.9392]), pytest.approx([0.402, 0.8608])]
    tab.close()


def test_ten_thousand_answers(browser, run, tmp_path):
    large = tmp_path / "large"
    shutil.copytree(run, large, ignore=shutil.ignore_patterns("model", "checkpoints", "trajectories"))
    (large / "trajectories").mkdir()
    words = Path(__file__).read_text().split()
    for step in range(10):
        rows = []
        for place in range(1000):
            answer = " ".join(words[(17 * place + 31 * step + k) % len(words)] for k in range(150))
            row = {
                "step": step,
                "group_id": f"g{place // 8}",
                "prompt": f"question {place // 8}",
                "text": answer,
                "sample": place % 8,
            }
            rows.append(
                json.dumps(row | {"reward": place % 8 / 8, "length": 150, "episode_id": f"e{place}", "task": place // 8})
            )
        (large / f"trajectories/train-step-{step:06d}.jsonl").write_text("\n".join(rows) + "\n")
    text, notices = page([RunDirectory(large)], ["large"])
    assert not notices
    assert len(text) < 20e6
    file = tmp_path / "page.html"
    file.write_text(text)
    tab = browser.new_page()
    tab.set_default_timeout(120_000)
    tab.goto(file.as_uri())
    tab.click("nav >> text=Answers")
    tab.wait_for_selector("#group .row")
    assert tab.locator("#place option").count() == 10
    assert tab.locator("#groups button").count() == 125
    assert tab.locator("#group .row").count() == 8
    tab.close()
