"""Scripts and configurations of the published packages: each of their options is in one class, and the files load.

``make oracles`` fetches the packages; they are read where they are, and never run. With ``-s``, what became of the scripts of
each version is printed as a table; a script of several versions counts for the newest.
"""

from __future__ import annotations

import ast
import collections
import json
import re
from pathlib import Path

import pytest
from rlhf_translate.commands import find_commands
from rlhf_translate.programs import program_of
from rlhf_translate.translation import translate
from rlhf_translate.write import file_text

from rlhf_host import UserError
from rlhf_host.settings import plain, read_yaml

from .conftest import ORACLES
from .known import PLAUSIBLE, flag, unset

ORACLE_VERSIONS = {"openrlhf": "openrlhf-0.11.2", "trl": "trl-1.16.0", "verl": "verl-0.9.1"}
"""Versions of folders that name none, as in ``scripts/fetch_oracles.py``."""
PACKAGES = ("openrlhf", "trl", "verl")
ROW = {name: "1+1=" for name in ("prompt", "input", "context_messages", "question")}
LABEL = {"label": "2", "answer": "2"}
PAIR = {"chosen": "2", "rejected": "3"}
ROWS = {
    **{name: PAIR for name in ("dpo", "ipo", "rm")},
    **{name: {"completion": "2"} for name in ("sft", "distill")},
    "kto": {"completion": "2", "label": True},
    "prm": {"completions": ["2"], "labels": [True]},
}
"""Columns that the rows of an algorithm have too."""
REWARD_AND_AGENT = """def reward_func(queries, prompts, labels):
    return [1.0]
async def execute(episode, policy):
    return 1.0
"""
CLASSES = ("setting", "needs none", "no counterpart", "SET THIS")
PASSED = ("as it is", "filled in", "decide", "fails")
COLUMNS = ("scripts", "told instead", *CLASSES, *PASSED)


@pytest.fixture(scope="module")
def table():
    """Project and version → column → how many."""
    rows = collections.defaultdict(collections.Counter)
    yield rows
    total = sum(rows.values(), collections.Counter())
    print("\n" + " " * 20 + "".join(f"{column:>14}" for column in COLUMNS))
    for name, row in [*sorted(rows.items(), key=lambda item: version_of(item[0])), ("all", total)]:
        print(f"{name:20}" + "".join(f"{row[column]:>14}" for column in COLUMNS))


def version_of(name):
    project, _, version = name.partition(" ")
    return project, [int(part) for part in re.findall(r"\d+", version)]


def package_of(path):
    """Project and version that a script is of."""
    names = [*path.parts[:-1], re.sub(r"-\d+$", "", path.stem)]
    name = next((name for name in names if re.fullmatch(r"(openrlhf|trl|verl)-\d[\w.]+", name)), None)
    name = name or ORACLE_VERSIONS[next(name for name in reversed(names) if name in ORACLE_VERSIONS)]
    return name.replace("-", " ")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """Files with the packages' commands, each once, and their configurations where they are."""
    roots = [
        path for path in (*ORACLES.glob("*"), *ORACLES.glob("published/*")) if any((path / name).is_dir() for name in PACKAGES)
    ]
    if not roots:
        pytest.skip("make oracles fetches the published packages")
    folder, texts, found = tmp_path_factory.mktemp("published"), set(), []
    for root in sorted(roots):
        for number, text in enumerate(sorted(commands_of(root) - texts)):
            texts.add(text)
            found.append(folder / f"{root.name}-{number}.sh")
            found[-1].write_text(text)
        found += sorted(
            path for path in root.glob("verl/trainer/config/*.yaml") if re.search("ppo.*trainer|sft_trainer", path.name)
        )
    return found


def commands_of(root):
    """Shell blocks of the readme, and those of docstrings, that run a program of these projects."""
    readmes = (path.read_text(errors="replace") for path in root.glob("*.dist-info/METADATA"))
    docstrings = (text for path in root.rglob("*.py") if path.is_relative_to(root) for text in docstrings_of(path))
    return {block for text in (*readmes, *docstrings) for block in blocks(text) if has_a_program(block)}


def docstrings_of(path):
    try:
        tree = ast.parse(path.read_text(errors="replace"))
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield text


def blocks(text):
    language, lines = None, []
    for line in text.splitlines():
        if line.strip().startswith("```"):
            if language in ("", "bash", "shell", "sh"):
                yield "\n".join(lines) + "\n"
            language, lines = (line.strip()[3:].strip() if language is None else None), []
        lines += [line] if language is not None and not line.strip().startswith("```") else []


