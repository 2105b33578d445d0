"""Sweeps: settings by seeds, each a run of its own, in one folder with one table and one page."""
