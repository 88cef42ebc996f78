"""Media files from arrays: exact frame rate, exact sound length, the same bytes every time."""

from __future__ import annotations

import heapq
import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import av
import numpy as np
import soxr
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.codec.context import Flags
from av.container import OutputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Colorspace, Interpolation
from av.video.stream import VideoStream
from numpy.typing import NDArray

from data.files import whole

BT709 = 1
"""Code of matrix, primaries and transfer. Source: ITU-T H.273."""
LOWEST_AAC_HZ, WRITTEN_AAC_HZ = 32000, 48000
"""Sound below the first is written at the second: every browser plays it, and a codec frame is 21 ms, not 128 ms."""
BITS_PER_S = {"aac": 192_000, "libopus": 96_000}
"""For two channels. AAC with the fast coder keeps 26 dB over noise and clicks, the default coder 19 dB (measured)."""
VIDEO_OPTIONS = {
    # Plain x264 gives different bytes from run to run: its macroblock tree sums floats in SIMD lanes (measured).
    "libx264": {"preset": "medium", "x264-params": "cpu-independent=1"},
    "libvpx-vp9": {"deadline": "good", "cpu-used": "5", "row-mt": "0", "lag-in-frames": "0"},
}
AUDIO_OPTIONS = {"aac": {"aac_coder": "fast"}, "libopus": {"compression_level": "4"}}
SAMPLE_FORMATS = {"aac": "fltp", "libopus": "flt"}
MATRICES = {
    90: (0, 1, -1, 0),
    180: (-1, 0, 0, -1),
    270: (0, -1, 1, 0),
}
"""Display matrices by clockwise turn, (a, b, c, d). Source: ISO/IEC 14496-12, track header."""


def write_mp4(
    path: Path,
    frames_FHWC: NDArray[np.uint8],
    waveform_CT: NDArray[np.float32] | None,
    frame_rate: Fraction | int,
    sample_rate_hz: int,
    crf: int = 16,
) -> None:
    """Write H.264 (4:2:0, BT.709) and stereo AAC as an MP4 that browsers play while it loads; atomic.

    Args:
        frames_FHWC: RGB, even sides.
        waveform_CT: (2, T), or None for a silent film; full scale = 1.
    """
    with whole(path) as temporary:
        write_media(temporary, frames_FHWC, waveform_CT, frame_rate=frame_rate, sample_rate_hz=sample_rate_hz, crf=crf)


def write_media(
    path: Path,
    frames: Iterable[NDArray[np.uint8]],
    waveform_CT: NDArray[np.float32] | None,
    *,
    frame_rate: Fraction | int,
    sample_rate_hz: int,
    crf: int = 16,
    container: Literal["mp4", "mov", "matroska", "webm"] = "mp4",
    video_codec: Literal["libx264", "libvpx-vp9"] = "libx264",
    audio_codec: Literal["aac", "libopus"] = "aac",
    pixel_format: str = "yuv420p",
    layout: str = "stereo",
    frame_times: Sequence[Fraction] | None = None,
    sound_start_s: float = 0.0,
    rotation_deg: int = 0,
    audio_bits_per_s: int | None = None,
) -> None:
    """Write any file the sample corpus needs, not atomically.

    Args:
        frames: RGB (H, W, 3) each, in memory or streamed.
        frame_times: When each frame is shown, s, on a 1/90000 s grid; None is a constant `frame_rate`.
        sound_start_s: When the first sample sounds after the first frame is shown.
        audio_bits_per_s: For every two channels; None is `BITS_PER_S`.
        rotation_deg: Clockwise turn that a player is asked for (MP4 and MOV); the pixels are written as given.

    Raises:
        ValueError: no frames, odd sides with 4:2:0 H.264, or channels that do not fit `layout`.
    """
    pictures = iter(frames)
    first = next(pictures, None)
    if first is None:
        raise ValueError(f"{path.name}: no frames to write")
    if video_codec == "libx264" and pixel_format.startswith("yuv420") and (first.shape[0] % 2 or first.shape[1] % 2):
        raise ValueError(f"{path.name}: {first.shape[1]}x{first.shape[0]} px; 4:2:0 H.264 needs even sides")
    options = {"fflags": "+bitexact", **({"movflags": "+faststart"} if container in {"mp4", "mov"} else {})}
    waveform, rate = (None, 0) if waveform_CT is None else _written_sound(waveform_CT, sample_rate_hz, audio_codec)
    if container in {"mp4", "mov"} and rate:
        options["movie_timescale"] = str(rate)  # edit lists then end on a sample, not on a millisecond
    with av.open(str(path), "w", format=container, options=options) as output:
        tick = Fraction(1, 90000) if frame_times else 1 / Fraction(frame_rate)
        video = _video_stream(output, first, Fraction(frame_rate), tick, video_codec, pixel_format, crf)
        audio = None
        if waveform is not None:
            bits = audio_bits_per_s or BITS_PER_S[audio_codec]
            audio = _audio_stream(output, waveform, rate, audio_codec, layout, bits, path.name)
        output.start_encoding()
        ticks = [round(time / tick) for time in frame_times] if frame_times else None
        shown = _video_frames(
            itertools.chain([first], pictures), ticks, tick, pixel_format, left_sited=video_codec == "libx264"
        )
        sounds = iter(()) if audio is None or waveform is None else _audio_frames(audio, waveform, rate, sound_start_s)
        _interleave(cast(_Muxer, output), cast(_Encoder, video), shown, cast(_Encoder | None, audio), sounds)
    if container in {"mp4", "mov"} and rate and round(sound_start_s * rate) > 0:
        _hide_priming(path, round(sound_start_s * rate))
    if rotation_deg:
        _turn(path, rotation_deg)


