"""From a name to a plugin: what can go wrong is said once, in one line, with what to do."""

from __future__ import annotations

import math
import re
import sys
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from rlhf_host import PluginError
from rlhf_host.plugins import options, selection
from rlhf_host.plugins.discovery import PluginInfo


def info(kind="reward", name="math_verifier", distribution="dist-a", status="ok", value="m:X", problem=""):
    return PluginInfo(kind, name, distribution, "1.0", ">=1,<2", status, "", value, problem)


def refuses(message):
    return pytest.raises(PluginError, match=f"^{re.escape(message)}$")


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("math_verifier", ("math_verifier", "math_verifier")),
        ("strict=math_verifier", ("strict", "math_verifier")),
        ("dist-a:math_verifier", ("math_verifier", "dist-a:math_verifier")),
        ("my-strict=dist-a:math_verifier", ("my-strict", "dist-a:math_verifier")),
    ],
)
def test_a_choice_is_an_alias_and_a_name(text, choice):
    assert selection.parse_choice(text) == choice


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a, b=c", ["a", "b=c"]),
        ("http://a/x,https://b/y", ["http://a/x,https://b/y"]),
        ("length,one=http://a,http://b,two=http://c,f", ["length", "one=http://a,http://b", "two=http://c", "f"]),
        ("length,http://a", ["length", "http://a"]),
    ],
)
def test_addresses_that_follow_one_another_are_one_choice(text, names):
    assert selection.split_names(text) == names


@pytest.mark.parametrize("text", ["=x", "a.b=x", "1=x", "strict="])
def test_an_alias_must_be_spellable(text):
    with pytest.raises(PluginError, match=r"alias|names no plugin"):
        selection.parse_choice(text)


def test_a_name_or_distribution_and_name_finds_the_plugin():
    plugins = [info(), info("algo", "math_verifier"), info(name="other")]
    assert selection.find("reward", "math_verifier", plugins) is plugins[0]
    assert selection.find("reward", "Dist_A:math_verifier", plugins) is plugins[0]


def test_a_name_of_two_distributions_needs_one_of_them():
    plugins = [info(), info(distribution="dist-b")]
    choices = "dist-a:math_verifier or dist-b:math_verifier"
    with refuses(f"reward 'math_verifier' is provided by dist-a 1.0 and dist-b 1.0; choose with {choices}"):
        selection.find("reward", "math_verifier", plugins)
    assert selection.find("reward", "dist-b:math_verifier", plugins) is plugins[1]
    with refuses(f"'dist-c' provides no reward 'math_verifier'; dist-a and dist-b do: {choices}"):
        selection.find("reward", "dist-c:math_verifier", plugins)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("reward", "math_verifer", "no reward named 'math_verifer' is installed; did you mean 'math_verifier'?"),
        ("algo", "rloo", "no algo named 'rloo' is installed; pip install -c dist/wheels.txt rlhf-plugin-rloo"),
        ("algo", "mine", "no algo named 'mine' is installed; 'mine' is the name of a reward"),
        (
            "reward",
            "127.0.0.1:5000/get_reward",
            "no reward named '127.0.0.1:5000/get_reward' is installed; an address begins with http://,"
            " as in http://127.0.0.1:5000/get_reward",
        ),
        ("algo", "zzzzzz", "no algo named 'zzzzzz' is installed; rlhf plugins lists what is installed"),
        ("algo", "dpo", "no algo named 'dpo' is installed, though rlhf-plugin-dpo is: upgrade it"),
    ],
)
def test_an_unknown_name_gets_what_helps(kind, name, message):
    plugins = [info(), info(name="mine"), info("preset", "dpo_recipe", "rlhf-plugin-dpo")]
    with refuses(message):
        selection.find(kind, name, plugins)


def test_only_listed_names_get_an_install_line():
    with pytest.raises(PluginError) as error:
        selection.find("algo", "rlo", [])
    assert "rloo" in str(error.value)
    assert "pip install" not in str(error.value)


# --- loading ------------------------------------------------------------------------------------


