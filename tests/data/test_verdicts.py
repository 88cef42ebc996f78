from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.captions import CaptionFault
from data.limits import Limits
from data.records import Reject, Source, Treatment
from data.verdicts import Verdicts, judged, total

Maker = Callable[..., Source]


def verdicts_of(folder: Path, sources: list[Source], limits: Limits | None = None) -> tuple[Verdicts, list[Source]]:
    """The verdicts on some sources, and those accepted."""
    verdicts = Verdicts(folder / "verdicts.sqlite", limits or Limits())
    for source in sources:
        verdicts.learn(source)
    return verdicts, list(judged(sources, verdicts))


def test_a_copy_is_rejected_and_the_first_stays(tmp_path: Path, make_source: Maker):
    first = make_source("a.mp4")
    copy = first.model_copy(update={"path": "corpus/b.mp4"})
    verdicts, accepted = verdicts_of(tmp_path, [first, copy])
    assert [source.path for source in accepted] == ["corpus/a.mp4"]
    (reject,) = verdicts.read(Reject)
    assert (reject.rule, reject.path) == ("validate.unique", "corpus/b.mp4")
    assert reject.measured == "same content as corpus/a.mp4"


def test_a_copy_of_what_was_rejected_is_judged_by_itself(tmp_path: Path, make_source: Maker):
    short = make_source("a.mp4", video_duration_s=0.1, audio_duration_s=0.1)
    whole = make_source("a.mp4", path="corpus/b.mp4")
    verdicts, accepted = verdicts_of(tmp_path, [short, whole])
    assert [source.path for source in accepted] == ["corpus/b.mp4"]
    assert verdicts.counts["rejected"] == 1


def test_a_clip_whose_reference_is_absent_or_unusable_is_rejected_and_names_it(tmp_path: Path, make_source: Maker):
    good = make_source("r.png", use="reference", media_type="image/png", path="r.png")
    broken = make_source("s.png", use="reference", error="is empty", path="s.png")
    sources = [
        make_source("a.mp4", references=("r.png",)),
        make_source("b.mp4", references=("r.png", "s.png")),
        make_source("c.mp4", references=("gone.png",)),
        good,
        broken,
    ]
    verdicts, accepted = verdicts_of(tmp_path, sources)
    assert [source.path for source in accepted] == ["corpus/a.mp4"]
    assert {item.path: (item.rule, item.measured) for item in verdicts.read(Reject)} == {
        "corpus/b.mp4": ("validate.references", "s.png is empty"),
        "corpus/c.mp4": ("validate.references", "gone.png is not in the manifest"),
        "s.png": ("validate.usable", "is empty"),
    }
    assert (verdicts.counts["reference"], total(verdicts.counts)) == (1, 5)


def test_captions_of_one_template_are_listed_with_their_share_and_may_cost_their_sources(
    tmp_path: Path, make_source: Maker
):
    habit = [make_source(f"{n}.mp4", caption=f"The video shows a thing{n} in the room of a house") for n in range(25)]
    others = [make_source(f"x{n}.mp4", caption=word) for n, word in enumerate(("a dog barks", "rain falls", "night"))]
    verdicts, accepted = verdicts_of(tmp_path, [*habit, *others])
    assert len(accepted) == 28
    faults = list(verdicts.read(CaptionFault))
    assert {(fault.fault, fault.measured, fault.action) for fault in faults} == {
        ("template", "25 of 28 captions have its form", "list")
    }
    assert len(faults) == 25
    limits = Limits(caption_actions={"template": "reject"})
    verdicts, accepted = verdicts_of(tmp_path, [*habit, *others], limits)
    assert len(accepted) == 3
    limits = Limits(caption_actions={"template": "default"})
    verdicts, accepted = verdicts_of(tmp_path, [*habit, *others], limits)
    assert Counter(source.caption for source in accepted)["a video with sound"] == 25


def test_hostile_captions_stay_data_and_are_listed(tmp_path: Path, make_source: Maker):
    hostile = [
        "<img src=x onerror=alert(1)>",
        "=HYPERLINK(1)",
        "'); DROP TABLE written; --",
        "${jndi:ldap://x}",
        "{{7*7}}",
    ]
    sources = [make_source(f"{number}.mp4", caption=text) for number, text in enumerate(hostile)]
    verdicts, accepted = verdicts_of(tmp_path, sources)
    assert [source.caption for source in accepted] == hostile
    assert {(item.path, item.fault) for item in verdicts.read(CaptionFault)} == {
        ("corpus/0.mp4", "markup"),
        ("corpus/1.mp4", "formula"),
    }


def test_the_language_is_guessed_where_the_user_states_none(tmp_path: Path, make_source: Maker):
    text = "Ein Mann läuft mit dem Hund."
    sources = [make_source("a.mp4", caption=text), make_source("b.mp4", caption=text, caption_language="nl")]
    assert [source.caption_language for source in verdicts_of(tmp_path, sources)[1]] == ["de", "nl"]


def test_what_was_written_down_comes_back_by_path(tmp_path: Path, make_source: Maker):
    sources = [make_source(f"{name}.mp4", num_channels=1, frame_rate="30") for name in "cab"]
    verdicts, _ = verdicts_of(tmp_path, sources)
    found = [(item.path, item.treatment) for item in verdicts.read(Treatment)]
    assert found == [(f"corpus/{name}.mp4", kind) for name in "abc" for kind in ("mono_to_stereo", "retime")]
    assert verdicts.counts == {"accepted": 3, "treated": 3, "mono_to_stereo": 3, "retime": 3}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verdicts")


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 20), st.sampled_from([None, "broken"]), st.floats(0, 3)), max_size=30))
def test_every_source_is_accepted_or_rejected_and_none_is_both(
    scratch: Path, rows: list[tuple[int, str | None, float]]
):
    sources = [
        Source(
            source_id=f"{content:016x}", sha256=f"{content:064x}", path=f"{number}.mp4", group="", size_bytes=1,
            error=error, width=64, height=64, frame_rate="24", num_frames=48, video_duration_s=duration,
        )
        for number, (content, error, duration) in enumerate(rows)
    ]  # fmt: skip
    verdicts, accepted = verdicts_of(scratch, sources)
    fates = [item.path for item in accepted] + [item.path for item in verdicts.read(Reject)]
    assert sorted(fates) == sorted(source.path for source in sources)
    assert len({source.source_id for source in accepted}) == len(accepted)
