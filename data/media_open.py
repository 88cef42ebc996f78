"""Opening a media file: which streams count, where to start, and one kind of error for all that can be wrong."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
import av.error
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.stream import Disposition
from av.video.stream import VideoStream

TEXT_CODECS = ("ansi", "bintext", "xbin", "idf")
"""What the demuxer calls a picture although it is a text file."""


class Unreadable(RuntimeError):
    """A file that cannot be decoded; the message is a sentence that says why."""


@contextmanager
def opened(path: Path) -> Generator[InputContainer]:
    """The file's container; every error of decoding, or of arithmetic on odd headers, becomes `Unreadable`."""
    if not path.is_file():
        raise Unreadable("there is no such file")
    try:
        with av.open(str(path), metadata_errors="replace") as container:
            yield container
    except (av.error.FFmpegError, EOFError, ValueError, ArithmeticError) as error:
        raise Unreadable(f"does not decode: {getattr(error, 'strerror', None) or error}") from error


def picture_stream(container: InputContainer) -> VideoStream:
    """The largest picture that is not cover art.

    Raises:
        Unreadable: there is none.
    """
    art = Disposition.attached_pic | Disposition.timed_thumbnails
    streams = [item for item in container.streams.video if not item.disposition & art and item.codec_context]
    if not streams:
        raise Unreadable("holds no picture, only sound" if container.streams.audio else "holds no picture")
    stream = max(streams, key=lambda item: (item.width * item.height, _preferred(item), -item.index))
    if stream.codec_context.name in TEXT_CODECS:
        raise Unreadable("is text, not a video")
    stream.codec_context.thread_count = 1  # workers are processes; more threads only fight over the cores
    return stream


def sound_stream(container: InputContainer) -> AudioStream | None:
    """The sound that plays by default, or None."""
    streams = [item for item in container.streams.audio if item.codec_context and item.codec_context.sample_rate > 0]
    return max(streams, key=lambda item: (_preferred(item), -item.index), default=None)


def _preferred(stream: VideoStream | AudioStream) -> bool:
    return bool(stream.disposition & Disposition.default)


def seek(container: InputContainer, stream: VideoStream | AudioStream, seconds: float) -> bool:
    """Go to the key frame at or before `seconds` of container time; False where nothing was moved."""
    if seconds <= 0:
        return False
    try:
        container.seek(math.floor(seconds / cast(Fraction, stream.time_base)), stream=stream)
    except av.error.FFmpegError:
        container.seek(0)  # some containers have no index: start over
    return True
