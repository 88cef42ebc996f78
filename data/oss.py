"""What `remote` asks of Alibaba OSS, through Alibaba's own library.

fsspec's `ossfs` is passed by: it lists a whole folder to look at one file in it, and takes a folder that may not be
listed for an empty one.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

TIMEOUT_S = 60
"""Longest silence of the server, s; the library's own default."""


class Oss:
    """Objects by the names `bucket/key`, with the few methods of an fsspec file system that are needed."""

    def __init__(self) -> None:
        """Take endpoint and keys from the environment.

        Raises:
            ImportError: oss2 is not installed.
            RuntimeError: no endpoint is set.
        """
        import oss2  # pyright: ignore[reportMissingTypeStubs]

        self._library = cast(Any, oss2)
        self._endpoint = os.environ.get("OSS_ENDPOINT", "")
        if not self._endpoint:
            raise RuntimeError(
                "oss:// needs OSS_ENDPOINT in the environment, like https://oss-cn-hangzhou.aliyuncs.com"
            )
        names = ("OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET", "OSS_SESSION_TOKEN")
        keys = [value for name in names if (value := os.environ.get(name))]
        kinds = {0: self._library.AnonymousAuth, 2: self._library.Auth, 3: self._library.StsAuth}
        if len(keys) not in kinds:
            raise RuntimeError(f"oss:// needs {names[0]} and {names[1]} in the environment, or neither")
        self._auth = kinds[len(keys)](*keys)
        self._session = self._library.Session()

    def info(self, name: str) -> dict[str, Any]:
        """Size and version of an object."""
        bucket, key = self._at(name)
        if not key or key.endswith("/"):
            return {"type": "directory"}
        with self._translated():
            head = bucket.head_object(key)
        return {"type": "file", "size": head.content_length, "ETag": head.etag, "LastModified": head.last_modified}

    def ls(self, name: str, detail: bool = True) -> list[dict[str, Any]]:  # noqa: ARG002
        """What lies directly in a folder."""
        bucket, key = self._at(name)
        prefix = f"{key.rstrip('/')}/" if key else ""
        place = name.partition("/")[0]
        with self._translated():
            found = list(self._library.ObjectIteratorV2(bucket, prefix=prefix, delimiter="/"))
        kinds = ((item, "directory" if item.is_prefix() else "file") for item in found)
        return [{"name": f"{place}/{item.key}", "type": kind, "size": item.size or 0} for item, kind in kinds]

    def get_file(self, name: str, target: str) -> None:
        """Download an object; the library compares its checksum."""
        bucket, key = self._at(name)
        with self._translated():
            bucket.get_object_to_file(key, target)

    def put_file(self, source: str, name: str) -> None:
        """Upload a file; the library compares its checksum."""
        bucket, key = self._at(name)
        with self._translated():
            bucket.put_object_from_file(key, source)

    def cat_file(self, name: str) -> bytes:
        """The content of a small object."""
        bucket, key = self._at(name)
        with self._translated():
            return cast(bytes, bucket.get_object(key).read())

    def _at(self, name: str) -> tuple[Any, str]:
        place, _, key = name.partition("/")
        bucket = self._library.Bucket(
            self._auth, self._endpoint, place, session=self._session, connect_timeout=TIMEOUT_S
        )
        return bucket, key

    @contextmanager
    def _translated(self) -> Generator[None]:
        """The library's answers about one object as Python's own errors."""
        errors = self._library.exceptions
        try:
            yield
        except errors.NotFound as error:
            raise FileNotFoundError(error.code) from error
        except errors.AccessDenied as error:
            raise PermissionError(error.code) from error
        except errors.ServerError as error:
            if error.status == 403:  # an answer to HEAD has no body that would name the reason
                raise PermissionError(error.code) from error
            if error.status == 404:
                raise FileNotFoundError(error.code) from error
            raise
