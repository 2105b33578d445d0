"""The folder of a job, reached only by descriptors: the target of a path can change, an open file cannot."""

import os


class Job:
    """A folder that only this user changes, with the files and folders that cells get.

    Raises ``OSError`` if another user could change it.
    """

    def __init__(self, path: str):
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        about = os.fstat(self.fd)
        if about.st_uid != os.geteuid() or about.st_mode & 0o022:
            raise OSError(f"the folder {path} can be changed by others")
        os.fchmod(self.fd, 0o711)
        self.folders: set[str] = set()

    def file(self, name: str, content: bytes, owner: int) -> int:
        """Returns a new file that a cell's user may read but not change, open for reading."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(name, flags, 0o600, dir_fd=self.fd), "wb") as file:
            file.write(content)
            if owner != os.geteuid():
                os.fchown(file.fileno(), -1, owner)
                os.fchmod(file.fileno(), 0o640)
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self.fd)

    def folder(self, name: str, owner: int) -> int:
        """Returns a folder of the cell's user, open; a new one, unless a cell has it already."""
        new = name not in self.folders
        if new:
            os.mkdir(name, 0o700, dir_fd=self.fd)
            self.folders.add(name)
        opened = _open(name, self.fd)
        if new and owner != os.geteuid():
            os.fchown(opened, owner, owner)
        return opened

    def clear(self) -> None:
        """Removes all its contents; only after the programs have ended."""
        self.folders.clear()
        _clear(self.fd)


DEPTH = 64
"""Maximum depth of folders in which programs make files."""


def used(folder: int, depth: int = 2 * DEPTH) -> int:
    """Returns the bytes that files below an open folder take on the disk."""
    total = 0
    with os.scandir(folder) as listed:
        found = list(listed)
    for entry in found:
        try:
            total += entry.stat(follow_symlinks=False).st_blocks << 9
            if depth and entry.is_dir(follow_symlinks=False):
                inner = _open(entry.name, folder)
                try:
                    total += used(inner, depth - 1)
                finally:
                    os.close(inner)
        except OSError:
            continue  # it was removed meanwhile, or cannot be looked into
    return total


def entries(folder: int, most: int, depth: int = DEPTH) -> int:
    """Returns the number of files and folders below an open folder, at most ``most``."""
    with os.scandir(folder) as listed:
        names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in listed]
    found = 0
    for name, is_folder in names:
        found += 1
        if found >= most:
            break
        if not is_folder:
            continue
        if not depth:
            return most
        try:
            inner = _open(name, folder)
        except OSError:
            return most  # a folder that cannot be looked into
        try:
            found += entries(inner, most - found, depth - 1)
        finally:
            os.close(inner)
    return found


def _open(name: str, folder: int, flags: int = os.O_RDONLY) -> int:
    return os.open(name, flags | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)


def _clear(folder: int) -> None:
    for name in os.listdir(folder):
        try:
            os.unlink(name, dir_fd=folder)
            continue
        except OSError:
            pass
        place = _open(name, folder, os.O_PATH)
        try:
            os.chmod(f"/proc/self/fd/{place}", 0o700)  # this folder, whatever has its name by now
            inner = _open(".", place)
        finally:
            os.close(place)
        try:
            _clear(inner)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=folder)
