"""A file system of its own for a cell: what it may read at the usual paths, and its folders at chosen ones."""

import os

from .kernel import MS_BIND, MS_PRIVATE, MS_REC, mount

ALSO = ("/dev", "/proc")
MEMORY = "/dev/shm"
"""Folder of semaphores and shared memory: one of its own may take its place."""


def enter(root: str, readable: list[str], binds: dict[str, str]) -> None:
    """Changes the root to an empty folder that gets these paths; only in user and mount namespaces of its own.

    Args:
        root: an empty folder.
        readable: paths that are inside what they are outside.
        binds: path inside → path outside.

    Raises ``OSError``, also for a path inside that the system has already.
    """
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", 0, "size=1m,nr_inodes=1024,mode=755")
    for path in sorted({*readable, *ALSO}):
        if os.path.lexists(root + path):
            continue  # it is inside one of the others
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.exists(path):
            _bind(path, root + path)
    for inside, outside in sorted(binds.items()):
        _bind(outside, root + inside, inside == MEMORY)
    os.chroot(root)
    os.chdir("/")


def _bind(source: str, target: str, over: bool = False) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=over)
    else:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    mount(source, target, None, MS_BIND | MS_REC)
