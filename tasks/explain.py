"""What the command line says: help from the settings' own sentences, and a way out of every mistake."""

from __future__ import annotations

import ast
import difflib
import errno
import re
import shlex
import shutil
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tasks import MAKERS, PIPELINE, file_of

FOLDER = Path(__file__).parent
WRITERS = {"checkpoint": "train", "base": "base", "source": "sample", "report": "evaluate"}
"""Verbs that write what several earlier verbs only read under the same name."""
QUOTED = {"string_type", "path_type"}
"""Faults of what should be words, by pydantic's names."""
EXPECTED = {
    "string_type": "must be a text",
    "path_type": "must be a path",
    "tuple_type": "must be a list, [a, b]",
    "dict_type": "must be names with values, {name: value}",
    "model_type": "must be settings of its own, {name: value}",
    "model_attributes_type": "must be settings of its own, {name: value}",
}
"""What pydantic says in words of Python."""
JOINERS = re.compile("(?<=[^\x00-\x7f])[\u200c\u200d](?=[^\x00-\x7f])")
MAX_VALUE = 60
"""Characters of a wrong value in a message."""


def summaries(verbs: Sequence[str]) -> str:
    """A line a verb: its name and the first line of its file, read without importing it."""
    width = max(len(verb) for verb in verbs)
    return "\n".join(f"  {verb:<{width}}  {_first_line(verb)}" for verb in verbs)


def _first_line(verb: str) -> str:
    path = FOLDER / f"{file_of(verb)}.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def describe(verb: str, about: str, config: type[BaseModel], section: Mapping[str, Any]) -> str:
    """The verb's settings, nested ones too: sentence, built-in default, and what params.yaml says where it differs."""
    where = "key=value" if verb == "run" else f"section `{verb}` of params.yaml, or key=value"
    lines = [about.strip(), "", f"settings ({where} on the command line; dots descend):"]
    return "\n".join([*lines, *_fields(config, section, "")])


def _fields(
    config: type[BaseModel], section: Mapping[str, Any], prefix: str, default: BaseModel | None = None
) -> Iterator[str]:
    """A line a setting; where settings hold others, the values stand in the lines of those. `default` is of them all."""
    for plain, field in config.model_fields.items():
        name = field.alias or plain
        given = cast(object, section.get(name))
        inner, keyed = _model_in(field.annotation)
        own: object = field.get_default(call_default_factory=True) if default is None else getattr(default, plain)
        group = own if isinstance(own, BaseModel) else None
        grouped = inner is not None and not keyed and (group is not None or (default is None and field.is_required()))
        required = default is None and field.is_required()
        said = "settings:" if grouped else f"({_value(own, given, required=required)})"
        yield f"  {prefix}{name}: {' '.join((field.description or '').split())} {said}"
        if inner is not None:
            nested = cast(Mapping[str, Any], given if isinstance(given, Mapping) and not keyed else {})
            yield from _fields(inner, nested, f"{prefix}{name}.{'NAME.' if keyed else ''}", group)


def _model_in(annotation: object) -> tuple[type[BaseModel] | None, bool]:
    """The settings inside a field, and whether they stand under names of the user's choice."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is dict:
        return _model_in(inside[1])[0], True
    if origin in (Union, UnionType):
        return next((found for item in inside if (found := _model_in(item))[0] is not None), (None, False))
    return None, False


def _value(default: object, given: object, *, required: bool) -> str:
    parts = ["required" if required else f"default {_yaml(default)}"]
    if given is not None and (shown := _yaml(given)) != parts[0].removeprefix("default "):
        parts.append(f"params.yaml: {shown}")
    return "; ".join(parts)


def _yaml(value: object) -> str:
    """A value as one would write it in params.yaml, on one line."""
    plain: Any = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    if isinstance(plain, Path | str):
        return str(plain) or '""'
    if isinstance(plain, tuple | set | frozenset):
        plain = list(cast("tuple[Any, ...]", plain))
    text = yaml.safe_dump(plain, default_flow_style=True, width=10_000, sort_keys=False, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def one_line(error: Exception, config: type[BaseModel] | None = None) -> str:
    """The error as one clear line: pydantic's as `setting = value: what it must be`, with the nearest name or choice."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(_wrong(item, config) for item in error.errors(include_url=False))


def _wrong(item: ErrorDetails, config: type[BaseModel] | None) -> str:
    """One fault of pydantic's in our words."""
    place, kind = [str(key) for key in item["loc"] if key != "[key]"], item["type"]
    known = _settings(config, place[:-1]) if config is not None else {}
    name, given = ".".join(place) or "settings", cast(object, item["input"])
    if kind == "extra_forbidden":
        return f"{name}: there is no such setting{_nearest(place[-1], known)}"
    if kind == "missing":
        return f"{name}: is required and not set"
    if kind == "value_error":
        return f"{name}: {item['msg'].removeprefix('Value error, ')}"
    said = EXPECTED.get(kind) or item["msg"].partition(", unable")[0]
    said = re.sub(r"^(Input|String|List|Tuple|Dictionary) should ", "must ", said)
    if kind == "literal_error":
        said += _nearest(str(given), re.findall(r"'(.*?)'", said))
    if kind in QUOTED:
        field = known.get(place[-1]) if place else None
        said += f" ({' '.join(field.description.split()).rstrip('.')})" if field and field.description else ""
        scalar = isinstance(given, int | float | date)
        said += f"; a word that YAML reads as something else goes in quotes: {name}='\"…\"'" if scalar else ""
    return f"{name} = {_shortened(given)}: {said}"


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _shortened(value: object) -> str:
    """A value as in params.yaml, or the beginning of it."""
    try:
        text = _yaml(value)
    except yaml.YAMLError:
        text = repr(value)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}…"


