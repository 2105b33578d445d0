"""A port that is agreed on before somebody listens at it is kept until then (``rlhf_host.distributed.reserved``)."""

import ast

from .sources import ROOT, python_files

ASKED = "getsockname()[1]"


def let_go(source):
    """Returns the lines at which a number of a port outlives the socket that had it."""
    tree = ast.parse(source)
    opened = (node for node in ast.walk(tree) if isinstance(node, ast.With) and "socket." in ast.unparse(node.items[0]))
    lasts = (node.body[-1] for node in opened)
    return [
        last.lineno
        for last in lasts
        if isinstance(last, ast.Assign | ast.AnnAssign | ast.Return) and ASKED in ast.unparse(last)
    ]


def test_no_port_is_looked_for_and_let_go():
    files = [(file, text) for file in python_files() if ASKED in (text := file.read_text())]
    found = [f"{file.relative_to(ROOT)}:{line}" for file, text in files for line in let_go(text)]
    assert not found, "somebody else may have the port when it is used: keep it with rlhf_host.distributed.reserved"


def test_what_is_told():
    looked = 'with socket.socket() as one:\n    one.bind(("127.0.0.1", 0))\n    {}one.getsockname()[1]\n'
    assert let_go(looked.format("port = ")) == let_go(looked.format("port: int = ")) == [3]
    assert let_go("def port():\n" + "".join(f"    {line}\n" for line in looked.format("return ").splitlines())) == [4]
    assert not let_go(looked.format("port = ") + "    use(port)\n")