def test_a_plugin_is_loaded_and_built_with_its_options(here):
    here.install(
        "sel-a",
        {"rlhf.rewards": "r = sel_mod:Outer.Reward"},
        {
            "sel_mod.py": """
            from pydantic import BaseModel

            class Outer:
                class Reward:
                    class Options(BaseModel):
                        clip_eps: float = 0.2

                    def __init__(self, options):
                        self.options = options
            """
        },
    )
    found = selection.find("reward", "r")
    plugin = selection.build(found, {"clip-eps": "0.5"}, "strict")
    assert type(plugin) is selection.load(found)
    assert plugin.options.clip_eps == 0.5


def test_an_incompatible_plugin_is_refused_before_its_import(here):
    here.install("sel-a", {"rlhf.rewards": "r = sel_mod:X"}, {"sel_mod.py": "X = 1"}, requires=["rlhf-host>=1,<2"])
    with pytest.raises(
        PluginError, match=r"reward 'r' from sel-a 1\.0: sel-a 1.0 is for rlhf-host >=1,<2, and this is rlhf-host 0"
    ):
        selection.load(selection.find("reward", "r"))
    assert "sel_mod" not in sys.modules


@pytest.mark.parametrize(
    ("requires", "message"),
    [
        (["no-such-thing>=1"], r"reward 'r' from sel-a 1.0 needs no-such-thing: pip install no-such-thing$"),
        (["a-b", "no_such.thing"], "needs a-b, no-such-thing: pip install a-b no-such-thing$"),
        (
            ["pytest", 'a-b; extra == "x"', 'a-b; python_version < "3"'],
            "importing sel_mod failed: ModuleNotFoundError: No module",
        ),
    ],
)
def test_an_import_that_lacks_a_required_distribution_says_which(here, requires, message):
    here.install("sel-a", {"rlhf.rewards": "r = sel_mod:X"}, {"sel_mod.py": "from no_such_thing import X"}, requires=requires)
    with pytest.raises(PluginError, match=message):
        selection.load(selection.find("reward", "r"))


