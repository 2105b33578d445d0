"""The pages' Content-Security-Policy: each of their scripts and styles by its hash, and nothing else."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import urllib.request
from html.parser import HTMLParser

import pytest
from rlhf_runs.report import page

from rlhf_host import RunDirectory
from rlhf_host.settings import RunConfig, write_yaml


class Parts(HTMLParser):
    """Inline scripts and styles of a page, its policy, and what would need more than hashes."""

    def __init__(self, text):
        super().__init__()
        self.policy, self.scripts, self.styles, self.others = "", [], [], []
        self._into = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if given.get("http-equiv") == "Content-Security-Policy":
            assert not self.scripts + self.styles, "it holds for what comes after it"
            self.policy = given["content"]
        self.others += [(tag, name) for name in given if name.startswith("on") or name == "style"]
        self.others += [(tag, name) for name in ("src", "href") if not given.get(name, "data:").startswith("data:")]
        if (tag == "script" and given.get("type") is None) or tag == "style":
            self._into = self.scripts if tag == "script" else self.styles
            self._into.append("")

    def handle_data(self, data):
        if self._into is not None:
            self._into[-1] += data

    def handle_endtag(self, tag):
        self._into = None


def directives(policy):
    return {name: sources for name, *sources in map(str.split, policy.split(";"))}


def digest(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.yaml").write_text(write_yaml(RunConfig().model_dump()))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 1.0}) + "\n")
    return RunDirectory(tmp_path)


def check(text, *, asks):
    parts = Parts(text)
    policy = directives(parts.policy)
    assert len(parts.scripts) == 2
    assert policy["script-src"] == [digest(script) for script in parts.scripts]
    assert policy["style-src"] == [digest(style) for style in parts.styles]
    assert len(parts.styles) == 1
    assert parts.others == []
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == ["'none'"]
    assert policy["connect-src"] == [asks]
    assert policy["img-src"] == ["data:"]
    assert "unsafe" not in parts.policy
    assert "\r" not in text
    assert "\0" not in text
    return parts.policy


def test_a_page_that_is_a_file_has_it_inside(run):
    text, _ = page([run], ["<script>alert(1)</script>"])
    check(text, asks="'none'")


def test_a_page_that_is_served_has_it_in_its_header_too(run):
    pytest.importorskip("rlhf_server")
    from rlhf_runs.server import RunsServer

    def get(url):
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.headers["Content-Security-Policy"], answer.read()

    async def main():
        server = RunsServer([run], ["a"])
        url = await server.start(0)
        try:
            return await asyncio.to_thread(get, url), await asyncio.to_thread(get, f"{url}chunk/head")
        finally:
            await server.close()

    (header, text), (of_data, _) = asyncio.run(main())
    policy = check(text.decode(), asks="'self'")
    assert header == f"{policy}; frame-ancestors 'none'"
    assert of_data == "default-src 'none'; frame-ancestors 'none'"
