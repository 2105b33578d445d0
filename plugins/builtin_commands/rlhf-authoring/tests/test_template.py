"""Parts of a new project, for every kind, whatever it is called and whatever its author writes about it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from rlhf_authoring.commands.new import KINDS, template_folder

from rlhf_host.plugins.discovery import GROUPS

TEMPLATE = template_folder()

NASTY = [
    'She said "no" \\ twice \\" and \'yes\'',
    "{{ cookiecutter.name }} {% if %} {# none #} ${{ matrix }} {0}",
    'three """ quotes and one more"',
    "ends with a backslash \\",
    "naïve 模型 \U0001f600 \U0001f469‍\U0001f52c \u202eright to left",
    "\\N{BULLET} \\x00 \\u12 %s # not a comment = [1] 'it''s'",
    "<script>alert(1)</script> & more",
]
"""Text that would break TOML, Python or the template, were it put in as it is."""


def files(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def module(project: Path) -> ast.Module:
    (path,) = project.glob("src/*/__init__.py")
    return ast.parse(path.read_text())


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def new(rlhf_here, tmp_path):
    """``new(kind, name, *flags)``: the project's folder."""

    def write(kind: str, name: str, *flags: str) -> Path:
        done = rlhf_here("plugins", "new", kind, name, "--output", tmp_path / "made", *flags)
        assert done.exit_code == 0, done.output
        return tmp_path / "made" / f"rlhf-plugin-{name.replace('_', '-')}"

    return write


# --- the files ----------------------------------------------------------------------------------


def test_a_project_has_exactly_these_files(kind, new):
    assert sorted(files(new(kind, "my-plugin"))) == [
        ".github/workflows/test.yml",
        ".gitignore",
        "CHANGELOG.md",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "src/rlhf_plugin_my_plugin/__init__.py",
        "src/rlhf_plugin_my_plugin/py.typed",
        "tests/test_behaviour.py",
        "tests/test_contract.py",
    ]


def test_nothing_of_the_template_is_left(kind, new):
    for name, text in files(new(kind, "my-plugin")).items():
        assert "cookiecutter" not in text, name
        text = re.sub(r"\$\{\{ (matrix|github)\.\w+ \}\}", "the workflow's own", text)
        assert not re.search(r"\{\{|\}\}|\{%|%\}|\{#", text), name
        assert text == "" or text.endswith("\n"), name
        assert "\n\n\n\n" not in text, name
        assert not re.search(r"[ \t]$", text, re.MULTILINE), name


def test_the_metadata_is_complete(kind, new):
    project = new(kind, "my-plugin", "--author", "Ada Lovelace")
    settings = tomllib.loads((project / "pyproject.toml").read_text())
    about = settings["project"]
    assert about["name"] == "rlhf-plugin-my-plugin"
    assert about["license"] == "Apache-2.0"
    assert "Apache License" in (project / about["license-files"][0]).read_text()
    assert about["authors"] == [{"name": "Ada Lovelace"}]
    assert "rlhf-host>=0.10,<0.11" in about["dependencies"]
    assert settings["dependency-groups"]["test"] == ["rlhf-host[testing]>=0.10,<0.11"]
    group = GROUPS[kind.replace("-", "_")]
    point = (
        {"my-plugin": "rlhf_plugin_my_plugin:command"} if kind == "command" else {"my_plugin": "rlhf_plugin_my_plugin:MyPlugin"}
    )
    assert about["entry-points"] == {group: point}


def test_without_an_author_there_is_no_author(new):
    assert "authors" not in tomllib.loads((new("algo", "x") / "pyproject.toml").read_text())["project"]


def test_the_contract_test_is_one_line(kind, new):
    lines = (new(kind, "my-plugin") / "tests/test_contract.py").read_text().splitlines()
    assert len([line for line in lines if line.startswith("Test")]) == 1
    assert len(lines) == 5


def test_every_kind_is_formatted_and_clean(new, repository):
    """Formatted as its own pyproject.toml has it, and with the host's own rules."""
    rules = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    for kind in KINDS:
        project = new(kind, f"some-{kind}")
        ruff = [sys.executable, "-m", "ruff"]
        check = ["check", "--no-cache", "--select", ",".join(rules["select"]), "--ignore", ",".join(rules["ignore"])]
        for command in (["format", "--no-cache", "--diff"], check):
            done = subprocess.run([*ruff, *command, "."], cwd=project, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr


def test_cookiecutter_itself_writes_the_same(kind, new, tmp_path, monkeypatch):
    from cookiecutter.main import cookiecutter

    monkeypatch.setenv("HOME", str(tmp_path))  # it remembers answers there
    monkeypatch.setenv("COOKIECUTTER_CONFIG", str(tmp_path / "none.yaml"))
    (tmp_path / "none.yaml").write_text(f"replay_dir: {tmp_path}/replay\n")
    answers = {"kind": kind, "name": "my-plugin", "author": 'A "B" \\ C'}
    made = cookiecutter(str(TEMPLATE), no_input=True, extra_context=answers, output_dir=str(tmp_path / "plain"))
    assert files(Path(made)) == files(new(kind, "my-plugin", "--author", 'A "B" \\ C'))


def test_the_command_offers_what_the_template_has():
    import json

    asked = json.loads((TEMPLATE / "cookiecutter.json").read_text())
    assert tuple(asked["kind"]) == KINDS
    assert {path.name for path in (TEMPLATE / "templates").iterdir() if path.is_dir()} == set(KINDS)


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "plugin", "cls"), [("a", "a", "A"), ("my_own", "my_own", "MyOwn"), ("gae2-x", "gae2_x", "Gae2X")]
)
def test_a_name_becomes_entry_point_class_and_package(name, plugin, cls, new):
    project = new("reward", name)
    points = tomllib.loads((project / "pyproject.toml").read_text())["project"]["entry-points"]["rlhf.rewards"]
    assert points == {plugin: f"rlhf_plugin_{plugin}:{cls}"}


