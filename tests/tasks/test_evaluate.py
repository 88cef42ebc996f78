from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from data.files import sha256, write_records
from data.media import read_clip, write_mp4
from data.records import Clip, ClipShape, DataRefused, Report, Treatment
from models.generation import Generation, Generator
from tasks import evaluate
from tasks.evaluate import Config, run
from tasks.generations import choose_clips, crossfade, noise_seed, partner_of

MakeClip = Callable[..., Clip]
SHAPE = ClipShape()


def film(path: Path, number: int, *, sound: bool = True) -> None:
    """A square that moves right while a tone on its side sounds; each number has its own colour and pitch."""
    frames = np.full((22, 32, 32, 3), 20 + 9 * number, np.uint8)
    for index in range(22):
        frames[index, 8:20, index // 2 : index // 2 + 10] = (40 * number % 255, 255 - 30 * number, 128)
    t = np.arange(SHAPE.num_samples) / SHAPE.sample_rate_hz
    tone = 0.3 * np.sin(2 * np.pi * (300 + 80 * number) * t) * np.exp(-3 * t)
    write_mp4(path, frames, np.stack([tone, 0.5 * tone]).astype(np.float32) if sound else None, 24, 8000)


class FakeGenerator:
    """Copies the clip whose first frame it is given, with more noise before fine-tuning than after."""

    made = 0
    stop_after: int | None = None

    def __init__(self, films: Sequence[Path], noise: float) -> None:
        self.noise = noise
        self.known = [read_clip(path, 0.0, None, SHAPE) for path in films]

    def generate(
        self,
        prompts: Sequence[str],
        *,
        first: Sequence[NDArray[np.uint8]] | None = None,
        last: Sequence[NDArray[np.uint8]] | None = None,
        seed: int,
        num_inference_steps: int,
    ) -> list[Generation]:
        if FakeGenerator.stop_after is not None and FakeGenerator.made >= FakeGenerator.stop_after:
            raise KeyboardInterrupt
        FakeGenerator.made += 1
        start = first[0] if first else np.zeros((32, 32, 3), np.uint8)
        best = min(self.known, key=lambda item: float(np.abs(item[0][0].astype(float) - start).mean()))
        return [self.spoilt(*best, seed)]

    def reconstruct(self, frames: NDArray[np.uint8], waveform: NDArray[np.float32]) -> Generation:
        return Generation(frames, waveform)

    def spoilt(self, frames: NDArray[np.uint8], waveform: NDArray[np.float32], seed: int) -> Generation:
        rng = np.random.default_rng(seed)
        noisy = np.clip(frames + rng.normal(0, self.noise, frames.shape), 0, 255).astype(np.uint8)
        sound = waveform + self.noise / 400 * rng.standard_normal(waveform.shape)
        return Generation(noisy, sound.astype(np.float32))


@pytest.fixture
def config(tmp_path: Path, make_clip: MakeClip, monkeypatch: pytest.MonkeyPatch) -> Config:
    clips: list[Clip] = []
    for number in range(6):
        path = tmp_path / f"film{number}.mp4"
        film(path, number, sound=number != 5)
        group = "new" if number < 4 else "base"
        clips.append(make_clip(f"s{number}", path=path.as_posix(), group=group, has_audio=number != 5, end_s=0.916667))
    (tmp_path / "splits").mkdir()
    write_records(tmp_path / "splits/test.parquet", clips, Clip)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/weights").write_bytes(b"base")
    checkpoint = tmp_path / "checkpoints/all"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text(json.dumps({"weights_sha256": "a" * 64}))
    films = [Path(clip.path) for clip in clips]

    def load(base: Path, checkpoint: Path | None, shape: ClipShape, device: str = "cpu") -> FakeGenerator:
        return FakeGenerator(films, 4.0 if checkpoint else 40.0)

    FakeGenerator.made, FakeGenerator.stop_after = 0, None
    monkeypatch.setattr(Generator, "load", staticmethod(load))
    paths = {name: tmp_path / name for name in ("splits", "base", "report", "work", "checkpoints")}
    return Config.model_validate(paths | {"checkpoint": checkpoint, "max_clips": 6, "num_shown": 2, "num_workers": 1})


def value(report: Report, name: str, subset: str, group: str = "all") -> SimpleNamespace:
    """One metric, by name."""
    key = (name, subset, group)
    found = [each for each in report.metrics if (each.name, each.subset, each.group) == key]
    assert len(found) == 1
    return SimpleNamespace(**found[0].model_dump())


def test_a_model_that_improved_is_measured_as_such_and_everything_is_counted(config: Config) -> None:
    report = run(config)
    before, after = (value(report, "psnr_db", f"{model}/fl2va").value for model in ("base", "tuned"))
    assert before == pytest.approx(20 * np.log10(255 / 40), abs=2)
    assert after == pytest.approx(20 * np.log10(255 / 4), abs=1)
    pairs = {(pair.name, pair.left, pair.right, pair.group): pair for pair in report.comparisons}
    gain = pairs["psnr_db", "tuned/fl2va", "base/fl2va", "new"]
    assert gain.better
    assert gain.num_items == gain.num_sources == 4
    assert pairs["lsd_db", "tuned/fl2va", "base/fl2va", "new"].better
    assert pairs["psnr_db", "tuned/fl2va", "tuned/fl2va_swapped", "all"].difference > 4
    # the film without sound is tried and counted, not dropped
    sound = value(report, "lsd_db", "tuned/fl2va")
    assert (sound.num_items, sound.num_attempted) == (5, 6)
    assert sound.reason == "the source has no sound to compare with (1)"
    assert value(report, "psnr_db", "tuned/fl2va").num_items == 6
    assert value(report, "lse_d", "tuned/fl2va").reason.startswith("the SyncNet weights are absent")
    assert value(report, "psnr_db", "reconstruction").value == 100
    assert len(report.per_clip) == 6 * 7


def test_a_dead_side_is_left_out_of_the_stereo_measure(config: Config, tmp_path: Path) -> None:
    marked = Treatment(item="s0", path="film0.mp4", treatment="dead_side", detail="the right side is silent")
    write_records(tmp_path / "treatments", [marked], Treatment)
    report = run(config.model_copy(update={"treatments": tmp_path / "treatments"}))
    placed, heard = (value(report, name, "tuned/fl2va") for name in ("balance_db", "lsd_db"))
    assert (placed.num_items, heard.num_items, placed.num_attempted) == (4, 5, 6)
    assert "one side of the source is silent throughout (1)" in placed.reason


def test_the_folder_is_the_same_bytes_when_made_again(config: Config) -> None:
    run(config)
    first = sha256(config.report)
    names = {path.name for path in config.report.rglob("*") if path.is_file()}
    assert names == {
        "report.json",
        "report.html",
        *(f"{n}.mp4" for n in ("reference", "before", "after", "text", "side_by_side")),
    }
    run(config)
    assert sha256(config.report) == first
    assert not list(config.work.iterdir())


def test_a_killed_run_goes_on_and_gives_the_same_report(config: Config) -> None:
    run(config)
    undisturbed, whole_work = sha256(config.report), FakeGenerator.made
    FakeGenerator.made, FakeGenerator.stop_after = 0, 7
    with pytest.raises(KeyboardInterrupt):
        run(config)
    assert sha256(config.report) == undisturbed  # the old report stays until the new one is whole
    FakeGenerator.made, FakeGenerator.stop_after = 0, None
    run(config)
    assert FakeGenerator.made == whole_work - 7
    assert sha256(config.report) == undisturbed


def test_kept_generations_of_other_weights_are_not_used(config: Config) -> None:
    FakeGenerator.stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        run(config)
    (config.checkpoint / "checkpoint.json").write_text(json.dumps({"weights_sha256": "b" * 64}))
    FakeGenerator.made, FakeGenerator.stop_after = 0, None
    run(config)
    assert FakeGenerator.made == 6 * 5


def test_missing_inputs_are_named_with_the_verb_that_makes_them(config: Config, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="run `soundstage split` first"):
        run(config.model_copy(update={"splits": tmp_path / "nowhere"}))
    with pytest.raises(RuntimeError, match="run `soundstage train later` first"):
        run(config.model_copy(update={"checkpoint": tmp_path / "later"}))
    write_records(config.splits / "test.parquet", [], Clip)
    with pytest.raises(DataRefused, match=r"raise split\.test_share"):
        run(config)


@given(
    st.lists(st.tuples(st.sampled_from(["new", "base", "mine"]), st.integers(0, 6)), max_size=40), st.integers(1, 20)
)
def test_chosen_clips_are_as_many_as_asked_and_do_not_depend_on_order(
    make_clip: MakeClip, items: list[tuple[str, int]], max_clips: int
) -> None:
    clips = [make_clip(f"{group}{source}", number, group=group) for number, (group, source) in enumerate(items)]
    shares = {"new": 0.6, "base": 0.3}
    chosen = choose_clips(clips, shares, max_clips, seed=1)
    assert len(chosen) == min(max_clips, len(clips))
    assert len({clip.clip_id for clip in chosen}) == len(chosen)
    assert chosen == choose_clips(clips[::-1], shares, max_clips, seed=1)


def test_chosen_clips_follow_the_shares_and_visit_every_source_once_first(make_clip: MakeClip) -> None:
    clips = [make_clip(f"{group}{s}", n, group=group) for group in ("new", "base") for s in range(10) for n in range(3)]
    chosen = choose_clips(clips, {"new": 0.7, "base": 0.3}, 10, seed=0)
    assert Counter(clip.group for clip in chosen) == {"new": 7, "base": 3}
    assert max(Counter(clip.source_id for clip in chosen).values()) == 1


def test_swapped_keyframes_come_from_another_source_of_the_same_group(make_clip: MakeClip) -> None:
    clips = [make_clip(source, n, group=source[0]) for source in ("a1", "a2", "b1") for n in range(2)]
    for clip in clips:
        other = partner_of(clip, clips)
        if clip.group == "b":
            assert other is None
        else:
            assert other is not None
            assert other.group == clip.group
            assert other.source_id != clip.source_id


def test_crossfade_starts_and_ends_at_the_keyframes_and_is_halfway_in_the_middle() -> None:
    first, last = np.zeros((4, 4, 3), np.uint8), np.full((4, 4, 3), 200, np.uint8)
    frames = crossfade(first, last, 5)
    assert [int(frame.mean()) for frame in frames] == [0, 50, 100, 150, 200]


def test_noise_differs_by_clip_and_seed_only() -> None:
    assert noise_seed(0, "a") == noise_seed(0, "a")
    assert len({noise_seed(0, "a"), noise_seed(0, "b"), noise_seed(1, "a")}) == 3


def test_videos_are_enlarged_by_repeating_pixels() -> None:
    frames = np.arange(2 * 32 * 48 * 3, dtype=np.uint8).reshape(2, 32, 48, 3)
    large = evaluate.enlarge(frames)
    assert large.shape == (2, 96, 144, 3)
    assert np.array_equal(large[:, ::3, ::3], frames)
    assert evaluate.enlarge(np.zeros((1, 8, 200, 3), np.uint8)).shape == (1, 8, 200, 3)