@pytest.mark.parametrize(
    ("source", "attribute", "message"),
    [
        ("import no_such_thing", "X", "importing sel_mod failed: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("raise SystemExit(3)", "X", "importing sel_mod failed: SystemExit: 3"),
        ("1 +", "X", "importing sel_mod failed: SyntaxError: "),
        ("class Reward: ...", "Rewards", "sel_mod has no 'Rewards'; did you mean 'Reward'?"),
        ("def X(options): ...", "X", "sel_mod:X is a function, not a class"),
        ("class X:\n    Options = dict", "X", "sel_mod.X: Options must be a subclass of pydantic.BaseModel"),
        (
            "from pydantic import BaseModel\nclass X:\n    class Options(BaseModel):\n        a: int = 1",
            "X",
            "sel_mod:X has Options and takes none; give it def __init__(self, options)",
        ),
        ("class X:\n    def __init__(self, options): 1 / 0", "X", "building it failed: ZeroDivisionError: division by zero"),
        (
            "class X:\n    def __init__(self): ...",
            "X",
            "sel_mod:X is made with its options alone; write def __init__",
        ),
        (
            "from rlhf_host import UserError\nclass X:\n    def __init__(self, options): raise UserError('no key set')",
            "X",
            "reward 'r' from sel-a 1.0: no key set",
        ),
    ],
)
def test_a_broken_plugin_is_one_line_that_names_it(here, source, attribute, message):
    here.install("sel-a", {"rlhf.rewards": f"r = sel_mod:{attribute}"}, {"sel_mod.py": source})
    with pytest.raises(PluginError) as error:
        selection.build(selection.find("reward", "r"), {})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


# --- options ------------------------------------------------------------------------------------


class Inner(BaseModel):
    cap: float = 2.0


class Options(BaseModel):
    """Unknown keys are the host's to refuse: an author who forgets ``extra="forbid"`` gets it all the same."""

    clip_eps: float = Field(0.2, gt=0, description="half-width of the trust region")
    mode: Literal["a", "b"] = "a"
    steps: int
    names: list[str] = Field(default_factory=list)
    limit: int | None = None
    inner: Inner = Inner()
    most: float = math.inf


def test_keys_may_be_written_with_hyphens_or_underscores():
    parsed = options.parse_options(Options, {"clip-eps": "0.1", "steps": 3, "inner": {"cap": 1}, "most": "inf"}, "algo 'x'")
    assert (parsed.clip_eps, parsed.steps, parsed.inner.cap) == (0.1, 3, 1.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 1, "clip-esp": 1}, "algo 'x' has no option 'clip-esp'; did you mean 'clip_eps'?"),
        (
            {"steps": 1, "zzz": 1},
            "algo 'x' has no option 'zzz'; it has clip_eps, mode, steps, names, limit, inner, most",
        ),
        ({"steps": 1, "inner": {"capp": 1}}, "algo 'x' has no option 'capp' under 'inner'; did you mean 'cap'?"),
        ({"steps": 1, "clip-eps": 1, "clip_eps": 1}, "algo 'x': option 'clip_eps' is given twice, once as 'clip_eps'"),
        ({}, "algo 'x' needs 'steps'"),
        ({"steps": 1, "clip_eps": "inf"}, "algo 'x': clip_eps: should be a finite number of 32 bits, not inf"),
        ({"steps": 1, "inner": {"cap": -1e39}}, "algo 'x': inner.cap: should be a finite number of 32 bits, not -1e+39"),
        ({"steps": 1, "clip_eps": -1}, "algo 'x': clip_eps: should be greater than 0, not -1"),
        (
            {"steps": "many", "mode": "c"},
            "algo 'x': mode: should be 'a' or 'b', not 'c'; steps: should be a valid integer, not 'many'",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(given, message):
    with refuses(message):
        options.parse_options(Options, given, "algo 'x'")


def test_a_plugin_without_options_takes_none():
    class Plain:
        def __init__(self, options): ...

    model = options.options_model(Plain)
    assert options.parse_options(model, {}, "algo 'x'").model_dump() == {}
    with refuses("algo 'x' has no option 'lr'; it takes no options"):
        options.parse_options(model, {"lr": 1}, "algo 'x'")


def test_options_are_described_with_type_default_and_description():
    rows = [(row.name, row.type, row.default, row.description) for row in options.describe_options(Options)]
    assert rows == [
        ("clip_eps", "float", "0.2", "half-width of the trust region"),
        ("mode", "'a' | 'b'", "'a'", ""),
        ("steps", "int", None, ""),
        ("names", "list[str]", "[]", ""),
        ("limit", "int | None", "None", ""),
        ("inner.cap", "float", "2.0", ""),
        ("most", "float", "inf", ""),
    ]


# --- keys that the configuration needs for itself ------------------------------------------------

TAKEN = """
from pydantic import BaseModel

class X:
    class Options(BaseModel):
        {field}: float = 1.0

    def __init__(self, options): ...
"""


@pytest.mark.parametrize(
    ("kind", "group", "field"),
    [
        ("extension", "rlhf.extensions", "weight"),
        ("reward", "rlhf.rewards", "name"),
        ("engine", "rlhf.engines", "name"),
        ("weight_sync", "rlhf.weight_sync", "verify"),
        ("tasks", "rlhf.tasks", "split"),
    ],
)
def test_an_option_with_a_name_that_the_configuration_needs_is_refused(here, kind, group, field):
    here.install("sel-taken", {group: "x = sel_taken:X"}, {"sel_taken.py": TAKEN.format(field=field)})
    message = f"X: Options has the field '{field}', a key that the configuration needs for itself: rename the field"
    with pytest.raises(PluginError, match=message):
        selection.build(selection.find(kind, "x"), {})


def test_other_kinds_may_use_what_one_kind_has_reserved(here):
    here.install("sel-free", {"rlhf.rewards": "x = sel_free:X"}, {"sel_free.py": TAKEN.format(field="verify")})
    assert selection.build(selection.find("reward", "x"), {"verify": 2}) is not None


def test_the_reserved_names_are_the_fields_of_the_schema():
    from rlhf_host.config.schema import DataSource, PluginChoice, RewardChoice, SyncChoice

    everywhere = {*PluginChoice.model_fields, *RewardChoice.model_fields}
    assert set(options.RESERVED[""]) == everywhere
    assert {*everywhere, *options.RESERVED["weight_sync"]} == everywhere | set(SyncChoice.model_fields)
    assert {*everywhere, *options.RESERVED["tasks"]} == everywhere | set(DataSource.model_fields)
