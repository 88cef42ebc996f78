"""What is wrong with one caption, measured: facts about text, which is never anything but text.

Guesses are honest about short texts: where too little speaks for a language, none is named.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

from pydantic import Field

from data.records import Frozen

Fault = Literal["empty", "template", "refusal", "file_name", "over_long", "language", "markup", "control", "formula"]
Action = Literal["list", "default", "clean", "reject"]
DEFAULT_ACTIONS: dict[Fault, Action] = {
    "empty": "default",
    "template": "list",
    "refusal": "default",
    "file_name": "default",
    "over_long": "list",
    "language": "list",
    "markup": "list",
    "control": "clean",
    "formula": "list",
}
"""What says nothing about the video gives way to the default caption; what may well be meant is only listed."""
TOKENS_A_WORD = 4 / 3
"""Rule of thumb of subword tokenisers for English: 100 tokens are about 75 words."""
REFUSAL = re.compile(
    r"\bas an? (ai|artificial intelligence)\b|\blanguage model\b|\b(i'm|i am|i’m) (very )?(sorry|unable|not able)\b"
    r"|^\W*sorry\b|\bi (cannot|can't|can’t|could not|couldn't)\b|\bunable to (see|view|watch|describe|process|access)\b"
    r"|\b(no|not an?) (video|image|picture) (was |is )?(provided|attached|given|available)\b",
    re.IGNORECASE,
)
FILE_NAME = re.compile(
    r"https?://|\bwww\.|\b[\w-]+\.(mp4|mov|mkv|webm|avi|m4v|mts|wav|mp3|jpe?g|png|gif)\b"
    r"|^\W*(img|dsc|vid|mov|gopr|pxl|mvi|dji|clip|video|untitled|screen recording)[\W_]*\d[\d\W_]*$",
    re.IGNORECASE,
)
MARKUP = re.compile(r"</?[a-z!][^<>]*>|&(#\d+|#x[0-9a-f]+|[a-z]{2,8});|\{\\[a-z]", re.IGNORECASE)
FORMULA = re.compile(r"^\s*[=@+\-]\s*[A-Za-z(|\"']|^\s*[\t\r]")
"""What a spreadsheet would run: a text that begins like a formula."""
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufffd]")
"""Control characters, invisible direction marks, and the mark of a broken encoding; newlines and tabs are none."""
WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?|\d+")
SCRIPTS: dict[str, re.Pattern[str]] = {
    "kana": re.compile(r"[\u3040-\u30ff]"),
    "han": re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]"),
    "hangul": re.compile(r"[\uac00-\ud7af\u1100-\u11ff]"),
    "cyrillic": re.compile(r"[\u0400-\u04ff]"),
    "arabic": re.compile(r"[\u0600-\u06ff]"),
    "hebrew": re.compile(r"[\u0590-\u05ff]"),
    "greek": re.compile(r"[\u0370-\u03ff]"),
    "devanagari": re.compile(r"[\u0900-\u097f]"),
    "thai": re.compile(r"[\u0e00-\u0e7f]"),
    "latin": re.compile(r"[A-Za-z\u00c0-\u024f]"),
}
LANGUAGES: dict[str, tuple[str, ...]] = {
    "kana": ("ja",), "han": ("zh", "ja"), "hangul": ("ko",), "cyrillic": ("ru", "uk", "bg", "sr"),
    "arabic": ("ar", "fa", "ur"), "hebrew": ("he",), "greek": ("el",), "devanagari": ("hi", "mr", "ne"),
    "thai": ("th",), "latin": ("en", "de", "fr", "es", "it", "pt", "nl", "pl", "sv", "tr", "vi", "id", "cs"),
}  # fmt: skip
"""Languages that a script may stand for, the commonest first."""
COMMON = {
    "en": "the a an and of in on with is are to at by it this that from while his her its",
    "de": "der die das und ein eine einen einem ist sind mit auf im den dem von zu nicht über wird",
    "fr": "le la les un une des et est sont dans sur avec du au qui par pour il elle ses",
    "es": "el la los las un una y es son en con del al que por para su se sobre mientras",
    "it": "il lo la gli un una e è sono in con del della che per su di nel sulla mentre",
    "pt": "o a os as um uma e é são em com do da no na que por para seu enquanto",
    "nl": "de het een en van in op met is zijn te dat die aan door voor naar terwijl zijn",
}
STOP_WORDS = {code: frozenset(words.split()) for code, words in COMMON.items()}
"""Words that are in almost every sentence of a language."""
MIN_STOP_WORDS = 2
"""Fewest common words that speak for a language; one alone (`a`, `in`, `la`) is in several."""


class CaptionLimits(Frozen):
    """What a caption must be, and what happens to one that is not."""

    caption_language: str | None = None
    """Language that captions should be in, ISO 639-1; None asks for none. Languages told apart: see `guess_language`."""
    max_caption_tokens: int | None = Field(default=512, gt=0)
    """Most tokens of a caption; text encoders drop what is beyond. None asks for none."""
    caption_tokenizer: Path | None = None
    """Folder with the text encoder's `tokenizer.json`, to count by; None estimates 4 tokens for 3 words."""
    max_template_share: float = Field(default=0.2, gt=0, le=1)
    """Largest share of all captions that may differ in their content words alone; beyond it all of them are faulty."""
    min_template_captions: int = Field(default=20, gt=1)
    """Fewest captions of one template that count as a habit."""
    caption_actions: dict[Fault, Action] = {}
    """What a fault leads to: `list` it, use the `default` caption, `clean` it (control characters), or `reject` the
    source. Without a word here: refusals and file names are replaced, control characters cleaned, the rest listed."""

    def action(self, fault: Fault) -> Action:
        """What is done about a fault."""
        return self.caption_actions.get(fault, DEFAULT_ACTIONS[fault])


