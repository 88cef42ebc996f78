"""The house keeps its own rules: one list of verbs, one graph, one way for imports, files and functions of a liveable size."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import grimp
import pytest
import yaml
from pydantic import BaseModel

from tasks import ALONE, LOOKERS, MAKERS, PIPELINE, explain, file_of
from tasks.launch import ORDER, Config, Verb, load_params, steps

ROOT = Path(__file__).parents[1]
ROOMS = ("data", "models", "metrics", "tasks", "flows")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 350, 60


def tracked(*patterns: str) -> list[Path]:
    """Files that Git knows, or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listing.splitlines() if (path := ROOT / name).is_file()]


def sources() -> list[Path]:
    return tracked(*(f"{room}/*.py" for room in ROOMS))


@cache
def graph() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]


@cache
def params() -> dict[str, Any]:
    return load_params(ROOT / "params.yaml")


@cache
def imports() -> grimp.ImportGraph:
    return grimp.build_graph(*ROOMS, cache_dir=None)


def stage_body(verb: str) -> dict[str, Any]:
    return graph()[verb].get("do", graph()[verb])


def test_graph_has_one_stage_a_verb_in_pipeline_order() -> None:
    assert tuple(graph()) == ("sample", *PIPELINE) == ORDER == get_args(Verb)


@pytest.mark.parametrize("verb", ["sample", *PIPELINE])
def test_stage_uses_the_one_door(verb: str) -> None:
    assert stage_body(verb)["cmd"] == ("soundstage train ${key}" if verb == "train" else f"soundstage {verb}")


def test_every_verb_has_a_section_and_a_file_and_there_are_no_others() -> None:
    files = {
        path.stem for path in (ROOT / "tasks").glob("*.py") if re.search(r"^def run\(", path.read_text(), re.MULTILINE)
    }
    assert files == {file_of(verb) for verb in (*MAKERS, *PIPELINE, *LOOKERS, "run")}
    assert {*MAKERS, *PIPELINE} - {*ALONE} <= set(params())


@pytest.mark.parametrize("verb", [verb for verb in (*MAKERS, *PIPELINE) if verb not in ALONE])
def test_section_is_accepted_by_its_config(verb: str) -> None:
    import_module(f"tasks.{file_of(verb)}").Config.model_validate(params()[verb])


@pytest.mark.parametrize("verb", [*MAKERS, *PIPELINE, *LOOKERS, "run"])
def test_every_field_has_a_sentence_and_the_file_an_example(verb: str) -> None:
    module = import_module(f"tasks.{file_of(verb)}")
    assert f"soundstage {verb}" in module.__doc__
    assert not bare_fields(module.Config)


def bare_fields(kind: type[BaseModel]) -> list[str]:
    """Settings without a sentence, those inside settings too."""
    found = [name for name, field in kind.model_fields.items() if not field.description]
    for name, field in kind.model_fields.items():
        inner, _ = explain._model_in(field.annotation)
        found += [f"{name}.{below}" for below in bare_fields(inner)] if inner else []
    return found


@pytest.mark.parametrize("verb", ["sample", *PIPELINE])
def test_stage_depends_on_every_file_its_verb_imports(verb: str) -> None:
    modules = {f"tasks.{verb}", *imports().find_upstream_modules(f"tasks.{verb}")} - {"tasks"}
    files = {path for module in modules if (path := module_file(module)).stat().st_size}
    listed = {ROOT / dep for dep in stage_body(verb)["deps"] if dep.endswith(".py")}
    assert files - listed == set(), "missing in dvc.yaml"
    others = {ROOT / "metrics/pesq_child.py", ROOT / "mlflow/pyfunc_model.py"}  # run as a process, stored as a model
    assert listed - files <= others, "in dvc.yaml, not imported"


def module_file(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@pytest.mark.parametrize("verb", ["sample", *PIPELINE])
def test_stage_depends_on_every_setting_of_its_verb(verb: str) -> None:
    listed = set(stage_body(verb)["params"])
    if verb == "train":
        rest = {f"train.{name}" for name in params()["train"] if name != "stages"}
        assert listed == rest | {"train.stages.${key}"}
    else:
        assert listed == {verb}


def test_curriculum_stage_waits_for_the_checkpoint_it_starts_from() -> None:
    section = params()["train"]
    for stage in section["stages"].values():
        previous = stage.get("start_from")
        assert stage["after"] == (f"{section['checkpoints']}/{previous}" if previous else section["base"])


def test_steps_follow_the_graph_and_leave_out_the_sample_for_own_videos() -> None:
    names = [f"train@{name}" for name in params()["train"]["stages"]]
    before, after = PIPELINE[: PIPELINE.index("train")], PIPELINE[PIPELINE.index("train") + 1 :]
    assert steps(params(), Config()) == ("sample", *before, *names, *after)
    own = params() | {"ingest": params()["ingest"] | {"source": "/data/mine"}}
    assert steps(own, Config(last="cut")) == ("ingest", "validate", "cut")


def test_mlflow_folder_never_shadows_the_library() -> None:
    assert not (ROOT / "mlflow" / "__init__.py").exists()


def test_no_file_shadows_a_standard_module_that_torch_or_pydantic_needs() -> None:
    assert not {path.stem for path in sources()} & {"types", "typing", "token", "random", "queue", "select", "copy"}


def test_imports_go_one_way() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_file_and_its_functions_are_of_a_liveable_size(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {
        node.name: length for node in functions if (length := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long


def file_map() -> list[str]:
    """Paths in the README's fenced block below `## File map`: on each line some of one folder, then what they hold."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    block = re.search(r"^## File map$.*?^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    paths: list[str] = []
    for line in block[1].splitlines() if block else []:
        first, *others = re.split(r"\s{2,}", line)[0].split(", ")
        folder = first.rpartition("/")[0]
        paths += [first, *(f"{folder}/{other}" for other in others)]
    return [path for path in paths if path]


def test_readme_has_no_number_left_to_fill_in() -> None:
    assert "@@" not in (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_maps_every_file() -> None:
    mapped = file_map()
    assert mapped, "README.md has no fenced block below `## File map`"
    missing = [path for path in mapped if not list(ROOT.glob(path.rstrip("/")))]
    assert not missing, "mapped, but not there"
    covered = {file for path in mapped for file in expand(path)}
    unmapped = [path.relative_to(ROOT).as_posix() for path in sources() if path.stat().st_size and path not in covered]
    assert not unmapped, "there, but not mapped"


def expand(path: str) -> set[Path]:
    """Files that a line of the map speaks for: itself, those matching its pattern, or all below a folder with `/`."""
    if path.endswith("/"):
        return set((ROOT / path).rglob("*")) if path.strip("/") not in ROOMS else set()
    return set(ROOT.glob(path))
