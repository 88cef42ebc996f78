"""How many copies of a sound `data/soundalikes.py` finds, and how many different sounds it takes for copies.

Speech by the four voices of FFmpeg's flite (40 different texts, and 4 texts by every voice), 40 pieces of music by one
drum kit at one tempo, the repository's footage, and 33 sounds in which nothing, one thing, or always the same happens:
9 s each. Each kind of copy is looked for among all of them at once. Needs ffmpeg with flite.
Example: python -m benchmarks.sounds --seed 5000

With seed 5000, whose speech and music no limit was chosen by (footage and dull sounds are the same for every seed), no
sound was taken for another: not among the 132, nor with any kind of copy added. Found of the copies:

                               speech (56)   music (40)   footage (3)
    9 dB quieter                   56            40            3
    AAC, 64 kbit/s                 56            40            3
    Opus, 24 kbit/s                56            40            3
    0.125 s later, MP3             55             0            2
    0.25 s later (half a block)    43             4            1
    bass +6 dB, 0.15 s later       42             0            0
    treble +6 dB                   46             0            3
    200 to 5000 Hz alone           53             0            0
    compressed 3:1                 41            40            1
    5 s of it, half a block off    27             0            1
    4 s of it, half a block off    12             0            0

Of the dull sounds, one copy was found, of five clicks at uneven times. Music that repeats itself is found where its
blocks lie as they did, which is so in every copy whose sound starts at the same place. Looser limits found more of it
and took one or two pieces of forty for another.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data import duplicates, hearing, soundalikes

Wave = NDArray[np.float64]
RATE_HZ, SECONDS = 16000, 9
VOICES = ("slt", "kal", "awb", "rms")
WORDS = (
    "time year people way day man thing woman life child world school family student group country problem hand part"
    " place week company question work number night point home water room mother area money story month right study"
    " book eye word business the a of in and was ran looked through over big small red seldom yesterday, perhaps,"
)
COPIES = {
    "9 dB quieter": "volume=-9dB",
    "AAC, 64 kbit/s": "anull",
    "Opus, 24 kbit/s": "anull",
    "0.125 s later, MP3": "atrim=start=0.125,asetpts=PTS-STARTPTS",
    "0.25 s later (half a block)": "atrim=start=0.25,asetpts=PTS-STARTPTS",
    "bass +6 dB, 0.15 s later": "bass=g=6,atrim=start=0.15,asetpts=PTS-STARTPTS",
    "treble +6 dB": "treble=g=6:f=3000,volume=-6dB",
    "200 to 5000 Hz alone": "highpass=f=200,lowpass=f=5000",
    "compressed 3:1": "acompressor=threshold=0.1:ratio=3:attack=20:release=200,volume=4dB",
    "5 s of it, half a block off": "atrim=start=1.35:end=6.35,asetpts=PTS-STARTPTS",
    "4 s of it, half a block off": "atrim=start=2.05:end=6.05,asetpts=PTS-STARTPTS",
}
CODECS = {"AAC": ("aac", "64k", "m4a"), "Opus": ("libopus", "24k", "ogg"), "0.125": ("libmp3lame", "64k", "mp3")}


def main() -> None:
    """Make the set, look for every kind of copy, and print a table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--work", type=Path, help="folder to keep the sounds in")
    arguments.add_argument(
        "--seed", type=int, default=0, help="another set of the same kinds: 0 is what limits were found on"
    )
    options = arguments.parse_args()
    work = options.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    waves = dict(sounds(options.seed))
    names = list(waves)
    tracks = [levels(wave) for wave in waves.values()]
    report(f"{len(names)} sounds among each other: {false_matches(names, found(tracks, work))} false")
    for copy in COPIES:
        copies = [levels(changed(wave, copy, work)) for wave in waves.values()]
        groups = found(tracks + copies, work)
        hits: dict[str, list[bool]] = defaultdict(list)
        for number, name in enumerate(names):
            hits[name.split()[0]].append(groups[number] == groups[number + len(names)])
        told = ", ".join(f"{kind} {sum(rows)} of {len(rows)}" for kind, rows in hits.items())
        report(f"{copy}: {told}; {false_matches(names * 2, groups)} false")


