from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.limits import Limits
from data.records import ClipShape, Source
from data.rules import final_caption, has_sound, judge_one, resize_detail, sound_span, treatments

Maker = Callable[..., Source]


def named(source: Source, limits: Limits | None = None) -> dict[str, str]:
    """Details of the source's treatments by name."""
    return {item.treatment: item.detail for item in treatments(source, limits or Limits())}


def test_an_ordinary_source_is_accepted_as_it_is(make_source: Maker):
    source = make_source("a.mp4")
    assert judge_one(source, Limits()) == []
    assert named(source) == {}


@pytest.mark.parametrize(
    ("fields", "rule", "measured"),
    [
        ({"error": "is text, not a video"}, "usable", "is text, not a video"),
        ({"media_type": "image/png", "num_frames": 1, "error": "is a still picture"}, "kind", "is image/png"),
        ({"media_type": "image/gif", "num_frames": 1}, "kind", "is image/gif"),
        ({"media_type": "audio/wav", "width": 0, "height": 0}, "kind", "is audio/wav"),
        ({"num_frames": 1}, "picture", "1 frames"),
        ({"num_frames": 0, "width": 0, "height": 0, "frame_rate": "0"}, "picture", "0 frames"),
        ({"video_duration_s": 0.5, "audio_duration_s": 0.5}, "min_duration_s", "0.500 s"),
        ({"width": 15, "height": 15}, "min_side_px", "15x15 px"),
        ({"width": 8194, "height": 4096}, "max_side_px", "8194x4096 px"),
        ({"frame_rate": "5"}, "min_frame_rate", "5.00 fps"),
        ({"frame_rate": "90000"}, "max_frame_rate", "90000.00 fps"),
        ({"width": 320}, "max_aspect", "320x64 px, 5.00:1"),
        ({"height": 320}, "max_aspect", "64x320 px, 5.00:1"),
        ({"rotation_deg": 45}, "rotation", "45 degrees"),
        ({"num_channels": 12}, "max_channels", "12 channels"),
        ({"peak": 900.0}, "max_peak", "900 of full scale"),
        ({"audio_duration_s": 9.5}, "max_sound_gap_s", "sound ends 7.500 s after the picture"),
        (
            {"audio_start_s": -6.0, "audio_duration_s": 8.0},
            "max_sound_gap_s",
            "sound starts 6.000 s before the picture",
        ),
        (
            {"video_duration_s": 20.0, "num_frames": 480, "audio_duration_s": 8.0},
            "max_sound_gap_s",
            "sound ends 12.000 s before the picture",
        ),
        (
            {"video_duration_s": 20.0, "num_frames": 480, "audio_start_s": 6.0, "audio_duration_s": 14.0},
            "max_sound_gap_s",
            "sound starts 6.000 s after the picture",
        ),
        ({"audio_start_s": 2.5}, "max_sound_gap_s", "sound from 2.500 s to 4.500 s never overlaps the picture"),
        (
            {"video_start_s": 3600.0},
            "max_sound_gap_s",
            "sound from -3600.000 s to -3598.000 s never overlaps the picture",
        ),
    ],
)
def test_each_fault_is_rejected_by_its_option_with_what_was_measured(
    make_source: Maker, fields: dict[str, object], rule: str, measured: str
):
    (reject,) = judge_one(make_source("a.mp4", **fields), Limits())
    assert (reject.rule, reject.measured, reject.path) == (f"validate.{rule}", measured, "corpus/a.mp4")
    assert reject.limit


@pytest.mark.parametrize(
    ("setting", "fields", "measured", "limit"),
    [
        ({"hdr": "reject"}, {"color_transfer": "smpte2084"}, "transfer smpte2084", "an SDR transfer, or hdr: tone_map"),
        ({"hdr": "reject"}, {"color_transfer": "ARIB_STD_B67"}, "transfer ARIB_STD_B67", "an SDR transfer, or hdr: tone_map"),
        ({"dead_side": "reject"}, {"dead_side": "left"}, "the left side is silent", "sound on both, or dead_side: warn"),
        ({"max_frame_jitter": 0.1}, {"frame_jitter": 0.5}, "intervals vary by 50.0%", "0.1"),
        ({"max_true_peak_db": -1}, {"true_peak_db": 0.5}, "0.5 dB true peak", "-1 dB"),
        ({"min_loudness_lufs": -45}, {"loudness_lufs": None}, "-70.0 LUFS", "-45 LUFS"),
        ({"max_loudness_lufs": -5}, {"loudness_lufs": -3.0}, "-3.0 LUFS", "-5 LUFS"),
        ({"max_clipped_share": 0.001}, {"clipped_share": 0.01}, "1.00% of the samples clip", "0.001"),
        ({"max_silent_share": 0.5}, {"silent_share": 0.9}, "90.0% of the sound is silent", "0.5"),
        ({"min_speech_share": 0.5}, {"speech_share": 0.1}, "10.0% of the sound is speech", "0.5"),
        ({"max_speech_share": 0.1}, {"speech_share": 0.5}, "50.0% of the sound is speech", "0.1"),
        ({"max_interlaced_share": 0}, {"interlaced_share": 0.5}, "50.0% of the frames are interlaced", "0"),
        ({"max_black_share": 0.5}, {"black_share": 0.9}, "90.0% of the frames are black", "0.5"),
        ({"max_freeze_share": 0.5}, {"freeze_share": 0.9}, "90.0% of the frames repeat", "0.5"),
        ({"max_letterbox_share": 0.1}, {"letterbox_share": 0.2}, "20.0% of the picture is bars", "0.1"),
    ],
)  # fmt: skip
def test_a_limit_that_is_off_by_default_rejects_once_it_is_set(
    make_source: Maker, setting: dict[str, object], fields: dict[str, object], measured: str, limit: str
):
    source = make_source("a.mp4", **fields)
    assert judge_one(source, Limits()) == []
    (reject,) = judge_one(source, Limits.model_validate(setting))
    assert (reject.rule, reject.measured, reject.limit) == (f"validate.{next(iter(setting))}", measured, limit)


