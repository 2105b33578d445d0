"""Runtimes: the processes in which roles and engines run."""
