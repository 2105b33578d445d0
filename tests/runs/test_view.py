"""``rlhf view``: the page of a run that goes on."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from http import HTTPStatus

import pytest
from rlhf_runs.server import RunsServer

from rlhf_host.runs.directory import RunDirectory

from ..conftest import in_background

pytest.importorskip("aiohttp")
STEPS = 30


@pytest.fixture
def running(rlhf, tiny_model, prompts, tmp_path):
    """A run of the real command that waits behind its third step until the file ``go`` is there."""
    reward = tmp_path / "judge.py"
    reward.write_text(f"""
import itertools, pathlib, time

calls = itertools.count()

def judge(text):
    while next(calls) >= 12 and not pathlib.Path({str(tmp_path / "go")!r}).exists():
        time.sleep(0.02)
    return float(sum(letter in "aeiou" for letter in text))
""")
    run = tmp_path / "run"
    small = ("--rollout.n", "2", "--rollout.max-new-tokens", "6", "--train.batch-size", "2", "--train.threads", "1")
    model = ("train", "--algo", "rloo", "--reward", f"{reward}:judge", "--actor.model", tiny_model, "--data", prompts)
    process = rlhf.start(*model, *small, "--trajectories.every", "1", "--train.steps", str(STEPS), "--run-dir", run)
    while not (run / "metrics.jsonl").exists() or RunDirectory(run).step < 3:
        assert process.poll() is None, process.communicate()
    yield run, tmp_path / "go"
    process.kill()
    process.communicate()


@pytest.fixture
def view():
    """Starts the command; gives its process and address."""
    begun = []

    def start(*arguments):
        command = [sys.executable, "-m", "rlhf_host.cli.main", "view", *map(str, arguments), "--no-browser"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
        begun.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return answer.status, answer.headers, answer.read()


def read(packed):
    return json.loads(gzip.decompress(packed))


def test_pieces_are_what_the_files_have_and_only_for_those_with_the_address(running, view):
    run, go = running
    process, url = view(run)
    assert url.startswith("http://127.0.0.1:")
    status, headers, packed = get(f"{url}chunk/head")
    [head] = read(packed)
    assert (status, head["status"], head["step"], head["steps"]) == (200, "running", 3, STEPS)
    assert head["curves"] == {name: [*map(list, curve)] for name, curve in RunDirectory(run).curves.items()}
    assert get(f"{url}chunk/head?seen={headers['ETag']}")[0] == 204
    split, step = head["places"][-1]
    rows = [row for group in read(get(f"{url}chunk/run0-{split}-{step}")[2]) for row in group["rows"]]
    assert [row["reward"] for row in rows] == [row["reward"] for row in RunDirectory(run).rows(split, step)]
    root = url.rsplit("/", 2)[0]
    for wrong in (
        f"{root}/",
        f"{root}/chunk/head",
        f"{url[:-2]}x/",
        f"{url}chunk/run0-train-99",
        f"{url}chunk/run1-train-1",
        f"{url}chunk/%2e%2e",
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(wrong)
        assert refused.value.code == 404, wrong
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(url, Host="elsewhere.example")
    assert refused.value.code == 403
    go.touch()
    while (answer := get(f"{url}chunk/head?seen={headers['ETag']}"))[0] == 204 or read(answer[2])[0]["status"] == "running":
        pass
    [head] = read(answer[2])
    assert (head["status"], head["step"]) == ("finished", STEPS)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0
    assert process.stderr.read().endswith("Ended.\n")


def test_in_the_background_ctrl_c_is_meant_for_others(view, tmp_path):
    settings = {"train": {"steps": 9}, "checkpoint": {}, "roles": {"actor": {"model": "m"}}, "data": {"sources": []}}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    with in_background():
        process, url = view(tmp_path)
    process.send_signal(signal.SIGINT)
    assert get(url)[0] == 200
    process.terminate()
    assert process.wait(timeout=120) == 0
    assert process.stderr.read().endswith("Ended.\n")


def test_what_is_no_run_is_refused(rlhf_here, tmp_path):
    result = rlhf_here("view", tmp_path, "--no-browser")
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


def test_a_run_that_is_removed_stops_no_other(view, tmp_path):
    for name in ("gone", "kept"):
        (tmp_path / name).mkdir()
        settings = {"train": {"steps": 9}, "checkpoint": {}, "roles": {"actor": {"model": "m"}}, "data": {"sources": []}}
        (tmp_path / name / "config.yaml").write_text(json.dumps(settings))
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    _, url = view(tmp_path / "gone", tmp_path / "kept")
    assert [head["step"] for head in read(get(f"{url}chunk/head")[2])] == [1, 1]
    (tmp_path / "gone").rename(tmp_path / "elsewhere")
    with (tmp_path / "kept/metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": 1.0}\n')
    gone, kept = read(get(f"{url}chunk/head")[2])
    assert (gone["status"], gone["step"], kept["step"]) == ("removed", 1, 2)
    assert "no such run directory" in gone["warnings"][0]


def test_a_request_is_answered_before_its_body_comes(tmp_path):
    settings = {"train": {"steps": 9}, "checkpoint": {}, "roles": {"actor": {"model": "m"}}, "data": {"sources": []}}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))

    async def asked(url, token):
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET /{token}/ HTTP/1.1\r\nHost: {host}\r\nContent-Length: {60 << 20}\r\n\r\n".encode())
        async with asyncio.timeout(5):
            line = await reader.readline()
        writer.close()
        return line.decode().split(" ", 1)[1].strip()

    async def test():
        server = RunsServer([RunDirectory(tmp_path)], ["run"])
        url = await server.start(0)
        root, token = url.rstrip("/").rsplit("/", 1)
        found = [await asked(root, one) for one in ("nobody", token[:-1], token)]
        await server.close()
        return found

    assert asyncio.run(test()) == ["404 Not Found", "404 Not Found", f"413 {HTTPStatus(413).phrase}"]


def test_without_the_package_of_servers_a_line_says_what_to_install(rlhf_here, tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("{}")
    monkeypatch.delitem(sys.modules, "rlhf_runs.server", raising=False)
    monkeypatch.setitem(sys.modules, "rlhf_server", None)
    done = rlhf_here("view", tmp_path, "--no-browser")
    assert (done.exit_code, done.stderr) == (
        2,
        "Error: rlhf view needs rlhf-server: pip install -c dist/wheels.txt 'rlhf-runs[view]'\n",
    )


def test_a_browser_follows_a_run(running, view, browser):
    run, go = running
    _, url = view(run)
    tab = browser.new_page()
    tab.set_default_timeout(120_000)
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.goto(url)
    tab.wait_for_selector("#live >> text=live")
    tab.wait_for_selector(f"#headline >> text=Step 3 of {STEPS}")
    plot = '.plot[data-metric="reward/mean"]'
    tab.wait_for_selector(f"{plot} canvas")
    assert tab.eval_on_selector(plot, "plot => plot.chart.data[1].length") == 3
    tab.click("nav >> text=Answers")
    tab.wait_for_selector("#group .row")
    shown = tab.inner_text("#group")
    places = tab.locator("#place option").count()
    go.touch()
    tab.locator("#place option").nth(places).wait_for(state="attached")
    assert tab.inner_text("#group") == shown, "what is read does not move"
    tab.click("nav >> text=Metrics")
    tab.wait_for_selector("#headline >> text=finished in")
    tab.wait_for_selector(f"{plot} canvas")
    values = RunDirectory(run).curve("reward/mean")[1]
    assert tab.eval_on_selector(plot, "plot => plot.chart.data[1]") == values
    assert not said
    tab.close()
