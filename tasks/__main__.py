"""The one door: `soundstage VERB` finds the verb's section of `params.yaml`, its Config and its run."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from data.records import DataRefused, GateFailed
from models.preemption import EXIT_PREEMPTED, Preempted
from tasks import ALONE, LOOKERS, MAKERS, PIPELINE, explain, file_of
from tasks.launching import told

VERBS = (*MAKERS, *PIPELINE, *LOOKERS, "run")
PARAMS = Path("params.yaml")
OPTIONS = ("--help", "--params", "--json", "--debug")
"""Of the command itself; any other is a setting of the verb."""
EXIT_CONFIGURATION, EXIT_ENVIRONMENT, EXIT_GATE, EXIT_DATA, EXIT_INTERRUPTED = 2, 3, 4, 5, 130
"""Distinct exit statuses, so that a scheduler can tell a bad model from a bad machine."""


def load_section(verb: str, params: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The verb's section of `params`, with `key=value` overrides applied (dots descend, values are YAML).

    Raises:
        ValueError: the file or the section does not exist or is none, or an override is not `key=value`.
    """
    if verb in ALONE and params == PARAMS:
        return overridden({}, overrides)
    if not params.is_file():
        raise ValueError(f"{params} does not exist; run from the checkout or pass --params")
    try:
        loaded = cast(object, yaml.safe_load(params.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{params} is not YAML: {' '.join(str(error).split())}") from error
    sections = cast(dict[str, Any], loaded if isinstance(loaded, dict) else {})
    if verb in LOOKERS:
        sections = {verb: {name: sections.get(name, {}) for name in LOOKERS[verb]}}
    if verb not in sections and verb != "run":
        raise ValueError(f"{params} has no section `{verb}`")
    given = cast(object, sections.get(verb, {}))
    if not isinstance(given, dict):
        raise ValueError(f"{params}: section `{verb}` holds no settings but {given!r}")  # noqa: TRY004 # wrong settings
    return overridden(cast(dict[str, Any], given), overrides)


def overridden(section: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The section with `key=value` overrides applied.

    Raises:
        ValueError: one is not `key=value`, or goes below a value.
    """
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"override {override!r} is not key=value")
        *parents, last = key.split(".")
        node = section
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                raise ValueError(f"override {override!r}: {parent} is a value, not a section")  # noqa: TRY004 # wrong settings
            node = cast(dict[str, Any], child)
        node[last] = parsed(value)
    return section


def find(verb: str) -> ModuleType:
    """The verb's file."""
    return importlib.import_module(f"tasks.{file_of(verb)}")


def parsed(text: str) -> Any:
    """A value of the command line as YAML; prose that YAML cannot read, or takes for a mapping or a date, stays as it is."""
    try:
        value = cast(object, yaml.safe_load(text))
    except yaml.YAMLError:
        return text
    is_prose = isinstance(value, dict) and not text.lstrip().startswith("{")
    return text if is_prose or isinstance(value, date) else cast(Any, value)


def describe(verb: str, params: Path) -> str:
    """The verb's settings with their sentences, for `--help`."""
    module = find(verb)
    section = load_section(verb, params, []) if params.is_file() else {}
    return explain.describe(verb, module.__doc__ or "", cast(type[BaseModel], module.Config), section)


def parser() -> argparse.ArgumentParser:
    """The command line; imports no verb, so it answers at once."""
    result = argparse.ArgumentParser(
        prog="soundstage",
        description="From a folder of videos to a fine-tuned, measured, registered audio-video model.",
        usage="soundstage VERB [key=value or --key value ...] [--params FILE] [--debug]",
        epilog=f"verbs:\n{explain.summaries(VERBS)}\n\nexamples:\n  soundstage run\n"
        "  soundstage ingest source=/data/my_videos\n  soundstage inspect cat.mp4 --json\n"
        "  soundstage train all\n  soundstage generate --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    result.add_argument("-h", "--help", action="store_true", help="this text, or the verb's settings")
    result.add_argument("verb", nargs="?", help="what to do; `soundstage VERB --help` explains its settings")
    result.add_argument("item", nargs="*", help="files for `inspect`, a stage for `train`; key=value overrides")
    result.add_argument("--params", type=Path, default=PARAMS, help="settings file")
    result.add_argument("--json", action="store_true", help="of `inspect`: print JSON")
    result.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return result


def call(verb: str, items: Sequence[str], params: Path) -> None:
    """Run one verb with its section of `params`."""
    module = find(verb)
    overrides = [item for item in items if is_override(item)]
    names = [item for item in items if not is_override(item)]
    kind = cast(type[BaseModel], module.Config)
    if verb == "run" and params != PARAMS:
        raise ValueError(f"--params {params}: `run` reads {PARAMS}, as DVC does; edit that, or run single verbs")
    section = load_section(verb, params, overrides)
    if "settings_file" in kind.model_fields and params != PARAMS:
        section.setdefault("settings_file", str(params))
    try:
        config = kind.model_validate(section)
    except ValidationError as error:
        raise ValueError(explain.one_line(error, kind)) from error
    try:
        inspect.signature(module.run).bind(config, *names)
    except TypeError as error:
        example = next((line for line in (module.__doc__ or "").splitlines() if "soundstage " in line), "").strip()
        raise ValueError(f"{' '.join(names) or 'no name given'}: {error}; {example}") from error
    from data.files import refuse_foreign_outputs  # not before: `--help` needs no Arrow

    try:
        refuse_foreign_outputs(config)
        found = module.run(config, *names)
    except OSError as error:
        if said := explain.remedy(error, verb, config):
            raise RuntimeError(said) from error
        raise
    if verb in LOOKERS:
        module.refuse(found, names)


def as_overrides(words: Sequence[str]) -> list[str]:
    """The command line with `--name value` and `--name=value` as `name=value` at the end; the command's own stay.

    Raises:
        SystemExit: a name without a value.
    """
    result, overrides = list[str](), list[str]()
    waiting = iter(words)
    for word in waiting:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in OPTIONS:
            result.append(word)
            continue
        if not equals and (value := next(waiting, None)) is None:
            parser().error(f"{name} needs a value: {name} VALUE")
        overrides.append(f"{name[2:].replace('-', '_')}={value}")
    return result + overrides


def is_override(item: str) -> bool:
    """Whether a word of the command line is `key=value`; a file may have such a name too."""
    return re.match(r"[A-Za-z_][\w.@-]*=", item) is not None and not Path(item).exists()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is the contract that DVC and Prefect read."""
    arguments = parser().parse_intermixed_args(as_overrides(sys.argv[1:] if argv is None else argv))
    verb = cast(str | None, arguments.verb)
    if verb is None:
        parser().print_help()
        return 0 if arguments.help else EXIT_CONFIGURATION
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        sys.stderr.write(f"soundstage: no verb {verb!r}{hint}; there are {', '.join(VERBS)}\n")
        return EXIT_CONFIGURATION
    if arguments.help:
        sys.stdout.write(describe(verb, cast(Path, arguments.params)) + "\n")
        return 0
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads are 20 times slower on a shared machine
    try:
        if arguments.json and verb not in LOOKERS:
            raise ValueError(f"--json: `{verb}` prints no records; {', '.join(LOOKERS)} does")
        items = [*cast(list[str], arguments.item), *(["as_json=true"] if arguments.json else [])]
        call(verb, items, cast(Path, arguments.params))
    except (ValidationError, ValueError, RuntimeError, GateFailed, DataRefused, OSError) as error:
        if arguments.debug:
            traceback.print_exc()
        return say(verb, error)
    except KeyboardInterrupt:
        sys.stderr.write(f"soundstage {verb}: interrupted; run it again to go on\n")
        return EXIT_INTERRUPTED
    except Exception as error:
        told(error)
        raise
    return 0


def say(verb: str, error: Exception) -> int:
    """Say the error in one line, unless a launcher does it for all its processes; returns the exit status."""
    if told(error):
        return 0 if isinstance(error, Preempted) else exit_status(error)
    sys.stderr.write(f"soundstage {verb}: {explain.printable(explain.one_line(error))}\n")
    return exit_status(error)


def exit_status(error: Exception) -> int:
    """Which exit status tells this error from the others."""
    if isinstance(error, GateFailed):
        return EXIT_GATE
    if isinstance(error, DataRefused):
        return EXIT_DATA
    if isinstance(error, Preempted):
        return EXIT_PREEMPTED
    return EXIT_CONFIGURATION if isinstance(error, ValueError) else EXIT_ENVIRONMENT


if __name__ == "__main__":
    sys.exit(main())
