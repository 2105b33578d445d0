"""``scripts/gpu_carry``: what is packed is what is unpacked, pieces that are lost or changed are noticed, and libraries are cut."""

from __future__ import annotations

import importlib.util
import shutil
import struct
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.scripts_as_modules import ROOT, load_script

FOLDER = ROOT / "scripts/gpu_carry"
SETTINGS = {"cut": {"remove": ["tiny/heavy*.so", "**/tests"], "libraries": ["tiny/*.so"]}, "architecture": 90}
ELF, PTX = 2, 1


@pytest.fixture(scope="module")
def carry():
    return load_script("scripts/gpu_carry/carry.py")


@pytest.fixture(scope="module")
def join():
    return load_script("scripts/gpu_carry/join.py")


@pytest.fixture(scope="module")
def fatbin():
    return load_script("scripts/gpu_carry/fatbin.py")


def entry(kind, architecture, size, fill):
    header = struct.pack("<HHIQ", kind, 0x101, 64, size) + bytes(12) + struct.pack("<I", architecture)
    return header.ljust(64, b"\0") + fill * size


def binary(*entries):
    data = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(data)) + data


MAGIC_ALONE = struct.pack("<I", 0xBA55ED50) + b"no fat binary"
H100 = entry(ELF, 90, 400, b"h")
NEWER_PTX, OLDER_PTX = entry(PTX, 89, 64, b"n"), entry(PTX, 80, 80, b"o")
BINARIES = [
    ((entry(ELF, 80, 800, b"a"), H100, entry(ELF, 120, 800, b"b")), (H100,)),
    ((OLDER_PTX, NEWER_PTX, entry(PTX, 100, 64, b"x")), (NEWER_PTX,)),
    ((entry(ELF, 100, 96, b"c"), entry(ELF, 120, 32, b"d")), (entry(ELF, 120, 32, b"d"),)),
]
"""Entries, and those that are kept: code of the architecture, PTX that it can run, the smallest."""


def library(entries=lambda case: case[0]):
    parts = [binary(*entries(case)) for case in BINARIES]
    return b"\x7fELF some code" + MAGIC_ALONE + parts[0] + b"between" + parts[1] + parts[2] + b"the end"


def test_of_each_fat_binary_the_right_entries_stay_and_everything_else_is_where_it_was(fatbin, tmp_path):
    path = tmp_path / "made_up.so"
    path.write_bytes(before := library())
    said = fatbin.cut(path, 90, dry=True)
    assert path.read_bytes() == before
    assert fatbin.cut(path, 90) == said
    sizes = [[len(b"".join(entries)) for entries in case] for case in BINARIES]
    assert (said.binaries, said.whole, said.kept) == (3, sum(all_ for all_, _ in sizes), sum(kept for _, kept in sizes))
    after, expected = path.read_bytes(), b""
    for (entries, kept), (whole, left) in zip(BINARIES, sizes, strict=True):
        begin = before.index(binary(*entries))
        expected = before[len(expected) : begin] if not expected else expected + before[len(expected) : begin]
        expected += binary(*kept) + bytes(whole - left)
    assert after == expected + before[len(expected) :]
    again = fatbin.cut(path, 90)
    assert (again.binaries, again.whole, again.kept) == (3, said.kept, said.kept)
    assert path.read_bytes() == after


