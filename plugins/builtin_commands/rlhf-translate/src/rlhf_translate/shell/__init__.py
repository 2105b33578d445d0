"""Shell scripts, read and not run."""
