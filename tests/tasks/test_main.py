"""The one door: overrides, one clear line for every error, an exit status for each kind, and no heavy import."""

from __future__ import annotations

import importlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from data.records import DataRefused, Frozen, GateFailed
from models.preemption import Preempted
from tasks import MAKERS, PIPELINE, browse, explain, file_of
from tasks.__main__ import PARAMS, as_overrides, load_section, main

HEAVY = {
    "torch",
    "prefect",
    "mlflow",
    "pandas",
    "lightning",
    "diffusers",
    "transformers",
    "great_expectations",
    "av",
    "dvc",
}


class Settings(Frozen):
    """Of a verb that only remembers."""

    limit: int = 1
    """A limit, items."""
    inner: dict[str, Any] = {}
    """Whatever else."""


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """`ingest` replaced by a verb that records its settings in `seen` and raises `error` where one is set."""
    module = ModuleType("tasks.ingest", "Remember.\n\nsoundstage ingest limit=2\n")
    module.Config, module.seen, module.error = Settings, [], None

    def run(config: Settings) -> None:
        module.seen.append(config)
        if module.error:
            raise module.error

    module.run = run
    monkeypatch.setitem(sys.modules, "tasks.ingest", module)
    (tmp_path / "params.yaml").write_text("ingest: {limit: 3}\n")
    monkeypatch.chdir(tmp_path)
    return module


def test_settings_come_from_the_section_and_overrides_go_before(verb: ModuleType) -> None:
    assert main(["ingest"]) == 0
    assert main(["ingest", "limit=5", "inner.a.b=[1, x]", "inner.c=a=b"]) == 0
    assert verb.seen == [Settings(limit=3), Settings(limit=5, inner={"a": {"b": [1, "x"]}, "c": "a=b"})]


def test_settings_may_be_written_as_options(verb: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--limit", "5", "ingest", "--inner.a-b=[1, x]"]) == 0
    assert verb.seen == [Settings(limit=5, inner={"a_b": [1, "x"]})]
    with pytest.raises(SystemExit, match="2"):
        main(["ingest", "--limit"])
    assert "--limit needs a value" in capsys.readouterr().err
    assert main(["ingest", "--debugg", "yes"]) == 2
    assert "debugg" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("limit = 3; at most 2"), 2),
        (RuntimeError("no ffmpeg; install it"), 3),
        (FileNotFoundError(2, "No such file", "clips.parquet"), 3),
        (GateFailed("psnr_db 3 dB; limit gate.min = 4"), 4),
        (DataRefused("60 % without caption; limit 20 %"), 5),
        (Preempted("stopped at step 12; its state is saved"), 75),
    ],
)
def test_each_kind_of_error_has_its_line_and_status(
    verb: ModuleType, capsys: pytest.CaptureFixture[str], error: Exception, status: int
) -> None:
    verb.error = error
    assert main(["ingest"]) == status
    assert capsys.readouterr().err == f"soundstage ingest: {error}\n"


def test_programming_errors_are_not_hidden(verb: ModuleType) -> None:
    verb.error = KeyError("a bug")
    with pytest.raises(KeyError):
        main(["ingest"])