def test_an_entry_that_is_not_understood_is_an_error_and_nothing_is_changed(fatbin, tmp_path):
    path = tmp_path / "odd.so"
    path.write_bytes(odd := binary(H100, entry(ELF, 80, 8, b"a")[:40] + bytes(100)))
    with pytest.raises(ValueError, match=r"the entry at byte \d+ of a fat binary is not understood"):
        fatbin.cut(path, 90)
    assert path.read_bytes() == odd
    done = subprocess.run([sys.executable, FOLDER / "fatbin.py", path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{path}: the entry at byte")


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_a_real_library_keeps_the_code_of_one_architecture(fatbin, tmp_path):
    (folder,) = importlib.util.find_spec("bitsandbytes").submodule_search_locations
    path = Path(shutil.copy(Path(folder, "libbitsandbytes_cuda130.so"), tmp_path))
    size, before = path.stat().st_size, fatbin.cut(path, 90)
    assert {"elf 75", "elf 90"} <= before.entries.keys()
    assert before.entries["elf 90"] == before.kept < before.whole == before.entries.total()
    assert path.stat().st_size == size
    assert fatbin.cut(path, 90).entries == {"elf 90": before.kept}


@pytest.fixture(scope="module")
def packed(carry, tmp_path_factory):
    """Two made-up wheels, unpacked, cut and packed into pieces of 2,000 bytes: the folder, and the pieces'."""
    out = tmp_path_factory.mktemp("carry")
    noise = b"".join(struct.pack("<Q", number * 0x9E3779B97F4A7C15 % 2**64) for number in range(900))
    files = {
        "tiny/__init__.py": b"VALUE = 7\n",
        "tiny/lib.so": library(),
        "tiny/heavy_one.so": b"x",
        "tiny/tests/test_it.py": b"",
        "tiny/noise.bin": noise,
    }
    wheels = [out / "tiny-1-py3-none-any.whl", out / "other-1-py3-none-any.whl"]
    for wheel, content in zip(wheels, (files, {"other.py": b"import tiny\n"}), strict=True):
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, data in content.items():
                archive.writestr(name, data)
    site, pieces = out / "site", out / "pieces"
    pieces.mkdir()
    carry.unpack(SETTINGS, wheels, site)
    carry.pack(site, pieces, 2000)
    return site, pieces


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_joined_is_what_was_packed(carry, join, packed, tmp_path):
    site, pieces = packed
    names = sorted(path.name for path in pieces.iterdir())
    assert names == ["SUMS", *(f"piece-{number:02}" for number in range(len(names) - 1))]
    assert len(names) > 3
    assert all(path.stat().st_size <= 2000 for path in pieces.iterdir())
    assert content(site).keys() == {"tiny/__init__.py", "tiny/lib.so", "tiny/noise.bin", "other.py"}
    assert content(site)["tiny/lib.so"] != library()
    for folder in ("one", "two"):  # by two calls
        shutil.copytree(pieces, tmp_path / folder)
    (tmp_path / "one/piece-01").unlink()
    (tmp_path / "two/piece-00").unlink()
    (tmp_path / "two/SUMS").unlink()
    done = subprocess.run(
        [sys.executable, FOLDER / "join.py", "one", "two", "a target"], cwd=tmp_path, capture_output=True, text=True
    )
    target = tmp_path / "a target"
    assert (done.returncode, done.stdout) == (0, f"export PYTHONPATH='{target}' VLLM_USE_FLASHINFER_SAMPLER=0\n")
    assert content(target) == content(site)
    again = tmp_path / "again"
    again.mkdir()
    carry.pack(site, again, 2000)
    assert content(again) == content(pieces), "the same files give the same bytes"


def lose(pieces):
    (pieces / "piece-01").unlink()
    return "piece-01 of 2,000 bytes is missing: carry it too"


def change(pieces):
    data = bytearray((pieces / "piece-01").read_bytes())
    data[7] ^= 1
    (pieces / "piece-01").write_bytes(data)
    return f"{pieces / 'piece-01'} is not what was packed (its SHA-256 differs): carry it again"


def shorten(pieces):
    (pieces / "piece-00").write_bytes(b"short")
    return f"{pieces / 'piece-00'} has 5 bytes in place of 2,000: carry it again"


def lose_sums(pieces):
    (pieces / "SUMS").unlink()
    return f"no SUMS in {pieces}: it comes with the pieces"


def empty_sums(pieces):
    (pieces / "SUMS").write_text("")
    return f"{pieces / 'SUMS'} is not a list of pieces: carry it again"


def damage_sums(pieces):
    (pieces / "SUMS").write_bytes(b"\xff" + (pieces / "SUMS").read_bytes())
    return f"{pieces / 'SUMS'} is not a list of pieces: carry it again"


def cut_sums(pieces):
    (pieces / "SUMS").write_text((pieces / "SUMS").read_text().splitlines(keepends=True)[0])
    ended = "Compressed file ended before the end-of-stream marker was reached"
    return f"cannot unpack into {pieces.parent / 'target'}: {ended}"


def use_target(pieces):
    (pieces.parent / "target").mkdir()
    return f"{pieces.parent / 'target'} exists: remove it, or name another folder"


@pytest.mark.parametrize("spoil", [lose, change, shorten, lose_sums, empty_sums, damage_sums, cut_sums, use_target])
def test_pieces_that_are_not_those_that_were_packed_are_refused(join, packed, tmp_path, spoil):
    pieces = Path(shutil.copytree(packed[1], tmp_path / "pieces"))
    line = spoil(pieces)
    with pytest.raises(join.JoinError) as refused:
        join.join([pieces], tmp_path / "target")
    assert str(refused.value) == line
    assert {path.name for path in tmp_path.iterdir()} <= {"pieces", "target"}
    assert not list(tmp_path.glob("target/*"))


def test_pieces_of_two_packings_are_not_mixed(carry, join, packed, tmp_path):
    site, pieces = packed
    (tmp_path / "others").mkdir()
    carry.pack(site, tmp_path / "others", 2500)
    with pytest.raises(join.JoinError, match="differ: the pieces are of two packings"):
        join.join([pieces, tmp_path / "others"], tmp_path / "target")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["out", "--without", "vlm"], "--without vlm: the groups are host, trl, vllm"),
        (["out", "--piece-mib", "0"], "--piece-mib 0: should be a number of at least 1"),
        (["out", "--piece-mib", "1e-9"], "--piece-mib 1e-09: should be a number of at least 1"),
        (["out", "--piece-mib", "nan"], "--piece-mib nan: should be a number of at least 1"),
        (["out", "--piece-mib", "inf"], "--piece-mib inf: should be a number of at least 1"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, arguments, line):
    done = subprocess.run([sys.executable, FOLDER / "carry.py", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert line in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damaged", ["wheel", "library"])
def test_what_cannot_be_carried_is_named_and_leaves_nothing_half_made(carry, tmp_path, capsys, monkeypatch, damaged):
    wheels, own = tmp_path / "out/wheels", tmp_path / "out/own"
    wheels.mkdir(parents=True)
    own.mkdir()
    with zipfile.ZipFile(wheels / "vllm-1-py3-none-any.whl", "w") as archive:
        archive.writestr("vllm/lib.so", struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 100) + b"\1" * 100)
    if damaged == "wheel":
        (wheels / "vllm-1-py3-none-any.whl").write_bytes(b"PK")
    monkeypatch.setattr(sys, "argv", ["carry.py", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as leaving:
        carry.main()
    assert leaving.value.code == 2
    problem = capsys.readouterr().err.splitlines()[-1]
    assert ("vllm-1-py3-none-any.whl is damaged (" if damaged == "wheel" else "lib.so: the entry at byte") in problem
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"wheels", "own"}


def test_the_packages_that_are_carried_are_there():
    settings = tomllib.loads((FOLDER / "packages.toml").read_text(encoding="utf-8"))
    assert all(list(ROOT.glob(f"{pattern}/pyproject.toml")) for pattern in settings["projects"])
