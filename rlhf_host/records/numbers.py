"""Numbers per token in little memory: 4 or 8 bytes each, where a list takes 40."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, SupportsIndex


class Numbers(array):  # type: ignore[type-arg]
    """An ``array`` that compares, adds and slices like a list, so that code for lists can use it.

    ``Numbers("i", ids)`` holds token ids and versions, ``Numbers("f", ...)`` results computed in 32 bits, ``Numbers("d", ...)``
    any floats. numpy reads it without copying.
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, list | array) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        values = super().__getitem__(place)
        return list(values) if isinstance(place, slice) else values

    def __setitem__(self, place: SupportsIndex | slice, values: Any) -> None:
        super().__setitem__(place, array(self.typecode, values) if isinstance(place, slice) else values)

    def __add__(self, other: Iterable[Any]) -> list[Any]:  # type: ignore[override]
        return [*self, *other]

    def __iadd__(self, other: Iterable[Any]) -> Numbers:  # type: ignore[override,misc]
        self.extend(other)
        return self

    def __radd__(self, other: Iterable[Any]) -> list[Any]:
        return [*other, *self]

    def __copy__(self) -> Numbers:
        return type(self)(self.typecode, self)

    def __deepcopy__(self, memo: object) -> Numbers:
        return self.__copy__()

    def __repr__(self) -> str:
        return repr(self.tolist())
