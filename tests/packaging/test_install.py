"""`scripts/install.py` installs with uv, told pip's settings, and with pip where uv cannot; stand-ins record the calls."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from ..scripts_as_modules import load_script

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/install.py"
UV = """#!/bin/sh
if [ "$1" = --version ]; then echo "${UV_SAYS:-uv 0.13.9 (x)}"; exit; fi
echo "uv $*" >> calls
env | grep -E '^(UV_[A-Z]+_|SSL_|HTTPS_PROXY)' > told
if [ -n "$KILLED" ]; then kill -9 $$; fi
case "$FAILS" in *"$(grep -c ^uv calls)"*) exit 2 ;; esac
"""
PIP = """
import os, pathlib, sys
words = sys.argv[1:]
if "config" in words:
    print(os.environ.get("SETTINGS", "global.index-url='https://own/simple'"))
else:
    with open("calls", "a") as calls:
        print("pip", *words, file=calls)
    if words[-1] == "uv" and "BRINGS_NO_UV" not in os.environ:
        uv = pathlib.Path(sys.executable).with_name("uv")
        uv.write_text(os.environ["UV"])
        uv.chmod(0o755)
    sys.exit(int(os.environ.get("PIP_CODE", 0)))
"""


class Environment:
    """A Python with a pip of its own; `calls` are lines of what was run, `told` what uv found in its environment."""

    def __init__(self, path: Path):
        self.path = path
        for folder in ("bin", "path", "modules/pip"):
            (path / folder).mkdir(parents=True)
        self.python = path / "bin/python"
        self.python.symlink_to(sys.executable)
        (path / "modules/pip/__init__.py").touch()
        (path / "modules/pip/__main__.py").write_text(PIP)

    def uv(self, folder: str = "path", text: str = UV) -> None:
        (self.path / folder / "uv").write_text(text)
        (self.path / folder / "uv").chmod(0o755)

    def install(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.path / 'path'}:/usr/bin:/bin"
        environment = {"PATH": path, "PYTHONPATH": str(self.path / "modules"), "UV": UV, **env}
        command = [self.python, SCRIPT, *(arguments or ("-c", "pins.txt", "-e", "."))]
        return subprocess.run(command, cwd=self.path, env=environment, capture_output=True, text=True)

    @property
    def calls(self) -> list[str]:
        flags = f" --quiet --python {self.python}"
        return [line.replace(flags, "") for line in (self.path / "calls").read_text().splitlines()]

    @property
    def told(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in (self.path / "told").read_text().splitlines())


PIP_UV = "pip --disable-pip-version-check install --quiet --no-compile -c pins.txt uv"
PIP_ALL = "pip --disable-pip-version-check install --quiet --no-compile -c pins.txt -e ."
UV_ALL = "uv pip install -c pins.txt -e ."


@pytest.fixture
def environment(tmp_path) -> Environment:
    return Environment(tmp_path)


@pytest.fixture
def script():
    return load_script("scripts/install.py")


def test_the_uv_on_the_path_installs(environment):
    environment.uv()
    done = environment.install()
    assert (done.returncode, done.stderr) == (0, "")
    assert environment.calls == [UV_ALL]
    assert environment.told["UV_INDEX_URL"] == "https://own/simple"


@pytest.mark.parametrize("stands_in", ["", "#!/bin/sh\necho no such version; exit 127\n", "#!/bin/sh\necho 'uv 0.4.30'\n"])
def test_pip_brings_uv_once_where_there_is_none_or_one_that_does_not_do(environment, stands_in):
    if stands_in:
        environment.uv(text=stands_in)
    assert environment.install().returncode == 0
    assert environment.install().returncode == 0
    assert environment.calls == [PIP_UV, UV_ALL, UV_ALL]


def test_pip_installs_where_it_cannot_bring_uv(environment):
    done = environment.install(BRINGS_NO_UV="1")
    assert done.returncode == 0
    assert done.stderr == "there is no uv, and pip could not install it: installing with pip, which takes longer\n"
    assert environment.calls == [PIP_UV, PIP_ALL]


def test_pip_installs_where_uv_fails_and_its_exit_code_counts(environment):
    environment.uv()
    done = environment.install(FAILS="1")
    assert done.returncode == 0
    assert done.stderr == "uv failed: installing with pip, which takes longer\n"
    assert environment.install(FAILS="12", PIP_CODE="3").returncode == 3
    assert environment.calls == [UV_ALL, PIP_ALL] * 2


def test_what_was_killed_is_not_tried_in_another_way(environment):
    environment.uv()
    assert environment.install(KILLED="1").returncode == 137
    assert environment.calls == [UV_ALL]


def test_pip_installs_where_a_setting_has_no_counterpart(environment):
    environment.uv()
    done = environment.install(SETTINGS="install.require-hashes='true'")
    assert done.stderr == "uv has no counterpart of pip's setting require-hashes: installing with pip, which takes longer\n"
    assert environment.calls == [PIP_ALL]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyPI's builds are for CPUs")
def test_torch_is_the_build_for_cpus_where_nobody_names_an_index(environment):
    environment.uv()
    for_cpus = f"{UV_ALL} --torch-backend cpu"
    assert environment.install(SETTINGS="").returncode == 0
    assert environment.calls == [for_cpus]
    done = environment.install(SETTINGS="", FAILS="2")  # as where only the package index is reached
    assert done.stderr == "uv failed with PyTorch's index of CPU builds: trying without it\n"
    assert environment.calls[1:] == [for_cpus, UV_ALL]
    environment.install(SETTINGS="", UV_INDEX_URL="https://own/simple")
    environment.install(SETTINGS="global.find-links='/wheels'")
    assert environment.calls[3:] == [UV_ALL] * 2


def test_pip_says_what_its_files_and_variables_say(script, tmp_path, monkeypatch):
    """The real pip; a variable wins over the section of the command, and that one over the global section."""
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://a:b@own/simple\nextra-index-url =\n    https://one/simple\n    https://two/simple\n"
        "retries = 1\nproxy = http://p\n[install]\nretries = 2\nproxy = http://q\n[download]\nretries = 3\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_PROXY", "http://r")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    found = script.pip_settings()
    expected = {"index-url": "https://a:b@own/simple", "retries": "2", "proxy": "http://r"}
    assert {key: found[key] for key in expected} == expected
    assert found["extra-index-url"].split() == ["https://one/simple", "https://two/simple"]
    assert "config-file" not in found or "config-file" in script.IN_PIP_ALONE


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"index-url": "https://a/simple"}, {"UV_INDEX_URL": "https://a/simple"}),
        (
            {"extra-index-url": "\nhttps://a/simple\nfile:///b"},
            {"UV_EXTRA_INDEX_URL": "https://a/simple file:///b", "UV_INDEX_STRATEGY": "unsafe-best-match"},
        ),
        ({"find-links": "/a ~/b"}, {"UV_FIND_LINKS": "/a,/home/me/b"}),
        ({"no-index": "yes"}, {"UV_NO_INDEX": "1"}),
        ({"no-index": "false"}, {}),
        ({"no-cache-dir": "false"}, {"UV_NO_CACHE": "1"}),
        ({"pre": "1"}, {"UV_PRERELEASE": "allow"}),
        ({"cert": "~/ca.pem"}, {"SSL_CERT_FILE": "/home/me/ca.pem"}),
        (
            {"proxy": "http://p:1"},
            dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://p:1"),
        ),
        ({"trusted-host": "a b:8"}, {"UV_INSECURE_HOST": "a b:8"}),
        ({"timeout": "60"}, {"UV_HTTP_TIMEOUT": "60"}),
        ({"retries": "9", "progress-bar": "off"}, {}),
    ],
)
def test_uv_is_told_in_its_own_words(script, monkeypatch, settings, told):
    for name in [name for name in os.environ if name.startswith(("UV_", "REQUESTS_CA", "CURL_CA"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/home/me")
    assert script.translate(settings) == (told, [])


def test_what_is_set_for_uv_stays_and_pips_certificate_goes_before_that_of_others(script, monkeypatch):
    monkeypatch.setenv("UV_INDEX_URL", "https://uv/simple")
    monkeypatch.setenv("SSL_CERT_FILE", "/system.pem")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/requests.pem")
    told, constraints = script.translate({"index-url": "https://pip/simple", "cert": "/pip.pem", "constraint": "/a.txt b.txt"})
    assert (told, constraints) == ({"SSL_CERT_FILE": "/pip.pem"}, ["-c", "/a.txt", "-c", "b.txt"])
    assert script.translate({})[0] == {"SSL_CERT_FILE": "/requests.pem"}


def write_wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (
        f"Requires-Dist: {requires}\n" if requires else ""
    )
    files = {f"{about}/METADATA": metadata, f"{about}/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\nRoot-Is-Purelib: true\n"}
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{about}/RECORD": "".join(f"{path},,\n" for path in files)}.items():
            wheel.writestr(path, text)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def settings(tmp_path) -> Iterator[dict[str, str]]:
    """Two indexes and a folder of wheels, in a file of pip's and in its variables."""
    write_wheel(tmp_path / "index/one/some-first", "some_first", "1.0", requires="some-second")
    write_wheel(tmp_path / "index/one/some-second", "some_second", "1.0")
    for version in ("2.0", "3.0"):
        write_wheel(tmp_path / "index/two/some-second", "some_second", version)
    write_wheel(tmp_path / "wheels", "some_third", "1.0")
    (tmp_path / "pins.txt").write_text("some-second<3\n")
    with served(tmp_path / "index") as address:
        (tmp_path / "pip.conf").write_text(
            f"[global]\nindex-url = {address}/one\nfind-links = {tmp_path}/wheels\nconstraint = {tmp_path}/pins.txt\n"
        )
        yield {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_EXTRA_INDEX_URL": f"{address}/two"}


def installed(command: list[str | Path], target: Path, settings: dict[str, str]) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    environment = {**kept, "UV_CACHE_DIR": str(target.with_name("cache")), **settings}
    command = [sys.executable, *command, "--target", target, "some-first", "some-third"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "installing with pip" not in done.stderr
    return sorted(path.name for path in target.glob("*.dist-info"))


def test_the_real_uv_takes_from_pips_indexes_what_pip_takes(tmp_path, settings):
    found = installed([SCRIPT], tmp_path / "with-uv", settings)
    assert found == ["some_first-1.0.dist-info", "some_second-2.0.dist-info", "some_third-1.0.dist-info"]
    assert found == installed(["-m", "pip", "install", "--quiet", "--no-compile"], tmp_path / "with-pip", settings)
