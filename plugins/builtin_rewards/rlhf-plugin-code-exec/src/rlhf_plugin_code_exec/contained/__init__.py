"""Code that runs inside of cells, beside a solution or its tests: it uses only the standard library, and is as light as
possible.
"""
