"""A program that reads its standard input. Its code comes by descriptor 3."""

import os
import sys

from . import prelude


def main():
    with os.fdopen(3, encoding="utf-8") as file:
        source = file.read()
    sys.argv[:] = ["program.py"]
    prelude.run(source, "program.py", "__main__")


main()
