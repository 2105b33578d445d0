"""The published package without what its first file imports."""
