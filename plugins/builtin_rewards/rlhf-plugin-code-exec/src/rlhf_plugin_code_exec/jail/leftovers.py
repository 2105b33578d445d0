"""Settings that commands left where a fresh command's tools would find them unasked: it sees results, not settings."""

import os
import re
import stat

STARTED = {
    *(".pdbrc", ".gdbinit", ".lldbinit", ".Rprofile", ".Renviron", ".RData", ".irbrc", ".pryrc", ".byebugrc", ".octaverc"),
    *(".ghci", ".ocamlinit", ".erlang", ".iex.exs", ".exrc", ".perldb", ".npmrc"),
}
"""Files that debuggers and interpreters read in the folder where they are started."""
PEOPLE = ("name", "email")
KNOWN = {
    "core": ("repositoryformatversion", "filemode", "bare", "logallrefupdates", "ignorecase", "symlinks", "autocrlf", "eol"),
    "extensions": ("objectformat", "refstorage"),
    **dict.fromkeys(("user", "author", "committer"), PEOPLE),
    "remote": ("url", "pushurl", "fetch", "push", "mirror", "prune", "tagopt"),
    "branch": ("remote", "pushremote", "merge", "rebase", "description"),
    "submodule": ("url", "active", "branch"),
    "init": ("defaultbranch",),
    "pull": ("rebase", "ff"),
    "push": ("default", "autosetupremote", "followtags"),
    "fetch": ("prune",),
    "merge": ("ff", "conflictstyle"),
}
"""Section of a repository's configuration → its keys that describe it, and start nothing. Short names (``alias``) stay, too."""
SECTION = re.compile(r"\s*\[\s*([\w-]+)(?:\s*\.[^\]\s\"]*|\s+\"(?:[^\"\\]|\\.)*\")?\s*\](.*)", re.ASCII)
KEY = re.compile(r"\s*([A-Za-z][\w-]*)\s*(?:=(.*))?", re.ASCII)
MOST = 1 << 20
"""Most bytes of a configuration that is read."""


def put_away(place: str, closed: list) -> None:
    """Removes below a folder: files that tools start with, settings of Git that start programs or lead elsewhere, and links into
    folders that commands did not have. Runs in the cell, as its user, while nothing else does. Raises ``OSError``.

    Args:
        closed: the real paths of these folders.
    """
    mode = stat.S_IMODE(os.stat(place).st_mode)
    if mode & 0o700 != 0o700:
        os.chmod(place, mode | 0o700)
    with os.scandir(place) as listed:
        found = {entry.name: entry for entry in listed}
    for name, entry in found.items():
        if entry.is_symlink():
            if name in STARTED or _leads(entry.path, closed):
                os.unlink(entry.path)
        elif entry.is_dir():
            if entry.path not in closed:
                put_away(entry.path, closed)
        elif name in STARTED:
            os.unlink(entry.path)
    if "objects" in found and "refs" in found and "config" in found:
        _describe(os.path.join(place, "config"))
    if mode & 0o700 != 0o700:
        os.chmod(place, mode)


def _leads(link: str, closed: list) -> bool:
    places = os.path.realpath(link), os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
    return any(f"{place}/".startswith(f"{each}/") for each in (*closed, "/proc") for place in places)


def _describe(path: str) -> None:
    """Leaves of a repository's configuration what describes it."""
    text = ""
    if os.path.isdir(path) and not os.path.islink(path):
        return
    if stat.S_ISREG(os.lstat(path).st_mode):
        os.chmod(path, 0o600)
        with open(path, "rb") as file:
            text = file.read(MOST).decode("utf-8", "surrogateescape")
    os.unlink(path)
    with open(path, "xb") as file:
        file.write(described(text).encode("utf-8", "surrogateescape"))


def described(text: str) -> str:
    """Returns the lines of a configuration that are known. A line that is read in another way than Git reads it is lost, or kept
    with a known key.
    """
    lines, keys, shorts = [], (), False
    for line in ("" if "\0" in text else re.sub(r"\\\r?\n", "", text.removeprefix("\ufeff"))).split("\n"):
        rest = line
        if header := SECTION.fullmatch(line.rstrip("\r")):
            name, rest = header[1].lower(), header[2]
            keys, shorts = KNOWN.get(name, ()), name == "alias"
            if keys or shorts:
                lines.append(line[: len(line.rstrip("\r")) - len(rest)])
        if (key := KEY.fullmatch(rest.rstrip("\r"))) and (key[1].lower() in keys or (shorts and "!" not in (key[2] or "!"))):
            lines.append(f"\t{rest.strip()}")
    return "".join(f"{line}\n" for line in lines)
