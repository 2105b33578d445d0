"""What ``gpu_accept.py`` measures: a file for each kind of part."""
