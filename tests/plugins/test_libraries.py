"""A library that a plugin's traits name and that is not installed: what to install, by the plugin's own metadata."""

import pytest

from rlhf_host.errors import PluginError
from rlhf_host.plugins.selection import find
from rlhf_host.plugins.specs import PluginSpec

SOURCE = """
from pydantic import BaseModel
from rlhf_host.protocols import EngineTraits

class Acme:
    class Options(BaseModel):
        pass
    traits = EngineTraits(libraries=("{library}",))
    def __init__(self, options):
        pass
"""


@pytest.mark.parametrize(
    ("library", "remedy"),
    [("fast_engine", r"'acme-engines\[fast\]'"), ("other_engine", "other-engine"), ("json", None)],
)
def test_the_extra_that_brings_it_is_named_where_there_is_one(here, library, remedy):
    here.install(
        "acme-engines",
        {"rlhf.engines": "acme = acme_engines:Acme"},
        {"acme_engines.py": SOURCE.format(library=library)},
        requires=("rlhf-host>=0.10,<0.11", 'fast-engine>=2; extra == "fast"'),
    )
    spec = PluginSpec.of(find("engine", "acme"), {})
    if remedy is None:
        spec.build()
        return
    with pytest.raises(PluginError, match=f"engine 'acme' needs {library}: pip install {remedy}$"):
        spec.build()


@pytest.mark.parametrize(
    ("traits", "problem"),
    [
        ("EngineTraits(libraries=('no.such.library',))", r"needs no.such.library: pip install no-such-library"),
        ("Traits()", "has traits of type Traits, not EngineTraits: see rlhf_host.protocols"),
        ("property(lambda self: 1 / 0)", "reading its traits failed: ZeroDivisionError: division by zero"),
        (
            "EngineTraits()\n    @hookimpl\n    def score(self, trajectories): ...",
            "marks methods with @hookimpl, and an engine has",
        ),
    ],
)
def test_traits_that_nobody_can_use_are_refused(here, traits, problem):
    source = SOURCE.replace('EngineTraits(libraries=("{library}",))', traits)
    source = source.replace("import EngineTraits", "import EngineTraits, Traits\nfrom rlhf_host import hookimpl")
    here.install("acme-engines", {"rlhf.engines": "acme = acme_engines:Acme"}, {"acme_engines.py": source})
    with pytest.raises(PluginError, match=problem):
        PluginSpec.of(find("engine", "acme"), {}).build()
