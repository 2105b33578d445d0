"""Usual names that solutions do not import because other judges provide them, ``exit`` and ``quit``, and a machine with few
processors.
"""

import builtins
import importlib
import os
import sys

MODULES = [
    "bisect",
    "collections",
    "copy",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "os",
    "random",
    "re",
    "statistics",
    "string",
    "sys",
    "time",
    "typing",
]
FROM = {
    "typing": """Any Callable DefaultDict Deque Dict FrozenSet Generator Generic Hashable Iterable Iterator List Literal Mapping
        MutableMapping NamedTuple NoReturn Optional Sequence Set Text Tuple Type TypeVar Union cast""",
    "collections": "ChainMap Counter OrderedDict UserDict defaultdict deque namedtuple",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce total_ordering wraps",
    "itertools": """accumulate batched chain combinations combinations_with_replacement compress count cycle dropwhile filterfalse
        groupby islice pairwise permutations product repeat starmap takewhile tee zip_longest""",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "math": """acos asin atan atan2 ceil comb cos degrees dist e exp fabs factorial floor fmod gcd hypot inf isclose isfinite isinf
        isnan isqrt lcm log log10 log1p log2 modf nan perm pi prod radians sin sqrt tan tau trunc""",
    "copy": "copy deepcopy",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation",
    "operator": "add attrgetter itemgetter methodcaller mul sub xor",
    "random": "choice randint randrange shuffle",
    "statistics": "mean median mode stdev",
    "datetime": "date datetime timedelta",
    "fractions": "Fraction",
    "decimal": "Decimal",
    "dataclasses": "dataclass",
    "enum": "Enum IntEnum",
    "abc": "ABC abstractmethod",
    "io": "BytesIO StringIO",
    "sys": "setrecursionlimit stdin stdout",
    "time": "sleep time",
}
NAMES = {name: module for module, names in FROM.items() for name in names.split()}
ALIASES = {"np": "numpy", "pd": "pandas"}
MISSING = object()


def usual(name, source=""):
    """Returns a module or a name in one, or ``MISSING``. If both have the name, as with ``bisect``, a called name is the
    function.
    """
    try:
        if name in NAMES and (name not in MODULES or _is_called(name, source)):
            return getattr(importlib.import_module(NAMES[name]), name)
        if name in MODULES or name in ALIASES:
            return importlib.import_module(ALIASES.get(name, name))
    except (ImportError, AttributeError):
        pass
    return MISSING


def _is_called(name, source):
    import re

    return re.search(rf"(?<![\w.]){name}\s*\(", source) and not re.search(rf"(?<![\w.]){name}\s*\.", source)


def free_names(source):
    """Returns names that code uses and neither its module nor Python defines."""
    import symtable

    module = symtable.symtable(source, "program", "exec")
    used: set[str] = set()
    todo = [module]
    for table in todo:
        used.update(name.get_name() for name in table.get_symbols() if name.is_global() or table is module)
        todo += table.get_children()
    if "annotations" in source:  # those that wait are read when somebody asks
        used.update(name for name in FROM["typing"].split() if name in source)
    given = {name.get_name() for name in module.get_symbols() if name.is_assigned() or name.is_imported()}
    return used - given - set(dir(builtins))


def prepare(source, space):
    """Adds to ``space`` the usual names that the code uses and does not define."""
    for name in free_names(source):
        if (value := usual(name, source)) is not MISSING:
            space[name] = value


def settle(source):
    """Prepares this interpreter for a single program."""
    import _sitebuiltins

    builtins.exit, builtins.quit = (_sitebuiltins.Quitter(name, "Ctrl-D") for name in ("exit", "quit"))  # type: ignore
    os.cpu_count = os.process_cpu_count = lambda: 2  # type: ignore[attr-defined]
    sys.setrecursionlimit(10_000)
    if "multiprocessing" in source or "concurrent" in source:
        from .semaphores import install

        install()


def run(source, file, name):
    """Runs a program in its own module. Its ``SystemExit`` and other exceptions are raised."""
    module = sys.modules[name] = type(sys)(name)
    module.__dict__.update(__builtins__=builtins, __file__=file)
    settle(source)
    code = compile(source, file, "exec", dont_inherit=True)
    prepare(source, module.__dict__)
    exec(code, module.__dict__)
    return module