class Found(NamedTuple):
    """One fault of one caption."""

    fault: Fault
    measured: str
    limit: str


class CaptionFault(Frozen):
    """One row of the list of captions at fault."""

    item: str
    """source_id."""
    path: str
    fault: Fault
    measured: str
    limit: str
    action: Action
    caption: str | None
    """As given: data, to be escaped wherever it is shown."""


FAULTS: tuple[Fault, ...] = get_args(Fault)


def faults(caption: str | None, limits: CaptionLimits, template: tuple[int, int] = (0, 0)) -> list[Found]:
    """Everything that is wrong with a caption.

    Args:
        template: how many captions share its skeleton, of how many.
    """
    text = (caption or "").strip()
    if not WORD.search(text):
        return [Found("empty", "no word" if text else "no text", "words")]
    found = [*said(text), *_template(template, limits)]
    tokens = num_tokens(text, limits.caption_tokenizer)
    if limits.max_caption_tokens is not None and tokens > limits.max_caption_tokens:
        about = "" if limits.caption_tokenizer else "about "
        found.append(Found("over_long", f"{about}{tokens} tokens", f"{limits.max_caption_tokens} tokens"))
    if limits.caption_language is not None and (other := other_language(text, limits.caption_language)):
        found.append(Found("language", other, limits.caption_language))
    return found


def said(text: str) -> list[Found]:
    """Faults that a pattern finds, with the words that matched."""
    table: tuple[tuple[Fault, re.Pattern[str], str], ...] = (
        ("refusal", REFUSAL, "a description"),
        ("file_name", FILE_NAME, "a description, no file names or links"),
        ("markup", MARKUP, "plain text"),
        ("formula", FORMULA, "text that no spreadsheet would run"),
        ("control", CONTROL, "visible characters"),
    )
    found: list[Found] = []
    for fault, pattern, limit in table:
        if match := pattern.search(text):
            found.append(Found(fault, f"holds {match[0][:40]!a}" if fault == "control" else match[0][:40], limit))
    return found


def _template(template: tuple[int, int], limits: CaptionLimits) -> list[Found]:
    same, total = template
    if same < limits.min_template_captions or same / max(total, 1) <= limits.max_template_share:
        return []
    return [Found("template", f"{same} of {total} captions have its form", f"{limits.max_template_share:.0%}")]


def skeleton(caption: str) -> str:
    """A caption without its content words: common words stay, runs of others become a dash, numbers a hash sign.

    Returns "" where fewer than three common words remain: too little to call it a form.
    """
    common = frozenset[str]().union(*STOP_WORDS.values())
    kept: list[str] = []
    for word in WORD.findall(caption.lower()):
        mark = word if word in common else "#" if word.isdigit() else "-"
        if mark != "-" or not kept or kept[-1] != "-":
            kept.append(mark)
    return " ".join(kept) if sum(mark not in "-#" for mark in kept) >= 3 else ""


def cleaned(caption: str) -> str:
    """The caption on one line without control characters and direction marks."""
    return " ".join(CONTROL.sub("", caption).split())


def num_tokens(text: str, tokenizer: Path | None = None) -> int:
    """Tokens of a text: by the tokenizer, else estimated; scripts without spaces count a token a character."""
    if tokenizer is not None:
        return len(_tokenizer(tokenizer).encode(text).ids)
    dense = sum(len(SCRIPTS[name].findall(text)) for name in ("kana", "han", "thai"))
    words = WORD.findall(re.sub(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]+", " ", text))
    return dense + round(len(words) * TOKENS_A_WORD)


@functools.cache
def _tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"validate.caption_tokenizer = {folder} holds no tokenizer.json")
    return cast(Any, Tokenizer).from_file(str(file))


def script(text: str) -> str | None:
    """The script of most letters; Japanese is told by its kana, which always stand among Han characters."""
    counts = Counter({name: len(pattern.findall(text)) for name, pattern in SCRIPTS.items()})
    if counts["kana"] and counts["kana"] + counts["han"] > counts["latin"]:
        return "kana"
    (name, count), *_ = counts.most_common(1)
    return name if count else None


def guess_language(text: str) -> str | None:
    """ISO 639-1 of a text, or None where too little speaks for one.

    Latin text is told apart by common words (en, de, fr, es, it, pt, nl); of other scripts the commonest language is
    named, so Farsi passes for Arabic and Bulgarian for Russian.
    """
    name = script(text)
    if name is None:
        return None
    if name != "latin":
        return "uk" if name == "cyrillic" and re.search(r"[іїєґ]", text.lower()) else LANGUAGES[name][0]
    words = Counter(word.lower() for word in WORD.findall(text))
    scores = Counter({code: sum(words[word] for word in common) for code, common in STOP_WORDS.items()})
    (best, score), (_, second) = scores.most_common(2)
    return best if score >= MIN_STOP_WORDS and score > second else None


def other_language(text: str, wanted: str) -> str | None:
    """The language or script that a text is in where it cannot be the wanted one; None where it may be."""
    name = script(text)
    if name is None:
        return None
    possible = LANGUAGES[name]
    known = any(wanted in codes for codes in LANGUAGES.values())
    if known and wanted not in possible:
        return guess_language(text) or f"{name} script"
    guess = guess_language(text) if name == "latin" and wanted in STOP_WORDS else None
    return guess if guess not in (None, wanted) else None