@pytest.mark.parametrize("kind", ["image/gif", "image/apng", "image/webp", "image/avif"])
def test_an_animation_is_a_video_without_sound(make_source: Maker, kind: str):
    animation = make_source("a.gif", media_type=kind, audio_codec=None, num_channels=0)
    assert judge_one(animation, Limits()) == []
    assert "silence" in named(animation)


def test_limits_on_sound_ask_nothing_of_a_source_without_any(make_source: Maker):
    silent = make_source("a.mp4", audio_codec=None, num_channels=0, loudness_lufs=None, true_peak_db=None)
    limits = Limits(
        max_silent_share=0, min_speech_share=1, min_loudness_lufs=-20, max_true_peak_db=-9, max_sound_gap_s=0
    )
    assert judge_one(silent, limits) == []


def test_sound_that_never_meets_its_picture_is_taken_for_silence_only_where_that_is_asked_for(make_source: Maker):
    apart = make_source("a.mp4", audio_start_s=2.5)
    assert judge_one(apart, Limits(max_sound_gap_s=None)) == []
    assert "never overlaps" in named(apart, Limits(max_sound_gap_s=None))["silence"]
    mute = make_source("a.mp4", audio_start_s=2.5, peak=0.0)
    assert judge_one(mute, Limits()) == []


def test_a_sound_file_of_its_own_may_outlast_its_picture(make_source: Maker):
    assert judge_one(make_source("a.mp4", sound_path="song.wav", audio_duration_s=200.0), Limits()) == []
    assert judge_one(make_source("a.mp4", audio_duration_s=200.0), Limits(max_sound_gap_s=None)) == []


def test_everything_that_is_wrong_is_named_and_not_the_first_alone(make_source: Maker):
    bad = make_source("a.mp4", width=8, height=80, rotation_deg=10, peak=9.0)
    rules = [reject.rule.removeprefix("validate.") for reject in judge_one(bad, Limits())]
    assert rules == ["min_side_px", "max_peak", "max_aspect", "rotation"]


@pytest.mark.parametrize(
    "fields",
    [{"width": 256}, {"height": 256}, {"video_duration_s": 22 / 24}, {"frame_rate": "8"}, {"width": 16, "height": 16}],
)
def test_limits_themselves_are_allowed(make_source: Maker, fields: dict[str, object]):
    assert judge_one(make_source("a.mp4", **fields), Limits(min_duration_s=0.916667)) == []


def test_a_caption_at_fault_is_replaced_cleaned_listed_or_costs_its_source_by_setting(make_source: Maker):
    refusal = make_source("a.mp4", caption="I'm sorry, I cannot view videos.")
    assert named(refusal)["caption_by_default"].startswith("refusal: ")
    assert final_caption(refusal, Limits()) == "a video with sound"
    dirty = make_source("b.mp4", caption="a cat\x07 \u202e purrs")
    assert list(named(dirty)) == ["caption_cleaned"]
    assert final_caption(dirty, Limits()) == "a cat purrs"
    markup = make_source("c.mp4", caption="<b>a cat</b>")
    assert named(markup) == {}
    (reject,) = judge_one(markup, Limits(caption_actions={"markup": "reject"}))
    assert (reject.rule, reject.measured) == ("validate.caption_actions.markup", "<b>")


@pytest.mark.parametrize(
    ("fields", "name", "words"),
    [
        ({"audio_codec": None, "num_channels": 0}, "silence", "no sound"),
        ({"peak": 0.0}, "silence", "all zeros"),
        ({"audio_duration_s": 0.0}, "silence", "holds no samples"),
        ({"num_channels": 1, "channel_layout": "mono"}, "mono_to_stereo", "both sides"),
        ({"num_channels": 6, "channel_layout": "5.1"}, "downmix", "6 channels (5.1)"),
        ({"num_channels": 3, "channel_layout": None}, "downmix", "3 channels of unknown layout"),
        ({"dead_side": "right"}, "dead_side", "the right side is silent"),
        ({"num_video_streams": 2, "video_stream": 1}, "choose_stream", "picture is stream 1 of 2"),
        ({"num_audio_streams": 3, "audio_stream": 2}, "choose_stream", "sound is stream 2 of 3"),
        ({"sound_path": "a.wav"}, "other_sound", "from a.wav"),
        ({"audio_duration_s": 3.0}, "trim_sound", "1000 ms after the picture"),
        ({"color_transfer": "smpte2084"}, "tone_map", "smpte2084 to BT.709"),
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
        ({"pixel_format": "bgra"}, "on_black", "bgra"),
        ({"pixel_format": "yuva420p"}, "on_black", "yuva420p"),
        ({"interlaced_share": 0.98}, "deinterlace", "98% of the frames are interlaced"),
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
        {"pixel_format": "yuyv422"},
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
