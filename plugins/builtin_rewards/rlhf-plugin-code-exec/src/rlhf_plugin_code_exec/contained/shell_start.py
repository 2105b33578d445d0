"""``sitecustomize`` of a shell without a file system of its own: ``multiprocessing`` without a folder of others."""

import sys


class Prepares:
    """Prepares a program that is about to use them."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "multiprocessing.synchronize" and cls in sys.meta_path:
            sys.meta_path.remove(cls)
            from rlhf_semaphores import install

            install()
        return None


sys.meta_path.insert(0, Prepares)