def test_traceback_only_with_debug(verb: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    verb.error = RuntimeError("no ffmpeg")
    assert main(["ingest", "--debug"]) == 3
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ingest", "limt=3"], "limt: there is no such setting; did you mean limit?"),
        (["ingest", "limit=many"], "limit = many: must be a valid integer"),
        (["ingest", "easy"], "easy: too many positional arguments"),
        (["ingest", "--params", "no.yaml"], "no.yaml does not exist"),
        (["run", "--params", "no.yaml"], "`run` reads params.yaml"),
        (["cut"], "params.yaml has no section `cut`"),
        (["ingst"], "no verb 'ingst'; did you mean ingest?; there are sample"),
    ],
)
def test_bad_words_are_answered_in_one_line(
    verb: ModuleType, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(words) == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1
    assert not verb.seen


def test_missing_input_names_the_setting_and_the_verb_that_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("gate: {report: gone.json, verdict: verdict.json}\n")
    assert main(["gate"]) == 3
    said = capsys.readouterr().err
    assert "gone.json does not exist (gate.report = gone.json); run `soundstage evaluate` first" in said


def test_help_descends_into_nested_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert "stages.NAME.batch_size: Clips an optimiser update sees, at most. (default 4)" in text
    assert main(["encode", "--help"]) == 0
    assert "canvases.NAME.area_px:" in capsys.readouterr().out


def test_values_stand_once_in_the_lines_of_the_innermost_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ingest", "--help"]) == 0
    text = capsys.readouterr().out
    assert "  engine: How many files are measured at once, where, and what one may use; the manifest" in text
    assert "{name: local" not in text
    assert (
        "  engine.ray.min_workers: Files for which an autoscaling cluster keeps room all the time. (default 1)" in text
    )
    assert main(["cut", "--help"]) == 0
    assert "  filters.min_sharpness_p90: " in (text := capsys.readouterr().out)
    assert "params.yaml: {" not in text


@pytest.mark.parametrize("verb", [*MAKERS, *PIPELINE])
def test_the_example_of_a_verb_fits_its_settings(verb: str) -> None:
    module = importlib.import_module(f"tasks.{file_of(verb)}")
    lines = [line for line in (module.__doc__ or "").splitlines() if f"soundstage {verb}" in line]
    assert lines
    for line in lines:
        words = as_overrides(shlex.split(line.partition(f"soundstage {verb}")[2]))
        module.Config.model_validate(load_section(verb, PARAMS, [word for word in words if "=" in word]))


def test_help_of_a_verb_that_only_looks_has_the_settings_it_looks_by(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--help"]) == 0
    text = capsys.readouterr().out
    assert "  validate.min_duration_s: " in text
    assert "  ingest.engine.max_item_s: " in text
    assert all(line.startswith("  ") for line in text.partition("dots descend):\n")[2].splitlines())


def test_json_is_for_verbs_that_print_records(verb: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ingest", "--json"]) == 2
    assert "--json: `ingest` prints no records; inspect does" in capsys.readouterr().err
    assert not verb.seen


def test_interrupt_says_that_running_again_goes_on(verb: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    verb.error = KeyboardInterrupt()
    assert main(["ingest"]) == 130
    assert "run it again" in capsys.readouterr().err


def test_help_shows_example_fields_sentences_and_defaults(verb: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ingest", "--help"]) == 0
    text = capsys.readouterr().out
    assert "soundstage ingest limit=2" in text
    assert "limit: A limit, items. (default 1; params.yaml: 3)" in text


def test_without_a_verb_the_verbs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "generate" in capsys.readouterr().out


def test_help_loads_nothing_heavy() -> None:
    code = "import sys, tasks.__main__ as door; door.main(['--help']); print(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(result.stdout.splitlines()[-1].split())


keys = st.text("abcdefgh", min_size=1, max_size=5)
values = st.one_of(st.integers(), st.booleans(), st.text("xyz =.:", max_size=8), st.lists(st.integers(), max_size=3))


@given(st.lists(keys, min_size=1, max_size=4), values)
def test_any_override_lands_at_its_place(tmp_path_factory: pytest.TempPathFactory, path: list[str], value: Any) -> None:
    params = tmp_path_factory.mktemp("params") / "params.yaml"
    params.write_text("cut: {}\n")
    written = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()
    found: Any = load_section("cut", params, [f"{'.'.join(path)}={written}"])
    for key in path:
        found = found[key]
    assert found == value


def test_prose_on_the_command_line_is_not_taken_for_yaml(tmp_path: Path) -> None:
    params = tmp_path / "params.yaml"
    params.write_text("generate: {seed: 0}\n", encoding="utf-8")
    for prompt in ("'tis a dog", "[x", "a dog: it barks"):
        assert load_section("generate", params, [f"prompt={prompt}"])["prompt"] == prompt
    assert load_section("generate", params, ["shape={height: 8}"])["shape"] == {"height": 8}
    with pytest.raises(ValueError, match="seed is a value"):
        load_section("generate", params, ["seed.x=1"])


@pytest.mark.parametrize("content", ["a: b: c", "\tx", "- 1\n- 2", "ingest: 3", "\xff"])
def test_settings_that_are_none_are_answered_in_one_line(
    verb: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
) -> None:
    (tmp_path / "odd.yaml").write_text(content, encoding="latin-1")
    assert main(["ingest", "--params", "odd.yaml"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("soundstage ingest: odd.yaml")
    assert line.count("\n") == 1
    assert not verb.seen


def test_a_file_name_cannot_steer_the_terminal(verb: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    verb.error = DataRefused("\x1b[2J\nsoundstage: all is well.mp4 has no caption")
    assert main(["ingest"]) == 5
    assert capsys.readouterr().err == "soundstage ingest: \\x1b[2J\\nsoundstage: all is well.mp4 has no caption\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cat\u202e4pm.exe", "cat\\u202e4pm.exe"),
        ("\u2066a\u2069\u200f\ufeff", "\\u2066a\\u2069\\u200f\\ufeff"),
        ("a\u200cb \x9b\udcff\u2028", "a\\u200cb \\x9b\\udcff\\u2028"),
        ("می\u200cخواهم 👩\u200d👧 at 9\u202fAM", "می\u200cخواهم 👩\u200d👧 at 9\u202fAM"),
    ],
)
def test_what_turns_the_direction_of_text_or_is_not_seen_is_spelled_out(name: str, said: str) -> None:
    assert explain.printable(name) == said
    assert explain.on_page(name) == said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError("gone"), "gone does not exist (browse.clips = gone); run `soundstage cut` first"),
        (
            FileNotFoundError(2, "No such file", "left/a"),
            "left/a does not exist (browse.rejects = left/a); run `soundstage validate` first",
        ),
        (
            FileNotFoundError(2, "No such file", "on/.pages.7.tmp"),
            "browse.pages = on/pages cannot be used: No such file",
        ),
        (NotADirectoryError(20, "Not a directory", "work/x/y"), "browse.work = work cannot be used: Not a directory"),
        (FileExistsError(17, "File exists", "on"), "browse.pages = on/pages cannot be used: File exists"),
        (PermissionError(13, "Permission denied", "elsewhere"), ""),
    ],
)
def test_a_path_that_cannot_be_used_is_named_with_its_setting(error: OSError, said: str) -> None:
    given = load_section("browse", PARAMS, ["clips=gone", "rejects=[left/a]", "pages=on/pages", "work=work"])
    assert explain.remedy(error, "browse", browse.Config.model_validate(given)) == said


def test_a_folder_of_another_origin_is_refused_before_the_verb_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "holiday.mp4").touch()
    for verb, name in (("browse", "pages"), ("split", "cards"), ("encode", "latents"), ("evaluate", "report")):
        assert main([verb, f"{name}={tmp_path}"]) == 2
        assert f"{name}: {tmp_path} holds 1 things of another origin ('holiday.mp4'…)" in capsys.readouterr().err
    for verb, suite in (("validate", "manifest"), ("cut", "clips"), ("split", "splits"), ("encode", "latents")):
        (tmp_path / suite).mkdir()
        (tmp_path / suite / "holiday.mp4").touch()
        assert main([verb, f"docs={tmp_path}"]) == 2
        assert f"docs: {tmp_path}/{suite} holds 1 things" in capsys.readouterr().err


def test_a_full_disk_is_named_by_the_setting_with_least_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        "shutil.disk_usage", lambda place: usage._replace(free=3_000_000 if Path(place) == tmp_path else 10**9)
    )
    given = load_section("browse", PARAMS, [f"pages={tmp_path}/pages"])
    said = explain.remedy(OSError(28, "No space left on device"), "browse", browse.Config.model_validate(given))
    assert said.startswith(f"a disk is full; browse.pages = {tmp_path}/pages has 3.0 MB left: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ingest", "engine.max_item_gb=.inf"], "engine.max_item_gb = .inf: must be "),
        (["ingest", "engine.max_file_gb=1e30"], "engine.max_file_gb = 1e30: must be less than"),
        (["validate", "min_loudness_lufs=.nan"], "min_loudness_lufs = .nan: must be a finite number"),
        (["validate", "min_side_px=99", "max_side_px=98"], "min_side_px = 99 is above max_side_px = 98"),
        (["validate", "hdr=tonemap"], "hdr = tonemap: must be 'tone_map' or 'reject'; did you mean tone_map?"),
        (["validate", "shape=7"], "shape = 7: must be settings of its own, {name: value}"),
        (["validate", "caption_actions.mrkup=clean"], "caption_actions.mrkup = mrkup: must be 'empty', "),
        (["split", "val_share=.9", "test_share=.5"], "settings: val_share 0.9 + test_share 0.5 leave nothing"),
        (["ingest", "source=3"], "source = 3: must be a text (A folder of videos with "),
        (["ingest", "source=3"], """in quotes: source='"…"'"""),
        (["ingest", "source="], "source = null: must be a text (A folder of videos with "),
        (["ingest", 'source=""'], 'source = "": must have at least 1 character'),
        (["ingest", "source=[a,b]"], "source = [a, b]: must be a text (A folder of videos with "),
        (["ingest", "source=2024-01-31"], "ingest.source = 2024-01-31 does not exist"),
        (["cut", "filters.min_loudness_lufs=.nan"], "filters.min_loudness_lufs = .nan: must be a finite number"),
    ],
)
def test_settings_by_which_nothing_could_pass_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_verb_that_names_commands_knows_its_settings_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PARAMS.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    seen: list[browse.Config] = []
    monkeypatch.setattr(browse, "run", seen.append)
    for name in ("params.yaml", "mine.yaml"):
        Path(name).write_text(text, encoding="utf-8")
        assert main(["browse", "--params", name]) == 0, capsys.readouterr().err
    assert [config.settings_file for config in seen] == [None, Path("mine.yaml")]
