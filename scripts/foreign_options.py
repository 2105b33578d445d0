"""Write the options and defaults of other projects, version by version, from their wheels, for ``rlhf-translate``.

    python scripts/foreign_options.py DIRECTORY

Fetches the wheels into DIRECTORY where they are not there. They are read, never imported.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WHEELS = {
    "openrlhf": (
        *(f"0.8.{n}" for n in range(12)),
        *(f"0.9.{n}" for n in range(11)),
        *("0.10.0", "0.10.1", "0.10.2", "0.10.3", "0.10.4", "0.11.0", "0.11.1", "0.11.2"),
    ),
    "trl": (
        *("0.14.0", "0.15.2", "0.16.1", "0.17.0", "0.18.2", "0.19.1", "0.20.0", "0.21.0", "0.22.2", "0.23.1", "0.24.0"),
        *("0.25.1", "0.26.2", "0.27.2", "0.28.0", "0.29.1", "1.0.0", "1.1.0", "1.2.0", "1.3.0", "1.4.0", "1.5.1", "1.6.0"),
        *("1.7.1", "1.8.0", "1.9.2", "1.10.0", "1.11.0", "1.12.0", "1.13.0", "1.14.2", "1.15.0", "1.16.0"),
    ),
    "verl": (
        *("0.2.0.post2", "0.3.0.post1", "0.4.0", "0.4.1", "0.5.0", "0.6.0", "0.6.1", "0.7.0", "0.7.1", "0.8.0", "0.9.0"),
        "0.9.1",
    ),
}
"""Project → releases; of TRL, the last of each minor version."""

ACCELERATE = "1.15.0"
"""Version of accelerate, which starts TRL's programs: its options are those of the program ``accelerate``."""

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "plugins/builtin_commands/rlhf-translate/src/rlhf_translate/versions"

Options = dict[str, Any]
"""Name → default."""


def main() -> None:
    folder = Path(sys.argv[1])
    for project, versions in WHEELS.items():
        table = {version: read(project, fetch(folder, project, version)) for version in versions}
        if project == "trl":
            table[versions[-1]]["accelerate"] = of_accelerate(fetch(folder, "accelerate", ACCELERATE))
        (TARGET / f"{project}.json").write_text(text_of(changes(table)), encoding="utf-8")


def fetch(folder: Path, project: str, version: str) -> Path:
    """The package's files, unpacked."""
    place = folder / f"{project}-{version}"
    if not place.is_dir():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
        subprocess.run([*command, f"{project}=={version}"], check=True)
        (wheel,) = folder.glob(f"{project}-{version}-*.whl")
        zipfile.ZipFile(wheel).extractall(place)
    return next(path.parent for path in sorted(place.rglob(f"{project}/__init__.py"))) / ""


def read(project: str, package: Path) -> dict[str, Options]:
    """What a package's programs take: program → options."""
    return {"openrlhf": of_openrlhf, "trl": of_trl, "verl": of_verl}[project](package)


# --- OpenRLHF: argparse -------------------------------------------------------------------------


def of_openrlhf(package: Path) -> dict[str, Options]:
    programs = {}
    for file in sorted((package / "cli").glob("train_*.py")):
        options: Options = {}
        for prefix in ("actor", "critic"):
            for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
                if getattr(call.func, "attr", "") == "add_argument":
                    options |= _argument(call, prefix)
        programs[file.stem.removeprefix("train_")] = options
    return programs


def _argument(call: ast.Call, prefix: str) -> Options:
    words = {word.arg: word.value for word in call.keywords}
    switch = "action" in words and ast.literal_eval(words["action"]) == "store_true"
    default = _evaluated(words["default"], prefix) if "default" in words else (False if switch else None)
    return {_evaluated(name, prefix).lstrip("-"): default for name in call.args}


def _evaluated(node: ast.expr, prefix: str) -> Any:
    """A literal, ``f"--{prefix}.lr"`` or ``float("inf")``; nothing else of the package is run."""
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else prefix for part in node.values)
        return "".join(map(str, parts))
    if isinstance(node, ast.IfExp) and ast.unparse(node.test).startswith("prefix == "):
        return _evaluated(node.body if prefix == ast.literal_eval(node.test.comparators[0]) else node.orelse, prefix)
    try:
        return ast.literal_eval(node)
    except ValueError:
        text = ast.unparse(node)
        return {"float('inf')": "inf"}.get(text, int(float(text[4:-1])) if re.fullmatch(r"int\([\d.e]+\)", text) else "...")


# --- TRL: dataclasses ---------------------------------------------------------------------------

TRL_PROGRAMS = {"grpo": "GRPO", "rloo": "RLOO", "dpo": "DPO", "sft": "SFT", "kto": "KTO", "reward": "Reward", "prm": "PRM"}


def of_trl(package: Path) -> dict[str, Options]:
    classes: dict[str, Options] = {}
    others = ("vllm_serve.py", "chat.py", "env.py")  # whose ScriptArguments are not those of training
    for file in sorted([*package.rglob("*config.py"), *package.glob("scripts/*.py"), *package.rglob("prm/prm_config.py")]):
        for node in ast.walk(ast.parse(file.read_text())) if file.name not in others else ():
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, {}).update(_fields(node))
    common = (
        _training_arguments()
        | classes.get("_BaseConfig", classes.get("BaseConfig", {}))
        | classes["ModelConfig"]
        | classes["ScriptArguments"]
    )
    programs = {}
    for method, name in TRL_PROGRAMS.items():
        if f"{name}Config" in classes:
            programs[method] = common | classes.get(f"{name}ScriptArguments", {}) | classes[f"{name}Config"]
    return programs


