"""The verbs, in the order a model meets them."""

PIPELINE = (
    "ingest",
    "validate",
    "cut",
    "split",
    "browse",
    "encode",
    "plan",
    "train",
    "evaluate",
    "gate",
    "register",
    "generate",
)
"""One DVC stage, one section of `params.yaml`, one file of this folder and one Prefect task each."""

MAKERS = ("sample", "base", "caption", "verify", "plan-run", "panel", "score")
"""Verbs beside the pipeline: they make the sample corpus, the tiny base model, captions, copies of latents, the plan of
a run's costs, panels of human raters, and scores of any two folders."""

ALONE = ("score",)
"""Verbs that need no settings file: all is said on the command line."""

LOOKERS = {"inspect": ("ingest", "validate", "cut")}
"""Verbs that only look and print, and the sections of `params.yaml` whose settings they look by; no stages of DVC."""


def file_of(verb: str) -> str:
    """Name of the file that a verb is in, without its ending; `run` is the launcher of all others."""
    return "launch" if verb == "run" else verb.replace("-", "_")