def has_a_program(text):
    return any(program_of(word) for word in text.split()) or re.search(r"^\s*trl (grpo|rloo|dpo|sft|kto|reward) ", text, re.M)


@pytest.fixture(scope="module")
def translations(scripts, table):
    """Each command's translation, and the programs that are not supported."""
    done, refused = [], []
    for path in scripts:
        table[package_of(path)]["scripts"] += 1
        try:
            done += [(path, translate(command, str(path))) for command in find_commands(path, origin_of(path))[0]]
        except UserError as error:
            refused.append(str(error))
            table[package_of(path)]["told instead"] += 1
    return done, refused


def origin_of(path):
    """Returns the origin of verl's configurations that are parts of one."""
    return "verl" if path.suffix == ".yaml" else None


def class_of(note):
    """All classes of an option."""
    own = {
        "setting": bool(note.outcome.settings) and not note.asks and not note.unfit,
        "needs none": note.needs_none,
        "no counterpart": note.lost,
        "SET THIS": note.asks,
    }
    return [name for name in CLASSES if own[name]]


def test_every_option_is_in_exactly_one_class(translations, table):
    done, refused = translations
    for path, translation in done:
        text = re.sub(r"\n *# +", " ", file_text(translation, str(path))).replace("\n", " ")
        options = [*translation.command.options, *translation.command.launch]
        assert len(translation.of_options) == len(options), path
        for note in translation.of_options:
            classes = class_of(note)
            assert len(classes) == 1, (path, note)
            assert classes == ["setting"] or note.outcome.remark or note.unfit, (path, note)
            assert (note.option.shown or note.option.name) in text, (path, note)
            table[package_of(path)][classes[0]] += 1
    assert all("is not translated" in line or "is not supported" in line or "no training command" in line for line in refused)
    assert len(done) > 50


def test_every_file_passes_the_dry_run_once_it_is_filled_in(
    translations, table, rlhf_here, tiny_model, scorer, tmp_path, monkeypatch
):
    """Models, data and 8 devices of the scripts are not here."""
    monkeypatch.chdir(tmp_path)
    failed = []
    for path, translation in translations[0]:
        text = re.sub(r"[^\s,\[]*/(\w+\.py)\b", r"\1", file_text(translation, str(path)))
        text = text.replace("flash_attention_2", "sdpa")
        Path("ours.yaml").write_text(text)
        for name in set(re.findall(r"^ +name: (\w+\.py)", text, re.M)):
            Path(name).write_text(REWARD_AND_AGENT)
        values = plain(read_yaml(Path("ours.yaml")))
        algorithm = values.get("algo", {}).get("name")
        Path("rows.jsonl").write_text(json.dumps(ROW | ROWS.get(algorithm, LABEL)) + "\n")
        asked = [key for key in unset(values) if key not in ("actor.model", "data.sources")]
        flags = [word for key in asked for word in (flag(key), plausible(key))]
        done = rlhf_here("train", "--config", "ours.yaml", *here(values, tiny_model, scorer), *flags, "--dry-run")
        kind = "filled in" if translation.refusals or translation.questions else "as it is"
        if done.exit_code:
            kind = "decide" if translation.refusals else "fails"
            failed += [] if translation.refusals else [(path.name, done.output)]
        table[package_of(path)][kind] += 1
    assert not failed, "\n".join(f"{name}: {said.splitlines()[-1]}" for name, said in failed)


def plausible(key):
    return PLAUSIBLE.get(key, "math_verifier" if key.startswith("reward.") else "2")


def here(values, model, scorer):
    """Flags for what is not on this machine."""
    flags = ["--actor.model", model, "--data", "rows.jsonl", "--run-dir", "run"]
    flags += ["--eval.data", "rows.jsonl"] if "data" in values.get("eval", {}) else []
    for role in ("reward_model", "critic", "reference", "teacher"):
        named = isinstance(values.get(role), dict) and "model" in values[role]
        flags += [f"--{role.replace('_', '-')}.model", scorer if role == "reward_model" else model] if named else []
    return flags


def test_configurations_of_other_projects_are_recognised():
    files = [path for path in sorted((ORACLES / "sources").glob("*/examples/**/*.y*ml"))]
    if not files:
        pytest.skip("make oracles fetches the published packages")
    told = collections.Counter()
    for path in files:
        with pytest.raises(UserError) as error:
            find_commands(path)
        told[
            next(
                (word for word in ("axolotl", "LLaMA-Factory", "accelerate") if f"configuration of {word}" in str(error.value)),
                "",
            )
        ] += 1
    print(f"\n{dict(told)}")
    assert told[""] <= len(files) / 50
