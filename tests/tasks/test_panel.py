"""Making a panel: films that tell nothing of where they come from; and the verb's words."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from data.loudness import Meter, integrated
from data.media import read_sound, write_mp4
from data.records import DataRefused
from tasks.panel import Config, drawn_sources, run
from tasks.panel_log import Log
from tasks.panel_media import PEAK_DB, amplified, coarse, dull_and_late, gains_of, level
from tasks.panel_plan import LOW_ANCHOR, RATINGS, REFERENCE, film_of, read


def config(films: Path, folder: Path, **settings: Any) -> Config:
    given = {"panel": folder / "panel", "mos": folder / "mos.json", "candidate": films / "candidate", "references": films / "references"}  # fmt: skip
    return Config.model_validate(given | settings)


@pytest.fixture(scope="module")
def made(films: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(config(films, tmp_path_factory.mktemp("all"), champion=films / "champion"), "make")


def loudness_of(path: Path) -> float:
    waveform_CT, rate_hz, _ = read_sound(path)
    found = integrated(
        Meter(rate_hz, ("FL", "FR")).take(waveform_CT, np.arange(0, waveform_CT.shape[1], rate_hz // 10))
    )
    assert found is not None
    return found


def facts_of(path: Path) -> tuple[object, ...]:
    """What a container says of a film, beside the pixels and samples themselves."""
    with av.open(str(path)) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        return (
            tuple(sorted(container.metadata.items())), tuple(sorted(video.metadata.items())), tuple(sorted(audio.metadata.items())),
            container.format.name, video.codec_context.name, audio.codec_context.name, video.width, video.height, video.average_rate,
            video.frames, video.codec_context.pix_fmt, video.profile, audio.rate, audio.layout.name, audio.duration, video.time_base,
        )  # fmt: skip


def test_films_of_one_source_are_alike_in_all_but_what_they_show(made: Path) -> None:
    panel = read(made)
    assert len(panel.sources) == 2
    for source in panel.sources:
        files = {item.system: film_of(made, item) for item in panel.shown if item.source == source}
        assert files.keys() == {"candidate", "champion", REFERENCE, LOW_ANCHOR}
        assert len({facts_of(path) for path in files.values()}) == 1
        levels = [loudness_of(path) for path in files.values()]
        assert max(levels) - min(levels) < 0.3
        assert levels[0] == pytest.approx(-23, abs=0.3)


def test_neither_name_nor_content_of_a_film_says_where_it_comes_from(made: Path) -> None:
    panel = read(made)
    for item in panel.items:
        content = film_of(made, item).read_bytes()
        assert len(item.name) == 16
        for word in (item.source, item.system, "film", "candidate", "champion", "reference", str(made)):
            assert word.encode() not in content
    assert len({item.name for item in panel.items}) == len(panel.items) == 3 + 2 * 4


def test_size_and_rate_are_the_candidates_and_length_is_the_shortests(made: Path, films: Path) -> None:
    item = next(item for item in read(made).shown if item.system == REFERENCE)
    with av.open(str(film_of(made, item))) as container:
        video = container.streams.video[0]
        assert (video.width, video.height, video.frames) == (192, 128, 12)  # 96×64 px with pixels repeated, 0.5 s
    assert item.duration_s == 0.5


def test_low_anchor_is_coarse_dull_and_late() -> None:
    rng = np.random.default_rng(0)
    frame = rng.integers(0, 256, (64, 64, 3)).astype(np.uint8)
    waveform = rng.normal(0, 0.1, (2, 96000)).astype(np.float32)
    assert coarse(frame).shape == frame.shape
    assert coarse(frame).std() < 0.3 * frame.std()
    found = dull_and_late(waveform)
    assert np.abs(found[:, :19000]).max() == 0
    spectrum = np.abs(np.fft.rfft(found[0, 24000:72000])) ** 2
    assert spectrum[3800:].sum() < 1e-3 * spectrum[:3400].sum()
    lag = np.argmax(np.correlate(found[0], waveform[0, :48000], "valid"))
    assert lag == pytest.approx(0.4 * 48000, abs=2)


def test_sound_that_would_clip_lowers_all_films_of_its_source_alike() -> None:
    time_T = np.arange(48000) / 48000
    loud = 0.1 * np.sin(2 * np.pi * 440 * time_T).astype(np.float32)
    peaky = loud * 0.05
    peaky[::4800] = 0.9
    sounds = {name: np.stack([wave] * 2) for name, wave in (("a", loud), ("b", peaky), ("silent", 0 * loud))}
    gains, reached = gains_of(sounds, -14.0)
    assert reached < -14
    equal = {name: amplified(wave, gains[name]) for name, wave in sounds.items()}
    for name in ("a", "b"):
        assert level(equal[name]).loudness_lufs == pytest.approx(reached, abs=0.01)
    assert true_peak_of(equal["b"]) == pytest.approx(10 ** (PEAK_DB / 20), rel=0.01)
    assert gains["silent"] is None
    assert not equal["silent"].any()


def true_peak_of(waveform_CT: np.ndarray) -> float:
    """True peak, full scale = 1."""
    meter = Meter(48000, ("FL", "FR"))
    meter.take(waveform_CT, np.array([0]))
    return meter.true_peak


def test_what_cannot_be_paired_or_read_is_named_and_the_rest_shown(films: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(films, tmp_path / "films"))
    for name in ("candidate", "references"):
        shutil.copy(own / name / "film0.mp4", own / name / "film3.mp4")
    (own / "candidate" / "film1.mp4").write_bytes(b"no film")
    (own / "candidate" / "alone.mp4").write_bytes(b"no film")
    (own / "candidate" / "film0.json").write_text("{}")
    panel = read(run(config(own, tmp_path), "make"))
    assert panel.left_out["alone"] == "no reference"
    assert panel.left_out["film1"].startswith("candidate: ")
    assert {item.source for item in panel.items} == {"film0", "film2", "film3"}


def test_silent_references_are_left_out_and_the_next_sources_take_their_place(films: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(films, tmp_path / "films"))
    for number in range(3, 6):
        for name in ("candidate", "references"):
            shutil.copy(own / name / "film0.mp4", own / name / f"film{number}.mp4")
    settings = config(own, tmp_path, max_sources=3)
    first, *_ = drawn_sources(settings)[0]
    frames, waveform = np.zeros((12, 64, 96, 3), np.uint8), np.zeros((2, 24000), np.float32)
    write_mp4(own / "references" / f"{first}.mp4", frames, waveform, 24, 48000)
    write_mp4(own / "candidate" / f"{drawn_at(settings, 1)}.mp4", frames, waveform, 24, 48000)  # silence is its fault
    panel = read(run(settings, "make"))
    assert list(panel.left_out) == [first]
    assert "is silent" in panel.left_out[first]
    assert {item.source for item in panel.items} == {drawn_at(settings, place) for place in (1, 2, 3)}


def drawn_at(settings: Config, place: int) -> str:
    """Name of the source at a place of the drawn order."""
    return list(drawn_sources(settings)[0])[place]


def test_too_few_sources_make_no_panel_and_leave_nothing(films: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(films, tmp_path / "films"))
    (own / "candidate" / "film1.mp4").unlink()
    with pytest.raises(DataRefused, match=r"2 sources can be shown; 3 are needed.*film1: no candidate"):
        run(config(own, tmp_path), "make")
    assert not (tmp_path / "panel").exists()


def test_an_evaluations_folder_is_read_as_before_and_after(films: Path, tmp_path: Path) -> None:
    for number in range(3):
        clip = tmp_path / "report/media" / f"clip{number}"
        clip.mkdir(parents=True)
        for name, kind in (("after", "candidate"), ("before", "champion"), ("reference", "references")):
            shutil.copy(films / kind / f"film{number}.mp4", clip / f"{name}.mp4")
    found, left_out = drawn_sources(Config(panel=tmp_path / "p", mos=tmp_path / "m", report=tmp_path / "report"))
    assert not left_out
    assert {name: path.name for name, path in found["clip1"].items()} == {
        "candidate": "after.mp4", "champion": "before.mp4", "reference": "reference.mp4",
    }  # fmt: skip


def test_choice_of_sources_depends_on_the_seed_alone(tmp_path: Path) -> None:
    for name in ("candidate", "references"):
        (tmp_path / name).mkdir()
        for number in range(40):
            (tmp_path / name / f"f{number}.mp4").touch()
    drawn = [list(drawn_sources(config(tmp_path, tmp_path, seed=seed))[0]) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sorted(drawn[0]) == sorted(drawn[2])


def test_a_panel_that_holds_votes_is_not_replaced(films: Path, panel_folder: Path) -> None:
    assert run(config(films, panel_folder.parent, num_raters=3), "invite")
    with pytest.raises(ValueError, match="holds votes; name another folder"):
        run(config(films, panel_folder.parent), "make")
    assert (panel_folder / RATINGS).exists()


def test_a_changed_film_or_panel_is_noticed(films: Path, panel_folder: Path) -> None:
    panel = read(panel_folder)
    Log(panel_folder / RATINGS, "another panel")
    with pytest.raises(RuntimeError, match="holds ratings of another panel"):
        run(config(films, panel_folder.parent), "invite")
    film = film_of(panel_folder, panel.items[0])
    film.write_bytes(film.read_bytes() + b"\0")
    with pytest.raises(RuntimeError, match="missing or not the film that was made"):
        read(panel_folder)


def test_links_hold_tokens_that_are_kept_as_hashes_alone(
    films: Path, panel_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = run(config(films, panel_folder.parent, num_raters=20), "invite")
    assert isinstance(tokens, list)
    links = capsys.readouterr().out.splitlines()
    assert links == [f"http://127.0.0.1:8765/#{token}" for token in tokens]
    assert len(set(tokens)) == 20
    assert min(map(len, tokens)) == 32
    kept = b"".join(path.read_bytes() for path in panel_folder.glob(f"{RATINGS}*"))
    assert not any(token.encode() in kept for token in tokens)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"report": "r"}, "report and folders of films both say what is judged"),
        ({"references": None}, "candidate and references are both needed"),
        ({"candidate": None, "references": None}, "nothing to judge; set panel.report"),
        ({"candidate": "gone"}, "panel.candidate = gone: there is no such folder"),
    ],
)
def test_contradictory_settings_are_refused(films: Path, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(config(films, tmp_path, **settings), "make")


def test_nobody_concludes_from_four_raters(films: Path, panel_folder: Path) -> None:
    run(config(films, panel_folder.parent, num_raters=4), "invite")
    with pytest.raises(DataRefused, match=r"0 raters can be used; at least 5 are needed \(4 have not finished"):
        run(config(films, panel_folder.parent), "conclude")
    assert not (panel_folder.parent / "mos.json").exists()
