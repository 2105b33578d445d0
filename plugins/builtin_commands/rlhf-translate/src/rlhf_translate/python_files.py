"""Python scripts that make a configuration of TRL with literals: read, and never run."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rlhf_host import UserError
from rlhf_translate.options import PROCESSES, Option
from rlhf_translate.programs import Command, Origin, unsupported
from rlhf_translate.python_values import ERRORS, OTHER, Values, settings_of

_METHODS = {"GRPO": "grpo", "RLOO": "rloo", "DPO": "dpo", "SFT": "sft", "KTO": "kto", "Reward": "reward", "PRM": "prm"}
_INSTEAD = {"GKD": "gkd", "Distillation": "distillation", "OnlineDPO": "online_dpo", "PPO": "ppo"}
_LORA = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "task_type": "lora_task_type",
    "use_gradient_checkpointing": "gradient_checkpointing",
}
_CHANGES = ("map", "filter", "select", "shuffle", "train_test_split", "rename_column", "remove_columns", "cast", "sort")
_FIRST = ("model", "reward_funcs")
"""Names of a trainer's first arguments."""
_REWARDED = ("GRPO", "RLOO")
_MODELS = ("from_pretrained",)


def python_command(path: Path, text: str, origin: Origin) -> Command | None:
    """Returns the command that a script represents; None if it makes no configuration.

    Raises:
        UserError: it is not Python, or makes an unsupported configuration.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line, why = getattr(error, "lineno", 1), getattr(error, "msg", str(error))
        raise UserError(f"{path}:{line}: is not valid Python: {why}") from error
    script = _Script(tree, path)
    made = [call for call in script.calls if _named(call, "Config", _METHODS)]
    if not made:
        other = next((call for call in script.calls if _named(call, "Config", _INSTEAD)), None)
        if other is not None:
            raise UserError(f"{path}:{other.lineno}: {unsupported(_name(other), 'trl', _INSTEAD[_name(other)[:-6]])}")
        return None
    call = made[-1]
    method = origin.method or _METHODS[_name(call)[:-6]]
    options = [*script.keywords(call), *script.of_trainer(), *script.wrapped()]
    processes = Option(PROCESSES, ("of the script",), call.lineno, missing=("the number of processes of the script",))
    command = Command("trl", method, options, call.lineno, path.name, processes=processes, version=origin.version)
    command.notes = [f"line {each.lineno}: {_name(each)} is made too, and not read" for each in made[:-1]]
    command.notes += script.notes
    return command


def docstring(text: str) -> tuple[str, int] | None:
    """Returns the text before a script's code, which has commands to run it, and its line."""
    try:
        first = ast.parse(text).body[:1]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in first:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines = text.splitlines()[node.lineno - 1 : node.end_lineno]  # as they are written, so that each has its number
            return re.sub(r"""^\s*[rRuU]*(?:'{3}|"{3}|['"])|(?:'{3}|"{3}|['"])[^'"]*$""", "", "\n".join(lines)), node.lineno
    return None


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _named(call: ast.Call, end: str, names: dict[str, str]) -> bool:
    return _name(call).removesuffix(end) in names and _name(call).endswith(end)


