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

MAKERS = ("sample", "base", "caption", "verify")
"""Verbs beside the pipeline: they make the sample corpus, the tiny base model, captions, and copies of latents."""

LOOKERS = {"inspect": ("ingest", "validate", "cut")}
"""Verbs that only look and print, and the sections of `params.yaml` whose settings they look by; no stages of DVC."""