def test_no_name_hides_what_the_module_itself_uses(kind, new):
    """A reward called ``reward`` has a class of another name than the record ``Reward`` that it returns."""
    tree = module(new(kind, "my-plugin"))
    imported = {name.asname or name.name for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names}
    for name in sorted(name for name in {"Options", *imported} if name[:1].isupper() and len(name) > 1):
        words = "-".join(re.findall("[A-Z]+[a-z]*", name)).lower()
        try:
            project = new(kind, words)
        except AssertionError:
            continue  # the name of a plugin that there is
        named = tomllib.loads((project / "pyproject.toml").read_text())["project"]["entry-points"]
        ((point,),) = (points.values() for points in named.values())
        assert point.partition(":")[2] not in {"Options", *imported}


REFUSED = {
    "": "cannot be a plugin's name",
    "My-Algo": "cannot be a plugin's name: use lower-case letters and digits, words joined by '-', such as 'my-algo'",
    "MyAlgo": "such as 'my-algo'",
    "my algo": "such as 'my-algo'",
    "3d": "cannot be a plugin's name: use lower-case letters and digits, words joined by '-'",
    "a--b": "such as 'a-b'",
    "-a": "",
    "a-": "such as 'a'",
    "a.b": "such as 'a-b'",
    "../x": "such as 'x'",
    "naïve": "cannot be a plugin's name",
    "{{x}}": "such as 'x'",
    "x" * 51: "51 characters",
    "class": "'class' is a word of Python itself: choose another name, such as 'my-class'",
    "none": "'none' is a word of Python itself",
    "rlhf-plugin-x": "the folder's name begins with 'rlhf-plugin-' by itself: rlhf plugins new algo x",
}
"""Name → what is said about it."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_cannot_be_one_is_refused_in_a_line(name, rlhf_here, tmp_path):
    done = rlhf_here("plugins", "new", "algo", "--output", tmp_path / "made", *(["--"] if name.startswith("-") else []), name)
    assert done.exit_code == 2
    assert len(done.output.splitlines()) == 1
    assert REFUSED[name] in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name in REFUSED if name])
def test_cookiecutter_itself_refuses_the_same_names(name, tmp_path, monkeypatch, capfd):
    from cookiecutter.exceptions import FailedHookException
    from cookiecutter.generate import generate_context, generate_files
    from cookiecutter.prompt import prompt_for_config

    context = generate_context(str(TEMPLATE / "cookiecutter.json"), extra_context={"name": "x"})
    answers = prompt_for_config(context, no_input=True)
    words = re.sub("[-_ ]", " ", name).title().split()
    answers |= {"name": name, "__distribution": "rlhf-plugin-x", "__class": "".join(words)}
    with pytest.raises(FailedHookException):
        generate_files(str(TEMPLATE), {"cookiecutter": answers}, str(tmp_path))
    assert capfd.readouterr().err.startswith("Error: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("algo", "rloo", "rlhf-plugin-rloo is published already"),
        ("reward", "grpo", "rlhf-plugin-grpo is published already"),
        ("algo", "gdpo", "algo 'gdpo' is the name of one from rlhf-plugin-grpo"),
        ("tracker", "jsonl", "tracker 'jsonl' is the name of one from rlhf-host"),
        ("weight-sync", "in-process", "weight-sync 'in_process' is the name of one from rlhf-host"),
        ("reward", "vowels", "reward 'vowels' is the name of one from test-rewards"),
    ],
)
def test_a_name_that_is_taken_is_refused(kind, name, said, rlhf_here, here, tmp_path):
    here.install("test-rewards", {"rlhf.rewards": "vowels = test_rewards:Vowels"}, {"test_rewards.py": "class Vowels: ..."})
    done = rlhf_here("plugins", "new", kind, name, "--output", tmp_path / "made")
    assert done.exit_code == 2
    assert done.output == f"Error: {said}: choose another name, such as 'my-{name}'\n"
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("algorithm", "did you mean 'algo'?"),
        ("rewards", "did you mean 'reward'?"),
        ("preset", "(there are algo, reward, agent"),
    ],
)
def test_an_unknown_kind_gets_the_nearest_one(kind, said, rlhf_here, tmp_path):
    done = rlhf_here("plugins", "new", kind, "x", "--output", tmp_path)
    assert done.exit_code == 2
    assert done.output.startswith(f"Error: no template for kind {kind!r}")
    assert said in done.output
    assert len(done.output.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


# --- places -------------------------------------------------------------------------------------


def test_a_folder_that_is_there_already_is_left_alone(rlhf_here, tmp_path):
    mine = tmp_path / "rlhf-plugin-x"
    mine.mkdir()
    (mine / "work.txt").write_text("mine")
    done = rlhf_here("plugins", "new", "algo", "x", "--output", tmp_path)
    assert done.exit_code == 2
    assert done.output == f"Error: {mine} already exists: remove it, or choose another name or --output DIR\n"
    assert files(tmp_path) == {"rlhf-plugin-x/work.txt": "mine"}


def test_a_place_that_cannot_be_written_to_is_named(rlhf_here, tmp_path):
    (tmp_path / "file").write_text("")
    done = rlhf_here("plugins", "new", "algo", "x", "--output", tmp_path / "file")
    assert done.exit_code == 2
    assert f"{tmp_path / 'file'}" in done.output
    assert len(done.output.splitlines()) == 1
    assert files(tmp_path) == {"file": ""}


def test_a_failure_half_way_leaves_nothing(rlhf_here, tmp_path, monkeypatch):
    import shutil

    def copytree(source, target, **kwargs):
        target.mkdir()
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(shutil, "copytree", copytree)
    done = rlhf_here("plugins", "new", "algo", "x", "--output", tmp_path)
    assert done.exit_code == 2
    assert "No space left on device" in done.output
    assert list(tmp_path.iterdir()) == []


def test_the_place_may_be_new_and_have_odd_characters(rlhf_here, tmp_path):
    place = tmp_path / "a {{b}} c" / "d"
    done = rlhf_here("plugins", "new", "algo", "x", "--output", place)
    assert done.exit_code == 0, done.output
    assert f"cd '{place}/rlhf-plugin-x'" in done.output
    assert (place / "rlhf-plugin-x/pyproject.toml").exists()


# --- free text ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", NASTY)
def test_free_text_arrives_as_it_was_written(text, kind, new):
    project = new(kind, "my-plugin", "--description", text, "--author", text)
    about = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert about["description"] == text
    assert about["authors"] == [{"name": text}]
    assert ast.get_docstring(module(project), clean=False) == text
    assert f"\n{text}. A plugin of kind" in (project / "README.md").read_text()


def test_a_project_points_to_nothing_that_is_not_published(kind, new):
    readme = (new(kind, "my-plugin") / "README.md").read_text()
    assert "pip install ." in readme
    assert "://" not in readme


def test_free_text_is_put_on_one_line(new):
    project = new("algo", "x", "--description", "one\n  two\r\n\tthree\u2028four")
    assert tomllib.loads((project / "pyproject.toml").read_text())["project"]["description"] == "one two three four"


@pytest.mark.parametrize(
    ("flag", "text", "said"),
    [
        ("--description", "a\x07b", r"--description holds '\x07', which is not text: leave it out"),
        ("--author", "a\x7f", r"--author holds '\x7f', which is not text: leave it out"),
        ("--author", "a\udce4", r"--author holds '\udce4', which is not text: leave it out"),
        ("--description", " \n ", "--description is empty: say in one line what the plugin is, or leave the flag out"),
    ],
)
def test_what_no_file_could_hold_is_refused(flag, text, said, rlhf_here, tmp_path):
    done = rlhf_here("plugins", "new", "algo", "x", "--output", tmp_path, flag, text)
    assert done.exit_code == 2
    assert done.output == f"Error: {said}\n"
    assert list(tmp_path.iterdir()) == []


# --- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize("active", [True, False])
def test_it_ends_with_what_to_do_next(rlhf_here, tmp_path, monkeypatch, active):
    scripts = sysconfig.get_path("scripts")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", scripts if active else "/nowhere")
    here = "" if active else f"{scripts}/python -m "
    assert rlhf_here("plugins", "new", "algo", "my-algo").output == (
        "Wrote rlhf-plugin-my-algo, a plugin that works. Next:\n"
        "  cd rlhf-plugin-my-algo\n"
        f"  {here}pip install -e . 'rlhf-host[testing]'\n"
        f"  {here}pytest\n"
        f"  {'' if active else f'{scripts}/'}rlhf train --algo my_algo --reward math_verifier --dry-run\n"
        "Then edit src/rlhf_plugin_my_algo/__init__.py: changes take effect at once.\n"
    )


def test_only_this_command_loads_cookiecutter(rlhf_here):
    program = "import sys, rlhf_authoring.commands.new; print({'cookiecutter', 'jinja2', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    assert "new " in rlhf_here("plugins", "--help").output
