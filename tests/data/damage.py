"""Small films of many kinds, and ways to break them; each recipe is a number."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.video.frame import VideoFrame

SIDE, RATE, NUM_FRAMES, HZ = 32, 16, 18, 16000
HEADER_BYTES = 1500
Bytes = bytearray
Random = np.random.Generator


class Seed(NamedTuple):
    """What a small film is made of; no picture or no sound where the codec is empty."""

    container: str
    video: str = ""
    audio: str = ""
    pixel_format: str = "yuv420p"
    layout: str = "stereo"
    hz: int = HZ
    options: tuple[tuple[str, str], ...] = ()


SEEDS: dict[str, Seed] = {
    "h264_aac.mp4": Seed("mp4", "libx264", "aac"),
    "hevc_ac3.mp4": Seed(
        "mp4", "libx265", "ac3", hz=32000, options=(("movflags", "frag_keyframe+empty_moov+delay_moov"),)
    ),
    "prores_pcm.mov": Seed("mov", "prores_ks", "pcm_s16le", "yuv422p10le", "mono", 4000),
    "h264_flac.mkv": Seed("matroska", "libx264", "flac", layout="mono"),
    "vp9_opus.webm": Seed("webm", "libvpx-vp9", "libopus"),
    "mpeg2_mp2.ts": Seed("mpegts", "mpeg2video", "mp2"),
    "h264_aac.ts": Seed("mpegts", "libx264", "aac", layout="mono"),
    "mpeg4_mp3.avi": Seed("avi", "mpeg4", "libmp3lame"),
    "mjpeg_pcm.avi": Seed("avi", "mjpeg", "pcm_u8", "yuvj420p", "mono", 8000),
    "wmv2_wma.asf": Seed("asf", "wmv2", "wmav2"),
    "flv_mp3.flv": Seed("flv", "flv", "libmp3lame", hz=22050),
    "ffv1_pcm.nut": Seed("nut", "ffv1", "pcm_s16le", layout="mono", hz=4000),
    "gif.gif": Seed("gif", "gif", pixel_format="rgb8"),
    "flac.ogg": Seed("ogg", audio="flac", layout="mono"),
    "pcm.wav": Seed("wav", audio="pcm_s16le", layout="mono", hz=8000),
}
"""File name → what is in it."""


ENCODERS = {
    "libx264": {"preset": "ultrafast"},  # others give different bytes from run to run
    "libx265": {"preset": "ultrafast", "x265-params": "log-level=none:pools=none:frame-threads=1"},
}


def write(path: Path, seed: Seed) -> None:
    """Moving colours and a chord."""
    random = np.random.default_rng(3)
    wave = (0.2 * np.sin(2 * np.pi * 440 * np.arange(seed.hz * NUM_FRAMES // RATE) / seed.hz)).astype(np.float32)
    with av.open(
        str(path), "w", format=seed.container, options={"fflags": "+bitexact", **dict(seed.options)}
    ) as output:
        streams: list[Any] = []
        if seed.video:
            video: Any = output.add_stream(seed.video, rate=Fraction(25 if seed.video == "mpeg2video" else RATE))
            video.width = video.height = SIDE
            video.pix_fmt, video.codec_context.thread_count, video.codec_context.gop_size = seed.pixel_format, 1, 6
            video.options = ENCODERS.get(seed.video, {})
            streams.append(video)
        if seed.audio:
            audio: Any = output.add_stream(seed.audio, rate=seed.hz, layout=seed.layout)
            audio.bit_rate = 48000
            streams.append(audio)
        base = np.kron(random.integers(0, 256, (4, 4, 3)), np.ones((8, 8, 1))).astype(np.uint8)
        for index in range(NUM_FRAMES):
            if seed.video:
                picture = np.roll(base // 4 + 8 * (index % 20), index, axis=1)
                output.mux(streams[0].encode(VideoFrame.from_ndarray(picture, format="rgb24")))
            if seed.audio:
                block = wave[index * seed.hz // RATE : (index + 1) * seed.hz // RATE]
                repeated = np.repeat(block, 1 if seed.layout == "mono" else 2)
                frame = AudioFrame.from_ndarray(
                    (repeated * 32767).astype(np.int16)[None], format="s16", layout=seed.layout
                )
                frame.sample_rate, frame.pts = seed.hz, index * seed.hz // RATE
                frame.time_base = Fraction(1, seed.hz)
                output.mux(streams[-1].encode(frame))
        for stream in streams:
            output.mux(stream.encode(None))


ABSURD = (0, 1, 2, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x10000, 0xFFFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)
BOXES = (
    b"moov mvhd trak tkhd edts elst mdia mdhd hdlr minf stbl stsd avc1 avcC mp4a esds stts ctts stsc stsz stco stss "
    b"moof traf tfhd trun tfdt mvex trex hvc1 hvcC dac3 apcn sowt lpcm mdat ftyp udta"
).split()
CHUNKS = b"RIFF LIST hdrl avih strl strh strf movi idx1 data fmt 00dc 01wb JUNK".split()
EBML = tuple(
    map(
        bytes.fromhex,
        (
            "1a45dfa3",  # EBML, then segment, seek head, info, tracks, cluster, cues
            "18538067",
            "114d9b74",
            "1549a966",
            "1654ae6b",
            "1f43b675",
            "1c53bb6b",
            "2ad7b1",  # tick, then duration, track, its number and kind
            "4489",
            "ae",
            "d7",
            "83",
            "86",  # codec and its private data, picture and its sides, sound, channels, rate
            "63a2",
            "e0",
            "b0",
            "ba",
            "e1",
            "9f",
            "b5",
            "23e383",  # frame length, codec delay, seek preroll, block, block of a group, cluster's time
            "56aa",
            "56bb",
            "a3",
            "a1",
            "e7",
        ),
    )
)
"""Elements of Matroska. Source: RFC 9559."""


def at_random(random: Random, content: Bytes, _seeds: Sequence[bytes]) -> Bytes:
    """Bytes flipped anywhere."""
    for place in random.integers(0, len(content), random.integers(1, 60)):
        content[place] ^= int(random.integers(1, 256))
    return content


def header(random: Random, content: Bytes, _seeds: Sequence[bytes]) -> Bytes:
    """Bytes flipped in the header or, where that stands last, in the trailer."""
    near = min(HEADER_BYTES, len(content))
    from_end = bool(random.integers(2))
    for place in random.integers(0, near, random.integers(1, 12)):
        content[len(content) - 1 - place if from_end else place] ^= 1 << int(random.integers(8))
    return content


def cut_short(random: Random, content: Bytes, _seeds: Sequence[bytes]) -> Bytes:
    return content[: int(random.integers(1, len(content)))]


def spliced(random: Random, content: Bytes, seeds: Sequence[bytes]) -> Bytes:
    """The beginning of one file, then the end of another."""
    other = seeds[int(random.integers(len(seeds)))]
    return content[: int(random.integers(1, len(content)))] + other[int(random.integers(len(other))) :]


def zeroed(random: Random, content: Bytes, _seeds: Sequence[bytes]) -> Bytes:
    """A stretch that the disk lost."""
    start = int(random.integers(len(content)))
    length = min(int(random.choice([16, 256, 2048])), len(content) - start)
    content[start : start + length] = bytes(length) if random.integers(2) else b"\xff" * length
    return content


def absurd(random: Random, content: Bytes, _seeds: Sequence[bytes]) -> Bytes:
    """Numbers in the header that no film has, at any place."""
    for _ in range(int(random.integers(1, 4))):
        place = int(random.integers(0, min(HEADER_BYTES, len(content) - 8)))
        form = str(random.choice([">I", "<I", ">H", "<H", ">Q"]))
        value = int(random.choice(ABSURD)) & ((1 << 8 * struct.calcsize(form)) - 1)
        struct.pack_into(form, content, place, value)
    return content


def lying(random: Random, content: Bytes, _seeds: Sequence[bytes]) -> Bytes:
    """A known box, chunk or element whose size or one of its fields lies: duration, scale, size, rate, count."""
    found = [(place, tag) for tag in (*BOXES, *CHUNKS, *EBML) for place in places(content, tag)]
    if not found:
        return absurd(random, content, ())
    for _ in range(int(random.integers(1, 3))):
        place, tag = found[int(random.integers(len(found)))]
        value = int(random.choice(ABSURD))
        if tag in EBML:
            after = place + len(tag)
            if random.integers(2):  # the size, as long as it was, or a value of one to four bytes
                content[after : after + 1] = bytes([int(random.choice([0, 0x80, 0x81, 0x88, 0x9F, 0xFE, 0xFF, 0x01]))])
            else:
                content[after + 1 : after + 5] = value.to_bytes(4, "big")
            continue
        size_at, order = (place + 4, "<") if tag in CHUNKS else (place - 4, ">")
        field = size_at if random.integers(3) == 0 else place + 4 + 4 * int(random.integers(0, 24))
        if 0 <= field <= len(content) - 4:
            struct.pack_into(f"{order}I", content, field, value)
    return content


def places(content: Bytes, tag: bytes) -> list[int]:
    """Where a tag stands; short ones stand everywhere, so only in the header."""
    if len(tag) < 3:
        return [place for place in (content.find(tag, 0, 600),) if place >= 0]
    found: list[int] = []
    place = content.find(tag)
    while place >= 0 and len(found) < 4:
        found.append(place)
        place = content.find(tag, place + 1)
    return found


def moved(random: Random, content: Bytes, _seeds: Sequence[bytes]) -> Bytes:
    """A stretch left out or doubled."""
    start, length = int(random.integers(len(content))), int(random.integers(1, 600))
    stretch = content[start : start + length]
    return content[:start] + (stretch * 2 if random.integers(2) else b"") + content[start + length :]


Damage = Callable[[Random, Bytes, Sequence[bytes]], Bytes]
DAMAGES: tuple[Damage, ...] = (at_random, header, cut_short, spliced, zeroed, absurd, lying, lying, moved)


def mutated(number: int, folder: Path) -> tuple[str, str, bytes]:
    """Recipe `number`: the film's name, the kind of damage, and the file's bytes."""
    random = np.random.default_rng(number)
    name = list(SEEDS)[number % len(SEEDS)]
    seeds = [(folder / other).read_bytes() for other in SEEDS]
    damage = DAMAGES[number // len(SEEDS) % len(DAMAGES)]
    return name, damage.__name__, bytes(damage(random, Bytes((folder / name).read_bytes()), seeds))


def sized(name: str, place: int, form: str, *values: int) -> Callable[[Path], bytes]:
    """A film with other numbers in a known place of its header."""

    def make(folder: Path) -> bytes:
        content = bytearray((folder / name).read_bytes())
        struct.pack_into(form, content, place, *values)
        return bytes(content)

    return make


def in_box(tag: bytes, after: int, *values: int, name: str = "h264_aac.mp4") -> Callable[[Path], bytes]:
    """The same, counted from the end of a box's or a marker's name."""

    def make(folder: Path) -> bytes:
        content = bytearray((folder / name).read_bytes())
        place = content.find(tag)
        while place >= 0:
            struct.pack_into(
                f">{len(values)}{'H' if len(tag) == 2 else 'I'}", content, place + len(tag) + after, *values
            )
            place = content.find(tag, place + 1)
        return bytes(content)

    return make


BOASTS = (
    sized("gif.gif", 6, "<2H", 65535, 65535),
    sized("gif.gif", 6, "<2H", 4096, 4096),
    in_box(b"\xff\xc0", 3, 65500, 65500, name="mjpeg_pcm.avi"),
    in_box(b"\xff\xc0", 3, 8192, 8192, name="mjpeg_pcm.avi"),
    in_box(b"stsz", 4, 0, 0x7FFFFFFF),
    in_box(b"stsz", 4, 4, 0x7FFFFFFF),
    in_box(b"stts", 4, 1, 0x7FFFFFFF, 1),
    in_box(b"stco", 4, 0x7FFFFFFF),
    in_box(b"ctts", 4, 0x7FFFFFFF),
    in_box(b"elst", 4, 0x7FFFFFFF),
    in_box(b"mvhd", 12, 1, 0x7FFFFFFF),
    in_box(b"mdhd", 12, 0x7FFFFFFF, 1),
)
"""Screens, frames, tables and clocks that are far too large, or as large as may be."""
