"""Encoding: only what is missing, the same bytes however it was interrupted, and every clip accounted for."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch

from data.files import alone, read_records, refuse_foreign_outputs, sha256, write_records
from data.latents import LatentStore
from data.media import write_mp4
from data.records import Clip, DataRefused, Reject, Source
from data.world import scene
from models.families import load_encoders
from tasks import encoding, indexing, packing, supply
from tasks.encode import Config, run
from tasks.jobs import jobs_of, lineage_of, shards
from tasks.packing import Job

MakeClip = Callable[..., Clip]
CANVASES = {"small": {"area_px": 256, "durations_s": [22 / 24]}}
MODES = ("t2va", "fl2va_first", "fl2va")


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory, make_clip: MakeClip) -> list[Clip]:
    """Two short films, the second one silent."""
    folder = tmp_path_factory.mktemp("films")
    made: list[Clip] = []
    for index, name in enumerate(("bell", "silent")):
        seen = scene("base", index, 22 / 24, 24, 48, 8000, "bounce")
        path = folder / f"{name}.mp4"
        write_mp4(path, seen.frames_FHWC, seen.waveform_CT if name == "bell" else None, 24, 8000)
        made.append(
            make_clip(name, path=str(path), caption=seen.caption, has_audio=name == "bell", width=48, height=48)
        )
    return made


@pytest.fixture
def clips(films: list[Clip], tmp_path: Path) -> list[Clip]:
    """The films, copied to where a test may do with them what it likes."""
    return [film.model_copy(update={"path": shutil.copy(film.path, tmp_path)}) for film in films]


def config_of(folder: Path, base: Path, clips: Sequence[Clip], **changes: Any) -> Config:
    """One clip a shard, everything below `folder`; the last clip is held out."""
    splits = {"train": clips[:-1], "val": clips[:0], "test": clips[-1:]}
    for name, rows in splits.items():
        write_records(folder / "splits" / f"{name}.parquet", rows, Clip)
    if not (folder / "accepted.parquet").exists():
        write_records(folder / "accepted.parquet", [], Source)
    names = {"splits", "latents", "work", "docs"}
    paths = {name: folder / name for name in names} | {"base": base, "expectations": folder / "expectations.json"}
    tables = {name: folder / f"{name}.parquet" for name in ("accepted", "rejects")}
    settings = {"canvases": CANVASES, "modes": MODES, "clips_per_shard": 1, "num_workers": 1}
    return Config.model_validate({**paths, **tables, **settings, **changes})


class InProcess:
    """Stands in for the pool of processes: works here, and counts what is made; killed when so many parts are made."""

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()
        self.stop_at: int | None = None

    def pool(self, function: Callable[[Any], Any], *_: object) -> InProcess:
        self._function = function
        return self

    def answers(self, items: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for index, item in enumerate(items):
            yield index, self._function(item)

    def keep(self, settings: Any, part: str, key: str, arrays: Any) -> None:
        if self.made.total() == self.stop_at:
            raise KeyboardInterrupt
        self.made[part] += 1
        packing.keep(settings, part, key, arrays)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> InProcess:
    return installed(monkeypatch)


def installed(patch: pytest.MonkeyPatch) -> InProcess:
    result = InProcess()
    patch.setattr(supply, "Pool", result.pool)
    patch.setattr(encoding, "keep", result.keep)
    return result


@pytest.fixture
def unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Great Expectations left out: a second a run, of tests that are about bytes."""
    monkeypatch.setattr(indexing, "judge", lambda *_: None)


def an_undisturbed_run(factory: pytest.TempPathFactory, base: Path, films: list[Clip], size: int) -> Path:
    folder = factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        installed(patch)
        run(config_of(folder, base, films, clips_per_shard=size))
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, base: Path, films: list[Clip]) -> Path:
    """Folder of an undisturbed run on the films; copy it to change it."""
    return an_undisturbed_run(tmp_path_factory, base, films, 1)


@pytest.fixture(scope="module")
def undisturbed_in_one(tmp_path_factory: pytest.TempPathFactory, base: Path, films: list[Clip]) -> Path:
    """The same with both clips in one shard."""
    return an_undisturbed_run(tmp_path_factory, base, films, 8)


