from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.records import ClipShape, Source
from data.rules import Limits, has_sound, judge, resize_detail, sound_span, treatments

Maker = Callable[..., Source]


def named(source: Source, limits: Limits | None = None) -> dict[str, str]:
    """Details of the source's treatments by name."""
    return {item.treatment: item.detail for item in treatments(source, limits or Limits())}


def test_an_ordinary_source_is_accepted_as_it_is(make_source: Maker):
    source = make_source("a.mp4")
    assert judge([source], Limits()) == ([source], [])
    assert named(source) == {}


@pytest.mark.parametrize(
    ("fields", "rule", "measured"),
    [
        ({"error": "is text, not a video"}, "usable", "is text, not a video"),
        ({"num_frames": 1}, "picture", "1 frames"),
        ({"num_frames": 0, "width": 0, "height": 0, "frame_rate": "0"}, "picture", "0 frames"),
        ({"video_duration_s": 0.5}, "min_duration_s", "0.500 s"),
        ({"width": 15}, "min_side_px", "15x64 px"),
        ({"frame_rate": "5"}, "min_frame_rate", "5.00 fps"),
        ({"frame_rate": "90000"}, "max_frame_rate", "90000.00 fps"),
        ({"width": 320}, "max_aspect", "320x64 px, 5.00:1"),
        ({"height": 320}, "max_aspect", "64x320 px, 5.00:1"),
        ({"rotation_deg": 45}, "rotation", "45 degrees"),
        ({"color_transfer": "smpte2084"}, "reject_hdr", "transfer smpte2084"),
        ({"color_transfer": "arib-std-b67"}, "reject_hdr", "transfer arib-std-b67"),
        ({"color_transfer": "ARIB_STD_B67"}, "reject_hdr", "transfer ARIB_STD_B67"),
    ],
)
def test_each_fault_is_rejected_by_its_option_with_what_was_measured(
    make_source: Maker, fields: dict[str, object], rule: str, measured: str
):
    accepted, (reject,) = judge([make_source("a.mp4", **fields)], Limits())
    assert accepted == []
    assert (reject.rule, reject.measured, reject.path) == (f"validate.{rule}", measured, "corpus/a.mp4")
    assert reject.limit


@pytest.mark.parametrize(
    "fields",
    [{"width": 256}, {"height": 256}, {"video_duration_s": 22 / 24}, {"frame_rate": "8"}, {"width": 16, "height": 16}],
)
def test_limits_themselves_are_allowed(make_source: Maker, fields: dict[str, object]):
    accepted, rejects = judge([make_source("a.mp4", **fields)], Limits(min_duration_s=0.916667))
    assert (len(accepted), rejects) == (1, [])


def test_hdr_may_be_let_in_but_never_silently(make_source: Maker):
    source = make_source("a.mkv", color_transfer="smpte2084", pixel_format="yuv420p10le")
    limits = Limits(reject_hdr=False)
    assert judge([source], limits)[1] == []
    assert "smpte2084 transfer is not tone-mapped" in named(source, limits)["ten_bit"]


def test_a_copy_is_rejected_and_the_first_path_stays(make_source: Maker):
    first = make_source("a.mp4")
    copy = first.model_copy(update={"path": "corpus/b.mp4"})
    accepted, (reject,) = judge([copy, first], Limits())
    assert [source.path for source in accepted] == ["corpus/a.mp4"]
    assert (reject.rule, reject.path, reject.measured) == (
        "validate.unique",
        "corpus/b.mp4",
        "same content as corpus/a.mp4",
    )


