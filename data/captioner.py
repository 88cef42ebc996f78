"""Captions that a model wrote: their table, and who writes them behind one interface."""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from data import captions, files
from data.captions import CaptionLimits
from data.records import Frozen, Source

LOOPBACK = ("127.0.0.1", "::1", "localhost")
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
"""HTTP statuses that may pass: too busy, too many requests, not up yet."""
MAX_WAIT_S = 60.0
"""Longest pause between two tries, s; a server that asks for more is down rather than busy."""


class Written(Frozen):
    """One caption that a model wrote."""

    source_id: str
    path: str
    caption: str
    model: str
    prompt: str
    """First 16 hex digits of the SHA-256 of everything that was asked: words, sampling, number and size of frames."""
    reason: str
    """Why one was needed: the fault of the caption that was there."""


class Endpoint(Frozen):
    """A server that speaks the chat protocol of OpenAI: vLLM, SGLang, llama.cpp, Ollama…"""

    url: str = "http://127.0.0.1:8000/v1"
    """Where it listens, up to and with the version."""
    allow_remote: bool = False
    """Let pictures of the corpus leave this machine: any other host than loopback is refused without it."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; unset sends none."""
    timeout_s: float = Field(default=120, gt=0)
    """Longest time one answer may take, s."""
    num_retries: int = Field(default=4, ge=0)
    """Further tries after a fault that may pass."""
    wait_s: float = Field(default=1, ge=0)
    """Pause before the first further try, s; doubled at each, at most a minute."""

    @model_validator(mode="after")
    def _stays_here(self) -> Endpoint:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"caption.endpoint.url = {self.url} is no http address")
        if parts.username or parts.password:
            raise ValueError(
                "caption.endpoint.url holds a password; put a key into the variable that key_variable names"
            )
        if parts.hostname not in LOOPBACK and not self.allow_remote:
            raise ValueError(
                f"caption.endpoint.url = {self.url} is another machine, and pictures of the corpus would be sent there;"
                " set caption.endpoint.allow_remote = true if they may"
            )
        return self


class Captioner(Protocol):
    """Whoever looks at frames and writes a caption."""

    def __call__(self, frames_JPEG: Sequence[bytes], prompt: str) -> str:
        """The caption of some frames in order, each a JPEG file.

        Raises:
            Unanswered: this one could not be captioned; others may.
            RuntimeError: none can be: no server, no weights, a refused key.
        """
        ...


class Unanswered(Exception):
    """One video got no caption; the message says why."""


class EndpointCaptioner:
    """Asks a server; frames travel inside the request."""

    def __init__(
        self, endpoint: Endpoint, model: str, max_tokens: int, *, pause: Callable[[float], None] = time.sleep
    ) -> None:
        import httpx

        key = os.environ.get(endpoint.key_variable, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # no proxy and no redirect: what is meant for loopback stays there, and a key goes to one host alone
        self._client = httpx.Client(
            headers=headers, timeout=endpoint.timeout_s, follow_redirects=False, trust_env=endpoint.allow_remote
        )
        self._endpoint, self._model, self._max_tokens, self._pause = endpoint, model, max_tokens, pause

    def __call__(self, frames_JPEG: Sequence[bytes], prompt: str) -> str:
        """As `Captioner`."""
        pictures = [f"data:image/jpeg;base64,{base64.b64encode(frame).decode()}" for frame in frames_JPEG]
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
        content.append({"type": "text", "text": prompt})
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "seed": 0,
        }
        return said_in(self._post(body))

    def _post(self, body: Mapping[str, Any]) -> object:
        import httpx

        url, trouble = f"{self._endpoint.url.rstrip('/')}/chat/completions", ""
        for attempt in range(self._endpoint.num_retries + 1):
            if attempt:
                self._pause(min(self._endpoint.wait_s * 2 ** (attempt - 1), MAX_WAIT_S))
            try:
                answer = self._client.post(url, json=body)
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code in RETRIED:
                trouble = f"status {answer.status_code}"
                continue
            return self._checked(answer, url)
        raise RuntimeError(
            f"no answer from {url} in {self._endpoint.num_retries + 1} tries: {trouble}; is the server of"
            " caption.endpoint.url up? Captions written so far are kept"
        )

    def _checked(self, answer: Any, url: str) -> object:
        status = int(answer.status_code)
        if status in (401, 403):
            raise RuntimeError(f"{url} refuses the key (status {status}); set {self._endpoint.key_variable}")
        if status == 404:
            raise RuntimeError(f"{url} does not exist, or serves no model {self._model} (status 404)")
        if status != 200:
            raise Unanswered(f"status {status}: {str(answer.text)[:200]}")
        try:
            return answer.json()
        except ValueError as error:
            raise Unanswered(f"the answer is no JSON: {str(answer.text)[:100]!r}") from error