@pytest.fixture(scope="module")
def killed_in_one(tmp_path_factory: pytest.TempPathFactory, base: Path, films: list[Clip]) -> Path:
    """Working folder of a run that was to write both clips into one shard, killed when five of six parts were made."""
    folder = tmp_path_factory.mktemp("killed")
    with pytest.MonkeyPatch.context() as patch:
        installed(patch).stop_at = 5
        with pytest.raises(KeyboardInterrupt):
            run(config_of(folder, base, films, clips_per_shard=8))
    return folder / "work"


def made_by(pool: InProcess, config: Config) -> dict[str, int]:
    """How many entries had each part made by a run."""
    pool.made.clear()
    run(config)
    return dict(pool.made)


ALL = {"picture": 2, "sound": 2, "text": 2}


@pytest.mark.parametrize("stop_at", [0, 1, 2, 4, 5])
def test_a_run_killed_at_any_part_makes_only_the_rest_and_gives_the_same_bytes(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess, undisturbed: Path, unjudged: None, stop_at: int
) -> None:
    config = config_of(tmp_path, base, clips)
    pool.stop_at = stop_at
    with pytest.raises(KeyboardInterrupt):
        run(config)
    assert not config.latents.exists()
    pool.made.clear()
    pool.stop_at = None
    assert sha256(run(config)) == sha256(undisturbed / "latents")
    assert pool.made.total() == 6 - stop_at
    assert sorted(path.name for path in config.work.iterdir()) == ["shards"]


def test_real_processes_write_what_one_does(base: Path, clips: list[Clip], tmp_path: Path, undisturbed: Path) -> None:
    there = run(config_of(tmp_path, base, clips, num_workers=2))
    assert sha256(there) == sha256(undisturbed / "latents")


def test_every_clip_is_in_the_store_with_all_variants(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess
) -> None:
    modes = ("t2va", "fl2va_first", "fl2va_last", "fl2va", "a2v", "v2a")
    config = config_of(tmp_path, base, clips, clips_per_shard=8, modes=modes, uncaptioned=True)
    store = LatentStore(run(config))
    refuse_foreign_outputs(config)
    rows = {row.clip_id: row for row in store.index.rows()}
    assert {name: (row.split, row.has_audio) for name, row in rows.items()} == {
        "bell-000000": ("train", True),
        "silent-000000": ("test", False),
    }
    assert len(rows["bell-000000"].variants) == 12
    assert {name.partition("-")[0] for name in rows["silent-000000"].variants} == set(modes) - {"a2v", "v2a"}
    for row in rows.values():
        assert store.read(row, "video").shape == (24, 7, 4, 4)  # 17 frames to 5, 5 to 2; 4 px to 1
        assert store.read(row, "audio").shape == (2, 32, 37)  # 40 a second
        for variant, num_keyframes in (("t2va", 0), ("fl2va_first", 1), ("fl2va_last-uncaptioned", 1), ("fl2va", 2)):
            given = store.conditions(row, variant)
            assert sum(name.startswith("keyframe/") for name in given) == num_keyframes
            assert {"text/rows", "text/tags"} <= set(given)
    bell, silent = (store.read(row, "audio") for row in rows.values())
    assert torch.equal(silent[0], silent[1])  # both sides of nothing; the bell is heard from where it is
    assert not torch.equal(bell[0], bell[1])
    left = store.conditions(rows["bell-000000"], "a2v")["text/rows"]
    assert left.equal(store.conditions(rows["bell-000000"], "t2va")["text/rows"])
    silence = [store.conditions(row, "t2va-uncaptioned")["text/rows"] for row in rows.values()]
    assert silence[0].equal(silence[1])


