"""``rlhf push``: as huggingface_hub speaks to the hub, and what it says where it cannot. The hub here is a stand-in."""

from __future__ import annotations

import base64
import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from .test_export import small


class Hub(BaseHTTPRequestHandler):
    """Takes one commit, with all files in it."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or self.chunks()
        here, seen = f"http://127.0.0.1:{self.server.server_port}", self.server.seen
        seen.append((self.path, self.headers.get("Authorization"), body))
        if self.server.refuses:
            return self.answer({"error": "You don't have the rights"}, 403)
        if self.path == "/api/repos/create":
            return self.answer({"url": f"{here}/me/model"})
        if "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        if "/commit/" in self.path:
            return self.answer({"commitUrl": f"{here}/me/model/commit/abc", "commitOid": "abc"})
        return self.answer({})

    def do_GET(self):
        self.answer({"id": "me/model", "sha": "abc", "siblings": []})

    def chunks(self):
        body = b""
        while size := int(self.rfile.readline() or b"0", 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        return body

    def answer(self, value, status=200):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen, server.refuses = [], False
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def run(rlhf, tiny_model, prompts, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    rlhf.run(*small(tiny_model, prompts), "--run-dir", path)
    return path


@pytest.fixture
def push(rlhf_process, hub, tmp_path):
    """``push(*arguments, code=...)`` with a token, and the stand-in as the hub."""
    online = {
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(tmp_path),
        "HF_TOKEN": "t",
    }

    def push(*arguments, code=0, **variables):
        rlhf_process.environment.update(online | variables)
        return rlhf_process.run("push", *arguments, code=code)

    before = dict(rlhf_process.environment)
    yield push
    rlhf_process.environment.clear()
    rlhf_process.environment.update(before)


def test_one_commit_has_the_files_of_export(rlhf_here, push, hub, run, tmp_path):
    printed = push(run, "me/model", "--private").stdout
    assert printed == f"http://127.0.0.1:{hub.server_port}/me/model/commit/abc\n"
    made = next(json.loads(body) for path, _, body in hub.seen if path == "/api/repos/create")
    assert (made["name"], made["organization"]) == ("model", "me")
    assert made.get("private") is True or made.get("visibility") == "private"
    assert {key for _, key, _ in hub.seen} <= {"Bearer t", None}
    lines = next(body for path, _, body in hub.seen if "/commit/" in path).decode().splitlines()
    header, *files = [json.loads(line)["value"] for line in lines]
    assert header["summary"] == f"model of {run}, step 2, by rlhf push"
    assert rlhf_here("export", run, "--output", tmp_path / "same").exit_code == 0
    same = {path.name: path.read_bytes() for path in (tmp_path / "same").iterdir()}
    assert {file["path"]: base64.b64decode(file["content"]) for file in files} == same


def test_a_hub_that_refuses(push, hub, run):
    hub.refuses = True
    said = push(run, "me/model", code=1).stderr
    assert re.search(r"me/model is not uploaded to http://127\.0\.0\.1:\d+: .*403", said)


@pytest.mark.parametrize(
    ("name", "variables", "message"),
    [
        ("me/model", {"HF_TOKEN": ""}, "there is no token for the hub: hf auth login, or set HF_TOKEN"),
        ("me/model", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set; rlhf export writes the same files into a directory"),
        ("me/model", {"HF_ENDPOINT": "http://hub.invalid"}, "it cannot be reached from here"),
        ("a/b/c", {}, "a/b/c is no name of a repository, such as my-name/my-model"),
    ],
)
def test_refusals(push, hub, run, name, variables, message):
    assert message in push(run, name, code=2, **variables).stderr
    assert hub.seen == []


def test_a_damaged_model_is_not_uploaded(push, hub, run, tmp_path):
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    (tmp_path / "run/model/model.safetensors").write_bytes(b"xx")
    assert "run/model/model.safetensors is damaged: " in push(tmp_path / "run", "me/model", code=2).stderr
    assert hub.seen == []


def test_a_hub_that_is_gone(push, run):
    assert (
        "me/model is not uploaded to http://127.0.0.1:9: "
        in push(run, "me/model", code=1, HF_ENDPOINT="http://127.0.0.1:9").stderr
    )
