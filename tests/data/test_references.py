"""References of a clip: the user's own in order, else drawn, never from the target's own span."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given as when
from hypothesis import strategies as st
from pydantic import ValidationError

from data.media import write_mp4
from data.records import Clip, ClipShape, Source
from data.references import Pick, References, drawn, given, read

MakeClip = Callable[..., Clip]
ALL = References(num_sets=2, num_images=2, num_videos=1, num_sounds=1)
spans = st.lists(st.tuples(st.floats(0, 60), st.floats(0.5, 10)), min_size=1, max_size=8)


def clips_of(spans: list[tuple[float, float]]) -> list[Clip]:
    return [
        Clip.model_construct(
            clip_id=f"s-{number}", source_id="s", path="s.mp4", sound_path=None, references=(), start_s=start,
            end_s=start + length, has_audio=number % 3 > 0,
        )
        for number, (start, length) in enumerate(spans)
    ]  # fmt: skip


@when(spans, st.integers(0, 3), st.integers(0, 5))
def test_no_draw_touches_the_targets_own_span(spans: list[tuple[float, float]], number: int, seed: int) -> None:
    clips = clips_of(spans)
    settings = ALL.model_copy(update={"seed": seed})
    picks = drawn(clips[0], clips, settings, number)
    for pick in picks:
        assert pick.end_s <= clips[0].start_s or pick.start_s >= clips[0].end_s
        assert pick.start_s < pick.end_s
    assert picks == drawn(clips[0], clips[::-1], settings, number)
    apart = [clip for clip in clips[1:] if clip.end_s <= clips[0].start_s or clip.start_s >= clips[0].end_s]
    assert bool(picks) == bool(apart)


def test_the_clip_itself_is_drawn_from_only_where_that_is_asked_for() -> None:
    (clip,) = clips_of([(0, 2)])
    assert drawn(clip, [clip], ALL, 0) == ()
    picks = drawn(clip, [clip], ALL.model_copy(update={"own_span": True}), 0)
    assert [pick.kind for pick in picks] == ["image", "image", "video"]  # it has no sound
    assert all(0 <= pick.start_s < 2 for pick in picks)


def test_sets_and_clips_differ() -> None:
    clips = clips_of([(0, 2), (3, 2), (6, 2), (9, 2)])
    sets = {drawn(clip, clips, ALL, number) for clip in clips for number in range(2)}
    assert len(sets) == 8
    assert [pick.kind for pick in drawn(clips[0], clips, ALL, 0)] == ["image", "image", "video", "audio"]


def test_the_users_references_come_in_their_order_and_all_or_none(
    make_clip: MakeClip, make_source: Callable[..., Source]
) -> None:
    still = make_source("b.png", media_type="image/png", path="b.png", audio_codec=None, use="reference")
    voice = make_source("a.wav", media_type="audio/wav", path="a.wav", width=0, height=0, use="reference")
    film = make_source("c.mp4", path="c.mp4", use="reference")
    files = {source.path: source for source in (still, voice, film)}
    clip = make_clip("x", references=("c.mp4", "b.png", "a.wav"))
    assert [(pick.kind, pick.path, pick.has_audio) for pick in given(clip, files)] == [
        ("video", "c.mp4", True),
        ("image", "b.png", False),
        ("audio", "a.wav", True),
    ]
    assert given(clip, {"b.png": still}) == ()


def test_media_of_a_pick_are_as_long_as_it_says_and_no_longer_than_the_clip(tmp_path: Path) -> None:
    frames = np.repeat(np.arange(48, dtype=np.uint8)[:, None, None, None] * 5, 32, 1).repeat(32, 2).repeat(3, 3)
    sound = np.vstack([np.full(16000, 0.5), np.full(16000, -0.25)]).astype(np.float32)
    write_mp4(tmp_path / "a.mp4", frames, sound, 24, 8000)
    shape = ClipShape(num_frames=22, frame_rate=24, height=32, width=32, sample_rate_hz=8000)

    def pick(kind: str, start_s: float, end_s: float) -> Pick:
        return Pick(kind, str(tmp_path / "a.mp4"), None, "x", start_s, end_s, has_audio=True)  # type: ignore[arg-type]

    image, video, audio = (read(pick(*item), shape) for item in (("image", 1, 1), ("video", 1, 1.5), ("audio", 1, 9)))
    assert image.frames_FHWC is not None
    assert video.frames_FHWC is not None
    assert (image.kind, len(image.frames_FHWC), image.waveform_CT) == ("image", 1, None)
    assert abs(int(image.frames_FHWC[0].mean()) - 24 * 5) < 4  # the frame at 1 s
    assert len(video.frames_FHWC) == 12
    assert video.waveform_CT is not None
    assert audio.frames_FHWC is None
    assert audio.waveform_CT is not None
    assert abs(audio.waveform_CT.shape[1] - round(22 / 24 * 8000)) <= 1
    assert audio.waveform_CT[0].mean() > 0.4 > -0.2 > audio.waveform_CT[1].mean()


def test_sound_alone_is_no_reference() -> None:
    with pytest.raises(ValidationError, match="num_sounds"):
        References(num_images=0, num_sounds=1)