class _Script:
    def __init__(self, tree: ast.Module, path: Path):
        self.tree, self.path = tree, path
        self.notes: list[str] = []
        nodes = sorted((node for node in ast.walk(tree)), key=lambda node: getattr(node, "lineno", 0))
        self.calls = [node for node in nodes if isinstance(node, ast.Call)]
        self.functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        self.values = Values(nodes)

    # --- values ---------------------------------------------------------------------------------

    def option(self, name: str, value: ast.expr, line: int) -> Option:
        """Returns a literal, or what follows from literals; else a value that only a run would give."""
        try:
            literal = self.values.literal(value)
        except ERRORS:
            return self.unknown(name, ast.unparse(value), line)
        items = literal if isinstance(literal, list | tuple | set) else [literal]
        return Option(f"--{name}", tuple(map(_text, items)), line)

    def unknown(self, name: str, shown: str, line: int) -> Option:
        variable, _, attribute = shown.rpartition(".")
        parsed = any("parse" in ast.unparse(value) for value in self.values.assigned.get(variable, ()))
        usual = self.values.options.get(attribute) if parsed else self.values.defaults.get(shown)
        return Option(f"--{name}", (shown,), line, missing=(f"{shown} ({usual} by default)" if usual else shown,))

    def keywords(self, call: ast.Call) -> Iterator[Option]:
        """Yields the keywords of a call that makes a configuration, and settings made in it later."""
        if call.args:
            yield self.option("output_dir", call.args[0], call.args[0].lineno)
        for word in call.keywords:
            if word.arg is not None:
                yield self.option(word.arg, word.value, word.value.lineno)
            elif (more := self.values.mapping(word.value)) is not None:
                for name, value in more.items():
                    yield self.option(name, value, value.lineno)
                if isinstance(word.value, ast.Name):
                    yield from self.later(word.value.id, before=call.lineno)
            else:
                where = f"line {word.value.lineno}: **{ast.unparse(word.value)}"
                self.notes.append(f"{where} of {_name(call)} is not read: add what it has, instead of defaults")
        for variable in [name for name, assigned in self.values.assigned.items() if call in assigned]:
            yield from self.later(variable)

    def later(self, variable: str, before: int = sys.maxsize) -> Iterator[Option]:
        """Yields what is set in a configuration or a mapping after it is made.

        Args:
            before: line after which changes do not count.
        """
        for name, value, line, may in settings_of(variable, self.tree):
            shown = f"{variable}.{name}"
            if line > before:
                continue
            if name == "...":
                self.notes.append(f"line {line}: what it changes in {variable} is not read: change it here too")
            elif may:
                yield self.unknown(name, f"{shown} (set on line {line} under a condition)", line)
            else:
                yield self.unknown(name, shown, line) if value is OTHER else self.option(name, value, line)
        for call in self.calls:
            if _name(call) in ("setattr", "replace") and [ast.unparse(value) for value in call.args[:1]] == [variable]:
                self.notes.append(f"line {call.lineno}: {ast.unparse(call)} is not read: add what it sets")

    # --- the trainer ----------------------------------------------------------------------------

    def of_trainer(self) -> Iterator[Option]:
        trainer = next((call for call in reversed(self.calls) if _named(call, "Trainer", _METHODS)), None)
        if trainer is None:
            return
        first = _FIRST if _name(trainer)[:-7] in _REWARDED else _FIRST[:1]
        for name, value in zip(first, trainer.args, strict=False):
            yield from self.argument(name, value, value.lineno)
        for value in trainer.args[len(first) :]:
            known = self.values.known(value)
            if not (isinstance(known, ast.Call) and _named(known, "Config", _METHODS)):
                self.notes.append(
                    f"line {value.lineno}: {ast.unparse(value)} of {_name(trainer)} is not read: add what it says"
                )
        for word in trainer.keywords:
            yield from self.argument(word.arg or "**", word.value, word.value.lineno)

    def argument(self, name: str, value: ast.expr, line: int) -> Iterator[Option]:
        """Yields an argument of the trainer."""
        if name == "model":
            yield from self.model(value, line)
        elif name == "eval_dataset" and isinstance(value, ast.Constant) and value.value is None:
            return
        elif name in ("train_dataset", "eval_dataset"):
            yield from self.data(name, value, line)
        elif name == "reward_funcs":
            yield self.rewards(value, line)
        elif name == "peft_config":
            yield from self.adapter(value, line)
        elif name not in ("args", "processing_class", "tokenizer"):
            shown = ast.unparse(value)
            yield Option(f"--{name}", (shown if len(shown) <= 60 else "...",), line)

    def model(self, value: ast.expr, line: int) -> Iterator[Option]:
        known = self.loaded_model(value)
        if known is not None:
            for first in known.args[:1]:
                yield self.option("model_name_or_path", first, known.lineno)
            for word in known.keywords:
                if word.arg in ("model_name", "pretrained_model_name_or_path"):
                    yield self.option("model_name_or_path", word.value, known.lineno)
                elif word.arg in ("torch_dtype", "dtype"):
                    dtype = ast.unparse(word.value).removeprefix("torch.").strip("'\"")
                    yield Option("--dtype", (dtype,), word.value.lineno)
                elif word.arg == "quantization_config" and isinstance(bits := self.values.known(word.value), ast.Call):
                    names = {str(each.arg) for each in bits.keywords if ast.unparse(each.value) == "True"}
                    for name in sorted(names & {"load_in_4bit", "load_in_8bit"}):
                        yield Option(f"--{name}", ("True",), bits.lineno)
                elif word.arg:
                    yield self.option(word.arg, word.value, word.value.lineno)
        else:
            yield self.option("model_name_or_path", value, line)

    def loaded_model(self, value: ast.expr) -> ast.Call | None:
        """Returns the call that loads the model, even if it also gives a tokenizer, or an adapter is added later."""
        known = self.values.known(value)
        if isinstance(known, ast.Call) and _name(known) in _MODELS and (known.args or known.keywords):
            return known
        found = None
        for node in ast.walk(self.tree) if isinstance(value, ast.Name) else ():
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _name(node.value) in _MODELS:
                targets = (each for target in node.targets for each in getattr(target, "elts", [target]))
                if any(isinstance(each, ast.Name) and each.id == ast.unparse(value) for each in targets):
                    found = node.value
        return found

    def wrapped(self) -> Iterator[Option]:
        """Yields settings of an adapter that the script puts into the model itself: ``get_peft_model`` of PEFT and Unsloth."""
        for call in (call for call in self.calls if _name(call) == "get_peft_model"):
            values = (*call.args, *(word.value for word in call.keywords))
            own = [
                each for each in map(self.values.known, values) if isinstance(each, ast.Call) and _name(each) == "LoraConfig"
            ]
            unread = [each for each in call.args[1:] if self.values.known(each) not in own]
            self.notes += [
                f"line {call.lineno}: {ast.unparse(each)} of get_peft_model is not read: add what it has" for each in unread
            ]
            yield from self.of_lora(own[0] if own else call, "8" if own or unread else "16")

    def data(self, name: str, value: ast.expr, line: int) -> Iterator[Option]:
        """Yields the ``load_dataset`` of the variable, and a note on what the script does to the rows."""
        value, changes = self.loaded(value)
        prefix = "dataset" if name == "train_dataset" else "eval_dataset"
        for change, place in changes.items():
            self.notes.append(
                f"line {place}: the script changes the rows ({change}), which is not read: save them, or give a function: "
                f"--data FILE.py:FUNCTION"
            )
        if not (isinstance(value, ast.Call) and _name(value) == "load_dataset" and value.args):
            yield self.option(f"{prefix}_name", value, line)
            return
        yield self.option(f"{prefix}_name", value.args[0], value.lineno)
        words = {word.arg: word.value for word in value.keywords}
        config = words.get("name", value.args[1] if len(value.args) > 1 else None)
        if config is not None and name == "train_dataset":
            yield self.option("dataset_config", config, value.lineno)
        if "split" in words:
            split = "dataset_train_split" if name == "train_dataset" else "dataset_test_split"
            yield self.option(split, words["split"], value.lineno)

    def loaded(self, value: ast.expr, seen: frozenset[str] = frozenset()) -> tuple[ast.expr, dict[str, int]]:
        """Returns the call that loads a data set, and later changes of it: method → line."""
        changes: dict[str, int] = {}
        while True:
            if isinstance(value, ast.Name) and value.id not in seen and (assigned := self.values.assigned.get(value.id)):
                seen |= {value.id}
                for each in assigned[1:]:
                    changes |= _changes(each)
                value = assigned[0]
            elif isinstance(value, ast.Subscript):
                value = value.value
            elif isinstance(value, ast.Call) and _name(value) in _CHANGES and isinstance(value.func, ast.Attribute):
                changes[_name(value)] = value.lineno
                value = value.func.value
            else:
                return value, changes

    def rewards(self, value: ast.expr, line: int) -> Option:
        """Returns the rewards; functions of this file become ``FILE.py:NAME``."""
        known = self.values.known(value)
        items = known.elts if isinstance(known, ast.List | ast.Tuple) else [known]
        texts = [self.reward(item) for item in items]
        shown = [
            text or f"{type(item).__name__.lower()}_on_line_{item.lineno}" for text, item in zip(texts, items, strict=True)
        ]
        plain = [ast.unparse(item) if "," not in ast.unparse(item) else name for item, name in zip(items, shown, strict=True)]
        values = [text or other for text, other in zip(texts, plain, strict=True)]
        return Option("--reward_funcs", tuple(values), line, missing=tuple(value for value in values if value not in texts))

    def reward(self, item: ast.expr) -> str:
        item = self.values.known(item)
        if isinstance(item, ast.Constant) and isinstance(item.value, str):
            return item.value
        if isinstance(item, ast.Call):  # a factory, such as get_soft_overlong_punishment(...)
            return _name(item) if _name(item) not in self.functions else ""
        if isinstance(item, ast.Name):
            return f"{self.path}:{item.id}" if item.id in self.functions else item.id
        return ""

    def adapter(self, value: ast.expr, line: int) -> Iterator[Option]:
        known = self.values.known(value)
        if not (isinstance(known, ast.Call) and _name(known) == "LoraConfig"):
            yield self.option("peft_config", value, line)
            return
        yield from self.of_lora(known, "8")

    def of_lora(self, known: ast.Call, rank: str) -> Iterator[Option]:
        """Yields settings of a call that makes an adapter.

        Args:
            rank: default rank.
        """
        yield Option("--use_peft", ("True",), known.lineno)
        if not any(word.arg == "r" for word in known.keywords):
            yield Option("--lora_r", (rank,), known.lineno)
        if not any(word.arg == "lora_dropout" for word in known.keywords):
            yield Option("--lora_dropout", ("0.0",), known.lineno)
        for word in known.keywords:
            if word.arg not in (None, "model", "peft_config"):
                yield self.option(_LORA.get(str(word.arg), str(word.arg)), word.value, word.value.lineno)


def _changes(value: ast.expr) -> dict[str, int]:
    calls = (node for node in ast.walk(value) if isinstance(node, ast.Call) and _name(node) in _CHANGES)
    return {_name(call): call.lineno for call in calls}


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, dict) else str(value)