def _fields(node: ast.ClassDef) -> Options:
    return {
        item.target.id: _field(item.value)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def _field(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):
        words = {word.arg: word.value for word in value.keywords}
        value = words.get("default") or getattr(words.get("default_factory"), "body", None)
    try:
        return ast.literal_eval(value) if value is not None else None
    except ValueError:
        return "..."


def _training_arguments() -> Options:
    """Of the installed Transformers; TRL's configurations inherit them."""
    import dataclasses

    from transformers import TrainingArguments

    fields = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    return {name: None if value is dataclasses.MISSING else getattr(value, "value", value) for name, value in fields.items()}


def of_accelerate(package: Path) -> Options:
    """What ``accelerate launch`` and its files take."""
    options: Options = {}
    for call in (
        node for node in ast.walk(ast.parse((package / "commands/launch.py").read_text())) if isinstance(node, ast.Call)
    ):
        if getattr(call.func, "attr", "") == "add_argument":
            options |= _argument(call, "")
    for node in ast.walk(ast.parse((package / "commands/config/config_args.py").read_text())):
        options = _fields(node) | options if isinstance(node, ast.ClassDef) else options
    return options


# --- verl: YAML ---------------------------------------------------------------------------------


GROUPS = ("optim", "engine", "model", "model_engine", "actor", "critic", "ref", "rollout", "reward", "reward_model", "data")
"""Hydra's groups, of which a command may choose another part."""


def of_verl(package: Path) -> dict[str, Options]:
    """Of its programs, and under ``GROUP=CHOICE`` of the parts that a command may choose."""
    folder = package / "trainer/config"
    programs = {}
    for name, files in {
        "torchtitan": ("_generated_ppo_torchtitan_trainer.yaml",),
        "veomni": ("_generated_ppo_veomni_trainer.yaml",),
        "megatron": ("_generated_ppo_megatron_trainer.yaml", "ppo_megatron_trainer.yaml"),
        "ppo": ("_generated_ppo_trainer.yaml", "ppo_trainer.yaml"),
        "sft": ("sft_trainer.yaml", "sft_trainer_engine.yaml"),
    }.items():
        file = next((folder / each for each in files if (folder / each).is_file()), None)
        if file is not None:
            programs[name] = dict(_leaves(_composed(file)))
    others = [programs.pop(name, {}) for name in ("torchtitan", "veomni", "megatron")]
    whole = {name: value for options in (*others, programs.pop("ppo")) for name, value in options.items()}
    parts = {f"{group}={file.stem}": file for group in GROUPS for file in sorted((folder / group).glob("*.yaml"))}
    chosen = {name: dict(_leaves(_composed(file))) for name, file in parts.items()}
    return {"ppo": whole, **programs, **{name: _of_backend(name, options) for name, options in chosen.items()}}


def _of_backend(part: str, options: Options) -> Options:
    """What parts differ in: optimizers and engines, and for a role its strategy and its optimizer."""
    group = part.partition("=")[0]
    wanted = {"optim": "", "engine": "", "actor": ("strategy", "optim."), "critic": ("strategy", "optim.")}.get(group, "?")
    return {name: value for name, value in options.items() if name.startswith(wanted)}


def _composed(file: Path) -> dict[str, Any]:
    """A file with those that its ``defaults`` name."""
    from ruamel.yaml import YAML

    tree = YAML(typ="safe").load(file.read_text()) or {}
    whole: dict[str, Any] = {}
    for item in tree.pop("defaults", []):
        if isinstance(item, str) and (inner := file.parent / f"{item}.yaml").is_file() and inner.parent.name in GROUPS:
            whole = _merged(whole, _composed(inner))
        for place, name in item.items() if isinstance(item, dict) else ():
            group, _, key = str(place).partition("@")
            inner = file.parent / group / f"{name}.yaml"
            if inner.is_file():
                whole[key or group] = _composed(inner)
    return _merged(whole, tree)


def _merged(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merged(low[key], high[key]) for key in high if isinstance(low.get(key), dict) and isinstance(high[key], dict)}
    return low | high | both


def _leaves(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


# --- versions -----------------------------------------------------------------------------------


def changes(table: dict[str, dict[str, Options]]) -> dict[str, Any]:
    """Program → option → version from which its default is such, ``null`` from where it is gone."""
    programs = dict.fromkeys(program for options in table.values() for program in options)
    result: dict[str, Any] = {}
    for program in programs:
        names = dict.fromkeys(name for options in table.values() for name in options.get(program, {}))
        own = result[program] = {}
        for name in sorted(names):
            last: Any = None
            for version, options in table.items():
                value = plain(options[program][name]) if name in options.get(program, {}) else None
                if value != last:
                    own.setdefault(name, {})[version] = last = value
    return {"versions": list(table), "programs": result}


def plain(value: Any) -> Any:
    """A default as an option's values: texts."""
    if isinstance(value, list | tuple):
        return [str(item) for item in value]
    return "..." if isinstance(value, str) and re.fullmatch(r"\w+_\d{4}T\d\d:\d\d", value) else str(value)


def text_of(table: dict[str, Any]) -> str:
    """JSON with a line for each option."""
    lines = ["{", f'"versions": {json.dumps(table["versions"])},', '"programs": {']
    for program, options in table["programs"].items():
        rows = [f"  {json.dumps(name)}: {json.dumps(known)}" for name, known in options.items()]
        lines += [f"{json.dumps(program)}: {{", ",\n".join(rows), "},"]
    lines[-1] = "}"
    return "\n".join([*lines, "}", "}", ""])


if __name__ == "__main__":
    main()
