"""What a package index and a code host show of every distribution: its metadata, and links that lead somewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from rlhf_authoring.index import shipped

from rlhf_host import __version__
from rlhf_host.installed import install_line

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = [ROOT, *(path.parent for path in sorted(ROOT.glob("plugins/*/*/pyproject.toml")))]
IDS = ["rlhf-host", *(path.name for path in PROJECTS[1:])]
REPOSITORY = "https://github.com/rlhf-host/rlhf-host"
PLACES = re.compile(rf"{re.escape(REPOSITORY)}/(?:blob|tree)/main/([\w./-]+)")
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
SHOWN = ("*.md", "*.py", "*.jinja", "*.ipynb", "*.yml", "*.yaml", "*.sh", "*.json", "Makefile", "Dockerfile")
PIP = re.compile(r"pip install ([^`\n\"#;|&]*)")
OWN = re.compile(
    rf"(?<![\w/@.-])(rlhf-(?:{'|'.join(name.removeprefix('rlhf-') for name in sorted(IDS, reverse=True))}))(\[[\w,]+\])?(?![\w-])"
)


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("folder", PROJECTS, ids=IDS)
def test_every_distribution_says_who_made_it_what_it_is_and_where_it_is(folder):
    about, host = project(folder), project(ROOT)
    own = "" if folder == ROOT else f"/tree/main/{folder.relative_to(ROOT)}"
    assert about["urls"] == {
        "Homepage": f"{REPOSITORY}{own}",
        "Repository": REPOSITORY,
        "Documentation": f"{REPOSITORY}/tree/main/docs",
        "Issues": f"{REPOSITORY}/issues",
        "Changelog": f"{REPOSITORY}/blob/main/docs/changelog.md",
    }
    assert about["authors"] == [{"name": "rlhf-host contributors"}]
    assert about["license"].split(" AND ")[0] == "Apache-2.0"  # what a package carries of others follows
    assert [(folder / file).name for file in about["license-files"] if (folder / file).exists()] == ["LICENSE"] * len(
        about["license"].split(" AND ")
    )
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert {"rlhf", "reinforcement learning"} < {*about["keywords"]}
    assert len(about["description"]) <= 160
    assert {*host["classifiers"]} - {*about["classifiers"]} <= {"Operating System :: MacOS"}, "what Linux alone has"
    assert about["requires-python"] == host["requires-python"]
    assert about.get("readme", "README.md") == "README.md"
    pythons = [line.rpartition(" ")[2] for line in about["classifiers"] if re.search(r"Python :: 3\.\d+$", line)]
    assert pythons == [line.rpartition(" ")[2] for line in host["classifiers"] if re.search(r"Python :: 3\.\d+$", line)]


@pytest.mark.parametrize("folder", PROJECTS[1:], ids=IDS[1:])
def test_links_of_a_readme_are_addresses_because_an_index_has_no_files_beside_it(folder):
    text = (folder / "README.md").read_text(encoding="utf-8")
    links = [found[1] or found[2] for found in LINK.finditer(re.sub(r"`[^`\n]*`", "", text))]
    assert [link for link in links if not re.match(r"https?://|#", link)] == []
    assert [link for link in links if link.startswith(f"{REPOSITORY}/") and not PLACES.match(link)] == [], "no such place"


def test_addresses_in_the_repository_are_those_of_files():
    texts = {path: path.read_text(encoding="utf-8") for path in shown()}
    places = {(path, place.rstrip(".")) for path, text in texts.items() for place in PLACES.findall(text)}
    assert len(places) > 100
    assert [f"{path.relative_to(ROOT)}: {place}" for path, place in sorted(places) if not (ROOT / place).exists()] == []


def test_the_readme_of_an_index_has_addresses_in_place_of_paths(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from archives import relative
    from index_readme import tree, with_addresses

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert relative(text)
    shown = with_addresses(text, tree("1.2.0"))
    assert relative(shown) == []
    places = re.findall(r"(?:rlhf-host/rlhf-host/blob|rlhf-host/rlhf-host)/v1\.2\.0/([\w./-]+)", shown)
    assert len(places) == len(relative(text))
    assert [place for place in places if not (ROOT / place).exists()] == []
    assert (tree("1.2.0+local"), tree("1.2.0.dev1")) == ("main", "main")


def test_links_of_the_first_pages_lead_to_files():
    for path in ROOT.glob("*.md"):
        links = [found[1] or found[2] for found in LINK.finditer(path.read_text(encoding="utf-8"))]
        paths = [link.partition("#")[0] for link in links if not re.match(r"https?://|#", link)]
        assert [path for path in paths if not (ROOT / path).exists()] == [], path.name


def test_the_citation_has_the_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", text, re.M) == [__version__]
    assert re.findall(r'name: "(.+)"', text) == ["rlhf-host contributors"]


def shown() -> list[Path]:
    """Files whose text somebody reads or a program prints; tests apart, which quote it."""
    folders = ("docs", "examples", "plugin_template", "plugins", "rlhf_host", "scripts", ".github", "benchmarks")
    files = [path for folder in folders for kind in SHOWN for path in (ROOT / folder).rglob(kind)]
    files += [ROOT / name for name in (*(path.name for path in ROOT.glob("*.md")), "Makefile", "Dockerfile", "pyproject.toml")]
    files += [folder / "pyproject.toml" for folder in PROJECTS[1:]]
    return [path for path in files if not {"tests", "__pycache__", "node_modules"} & {*path.relative_to(ROOT).parts}]


def by_name(words: str) -> list[str]:
    """Our distributions that pip would look for by name, without something that holds it to our wheels.

    Extras may be added to what is installed, which pip keeps, if they bring nothing else of ours.
    """
    if re.search(r"-c \S*/wheels\.txt", words):
        return []
    if re.search(r"-r requirements\.txt", words):  # what a run stood on: rlhf plugins requirements
        return ["requirements.txt"]
    return [found[0] for found in OWN.finditer(words) if not found[2] or brings_ours(found[1], found[2][1:-1].split(","))]


def brings_ours(name: str, extras: list[str]) -> bool:
    optional = project(PROJECTS[IDS.index(name)]).get("optional-dependencies", {})
    # rlhf-authoring writes the lines with testing, so it is there.
    lines = [line for extra in extras for line in optional.get(extra, []) if extra != "testing"]
    return any(OWN.match(line) for line in lines)


def test_names_that_a_stranger_could_register_are_never_printed_without_what_holds_pip_to_our_wheels():
    held = install_line("rlhf-host") != "pip install rlhf-host"
    loose, lines = [], 0
    for path in shown():
        for words in PIP.findall(path.read_text(encoding="utf-8")):
            lines += bool(OWN.search(words))
            loose += [f"{path.relative_to(ROOT)}: pip install {words}" for _ in by_name(words)] if held else []
    assert lines > 90
    assert loose == []


def test_the_rule_finds_what_it_is_for():
    for words in (
        "rlhf-plugin-rloo",
        "--find-links dist rlhf-plugin-rloo",
        "-U 'rlhf-host[all]'",
        "'rlhf-runs[view]'",
        "-r requirements.txt",
        "rlhf-host",
    ):
        assert by_name(words), words
    for words in (
        "-c dist/wheels.txt rlhf-host",
        "'rlhf-host[peft]'",
        "./rlhf-plugin-x",
        "-e ./rlhf-plugin-rloo",
        "rlhf-plugin-gone-x",
    ):
        assert not by_name(words), words


def test_the_list_has_every_distribution_with_the_same_options_of_pip():
    (ours, *_) = shipped()
    assert {entry.name for entry in ours.distributions} == {*IDS}
    assert len({entry.pip_options for entry in ours.distributions}) == 1
    assert install_line("--upgrade", "rlhf_kernels>=0.1").endswith("--upgrade 'rlhf_kernels>=0.1'")
    assert install_line("numpy") == "pip install numpy"
