"""Names that were public in the release before this one. They work for one more release, and say what they are called now."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def warn_renamed(old: str, new: str, *, depth: int = 2) -> None:
    """Warn, in the line that used the old name.

    Args:
        old, new: both names, as a user writes them.
        depth: how many calls above this function that line is.
    """
    warnings.warn(
        f"{old} is now {new}; the old name goes with the next release", DeprecationWarning, stacklevel=depth + 1
    )


def renamed_parameters(**names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let callers of a function give arguments by their old names. Type checkers know the new ones alone.

    Args:
        names: the new name of each old one.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for old in names.keys() & kwargs.keys():
                if names[old] in kwargs:
                    raise TypeError(f"{function.__qualname__}() got {names[old]}= twice: {old}= is its old name")
                warn_renamed(f"{old}= of {function.__qualname__}", f"{names[old]}=")
                kwargs[names[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


def removed_parameters(*names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let callers of a function still give these arguments, and warn in their line: they have no effect any more."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs.keys() & set(names):
                message = f"{name}= of {function.__qualname__} has no effect any more; it goes with the next release"
                warnings.warn(message, FutureWarning, stacklevel=2)
                del kwargs[name]
            return function(*args, **kwargs)

        return call

    return decorate


def keep_old_methods(kind: type, **names: str) -> None:
    """Let methods of a class be called, and defined by this class, by their old names.

    A class that defines an old name gets that method under the new one. A class that defines the new one gets the old one, which
    warns and calls the new one of this very class, so that `super()` works.

    Args:
        kind: the class.
        names: the new name of each old one.
    """
    for old, new in names.items():
        if new in vars(kind):
            setattr(kind, old, _calling(f"{kind.__name__}.{old}", new, vars(kind)[new]))
        elif old in vars(kind):
            warn_renamed(f"{kind.__name__}.{old}", new, depth=3)
            setattr(kind, new, vars(kind)[old])


def _calling(old: str, new: str, method: Callable[_P, _R]) -> Callable[_P, _R]:
    @functools.wraps(method, updated=())  # not what it is marked with: an old name is not abstract
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        warn_renamed(old, new)
        return method(*args, **kwargs)

    call.__name__ = old.rpartition(".")[2]
    call.__qualname__ = f"{method.__qualname__.rpartition('.')[0]}.{call.__name__}"
    call.__doc__ = f"Deprecated: `{new}`."
    return call


def moved_names(module: str, **homes: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module whose names are in other modules now.

    Args:
        module: its full name.
        homes: the full name of the module that has each of these names now; behind a colon, what it is called there.
    """

    def of_another_module(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, renamed = homes[name].partition(":")
        warn_renamed(f"{module}.{name}", f"{home}.{renamed or name}")
        return getattr(importlib.import_module(home), renamed or name)

    return of_another_module
