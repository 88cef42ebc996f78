"""What may be opened: paths inside a folder, remote ones of wanted protocols; and how they are shown."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from urllib.parse import urlsplit


def inside(file: str, root: str) -> bool:
    """Whether a local path, its links followed, lies below `root`."""
    try:
        folder, name = os.path.split(os.path.abspath(file))  # noqa: PTH100  # resolve() would follow links
        place = _real(folder) / name
        return (place.resolve() if place.is_symlink() else place).is_relative_to(_real(root))
    except (OSError, ValueError, RuntimeError):  # a loop of links, a name that no file system takes
        return False


@functools.lru_cache(maxsize=4096)
def _real(folder: str) -> Path:
    """A folder with its links followed."""
    return Path(folder).resolve()


def refusal(url: str, protocols: tuple[str, ...]) -> str | None:
    """Why a remote path is not opened: its protocol is not wanted, or it carries credentials."""
    scheme = url.partition("://")[0].lower()
    if scheme not in protocols:
        return f"names {scheme}://, which ingest.protocols = {', '.join(protocols)} does not hold"
    if "@" in urlsplit(url).netloc or "::" in url:
        return "carries credentials or a chain of protocols; credentials belong in the environment"
    return None


def host_of(url: str) -> str:
    """The host or bucket of a URL, without the credentials in it."""
    return urlsplit(url).netloc.rpartition("@")[2]


def group_of(file: str, root: str) -> str:
    """First folder below the root that a path goes through; "" where there is none."""
    prefix = "" if root in (".", "") else f"{root.rstrip('/')}/"
    below = file.removeprefix(prefix) if file.startswith(prefix) else ""
    return below.partition("/")[0] if "/" in below else ""


def shown(file: Path) -> str:
    """A path relative to the working directory where it lies below it, else as it is; POSIX."""
    absolute, here = Path(os.path.abspath(file)), Path.cwd()  # noqa: PTH100  # resolve() would follow links
    return (absolute.relative_to(here) if absolute.is_relative_to(here) else file).as_posix()


def as_text(path: str) -> str:
    """A path as valid Unicode: it differs from the path where that is none."""
    try:
        return os.fsencode(path).decode("utf-8", "replace")
    except UnicodeEncodeError:  # half a surrogate pair, which JSON may spell
        return path.encode("utf-8", "replace").decode()