def _written_sound(waveform_CT: NDArray[np.float32], rate_hz: int, codec: str) -> tuple[NDArray[np.float32], int]:
    """Sound at a rate that the codec and browsers take."""
    wanted = 48000 if codec == "libopus" else rate_hz if rate_hz >= LOWEST_AAC_HZ else WRITTEN_AAC_HZ
    waveform = np.asarray(waveform_CT, np.float32)
    if wanted == rate_hz:
        return waveform, rate_hz
    resampled = np.asarray(soxr.resample(waveform.T, rate_hz, wanted, quality="HQ"), np.float32).T
    length = round(Fraction(waveform.shape[1] * wanted, rate_hz))
    padded = np.zeros((waveform.shape[0], length), np.float32)
    padded[:, : resampled.shape[1]] = resampled[:, :length]
    return padded, wanted


def _video_stream(
    output: OutputContainer,
    first: NDArray[np.uint8],
    frame_rate: Fraction,
    tick: Fraction,
    codec: Literal["libx264", "libvpx-vp9"],
    pixel_format: str,
    crf: int,
) -> VideoStream:
    settings = {"crf": str(crf), **VIDEO_OPTIONS[codec]}
    stream = output.add_stream(codec, rate=frame_rate, options=settings)  # pyright: ignore[reportUnknownMemberType]
    stream.height, stream.width, stream.pix_fmt = first.shape[0], first.shape[1], pixel_format
    context = stream.codec_context
    context.time_base = tick
    context.thread_count = 1
    context.flags |= Flags.bitexact
    context.colorspace = context.color_primaries = context.color_trc = BT709
    context.color_range = ColorRange.MPEG.value
    return stream


