"""``rlhf plugins search``: through the real command line, over the lists that come with the host, files and a real server."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from rlhf_authoring import index

from rlhf_host import __version__
from rlhf_host.commands import wrap
from rlhf_host.installed import install_line
from rlhf_host.plugins.discovery import normalised

JUDGE = {
    "name": "acme-judges",
    "version": "2.1",
    "summary": "Judges of Acme",
    "api": ">=0.10,<0.11",
    "homepage": "https://example.org/judges",
    "requirement": "acme-judges @ git+https://example.org/judges.git@v2.1",
    "plugins": [
        {"kind": "reward", "name": "politeness", "about": "Counts thanks."},
        {"kind": "algo", "name": "slow_rloo", "about": "RLOO with patience."},
    ],
}
OLD = {
    "name": "acme-old",
    "version": "0.1",
    "summary": "An old one",
    "api": ">=0.1,<0.2",
    "plugins": [{"kind": "reward", "name": "rudeness", "about": "Counts curses."}],
}


@pytest.fixture
def search(rlhf_here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: rlhf_here("plugins", "search", *arguments)


@pytest.fixture
def file(tmp_path):
    def write(*entries, text=None, **keys):
        path = tmp_path / "index.json"
        path.write_text(json.dumps({"distributions": entries, **keys}) if text is None else text)
        return path

    return write


@pytest.fixture
def server():
    """Answers with what ``bodies`` has for a path: bytes, or a function of the response."""
    bodies: dict[str, object] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = bodies.get(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            with contextlib.suppress(OSError):  # who asked has gone
                if callable(body):
                    body(self.wfile)
                elif body is not None:
                    self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    bodies["address"] = f"http://127.0.0.1:{running.server_port}"
    yield bodies
    running.shutdown()
    running.server_close()
    thread.join()


def found(done):
    assert done.exit_code == 0, done.output
    return [(row["kind"], row["name"]) for row in json.loads(done.stdout)]


# --- what is found --------------------------------------------------------------------------------


def test_the_command_line_shows_what_to_install(site, file):
    site.install("acme-old", {"rlhf.rewards": "rudeness = acme:X"}, {"acme.py": ""}, version="0.0.9")
    done = site.rlhf("plugins", "search", "acme", "--index", str(file(JUDGE, OLD, note="Ask Joe for a key.")))
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout
        == f"""\
acme-judges 2.1, for rlhf-host >=0.10,<0.11: not installed
  reward  politeness  Counts thanks.
  algo    slow_rloo   RLOO with patience.
  https://example.org/judges
  pip install 'acme-judges @ git+https://example.org/judges.git@v2.1'

acme-old 0.1, for rlhf-host >=0.1,<0.2, not for this rlhf-host {__version__}: 0.0.9 is
  installed
  reward  rudeness  Counts curses.
  pip install acme-old

Ask Joe for a key.
"""
    )


@pytest.mark.usefixtures("others")
def test_the_list_of_the_host_is_searched_and_fits_80_columns(search):
    done = search("MATH", "label")
    assert done.exit_code == 0
    assert (
        done.stdout
        == f"""\
rlhf-plugin-math-verifier {__version__}, for rlhf-host >=0.10,<0.11: installed
  reward  math_verifier  Compares the answer in the last action's text with the
                         label: reward and 0-1 score.
  {install_line("rlhf-plugin-math-verifier")}