def said_in(answer: object) -> str:
    """The text of a chat completion.

    Raises:
        Unanswered: it has another form, or is empty.
    """
    try:
        text = cast(Any, answer)["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise Unanswered(f"the answer has no choices[0].message.content: {str(answer)[:100]}") from error
    if not isinstance(text, str) or not text.strip():
        raise Unanswered("the answer is empty")
    return captions.cleaned(text)


class LocalCaptioner:
    """A vision-language model in a folder, through transformers; nothing is fetched and none of its code is run."""

    def __init__(self, folder: Path, max_tokens: int, device: str = "cpu") -> None:
        if not (folder / "config.json").is_file():
            raise RuntimeError(f"caption.model_folder = {folder} holds no config.json; download a model there first")
        import transformers

        hub = cast(Any, transformers)
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        self._processor = hub.AutoProcessor.from_pretrained(folder, **options)
        model = hub.AutoModelForImageTextToText.from_pretrained(folder, use_safetensors=True, dtype="auto", **options)
        self._model, self._max_tokens = model.to(device).eval(), max_tokens

    def __call__(self, frames_JPEG: Sequence[bytes], prompt: str) -> str:
        """As `Captioner`; greedy, so the same frames give the same words."""
        import io

        import torch
        from PIL import Image

        pictures = [Image.open(io.BytesIO(frame)).convert("RGB") for frame in frames_JPEG]
        content = [*({"type": "image", "image": picture} for picture in pictures), {"type": "text", "text": prompt}]
        inputs = self._processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
        ).to(self._model.device)  # fmt: skip
        with torch.inference_mode():
            ids = self._model.generate(**inputs, max_new_tokens=self._max_tokens, do_sample=False)
        fresh = ids[:, inputs["input_ids"].shape[1] :]
        text = captions.cleaned(str(self._processor.batch_decode(fresh, skip_special_tokens=True)[0]))
        if not text:
            raise Unanswered("the model says nothing")
        return text


def hash_of(*asked: object) -> str:
    """First 16 hex digits of the SHA-256 of what was asked."""
    return hashlib.sha256(repr(asked).encode()).hexdigest()[:16]


def needs_caption(source: Source, limits: CaptionLimits) -> str | None:
    """Why a source needs a caption: it has none, or one that says nothing; None where its own will do."""
    found = (item for item in captions.faults(source.caption, limits) if limits.action(item.fault) == "default")
    return next((f"{item.fault}: {item.measured}" for item in found), None)


def read_captions(path: Path) -> dict[str, Written]:
    """The table that `soundstage caption` wrote, by source id.

    Raises:
        RuntimeError: there is no such file.
    """
    if not path.is_file():
        raise RuntimeError(f"validate.captions = {path} does not exist; run `soundstage caption` first")
    return {row.source_id: row for row in files.iter_records(path, Written)}


def merged(source: Source, written: Mapping[str, Written], limits: CaptionLimits) -> Source:
    """The source with the model's caption where its own is missing or at fault, and where that came from."""
    found = written.get(source.source_id)
    if found is None or source.use != "clip" or needs_caption(source, limits) is None:
        return source
    origin = f"model {found.model} prompt {found.prompt}"
    return source.model_copy(update={"caption": found.caption, "caption_from": origin})