def _audio_stream(
    output: OutputContainer,
    waveform: NDArray[np.float32],
    rate: int,
    codec: Literal["aac", "libopus"],
    layout: str,
    bits_per_s: int,
    name: str,
) -> AudioStream:
    stream = output.add_stream(codec, rate=rate, options=AUDIO_OPTIONS[codec])  # pyright: ignore[reportUnknownMemberType]
    stream.layout = layout
    stream.format = SAMPLE_FORMATS[codec]
    num_channels = stream.codec_context.channels
    if waveform.ndim != 2 or waveform.shape[0] != num_channels:
        raise ValueError(f"{name}: sound of shape {waveform.shape}; layout {layout} needs ({num_channels}, T)")
    stream.codec_context.bit_rate = bits_per_s * max(1, num_channels // 2)
    stream.codec_context.flags |= Flags.bitexact
    return stream


def _video_frames(
    frames: Iterable[NDArray[np.uint8]],
    ticks: Sequence[int] | None,
    tick: Fraction,
    pixel_format: str,
    *,
    left_sited: bool,
) -> Iterator[tuple[float, VideoFrame]]:
    """Converted frames with their times, s."""
    accurate = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INP
    for index, picture in enumerate(frames):
        frame = VideoFrame.from_ndarray(np.ascontiguousarray(picture), "rgb24").reformat(
            format="yuv444p" if pixel_format == "yuv420p" and left_sited else pixel_format,
            dst_colorspace=Colorspace.ITU709.value,
            dst_color_range=ColorRange.MPEG.value,
            interpolation=int(accurate),
            threads=1,
        )
        if frame.format.name != pixel_format:
            frame = _left_sited(frame)
        frame.pts = ticks[index] if ticks is not None else index
        frame.time_base = tick
        yield float(frame.pts * tick), frame


def _left_sited(frame: VideoFrame) -> VideoFrame:
    """4:4:4 to 4:2:0 with chroma where H.264 has it, on every second column; swscale puts it between columns.

    Half a pixel of chroma: 50 dB instead of 44 dB after a lossless round trip of a colour ramp (measured).
    """
    luma, *chroma = cast(NDArray[np.uint8], frame.to_ndarray())
    planes = [luma.ravel()]
    for plane in chroma:
        padded = np.pad(plane.astype(np.int32), ((0, 0), (1, 0)), mode="edge")
        columns = padded[:, :-1:2] + 2 * padded[:, 1::2] + padded[:, 2::2]
        planes.append(((columns[0::2] + columns[1::2] + 4) // 8).astype(np.uint8).ravel())
    packed = np.concatenate(planes).reshape(-1, frame.width)
    result = VideoFrame.from_ndarray(packed, "yuv420p")
    result.colorspace, result.color_range = BT709, ColorRange.MPEG.value
    return result


def _audio_frames(
    stream: AudioStream, waveform: NDArray[np.float32], rate: int, start_s: float
) -> Iterator[tuple[float, AudioFrame]]:
    """Codec-sized frames with their times, s."""
    size = stream.codec_context.frame_size or 1024
    context = stream.codec_context
    start = round(start_s * rate)
    for low in range(0, waveform.shape[1], size):
        block = np.ascontiguousarray(waveform[:, low : low + size])
        if not context.format.is_planar:
            block = np.ascontiguousarray(block.T.reshape(1, -1))
        frame = AudioFrame.from_ndarray(block, context.format.name, context.layout.name)
        frame.sample_rate, frame.pts, frame.time_base = rate, start + low, Fraction(1, rate)
        yield (start + low) / rate, frame


class _Encoder(Protocol):
    """The part of a stream that is used, typed more fully than the library's stubs."""

    def encode(self, frame: VideoFrame | AudioFrame | None) -> list[Any]: ...


class _Muxer(Protocol):
    """The part of a container that is used, likewise."""

    def mux(self, packets: list[Any]) -> None: ...


def _interleave(
    output: _Muxer,
    video: _Encoder,
    shown: Iterator[tuple[float, VideoFrame]],
    audio: _Encoder | None,
    sounds: Iterator[tuple[float, AudioFrame]],
) -> None:
    """Encode both streams in the order of time, so that the muxer need not hold one of them."""
    timed = heapq.merge(
        ((seconds, 1, video, frame) for seconds, frame in shown),
        ((seconds, 0, cast(_Encoder, audio), frame) for seconds, frame in sounds),
        key=lambda item: item[:2],
    )
    for _, _, encoder, frame in timed:
        output.mux(encoder.encode(frame))
    for encoder in (video, audio):
        if encoder is not None:
            output.mux(encoder.encode(None))


def _turn(path: Path, rotation_deg: int) -> None:
    """Patch the display matrix of the first track's header, which the encoder's interface does not reach."""
    content = bytearray(path.read_bytes())
    box = content.find(b"tkhd") - 4
    if box < 0 or content[box + 8] != 0:
        raise ValueError(f"{path.name}: no version 0 track header to write a rotation to; use mp4 or mov")
    matrix = box + 48  # header 8, version 4, times and identity 20, layer and volume 16
    a, b, c, d = (value << 16 for value in MATRICES[rotation_deg])
    *_, width, height = cast(tuple[int, ...], struct.unpack(">11i", content[matrix : matrix + 44]))
    left = height if rotation_deg == 90 else width if rotation_deg == 180 else 0
    top = height if rotation_deg == 180 else width if rotation_deg == 270 else 0
    content[matrix : matrix + 36] = struct.pack(">9i", a, b, 0, c, d, 0, left, top, 1 << 30)
    path.write_bytes(bytes(content))


def _hide_priming(path: Path, start: int) -> None:
    """Patch the sound's edit list so that it begins with the first sample given, at `start` on the movie's time scale.

    The muxer lets late sound begin with what the encoder put before it: 21 ms that nobody recorded. Sound that is late
    by less than that keeps its list, which has no room for another entry.
    """
    content = bytearray(path.read_bytes())
    edits = content.rfind(b"elst", 0, content.find(b"soun")) + 4
    version, count = struct.unpack(">II", content[edits : edits + 8])
    if edits < 4 or (version, count) != (0, 2):
        return
    empty, nothing, speed, length, skipped = struct.unpack(">IiiIi", content[edits + 8 : edits + 28])
    priming = start - empty
    if nothing == -1 and 0 <= priming <= length:
        edit = struct.pack(">IiiIi", start, nothing, speed, length - priming, skipped + priming)
        content[edits + 8 : edits + 28] = edit
        path.write_bytes(bytes(content))
