"""What a file is by its first bytes and its container, never by its name."""

from __future__ import annotations

from pathlib import Path

from av.container import InputContainer

HEAD_BYTES = 4096
"""Read to tell text from media."""
MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"%PDF-", "application/pdf"),
    (b"PK\x03\x04", "application/zip"),
    (b"\x1f\x8b", "application/gzip"),
    (b"7z\xbc\xaf\x27\x1c", "application/x-7z-compressed"),
    (b"Rar!\x1a\x07", "application/vnd.rar"),
    (b"\x7fELF", "application/x-elf"),
    (b"SQLite format 3\x00", "application/vnd.sqlite3"),
    (b"PAR1", "application/vnd.apache.parquet"),
    (b"\x89HDF\r\n", "application/x-hdf5"),
)
"""What cannot be media whatever a demuxer guesses. Source: the formats' own specifications."""
TEXT_BYTES = frozenset(range(0x20, 0x7F)) | frozenset(b"\t\n\r\f\x1b") | frozenset(range(0x80, 0x100))
CONTAINERS = {
    "avi": "video/x-msvideo",
    "mpegts": "video/mp2t",
    "mpeg": "video/mpeg",
    "mpegvideo": "video/mpeg",
    "flv": "video/x-flv",
    "asf": "video/x-ms-asf",
    "ogg": "video/ogg",
    "mxf": "application/mxf",
    "wav": "audio/wav",
    "w64": "audio/wav",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "aac": "audio/aac",
    "aiff": "audio/aiff",
    "caf": "audio/x-caf",
    "gif": "image/gif",
    "apng": "image/apng",
    "jpeg_pipe": "image/jpeg",
    "bmp_pipe": "image/bmp",
    "tiff_pipe": "image/tiff",
}
"""Media types by the demuxer's first name. Source: IANA's registry; x- where it has none."""
BRANDS = {"qt": "video/quicktime", "avif": "image/avif", "avis": "image/avif", "heic": "image/heic", "M4A": "audio/mp4"}
"""Likewise by the major brand of an ISO base media file."""


def foreign(head: bytes) -> str | None:
    """The type of a file that is no media: text in any form, or an archive or document; None where it may be media.

    Play lists are text as well, and must never reach a demuxer: they make it open other files and addresses.
    """
    for magic, kind in MAGIC:
        if head.startswith(magic):
            return kind
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) and b"\x00" in head[2:8]:
        return "text/plain"
    return text_kind(head) if is_text(head) else None


def text_kind(head: bytes) -> str:
    """Which kind of text."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<body")) or b"<html" in start[:1024]:
        return "text/html"
    if start.startswith((b"<?xml", b"<svg")):
        return "text/xml"
    if start.startswith(b"#extm3u"):
        return "application/vnd.apple.mpegurl"
    return "application/json" if start.startswith((b"{", b"[")) else "text/plain"


def is_text(head: bytes) -> bool:
    """Whether bytes are printable and, but for a character cut off at the end, UTF-8."""
    if not head or not TEXT_BYTES.issuperset(head):
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return len(head) == HEAD_BYTES and error.start >= len(head) - 3
    return True


def is_animated_webp(head: bytes) -> bool:
    """Whether a WebP says that it moves; no decoder here reads those. Source: RFC 9649, 2.7.1, the animation flag."""
    return head.startswith(b"RIFF") and head[8:16] == b"WEBPVP8X" and len(head) > 20 and bool(head[20] & 2)


def head_of(path: Path) -> bytes:
    """The first bytes of a file."""
    with path.open("rb") as stream:
        return stream.read(HEAD_BYTES)


def media_type(container: InputContainer, head: bytes, *, has_picture: bool) -> str:
    """The registered type of an opened file."""
    name = container.format.name.partition(",")[0]
    if name == "mov":
        brand = container.metadata.get("major_brand", "").strip()
        return BRANDS.get(brand, "video/mp4" if has_picture else "audio/mp4")
    if name == "matroska":
        kind = "webm" if b"webm" in head[:64] else "x-matroska"
        return f"{'video' if has_picture else 'audio'}/{kind}"
    known = CONTAINERS.get(name, f"image/{name.removesuffix('_pipe')}" if name.endswith("_pipe") else None)
    if known is None or (known == "video/ogg" and not has_picture):
        return f"{'video' if has_picture else 'audio'}/{name if name == 'ogg' else f'x-{name}'}"
    return known
