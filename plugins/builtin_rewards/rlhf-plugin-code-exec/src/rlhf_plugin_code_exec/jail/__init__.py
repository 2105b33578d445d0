"""Contains programs by system calls alone. Runs as a process of its own, with the standard library alone: see ``main.py``."""