def _settings(config: type[BaseModel], path: Sequence[str]) -> dict[str, FieldInfo]:
    """The settings at a place, by name."""
    here, keyed = config, False
    for key in path:
        if keyed:
            keyed = False
            continue
        field = next((field for name, field in here.model_fields.items() if (field.alias or name) == key), None)
        inner, keyed = _model_in(field.annotation) if field else (None, False)
        if inner is None:
            return {}
        here = inner
    return {field.alias or name: field for name, field in here.model_fields.items()}


def printable(text: str, kept: str = "") -> str:
    """The same on one line, with what would steer a terminal or turn its direction spelled out, but for `kept`.

    A file's name may hold anything. Joiners stay where Persian, Hindi or an emoji needs them: not beside ASCII.
    """
    if text.isprintable():
        return text
    joiners = {match.start() for match in JOINERS.finditer(text)}
    return "".join(
        letter
        if letter in kept or place in joiners or letter.isprintable() or unicodedata.category(letter) == "Zs"
        else ascii(letter)[1:-1]
        for place, letter in enumerate(text)
    )


def on_page(value: object) -> object:
    """What a template is about to print, `printable` where it is text and no markup of ours."""
    return printable(value, "\n\t") if isinstance(value, str) and not hasattr(value, "__html__") else value


def inspect_command(path: str, params: Path | None = None) -> str:
    """The shell command that checks one file again; what does not print is written as bytes, which a paste survives.

    Args:
        params: Settings file to judge by; None is the usual one.
    """
    if params is not None:
        return f"{inspect_command(path)} --params {shlex.quote(str(params))}"
    name = f"./{path}" if path.startswith("-") else path
    if name.isprintable():
        return f"soundstage inspect {shlex.quote(name)}"
    escaped = "".join(
        f"\\{letter}"
        if letter in "\\'"
        else letter
        if letter.isprintable()
        else "".join(f"\\x{byte:02x}" for byte in letter.encode())
        for letter in name
    )
    return f"soundstage inspect $'{escaped}'"


def remedy(error: OSError, verb: str, config: BaseModel) -> str:
    """The file an error is about, the setting that names it and, of a missing input, the verb that writes it; or ""."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _fullest(verb, config)
    quoted = re.search(r"'([^']+)'", str(error))  # Arrow's own error holds no name but in its words
    given = str(error.filename or (quoted[1] if quoted else error))
    place = Path(re.sub(r"(^|/)\.([^/]+)\.[\d-]+\.tmp(?=/|$)", r"\1\2", given))
    for name, value in _paths(config):
        if not place.is_relative_to(value) and not (error.filename and value.is_relative_to(place)):
            continue
        if not isinstance(error, FileNotFoundError) or str(place) != given:
            return f"{verb}.{name} = {value} cannot be used: {error.strerror or error}"
        writer = WRITERS.get(name) or _first_with(name, verb)
        hint = f"; run `soundstage {writer}` first" if writer and writer != verb else ""
        return f"{place} does not exist ({verb}.{name} = {value}){hint}"
    return ""


def _fullest(verb: str, config: BaseModel) -> str:
    """Which of the places that a verb writes to has least room; an error of a full disk rarely says where."""
    rooms: list[tuple[int, str, Path]] = []
    for name, value in _paths(config):
        here = next((place for place in value.absolute().parents if place.is_dir()), Path("/"))
        rooms.append((shutil.disk_usage(here).free, name, value))
    if not rooms:
        return ""
    free, name, value = min(rooms)
    return (
        f"a disk is full; {verb}.{name} = {value} has {free / 1e6:.1f} MB left: make room there or name another place"
    )


def _paths(config: BaseModel) -> Iterator[tuple[str, Path]]:
    """Settings that are paths, with their names; those in a list bear the list's."""
    for name in type(config).model_fields:
        value = cast(object, getattr(config, name))
        for item in cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,):
            if isinstance(item, Path):
                yield name, item


def _first_with(name: str, verb: str) -> str | None:
    """The earliest verb of the pipeline with a setting of this name: the one that writes it."""
    earlier = PIPELINE[: PIPELINE.index(verb)] if verb in PIPELINE else (*MAKERS, *PIPELINE)
    for candidate in earlier:
        tree = ast.parse((FOLDER / f"{file_of(candidate)}.py").read_text(encoding="utf-8"))
        classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Config")
        fields = {
            item.target.id
            for node in classes
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        if name in fields:
            return candidate
    return None
