"""Pages that ``scripts/generate_docs.py`` writes: one module for each sort."""
