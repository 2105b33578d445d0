"""Translation of other projects' command lines and configurations to ours: the meaning of each option here, or that it has
none.
"""
