"""What may be opened: paths inside a folder, remote ones of wanted protocols; and how they are shown."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path


def inside(file: str, root: str) -> bool:
    """Whether a local path, its links followed, lies below `root`."""
    try:
        folder, name = os.path.split(os.path.abspath(file))  # noqa: PTH100  # resolve() would follow links
        place = f"{_real(folder)}/{name}"
        if os.path.islink(file):  # noqa: PTH114  # a name that is too long is no link
            place = str(Path(file).resolve())
        return place.startswith(f"{_real(os.path.abspath(root)).rstrip('/')}/")  # noqa: PTH100
    except (OSError, ValueError, RuntimeError):  # a loop of links, a name that no file system takes
        return False


@functools.lru_cache(maxsize=4096)
def _real(folder: str) -> str:
    """An absolute folder with its links followed; a relative one would mean another after `chdir`."""
    return str(Path(folder).resolve())


def refusal(url: str, protocols: tuple[str, ...]) -> str | None:
    """Why a remote path is not opened: its protocol is not wanted, or it carries credentials."""
    scheme = url.partition("://")[0].lower()
    if scheme not in protocols:
        return f"names {scheme}://, which ingest.protocols = {', '.join(protocols)} does not hold"
    if "@" in authority_of(url) or "::" in url:
        return "carries credentials or a chain of protocols; credentials belong in the environment"
    return None


def authority_of(url: str) -> str:
    """Host or bucket of a URL, with the credentials that may stand before it."""
    return re.split("[/?#]", url.partition("://")[2], maxsplit=1)[0]


def without_secrets(url: str) -> str:
    """A URL without credentials and query, which may be a signature."""
    scheme, _, rest = url.partition("://")
    host, slash, place = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{re.split('[?#]', place, maxsplit=1)[0]}"


def group_of(file: str, root: str) -> str:
    """First folder below the root that a path goes through; "" where there is none."""
    prefix, file = "" if root == "." else f"{root.rstrip('/')}/", file.removeprefix("./")
    below = file.removeprefix(prefix) if file.startswith(prefix) else ""
    return below.partition("/")[0] if "/" in below else ""


def is_name(path: str) -> bool:
    """Whether a file can be called that."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half a surrogate pair, which JSON may spell
        return False


def beside(file: str, name: str) -> str:
    """Path of a neighbour."""
    return f"{file[: file.rfind('/') + 1]}{name}"


def shown(file: str | Path) -> str:
    """A path relative to the working directory where it lies below it, else as it is."""
    path, here = os.path.abspath(file), f"{os.getcwd().rstrip('/')}/"  # noqa: PTH100, PTH109  # a million times
    return path.removeprefix(here) if path.startswith(here) else str(file)


def as_text(path: str) -> str:
    """A path as valid Unicode: it differs from the path where that is none."""
    try:
        return os.fsencode(path).decode("utf-8", "replace")
    except UnicodeEncodeError:  # half a surrogate pair, which JSON may spell
        return path.encode("utf-8", "replace").decode()
