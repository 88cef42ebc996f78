"""From a prompt and keyframes to pixels and stereo sound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from data.records import ClipShape
from models.families import Family, Frames, Waveform, load_family


class Generation(NamedTuple):
    """One generated (or reconstructed) clip."""

    frames_FHWC: Frames
    waveform_CT: Waveform


class Generator:
    """A base model, with or without a fine-tuned checkpoint, that generates clips of one shape."""

    def __init__(self, family: Family, shape: ClipShape) -> None:
        family.check(shape)
        family.transformer.eval()
        self._family = family
        self._shape = shape

    @classmethod
    def load(cls, base: Path, checkpoint: Path | None, shape: ClipShape, *, device: str = "cpu") -> Generator:
        """Load `base`, then the transformer of `checkpoint` (a folder that `train` wrote) over it.

        Raises:
            RuntimeError: a folder holds no model.
            ValueError: the shape is not on the family's grid.
        """
        family = load_family(base, device=device)
        if checkpoint is not None:
            folder = checkpoint / "transformer"
            if not folder.is_dir():
                raise RuntimeError(f"no transformer in {checkpoint}; run `soundstage train` first")
            family.load_transformer(folder)
        return cls(family, shape)

    def generate(
        self,
        prompts: Sequence[str],
        *,
        first: Sequence[Frames | None] | None = None,
        last: Sequence[Frames | None] | None = None,
        seed: int,
        num_inference_steps: int,
    ) -> list[Generation]:
        """One clip a prompt, with the given first and last frames (H, W, 3); same seed, same bytes.

        Every item is denoised alone, so a clip does not depend on what it is generated beside.
        """
        nothing: Sequence[Frames | None] = [None] * len(prompts)
        results: list[Generation] = []
        for prompt, start, end in zip(prompts, first or nothing, last or nothing, strict=True):
            condition = self._family.encode_condition(prompt, start, end)
            latents = self._family.generate(condition, self._shape, seed, num_inference_steps)
            results.append(Generation(*self._family.decode(*latents, self._shape)))
        return results

    def reconstruct(self, frames_FHWC: Frames, waveform_CT: Waveform) -> Generation:
        """Through the autoencoders and back: the most any generation can reach."""
        latents = self._family.encode_clip(frames_FHWC, waveform_CT)
        return Generation(*self._family.decode(*latents, self._shape))
