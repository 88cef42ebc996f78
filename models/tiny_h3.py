"""tiny-h3: the H3 classes of diffusers at a size that trains on one CPU core.

Nothing here is a stand-in: the same transformer, autoencoders, schedulers and Qwen3-VL conditioner classes as the
33 B model, narrower. Sizes follow from one rule: everything trains within an hour on one core.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, cast

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from tokenizers import pre_tokenizers
from transformers import (
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from data.world import STYLES
from models.families.weights import forget_place

LATENT_CHANNELS, SOUND_CHANNELS = 24, 32
"""As in the released model, so that every shape contract is the real one."""
HOP_LENGTH = 200
"""Sound samples a latent: 8 kHz at the released 40 latents a second."""
VIDEO_SHIFT, AUDIO_SHIFT = 12.0, 3.0
"""Noise shifts of the released scheduler pair."""
CANVAS = {"canvas_short_edge": 32, "canvas_max_pixels": 32 * 56, "reference_image_short_edge": 64}
"""Sizes that references are brought to, px, where the released model has 768, 768 * 1344 and 2048."""
TEXT_WIDTH = 32
CONDITIONER_LAYERS = 51
"""The family reads hidden state 50, so the stack must be deeper than that."""

CLASSES = {
    "text_encoder": ("transformers", "Qwen3VLForConditionalGeneration"),
    "tokenizer": ("transformers", "Qwen2TokenizerFast"),
    "processor": ("transformers", "Qwen3VLProcessor"),
    "vae": ("diffusers", "AutoencoderKLMiniMaxH3"),
    "audio_vae": ("diffusers", "AutoencoderKLMiniMaxH3Audio"),
    "transformer": ("diffusers", "MiniMaxH3Transformer3DModel"),
    "scheduler": ("diffusers", "MiniMaxH3Scheduler"),
    "audio_scheduler": ("diffusers", "MiniMaxH3Scheduler"),
}
"""Parts of the repository, in the diffusers layout. `transformer_ref` joins with `ref2va`."""


def build(seed: int) -> dict[str, Any]:
    """Every part with random weights, by name."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    return {
        "text_encoder": build_conditioner(tokenizer),
        "tokenizer": tokenizer,
        "processor": build_processor(tokenizer),
        "vae": build_picture_autoencoder(),
        "audio_vae": build_sound_autoencoder(),
        "transformer": build_transformer(),
        "scheduler": MiniMaxH3Scheduler(VIDEO_SHIFT),
        "audio_scheduler": MiniMaxH3Scheduler(AUDIO_SHIFT),
    }


