"""Pictures of saved lines: files named by their content, in a directory beside the lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_host.directories import write_file
from rlhf_host.errors import UserError
from rlhf_host.records.pictures import Picture, format_of

FOLDER = "pictures"


class PictureFiles:
    """The pictures of JSON lines.

    Args:
        directory: that of the lines.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._files: dict[str, str] = {}
        self._pictures: dict[str, Picture] = {}

    def path_of(self, value: Any) -> str:
        """Returns the file of a picture, relative to the lines, where its bytes are now; of any other value its text. Raises
        ``UserError`` if they cannot be read any more.
        """
        if not isinstance(picture := value, Picture):
            return str(value)
        if picture.key not in self._files:
            data = picture.read()
            path = self._directory / FOLDER / f"{picture.key}.{format_of(data)}"
            if not path.is_file() or path.stat().st_size != len(data):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, data)
            self._files[picture.key] = f"{FOLDER}/{path.name}"
        return self._files[picture.key]

    def named(self, value: Any) -> Any:
        """Returns the same with the picture's size."""
        file = self.path_of(value)
        return {"file": file, "width": value.width, "height": value.height} if isinstance(value, Picture) else file

    def find(self, file: str, width: int, height: int) -> Picture:
        """Returns a picture that lines name. Raises ``UserError`` if its file is missing, or has another content by now."""
        if file not in self._pictures:
            path = (self._directory / file).absolute()
            picture = Picture(path.stem, width, height, str(path))
            try:
                picture.read()
            except UserError as error:
                raise UserError(f"{error}; lines need the {FOLDER}/ beside them as it was written") from error
            self._pictures[file] = picture
        return self._pictures[file]