{"".join(f"{line}{chr(10)}" for line in wrap(index.shipped()[0].note or "", 80) if line)}"""
    )
    assert max(map(len, search().stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], [("reward", "politeness"), ("algo", "slow_rloo"), ("reward", "rudeness")]),
        (["COUNTS"], [("reward", "politeness"), ("reward", "rudeness")]),
        (["counts", "thanks"], [("reward", "politeness")]),
        (["reward", "old"], [("reward", "rudeness")]),
        (["acme", "--kind", "algo"], [("algo", "slow_rloo")]),
        (["thanks", "curses"], []),
    ],
)
def test_a_plugin_must_have_every_word(search, file, arguments, names):
    assert found(search(*arguments, "--json", "--index", file(JUDGE, OLD))) == names


def test_json_has_what_the_table_has(search, file):
    (row,) = json.loads(search("politeness", "--json", "--index", file(JUDGE)).stdout)
    assert row == {
        "kind": "reward",
        "name": "politeness",
        "about": "Counts thanks.",
        "distribution": "acme-judges",
        "version": "2.1",
        "api": ">=0.10,<0.11",
        "fits": True,
        "installed": None,
        "homepage": "https://example.org/judges",
        "install": "pip install 'acme-judges @ git+https://example.org/judges.git@v2.1'",
        "certificate": None,
    }


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["politness"], "Nothing found; did you mean 'politeness'?\n"),
        (["counts", "acme-jugdes"], "Nothing found; did you mean 'acme-judges'?\n"),
        (["politeness", "zzzzzz"], "Nothing found\n"),
    ],
)
def test_where_nothing_is_found_near_names_help(search, file, words, answer):
    done = search(*words, "--index", file(JUDGE))
    assert (done.exit_code, done.stdout) == (0, answer)


def test_the_list_on_the_page_for_authors_is_one(search, file, repository):
    page = (repository / "docs/plugins/index.md").read_text(encoding="utf-8")
    (text,) = re.findall(r'^```json title="plugins.json"\n(.*?)^```', page, re.M | re.S)
    assert found(search("politeness", "--json", "--index", file(text=text))) == [("reward", "politeness")]


# --- lists that cannot be used --------------------------------------------------------------------


def without(key, entry=JUDGE):
    return {name: value for name, value in entry.items() if name != key}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([without("version")], "distributions[0].version is missing"),
        ([JUDGE, {**OLD, "sumary": "x"}], "distributions[1].sumary is no key of such a list; did you mean 'summary'?"),
        (
            [{**OLD, "plugins": [{"kind": "rewrad", "name": "x", "about": "x"}]}],
            "distributions[0].plugins[0].kind: is no kind of plugin; did you mean 'reward'? (got 'rewrad')",
        ),
        ([{**OLD, "api": "0.9"}], "distributions[0].api: must be a range of host versions, such as >=0.10,<0.11 (got '0.9')"),
        ([{**OLD, "version": "new"}], "distributions[0].version: must be a version, such as 1.0.2 (got 'new')"),
        (
            [{**OLD, "summary": "\x1b[2J"}],
            "distributions[0].summary: must be a line of text without control characters (got '\\x1b[2J')",
        ),
        (
            [{**OLD, "api": f">={'9' * 5000}"}],
            f"distributions[0].api: must be a range of host versions, such as >=0.10,<0.11 (got '>={'9' * 197}...)",
        ),
        (
            [{**OLD, "version": "9" * 5000}],
            f"distributions[0].version: must be a version, such as 1.0.2 (got '{'9' * 199}...)",
        ),
        (
            [{**OLD, "pip_options": "--pre '"}],
            'distributions[0].pip_options: must be words as in a shell, with every quote closed (got "--pre \'")',
        ),
        ([OLD, {**OLD, "name": "Acme_Old"}], "Acme_Old is listed twice"),
    ],
)
def test_a_wrong_key_is_named_with_its_file(search, file, entries, message):
    path = file(*entries)
    done = search("--index", path)
    assert (done.exit_code, done.stderr) == (2, f"Error: {path}: {message}\n")


def test_a_file_must_be_there_and_be_json(search, file, tmp_path):
    done = search("--index", tmp_path / "none.json")
    assert (done.exit_code, done.stderr) == (2, f"Error: {tmp_path}/none.json cannot be read: No such file or directory\n")
    path = file(text='{"distributions": [')
    done = search("--index", path)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"Error: {path}: Invalid JSON: EOF while parsing")
    assert search("--index", file(text="[]")).stderr.startswith(f"Error: {path}: the list: Input should be an object")
    path.write_bytes(b" " * 5_000_000)
    assert search("--index", path).stderr == f"Error: {path} is larger than 4 MB, which no list of plugins is\n"


def test_a_file_may_begin_with_a_byte_order_mark(search, file):
    path = file(JUDGE)
    text = path.read_text()
    path.write_text(text, "utf-8-sig")
    assert found(search("thanks", "--json", "--index", path)) == [("reward", "politeness")]
    for encoding in ("utf-16", "utf-16-be"):
        path.write_text(text, encoding)
        done = search("--index", path)
        assert (done.exit_code, done.stderr) == (2, f"Error: {path} is UTF-16 or not text: save it as UTF-8\n")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("", "--index '': a list is read from a path, or from an http or https address"),
        ("file:///x.json", "--index file:///x.json: a list is read from a path, or from an http or https address"),
        ("FTP://host/x.json", "--index FTP://host/x.json: a list is read from a path, or from an http or https address"),
        ("~nosuch/x.json", "~nosuch/x.json cannot be read: Could not determine home directory."),
        ("http://a b/", "http://a b/ cannot be read: URL can't contain control characters. 'a b' (found at least ' ')"),
        ("http://127.0.0.1:abc/", "http://127.0.0.1:abc/ cannot be read: nonnumeric port: 'abc'"),
        (
            "http://user:SECRET@127.0.0.1/x",
            "http://127.0.0.1/x: an address must be without user and password; download the list and give its path",
        ),
    ],
)
def test_a_place_that_is_none(search, place, message):
    done = search("--index", place)
    assert (done.exit_code, done.stderr) == (2, f"Error: {message}\n")


def test_options_for_pip_are_words(search, file):
    options = "--index-url http://example.org/$(id) --pre; id"
    (row,) = json.loads(search("--json", "--index", file({**OLD, "pip_options": options})).stdout)
    assert row["install"] == "pip install --index-url 'http://example.org/$(id)' '--pre;' id acme-old"


# --- addresses ------------------------------------------------------------------------------------


def test_a_list_may_be_at_an_address(search, server):
    server["/plugins.json"] = json.dumps({"distributions": [JUDGE]}).encode()
    assert found(search("thanks", "--json", "--index", f"{server['address']}/plugins.json")) == [("reward", "politeness")]


def test_an_address_that_does_not_answer_well_is_named(search, server, monkeypatch):
    def refused(path, code=2):
        url = f"{server['address']}{path}"
        done = search("--index", url)
        assert done.exit_code == code
        assert done.stderr.startswith(f"Error: {url}")
        return done.stderr.removeprefix(f"Error: {url}").strip()

    over = threading.Event()
    server |= {"/page": b"<html>", "/large": b" " * 5_000_000, "/late": b" ", "/silent": lambda out: over.wait(30)}
    assert refused("/none") == "cannot be read: 404 Not Found"
    assert refused("/page").startswith(": Invalid JSON")
    assert refused("/large") == "is larger than 4 MB, which no list of plugins is"
    with monkeypatch.context() as patch:
        patch.setattr(index, "time", SimpleNamespace(monotonic=itertools.count(step=11).__next__))
        assert refused("/late", code=1) == "cannot be read: not complete after 10 s"
    monkeypatch.setattr(index, "TIMEOUT_S", 0.5)
    assert refused("/silent", code=1) == "cannot be read: timed out"
    over.set()


def test_an_address_where_nobody_listens_is_named(search):
    done = search("--index", "http://127.0.0.1:9/plugins.json")
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: http://127.0.0.1:9/plugins.json cannot be read: ")
    assert done.stderr.endswith("Connection refused\n")


@pytest.fixture
def raw():
    """``raw(answer)``: an address that answers every connection with these bytes."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            while self.rfile.readline().strip():
                pass
            self.wfile.write(self.server.answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()

        def answers(answer):
            running.answer = answer
            return f"http://127.0.0.1:{running.server_address[1]}/x"

        yield answers
        running.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        (b"garbage \x1b[2J\r\n\r\n", 1, "cannot be read: garbage \\x1b[2J"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{", 1, "cannot be read: IncompleteRead("),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 101 + b"\r\n", 1, "cannot be read: got more than 100 headers"),
        (b"HTTP/1.1 503 No\r\n\r\n", 1, "cannot be read: 503 No"),
        (b"HTTP/1.1 404 " + b"x" * 5000 + b"\r\n\r\n", 2, f"cannot be read: 404 {'x' * 200}...\n"),
        (
            b"HTTP/1.1 302 Found\r\nLocation: ftp://127.0.0.1/x\r\n\r\n",
            2,
            "leads to ftp://127.0.0.1/x: lists are read from http and https addresses only",
        ),
        (b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n", 2, "cannot be read: 302 Found"),
    ],
)
def test_answers_that_are_no_list(search, raw, answer, code, message):
    url = raw(answer)
    done = search("--index", url)
    assert (done.exit_code, done.stderr.count("\n")) == (code, 1), done.output
    assert done.stderr.startswith(f"Error: {url} {message}")


# --- the lists that come with the host ------------------------------------------------------------


def test_others_have_names_of_their_own():
    ours, others = index.shipped()
    taken = {normalised(entry.name) for entry in ours.distributions}
    assert [entry.name for entry in others.distributions if normalised(entry.name) in taken] == []