def save(parts: dict[str, Any], folder: Path) -> None:
    """Write a repository in the diffusers modular layout; nothing in it names where it was written."""
    index: dict[str, Any] = {
        "_class_name": "MiniMaxH3ModularPipeline",
        "_diffusers_version": "0.42.1",
        "_blocks_class_name": "MiniMaxH3Blocks",
        **CANVAS,
    }
    for name, (library, kind) in CLASSES.items():
        parts[name].save_pretrained(folder / name)
        forget_place(folder / name)
        # The loader joins "." with the working directory, so the family passes the real folder when it loads.
        where = {"pretrained_model_name_or_path": ".", "subfolder": name, "variant": None, "revision": None}
        index[name] = [library, kind, {"type_hint": [library, kind], **where}]
    (folder / "modular_model_index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def captions_of_the_world() -> list[str]:
    """Every word of both halves in sentences, which is what the tokenizer is trained on."""
    sentences = ["<Picture 1>: <Picture 2>: a video with sound"]
    for style in STYLES.values():
        sounds = [*style.tones, *style.knocks, *style.voices]
        for colour, shape, place, sound in itertools.product(style.colours, style.shapes, style.places, sounds):
            sentences += [
                f"a {colour} {shape} bounces in a {place} and each bounce rings a {sound}",
                f"a {colour} {shape} and a {colour} {shape} collide in a {place} with a {sound}",
                f"a {colour} face speaks in a {place} with a {sound}",
            ]
    return sentences


def build_tokenizer() -> Qwen2Tokenizer:
    """Byte-level, with whole-word merges for the sample world: captions of one kind are equally long.

    Equal length matters because a micro-batch of H3 shares one packed layout, text rows included.
    """
    specials = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<d>", "</d>"]
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    blank = Qwen2Tokenizer(
        vocab=alphabet,
        merges=[],
        additional_special_tokens=specials,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
    )
    return cast(Any, blank).train_new_from_iterator(captions_of_the_world(), vocab_size=640)


def build_conditioner(tokenizer: Qwen2Tokenizer) -> Qwen3VLForConditionalGeneration:
    """A Qwen3-VL with random, frozen weights: enough to tell captions apart, as its outputs differ by caption."""
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": CONDITIONER_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        "rope_theta": 10000.0,
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": TEXT_WIDTH,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }
    tokens = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    identifiers: dict[str, Any] = {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **identifiers)
    return Qwen3VLForConditionalGeneration(config).eval()


def build_processor(tokenizer: Qwen2Tokenizer) -> Qwen3VLProcessor:
    """Puts keyframes in front of the conditioner at 32–64 px."""
    common: dict[str, Any] = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    image = Qwen2VLImageProcessor(size={"shortest_edge": 32 * 32, "longest_edge": 64 * 64}, **common)
    video = Qwen3VLVideoProcessor(size={"shortest_edge": 32 * 32 * 2, "longest_edge": 64 * 64 * 32}, **common)
    return Qwen3VLProcessor(image_processor=image, tokenizer=tokenizer, video_processor=video)


def build_picture_autoencoder() -> AutoencoderKLMiniMaxH3:
    """4x4 px and 4 frames to a latent of 24 channels."""
    result = AutoencoderKLMiniMaxH3(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        spatial_downsample_factors=(2, 2, 1),
        temporal_downsample_factors=(2, 2, 1),
        norm_num_groups=8,
        decoder_num_layers=3,
        decoder_num_attention_heads=4,
        decoder_attention_head_dim=24,
        decoder_ffn_mult=2,
        latents_mean=(0.0,) * LATENT_CHANNELS,
        latents_std=(1.0,) * LATENT_CHANNELS,
    )
    for block in cast(Any, result.decoder).transformer_blocks:
        # The released initial layer scale is tuned for 36 layers; three layers need larger steps to learn at all.
        block.scale1.data.fill_(0.5)
        block.scale2.data.fill_(0.5)
    return result


def build_sound_autoencoder() -> AutoencoderKLMiniMaxH3Audio:
    """One mono channel at 8 kHz, 200 samples to a latent of 32 channels; nearly linear, so it trains in minutes."""
    return AutoencoderKLMiniMaxH3Audio(
        encoder_dim=16,
        encoder_rates=(HOP_LENGTH,),
        latent_dim=64,
        latent_channels=SOUND_CHANNELS,
        num_attention_heads=2,
        decoder_dim=56,
        decoder_rates=(HOP_LENGTH,),
        decoder_kernel_sizes=(2 * HOP_LENGTH,),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1,),),
        sampling_rate=40 * HOP_LENGTH,
        latents_mean=[0.0] * SOUND_CHANNELS,
        latents_std=[1.0] * SOUND_CHANNELS,
    )


def build_transformer() -> MiniMaxH3Transformer3DModel:
    """About 0.9 M parameters: 4 blocks of width 96."""
    return MiniMaxH3Transformer3DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        hidden_size=96,
        num_layers=4,
        num_refiner_layers=1,
        ffn_dim=192,
        in_channels=LATENT_CHANNELS,
        audio_in_channels=SOUND_CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=64,
        time_embed_hidden_dim=96,
        time_embed_dim=48,
        rope_freq_dim=4,
    )