def test_only_what_changed_is_made_again_and_never_because_a_file_moved(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess, unjudged: None
) -> None:
    def again(**changes: Any) -> dict[str, int]:
        encoding.loaded.cache_clear()  # a process of its own would load what was altered
        return made_by(pool, config_of(tmp_path, model, clips, **changes))

    model = tmp_path / "model"
    shutil.copytree(base, model)
    assert again() == ALL
    assert again() == {}
    moved = tmp_path / "elsewhere" / "klingel ñ.mp4"
    moved.parent.mkdir()
    shutil.move(clips[0].path, moved)
    clips[0] = clips[0].model_copy(update={"path": str(moved), "group": "elsewhere"})
    assert again() == {}
    clips[0] = clips[0].model_copy(update={"caption": "a blue ball bounces"})
    assert again() == {"text": 1}
    (tmp_path / "song.wav").write_bytes(Path(clips[1].path).read_bytes())
    clips[1] = clips[1].model_copy(update={"sound_path": str(tmp_path / "song.wav")})
    assert again() == {"sound": 1}
    clips[1] = clips[1].model_copy(update={"start_s": 0.01})
    assert again() == {"picture": 1, "sound": 1, "text": 1}  # the text sees the keyframes
    touch_weights(model / "audio_vae" / "diffusion_pytorch_model.safetensors")
    assert again() == {"sound": 2}
    touch_weights(model / "vae" / "diffusion_pytorch_model.safetensors")
    assert again() == {"picture": 2}
    with (model / "tokenizer" / "tokenizer_config.json").open("a") as stream:
        stream.write("\n")
    assert again() == {"text": 2}
    assert again(dtype="bfloat16") == ALL
    assert again(modes=("t2va",), dtype="bfloat16") == {"picture": 2, "text": 2}  # without keyframes


def touch_weights(file: Path) -> None:
    """Another last bit of the last weight."""
    data = bytearray(file.read_bytes())
    data[-4] ^= 1
    file.write_bytes(bytes(data))


def test_shards_that_hold_the_same_are_not_written_again(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess, unjudged: None
) -> None:
    config = config_of(tmp_path, base, clips, clips_per_shard=8)
    run(config)
    before = {path.name: path.stat().st_ino for path in config.latents.glob("*.safetensors")}
    clips[0] = clips[0].model_copy(update={"caption": "a blue ball bounces"})
    run(config_of(tmp_path, base, clips, clips_per_shard=8))
    after = {path.name: path.stat().st_ino for path in config.latents.glob("*.safetensors")}
    assert {name for name, inode in after.items() if before[name] != inode} == {"text-00000.safetensors"}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    """The last bit: of an array, or of the end of a text."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def rename_an_array(path: Path) -> None:
    """Flip a bit of an array's name in the header."""
    data = bytearray(path.read_bytes())
    data[data.index(b'":{"dtype"') - 1] ^= 1
    path.write_bytes(data)


def change_a_key(path: Path) -> None:
    """Flip a bit of the key of an entry in the header."""
    data = bytearray(path.read_bytes())
    data[data.index(b'\\"seal\\"') - 100] ^= 1
    path.write_bytes(data)


def swap(path: Path) -> None:
    """Give it the content of its neighbour."""
    part = path.name.partition("-")[0]
    other = next(item for item in path.parent.glob(f"{part}-*.safetensors") if item != path)
    path.write_bytes(other.read_bytes())


def lose_facts(path: Path) -> None:
    path.with_suffix(".json").unlink()


def spoil_facts(path: Path) -> None:
    beside = path.with_suffix(".json")
    beside.write_text(beside.read_text().replace("true", "false", 1))


def not_json(path: Path) -> None:
    path.with_suffix(".json").write_text("{")


@pytest.mark.parametrize(
    "spoil", [cut, empty, flip, rename_an_array, change_a_key, swap, lose_facts, spoil_facts, not_json]
)
def test_what_an_earlier_run_kept_is_not_believed_when_it_is_damaged(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess, undisturbed: Path, unjudged: None,
    spoil: Callable[[Path], None],
) -> None:  # fmt: skip
    config = config_of(tmp_path, base, clips)
    for name in ("work", "latents"):
        shutil.copytree(undisturbed / name, tmp_path / name)  # copies: the store has links to the same bytes
    spoil(min((config.work / "shards").glob("sound-*.safetensors")))
    assert made_by(pool, config) == {"sound": 1}
    LatentStore(config.latents).verify()
    assert sha256(config.latents) == sha256(undisturbed / "latents")


