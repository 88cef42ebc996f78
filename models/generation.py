"""From a prompt, keyframes and references to pixels and stereo sound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from data.conditions import MODES, Mode
from data.records import ClipShape
from models import adapters
from models.families import Family, Frames, Reference, Waveform, encode_condition, load_family
from models.families.partitions import ORDINARY, partition_of, partitions_of, refuse_other
from models.families.weights import load_transformer


class Generation(NamedTuple):
    """One generated (or reconstructed) clip."""

    frames_FHWC: Frames
    waveform_CT: Waveform


class Generator:
    """A base model, with or without a fine-tuned checkpoint, that generates clips of one shape."""

    def __init__(self, family: Family, shape: ClipShape, modes: Sequence[Mode] = MODES) -> None:
        family.encoders.check(shape)
        family.transformer.eval()
        self._family = family
        self._shape = shape
        self._modes = modes

    @classmethod
    def load(
        cls,
        base: Path,
        checkpoint: Path | None,
        shape: ClipShape,
        *,
        device: str = "cpu",
        partition: str | None = None,
        weights: Path | None = None,
        adapter: Path | None = None,
    ) -> Generator:
        """Load `base`, then the transformer of `checkpoint` (a folder that `train` wrote) over it.

        Args:
            base: A diffusers folder.
            checkpoint: Folder that `train` wrote.
            shape: Of every generation.
            device: Torch device.
            partition: Which of the model's transformers; default that of the checkpoint.
            weights: A diffusers folder of the transformer's weights, instead of those in `base`.
            adapter: File of an adapter that `train` wrote, put on top.

        Raises:
            RuntimeError: a folder holds no model.
            ValueError: the shape is not on the family's grid, or checkpoint or adapter are of another transformer.
        """
        if partition is None:
            partition = partition_of(checkpoint) if checkpoint else ORDINARY
        if checkpoint is not None:
            refuse_other(checkpoint, partition)
        known = partitions_of(base)
        if partition not in known:
            raise RuntimeError(f"{base} has no {partition}, it has {', '.join(known) or 'none'}; change `base`")
        family = load_family(base, device=device, partition=partition, weights=weights)
        if checkpoint is not None:
            folder = checkpoint / "transformer"
            if not folder.is_dir():
                raise RuntimeError(f"no transformer in {checkpoint}; run `soundstage train` first")
            load_transformer(family, folder)
        if adapter is not None:
            adapters.load(family, adapter)
        return cls(family, shape, known[partition])

    def generate(
        self,
        prompts: Sequence[str],
        *,
        first: Sequence[Frames | None] | None = None,
        last: Sequence[Frames | None] | None = None,
        references: Sequence[Sequence[Reference]] | None = None,
        keyframes: Sequence[Mapping[int, Frames]] | None = None,
        seed: int,
        num_inference_steps: int,
    ) -> list[Generation]:
        """One clip a prompt, with the given first and last frames (H, W, 3) or references; same seed, same bytes.

        Keyframes are more frames by their place in the clip, counted from 0.

        Every item is denoised alone, so a clip does not depend on what it is generated beside.

        Raises:
            ValueError: keyframes and references for one prompt, or references or keyframes that the family does not take.
        """
        nothing: Sequence[Frames | None] = [None] * len(prompts)
        ends = zip(first or nothing, last or nothing, references or [()] * len(prompts), strict=True)
        between = keyframes or [dict[int, Frames]()] * len(prompts)
        encoders, results = self._family.encoders, list[Generation]()
        for prompt, given, placed in zip(prompts, ends, between, strict=True):
            condition = encode_condition(encoders, prompt, *given, self._shape, placed)
            if condition.mode not in self._modes:
                said = ", ".join(self._modes)
                raise ValueError(f"{self._family.partition} serves {said}; {condition.mode} needs another transformer")
            latents = self._family.generate(condition, self._shape, seed, num_inference_steps)
            results.append(Generation(*encoders.decode(*latents, self._shape)))
        return results

    def reconstruct(self, frames_FHWC: Frames, waveform_CT: Waveform) -> Generation:
        """Through the autoencoders and back: the most any generation can reach."""
        encoders = self._family.encoders
        video_CFHW = encoders.encode_picture(frames_FHWC[None])[0]
        audio_SCT = encoders.encode_sound(waveform_CT[None], self._shape)[0]
        return Generation(*encoders.decode(video_CFHW, audio_SCT, self._shape))
