"""Opening a media file: which streams count, where to start, and one kind of error for all that can be wrong."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, cast, overload

import av
import av.error
import av.logging
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.codec.hwaccel import HWAccel
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from data.media_type import foreign, head_of

FORMATS = (
    "mov,mp4,matroska,webm,avi,mpegts,mpeg,mpegvideo,m4v,h264,hevc,obu,ivf,flv,asf,ogg,mxf,gxf,nut,dv,rm,yuv4mpegpipe,"
    "wav,w64,aiff,au,caf,flac,mp3,aac,ac3,eac3,dts,truehd,amr,ape,wv,tta,"
    "gif,apng,png_pipe,jpeg_pipe,webp_pipe,bmp_pipe,tiff_pipe,jpegxl_pipe,ppm_pipe"
)
"""Demuxers that may open a file: those that read nothing but the file itself. Play lists, image sequences, scripts and
devices are not among them."""
MAX_PIXELS = 2**26
"""Largest picture, px (8192 x 8192): sixteen reference frames of it at 10 bits and 4:2:0 take 3.2 GB."""
MAX_STREAMS = 64
"""Most streams of a file; films have a dozen, hostile files thousands."""
TEXT_CODECS = ("ansi", "bintext", "xbin", "idf")
"""What the demuxer calls a picture although it is a text file."""
ART = Disposition.attached_pic | Disposition.timed_thumbnails
UNSEEKABLE = ("mpeg",)
"""Demuxers that give the first frames after a seek the times of others: program streams time one frame in a dozen."""
OPTIONS = {"protocol_whitelist": "fd", "format_whitelist": FORMATS, "max_streams": str(MAX_STREAMS)}
CODEC_OPTIONS = {"max_pixels": str(MAX_PIXELS)}
UNDECODED = (
    av.error.InvalidDataError, av.error.UndefinedError, av.error.PatchWelcomeError, av.error.BugError,
    av.error.ExternalError,
)  # fmt: skip
"""What decoders say about a packet that is none of theirs; AAC's parser has numbers of its own for it."""


class Unreadable(RuntimeError):
    """A file that cannot be decoded; the message is a sentence that says why."""


@contextmanager
def opened(path: Path, decoder: Literal["cpu", "auto", "cuda"] = "cpu") -> Generator[InputContainer]:
    """The file's container; every error of decoding, or of arithmetic on odd headers, becomes `Unreadable`."""
    if not path.is_file():
        raise Unreadable("there is no such file")
    if not path.stat().st_size:
        raise Unreadable("is empty")
    av.logging.set_level(None)  # what libraries say about damaged files is noise; errors are raised
    try:
        if (kind := foreign(head_of(path))) is not None:
            raise Unreadable(f"is {kind}, not a media file")
        with (
            path.open("rb") as stream,
            av.open(
                "fd:",  # a name such as `concat:a|b` or `frame%03d.png` would be taken for more than a file
                metadata_errors="replace",
                container_options={**OPTIONS, "fd": str(stream.fileno())},
                options=CODEC_OPTIONS,
                hwaccel=_hwaccel(decoder),
            ) as container,
        ):
            yield container
    except (av.error.FFmpegError, EOFError, ValueError, ArithmeticError) as error:
        raise Unreadable(f"does not decode: {reason(error)}") from error
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from error


def reason(error: Exception) -> str:
    """What a decoder's error says, without the file's name."""
    return str(getattr(error, "strerror", None) or error)


def _hwaccel(decoder: Literal["cpu", "auto", "cuda"]) -> HWAccel | None:
    if decoder == "cpu":
        return None
    from data import hardware

    return hardware.hwaccel(decoder)


def pictures(container: InputContainer) -> list[VideoStream]:
    """Streams of moving pictures: cover art, thumbnails and what has no decoder are not among them."""
    return [item for item in container.streams.video if not item.disposition & ART and item.codec_context]


def sounds(container: InputContainer) -> list[AudioStream]:
    """Streams of sound that can be decoded."""
    return [item for item in container.streams.audio if item.codec_context and item.codec_context.sample_rate > 0]


def picture_stream(container: InputContainer) -> VideoStream:
    """The largest picture that is not cover art, of several equal ones the default, then a moving one, then the first.

    Raises:
        Unreadable: there is none, or it is larger than `MAX_PIXELS`.
    """
    streams = pictures(container)
    if not streams:
        raise Unreadable("holds no picture, only sound" if container.streams.audio else "holds no picture")
    stream = max(streams, key=lambda item: (item.width * item.height, _preferred(item), item.frames != 1, -item.index))
    if stream.codec_context.name in TEXT_CODECS:
        raise Unreadable("is text, not a video")
    if stream.width * stream.height > MAX_PIXELS:
        raise Unreadable(f"claims a picture of {stream.width}x{stream.height} px; limit {MAX_PIXELS} px")
    stream.codec_context.options = CODEC_OPTIONS
    stream.codec_context.thread_count = 1  # workers are processes; more threads only fight over the cores
    return stream


def sound_stream(container: InputContainer) -> AudioStream | None:
    """The sound that plays by default, else the first, or None."""
    return max(sounds(container), key=lambda item: (_preferred(item), -item.index), default=None)


def _preferred(stream: VideoStream | AudioStream) -> bool:
    return bool(stream.disposition & Disposition.default)


def seek(container: InputContainer, stream: VideoStream | AudioStream, seconds: float) -> bool:
    """Go to the key frame at or before `seconds` of container time; False where nothing was moved."""
    if seconds <= 0 or container.format.name in UNSEEKABLE:
        return False
    try:
        container.seek(math.floor(seconds / cast(Fraction, stream.time_base)), stream=stream)
    except av.error.FFmpegError:
        container.seek(0)  # some containers have no index: start over
    return True


@overload
def frames_of(container: InputContainer, stream: VideoStream, *, begun: bool = False) -> Iterator[VideoFrame]: ...
@overload
def frames_of(container: InputContainer, stream: AudioStream, *, begun: bool = False) -> Iterator[AudioFrame]: ...
def frames_of(container: InputContainer, stream: Any, *, begun: bool = False) -> Iterator[Any]:
    """Decoded frames; what does not decode before the first is skipped, as where it is measured: recordings start
    anywhere, and sound of which nothing decodes is none.

    Args:
        begun: the first frame was decoded before.
    """
    for packet in cast("Iterator[Packet[Any]]", container.demux(stream)):
        try:
            frames = cast(Sequence[Any], packet.decode())
        except UNDECODED:
            if begun:
                raise
            continue
        for frame in frames:
            begun = True
            yield frame