@pytest.mark.parametrize(
    ("fields", "name", "words"),
    [
        ({"audio_codec": None, "num_channels": 0}, "silence", "no sound"),
        ({"peak": 0.0}, "silence", "all zeros"),
        ({"audio_duration_s": 0.0}, "silence", "holds no samples"),
        ({"audio_start_s": 2.5}, "silence", "never overlaps"),
        ({"num_channels": 1, "channel_layout": "mono"}, "mono_to_stereo", "both sides"),
        ({"num_channels": 6, "channel_layout": "5.1"}, "downmix", "6 channels (5.1)"),
        ({"frame_rate": "30000/1001"}, "retime", "29.970 fps (constant rate) to 24 fps"),
        ({"frame_jitter": 0.5}, "retime", "vary by 50%"),
        ({"rotation_deg": 90}, "rotate", "90 degrees clockwise"),
        ({"audio_start_s": 0.4, "audio_duration_s": 1.6}, "delay_sound", "400 ms after the picture"),
        ({"video_start_s": 0.4, "audio_duration_s": 2.4}, "delay_sound", "400 ms before the picture"),
        ({"audio_duration_s": 1.5}, "pad_sound", "500 ms before the picture"),
        ({"width": 128}, "resize", "128x64 to 32x32 px, the outer 50% of its width cropped"),
        ({"width": 63, "height": 63}, "resize", "63x63 to 32x32 px, odd size"),
        ({"pixel_format": "yuv420p10le"}, "ten_bit", "yuv420p10le to 8 bits"),
        ({"pixel_format": "p010le"}, "ten_bit", "p010le to 8 bits"),
        ({"caption": None}, "caption_by_default", '"a video with sound"'),
        ({"caption": " \n"}, "caption_by_default", '"a video with sound"'),
    ],
)
def test_each_peculiarity_has_its_one_treatment_in_words_with_numbers(
    make_source: Maker, fields: dict[str, object], name: str, words: str
):
    found = named(make_source("a.mp4", **fields))
    assert list(found) == [name]
    assert words in found[name]


@pytest.mark.parametrize(
    "fields",
    [
        {"frame_jitter": 0.024},  # WebM's millisecond timestamps
        {"audio_start_s": 0.02},  # a codec frame
        {"audio_duration_s": 1.98},
        {"rotation_deg": 360},
        {"width": 640, "height": 640},
        {"pixel_format": "rgb24"},
    ],
)
def test_what_nobody_would_notice_is_not_mentioned(make_source: Maker, fields: dict[str, object]):
    assert named(make_source("a.mp4", **fields)) == {}


def test_sound_is_placed_relative_to_the_first_frame(make_source: Maker):
    source = make_source("a.mp4", video_start_s=1.0, audio_start_s=1.25, audio_duration_s=0.5)
    assert sound_span(source) == (0.25, 0.75)
    assert has_sound(source)
    assert not has_sound(source.model_copy(update={"audio_start_s": 0.0}))


@given(st.integers(16, 4000), st.integers(16, 4000))
def test_the_share_cropped_is_what_a_centre_crop_loses(width: int, height: int):
    source = Source(source_id="", sha256="", path="", group="", size_bytes=0, width=width, height=height)
    detail = resize_detail(source, ClipShape(height=32, width=64))
    kept = min(width, 2 * height) * min(height, width / 2) / (width * height)
    assert (detail is not None and "cropped" in detail) == (1 - kept > 0.01)


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from([None, "broken"]), st.floats(0, 3)), max_size=30))
def test_every_source_is_accepted_or_rejected_and_none_is_both(rows: list[tuple[int, str | None, float]]):
    sources = [
        Source(
            source_id=f"{content:016x}", sha256=f"{content:064x}", path=f"{number}.mp4", group="", size_bytes=1,
            error=error, width=64, height=64, frame_rate="24", num_frames=48, video_duration_s=duration,
        )
        for number, (content, error, duration) in enumerate(rows)
    ]  # fmt: skip
    accepted, rejects = judge(sources, Limits())
    assert sorted([item.path for item in accepted] + [item.path for item in rejects]) == sorted(
        source.path for source in sources
    )
    assert len({source.source_id for source in accepted}) == len(accepted)
