"""Containment of programs by system calls alone. Runs as its own process, with only the standard library: see ``main.py``."""