@pytest.mark.parametrize("spoil", [cut, empty, flip, rename_an_array, swap])
def test_parts_that_a_killed_run_finished_are_not_believed_when_they_are_damaged(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess, undisturbed_in_one: Path, killed_in_one: Path,
    unjudged: None, spoil: Callable[[Path], None], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    config = config_of(tmp_path, base, clips, clips_per_shard=8)
    shutil.copytree(killed_in_one, config.work)
    damaged = min((config.work / "done").glob("text-*.safetensors"))
    spoil(damaged)
    assert made_by(pool, config) == {"text": 1, "sound": 1}
    assert f"encode: {damaged} of an earlier run is not whole" in capsys.readouterr().err
    assert sha256(config.latents) == sha256(undisturbed_in_one / "latents")


def test_what_is_not_ours_in_the_working_folder_stays(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess, unjudged: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, base, clips)
    shards_folder = config.work / "shards"
    shards_folder.mkdir(parents=True)
    for name in ("mine.safetensors", "notes.txt"):
        (shards_folder / name).write_text("mine")
    run(config)
    assert "encode: 6 of 6 parts to make, 0 are kept" in capsys.readouterr().err
    run(config)
    assert "encode: 0 of 6 parts to make, 6 are kept" in capsys.readouterr().err
    assert {(shards_folder / name).read_text() for name in ("mine.safetensors", "notes.txt")} == {"mine"}


def test_a_clip_in_two_splits_is_refused_by_name(base: Path, clips: list[Clip], tmp_path: Path) -> None:
    config = config_of(tmp_path, base, clips)
    write_records(config.splits / "val.parquet", clips[:1], Clip)
    with pytest.raises(ValueError, match="clip bell-000000 is in train and in val"):
        run(config)
    write_records(config.splits / "val.parquet", [clips[0].model_copy(update={"clip_id": "../x"})], Clip)
    with pytest.raises(ValueError, match=r"val\.parquet: clip_id '\.\./x' is empty or has a slash"):
        run(config)


@pytest.mark.parametrize(
    ("name", "kind"), [("npu" if torch.cuda.is_available() else "cuda", RuntimeError), ("nope", ValueError)]
)
def test_a_device_that_is_not_here_is_refused_before_anything_is_read(
    base: Path, clips: list[Clip], tmp_path: Path, name: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=r"encode\.accelerator"):
        run(config_of(tmp_path, base, clips, accelerator=name, splits=tmp_path / "nowhere"))


def test_clips_that_say_or_sound_the_same_share_no_key(
    base: Path, clips: list[Clip], tmp_path: Path, make_clip: MakeClip
) -> None:
    (tmp_path / "song.wav").write_bytes(b"one")
    same = [make_clip(name, caption="the same", sound_path=str(tmp_path / "song.wav")) for name in ("a", "b")]
    config, encoders = config_of(tmp_path, base, same), load_encoders(base)
    encoders.text_sees = False  # as LTX-2's does not
    jobs, _ = jobs_of([("train", clip) for clip in same], config, encoders, lineage_of(config, encoders))
    keys = [key for job in jobs for key in job.keys if key]
    assert len(keys) == len(set(keys)) == 6


def test_a_row_that_cannot_be_true_is_a_reject_and_no_reference_of_others(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess
) -> None:
    endless = clips[0].model_copy(update={"clip_id": "bell-000007", "start_s": 7.0, "end_s": float("inf")})
    config = config_of(tmp_path, base, [endless, *clips], modes=("t2va", "ref2va"))
    store = LatentStore(run(config))
    assert [(row.clip_id, row.variants) for row in store.index.rows()] == [
        ("bell-000000", ("t2va",)),
        ("silent-000000", ("t2va",)),
    ]
    (reject,) = read_records(config.rejects, Reject)
    assert (reject.item, reject.rule, reject.measured) == ("bell-000007", "encode.span", "7 to inf s")


def test_a_clip_whose_own_references_were_not_accepted_is_told(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    clips[0] = clips[0].model_copy(update={"references": ("gone.png",)})
    config = config_of(tmp_path, base, clips, modes=("t2va", "ref2va"))
    assert {row.variants for row in LatentStore(run(config)).index.rows()} == {("t2va",)}
    said = "1 without ref2va since a reference of theirs was not accepted, first bell-000000"
    assert said in capsys.readouterr().err
    (found,) = (
        item for item in json.loads(config.expectations.read_text())["outcomes"] if item["name"] == "own_references"
    )
    assert (found["critical"], found["num_unexpected"]) == (False, 1)
    assert "bell-000000" in found["unexpected"][0]


def test_two_runs_never_share_a_working_folder(base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess) -> None:
    config = config_of(tmp_path, base, clips)
    with alone(config.work, "the first"), pytest.raises(RuntimeError, match=r"encode\.work = .* another process works"):
        run(config)
    assert not pool.made
    config.work.rmdir()
    config.work.touch()
    with pytest.raises(ValueError, match=r"encode\.work = \S+: \S+ is a file"):
        run(config)


def test_a_store_is_written_where_a_link_points_to(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess, unjudged: None
) -> None:
    config = config_of(tmp_path / "here", base, clips)
    (tmp_path / "disk").mkdir()
    config.latents.symlink_to(tmp_path / "disk")
    for _ in range(2):
        run(config)
    assert config.latents.is_symlink()
    LatentStore(tmp_path / "disk").verify()


def test_a_clip_whose_other_sound_is_gone_is_a_reject(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess
) -> None:
    clips[0] = clips[0].model_copy(update={"sound_path": str(tmp_path / "gone.wav")})
    config = config_of(tmp_path, base, clips)
    assert len(LatentStore(run(config)).index) == 1
    (reject,) = read_records(config.rejects, Reject)
    assert (reject.item, reject.rule) == ("bell-000000", "encode.readable")
    assert "gone.wav" in reject.measured


def test_a_clip_is_decoded_once_for_all_its_canvases(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    from data import clips as reading

    calls: list[int] = []

    def counted(clip: Clip, shapes: Sequence[Any]) -> Any:
        calls.append(len(shapes))
        return honest(clip, shapes)

    honest = reading.read_all
    monkeypatch.setattr(reading, "read_all", counted)
    canvases = {**CANVASES, "wide": {"area_px": 512, "aspects": ["2:1", "1:2"], "durations_s": [22 / 24]}}
    config = config_of(tmp_path, base, clips, canvases=canvases, clips_per_shard=8)
    store = LatentStore(run(config))
    assert calls == [2, 2]
    assert [(row.entry, row.width, row.height) for row in store.index.rows()] == [
        ("bell-000000@small", 16, 16),
        ("bell-000000@wide", 32, 16),
        ("silent-000000@small", 16, 16),
        ("silent-000000@wide", 32, 16),
    ]


def test_batches_give_nearly_the_same_and_depend_on_the_shard_alone(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess, undisturbed_in_one: Path, unjudged: None
) -> None:
    one = LatentStore(undisturbed_in_one / "latents")
    two = LatentStore(run(config_of(tmp_path / "2", base, clips, clips_per_shard=8, batch_size=2)))
    for left, right in zip(one.index.rows(), two.index.rows(), strict=True):
        torch.testing.assert_close(one.read(left, "video"), two.read(right, "video"), atol=1e-4, rtol=1e-4)
    config = config_of(tmp_path / "killed", base, clips, clips_per_shard=8, batch_size=2)
    pool.made.clear()
    pool.stop_at = 3
    with pytest.raises(KeyboardInterrupt):
        run(config)
    pool.stop_at = None
    assert sha256(run(config)) == sha256(tmp_path / "2" / "latents")


def test_references_are_drawn_from_other_clips_of_the_source_alone(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess, make_clip: MakeClip
) -> None:
    seen = scene("base", 7, 3.0, 24, 48, 8000, "bounce")
    path = tmp_path / "long.mp4"
    write_mp4(path, seen.frames_FHWC, seen.waveform_CT, 24, 8000)
    pair = [make_clip("long", number, path=str(path), caption=seen.caption, width=48, height=48) for number in (0, 1)]
    drawn = {"num_sets": 2, "num_images": 1, "num_videos": 1}
    config = config_of(tmp_path, base, [*pair, clips[0]], modes=("t2va", "ref2va"), references=drawn)
    store = LatentStore(run(config))
    rows = {row.clip_id: row for row in store.index.rows()}
    assert rows["bell-000000"].variants == ("t2va",)  # no other clip of its source
    assert rows["long-000000"].variants == ("t2va", "ref2va.0", "ref2va.1")
    given = store.conditions(rows["long-000000"], "ref2va.1")
    assert {name for name in given if name.startswith("references/")} == {
        "references/0/image",
        "references/1/video",
        "references/1/audio",
    }
    assert pool.made["references"] == 2


def test_a_clip_that_cannot_be_read_any_more_is_a_reject_and_the_rest_is_encoded(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(clips[0].path).write_bytes(b"not a film any more")
    config = config_of(tmp_path, base, clips, clips_per_shard=8)
    store = LatentStore(run(config))
    assert [row.clip_id for row in store.index.rows()] == ["silent-000000"]
    (reject,) = read_records(config.rejects, Reject)
    assert (reject.item, reject.rule) == ("bell-000000", "encode.readable")
    assert "1 cannot be encoded" in capsys.readouterr().err


def test_clips_too_short_for_every_canvas_are_rejects_and_none_left_is_refused(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess
) -> None:
    short = clips[0].model_copy(update={"end_s": 0.5})
    config = config_of(tmp_path, base, [short, clips[1]])
    assert len(LatentStore(run(config)).index) == 1
    assert [reject.rule for reject in read_records(config.rejects, Reject)] == ["encode.canvases.durations_s"]
    with pytest.raises(DataRefused, match=r"none of 1 clips .*0\.500 s; limit at least 0\.91"):
        run(config_of(tmp_path / "none", base, [short]))


def test_what_the_family_cannot_do_is_refused_before_anything_is_encoded(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"durations_s|17n"):
        run(config_of(tmp_path, base, clips, canvases={"a": {"area_px": 256, "durations_s": [0.2]}}))
    with pytest.raises(ValueError, match="modes"):
        config_of(tmp_path, base, clips, modes=())
    with pytest.raises(ValueError, match=r"encode\.modes: h3 has no kf2va; it has t2va"):
        run(config_of(tmp_path, base, clips, modes=("t2va", "kf2va")))
    for places, said in (((0.0,), "mode fl2va_first"), ((0.5, 1.5), r"keyframes: 1\.5 is outside.*0 and 1")):
        with pytest.raises(ValueError, match=said):
            config_of(tmp_path, base, clips, modes=("kf2va",), keyframes=places)
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(supply.shutil, "disk_usage", lambda _: full)
    with pytest.raises(RuntimeError, match=r"latents need .* GB .* 1e-06 GB are free.*encode\.dtype"):
        run(config_of(tmp_path, base, clips))
    assert not pool.made


def test_a_run_that_would_take_too_long_says_so_after_two_clips(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess, make_clip: MakeClip
) -> None:
    many = [make_clip(f"bell{n}", path=clips[0].path, width=48, height=48) for n in range(16)]
    with pytest.raises(RuntimeError, match=r"would take about .* h; limit encode\.max_hours = 1e-07"):
        run(config_of(tmp_path, base, many, max_hours=1e-7))
    assert pool.made == {"picture": 2, "sound": 2, "text": 2}


def test_latents_that_are_no_numbers_are_refused_by_name(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(encoders: Any, variant: Any, job: Job, *rest: Any) -> dict[str, Any]:
        arrays = honest(encoders, variant, job, *rest)
        return {name: array * np.nan if array.is_floating_point() and job.clip.source_id == "silent" else array
                for name, array in arrays.items()}  # fmt: skip

    honest = encoding.text
    monkeypatch.setattr(encoding, "text", spoilt)
    config = config_of(tmp_path, base, clips)
    with pytest.raises(DataRefused, match=r"latent_finite.*silent-000000") as refused:
        run(config)
    assert "bell-000000" not in str(refused.value)
    assert not config.latents.exists()
    found = json.loads(config.expectations.read_text())
    assert [item["name"] for item in found["outcomes"] if not item["success"]] == ["latent_finite"]


def test_a_clip_more_changes_the_shards_around_it_alone(make_clip: MakeClip) -> None:
    jobs = [
        Job(f"c{n:04d}@a", make_clip(f"c{n:04d}", clip_id=f"c{n:04d}"), "a", None, (), ())  # type: ignore[arg-type]
        for n in range(2000)
    ]
    before = {tuple(job.entry for job in group) for group in shards(jobs, 32)}
    after = {tuple(job.entry for job in group) for group in shards([*jobs[:700], *jobs[701:]], 32)}
    assert len(before - after) <= 3
    assert 25 <= 2000 / len(before) <= 40
    assert max(map(len, before)) <= 64