def report(line: str) -> None:
    """Say a result."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def found(tracks: list[NDArray[np.float16]], work: Path) -> list[int]:
    """The group of each track."""
    (work / "sounds").write_bytes(b"".join(track.tobytes() for track in tracks))
    groups = duplicates.Groups(len(tracks))
    for match in soundalikes.find(work / "sounds", np.array([len(track) for track in tracks]), work / "hashed"):
        groups.join(match.left, match.right)
    return [groups.find(number) for number in range(len(tracks))]


def false_matches(names: list[str], groups: list[int]) -> int:
    """How many different sounds are in a group with another one, less one a group."""
    held: dict[int, set[str]] = defaultdict(set)
    for name, group in zip(names, groups, strict=True):
        held[group].add(name)
    return sum(len(members) - 1 for members in held.values())


def levels(wave: Wave) -> NDArray[np.float16]:
    """What is remembered of a sound."""
    listener = hearing.Listener(RATE_HZ, ["FC"], speech_too=False)
    listener.take(wave[None].astype(np.float32))
    return soundalikes.levels(listener.finish(0.0)[0])


def changed(wave: Wave, copy: str, work: Path) -> Wave:
    """A copy, as FFmpeg makes it."""
    source, middle = work / "in.f32", None
    source.write_bytes(wave.astype(np.float32).tobytes())
    raw = ("-f", "f32le", "-ar", str(RATE_HZ), "-ac", "1")
    words = [*raw, "-i", str(source), "-af", COPIES[copy]]
    for start, (codec, rate, ending) in CODECS.items():
        if copy.startswith(start):
            middle = work / f"middle.{ending}"
            ffmpeg([*words, "-c:a", codec, "-b:a", rate, str(middle)])
            words = ["-i", str(middle)]
    return decoded([*words, *raw, "-"])


def decoded(words: list[str]) -> Wave:
    """What FFmpeg writes as raw samples."""
    return np.frombuffer(ffmpeg(words), np.float32).astype(np.float64)


def ffmpeg(words: list[str]) -> bytes:
    """Run FFmpeg; what it writes to standard output."""
    return subprocess.run(["ffmpeg", "-v", "error", "-nostdin", "-y", *words], check=True, capture_output=True).stdout


def sounds(seed: int) -> Iterator[tuple[str, Wave]]:
    """All sounds by name; the first word says of what kind."""
    raw = ("-f", "f32le", "-ar", str(RATE_HZ), "-ac", "1", "-t", str(SECONDS), "-")
    for number in range(56):
        draw = random.Random(seed + (number if number < 40 else 40 + number // 4))
        text = " ".join(draw.choice(WORDS.split()) for _ in range(26))
        yield (
            f"speech {number}",
            decoded(["-f", "lavfi", "-i", f"flite=text='{text}':voice={VOICES[number % 4]}", *raw]),
        )
    for path in sorted((Path(__file__).parents[1] / "data" / "footage").glob("*.mp4")):
        yield f"footage {path.stem}", decoded(["-i", str(path), *raw])
    for number in range(40):
        yield f"music {number}", music(np.random.default_rng(seed + number))
    for number in range(3):
        for name, wave in dull(number).items():
            yield f"dull {name} {number}", wave


def music(rng: np.random.Generator) -> Wave:
    """120 beats a minute on the same drums, and a melody of its own."""
    wave = np.zeros(RATE_HZ * (SECONDS + 1))
    times = np.arange(RATE_HZ // 2) / RATE_HZ
    hiss = np.random.default_rng(0).normal(size=len(times))
    kick = np.sin(2 * np.pi * (50 + 80 * np.exp(-30 * times)) * times) * np.exp(-12 * times)
    snare, hat = hiss * np.exp(-20 * times), np.diff(hiss, prepend=0) * np.exp(-60 * times)
    for beat in range(2 * SECONDS):
        at = beat * RATE_HZ // 2
        wave[at : at + len(times)] += 0.5 * kick + 0.2 * snare * (beat % 2) + 0.1 * hat
        for half in range(2):
            if rng.random() < 0.7:
                pitch = 220 * 2 ** (rng.choice([0, 2, 3, 5, 7, 8, 10, 12]) / 12)
                voice = sum(np.sin(2 * np.pi * pitch * part * times) / part for part in range(1, 5))
                start = at + half * RATE_HZ // 4
                wave[start : start + len(times)] += (
                    rng.uniform(0.05, 0.35) * voice * np.exp(-rng.uniform(3, 15) * times)
                )
    return 0.3 * wave[: RATE_HZ * SECONDS]


def dull(number: int) -> dict[str, Wave]:
    """Sounds that tell nothing apart; the larger number's are a little different."""
    rng, times = np.random.default_rng(number), np.arange(RATE_HZ * SECONDS) / RATE_HZ
    noise = rng.normal(size=len(times))
    tone = np.sin(2 * np.pi * (300 + 50 * number) * times)
    beat = (times % 0.5 < 0.015).astype(np.float64)
    return {
        "silence": 0 * times,
        "dither": 1e-4 * noise,
        "noise": 0.1 * noise,
        "hum": 0.1 * np.sin(2 * np.pi * 50 * times + number) + 0.03 * np.sin(2 * np.pi * 150 * times),
        "tremolo": 0.2 * (1 + 0.8 * np.sin(2 * np.pi * 3 * times + number)) * tone,
        "fade": 0.3 * times / SECONDS * tone,
        "fades": 0.1 * np.minimum(1, np.minimum(times, SECONDS - times)) * noise,
        "click": 1e-4 * noise + 0.8 * (np.abs(times - 2 - 0.9 * number) < 0.01),
        "clicks": 1e-4 * noise + 0.3 * sum((np.abs(times - at) < 0.01) for at in rng.uniform(0, SECONDS, 5)),
        "metronome": 1e-4 * noise + 0.3 * beat * noise,
        "beeps": 0.3 * np.sin(2 * np.pi * 1000 * times) * (times % 1 < 0.1),
    }


if __name__ == "__main__":
    main()
