"""tiny-ltx2: the LTX-2 classes of diffusers with random weights, narrow enough to build and run in a second.

Every ratio is the released one (32x32 px and 8 frames to a picture latent, 16 kHz and 640 samples to a sound latent);
only widths and depths shrink. For tests and dry runs: nothing here has been trained.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaTokenizer,
    SiglipVisionConfig,
)

from models.families.weights import forget_place

Version = Literal["2.0", "2.3"]
"""2.3 projects text once for each modality, gates attention and extends the vocoder's bandwidth to 48 kHz."""
TEXT_WIDTH, TEXT_LAYERS, TEXT_LENGTH = 24, 2, 128
VIDEO_CHANNELS, SOUND_CHANNELS, MEL_LATENTS = 8, 2, 16
VIDEO_HEADS, AUDIO_HEADS, HEAD_WIDTH = 4, 2, 8


def build(seed: int, version: Version = "2.3") -> dict[str, Any]:
    """Every part of `LTX2Pipeline` with random weights, by name."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    return {
        "text_encoder": build_text_encoder(tokenizer),
        "tokenizer": tokenizer,
        "connectors": build_connectors(version),
        "vae": build_picture_autoencoder(),
        "audio_vae": build_sound_autoencoder(),
        "vocoder": build_vocoder(version),
        "transformer": build_transformer(version),
        "scheduler": build_scheduler(),
    }


def save(parts: dict[str, Any], folder: Path) -> None:
    """Write a repository in the diffusers layout; nothing in it names where it was written."""
    LTX2Pipeline(**parts).save_pretrained(folder)
    for name in parts:
        forget_place(folder / name)


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The released schedule: shifted by the number of tokens, its last step from a noise level of 0.1."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )


def build_tokenizer() -> GemmaTokenizer:
    """A token for every ASCII letter, digit and sign; anything else falls apart into bytes, as in Gemma's own."""
    words = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<mask>",
        "▁",
        *string.ascii_letters,
        *string.digits,
        *string.punctuation,
    ]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {word: place for place, word in enumerate(dict.fromkeys(words))}
    return GemmaTokenizer(vocab=vocab, merges=[], model_max_length=TEXT_LENGTH)


def build_text_encoder(tokenizer: GemmaTokenizer) -> Gemma3ForConditionalGeneration:
    """A Gemma 3 of two layers; its vision tower is never run."""
    text = Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=32,
        num_hidden_layers=TEXT_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=12,
        max_position_embeddings=256,
        sliding_window=64,
    )
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Gemma3Config(text_config=text.to_dict(), vision_config=vision.to_dict(), mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config).eval()


def build_connectors(version: Version) -> LTX2TextConnectors:
    """From the text encoder's states to what the transformer's two streams attend to."""
    newer = version == "2.3"
    video_heads, audio_heads = (VIDEO_HEADS, AUDIO_HEADS) if newer else (TEXT_WIDTH // HEAD_WIDTH,) * 2
    sizes: dict[str, Any] = {}
    for modality, heads in (("video", video_heads), ("audio", audio_heads)):
        sizes |= {
            f"{modality}_connector_num_attention_heads": heads,
            f"{modality}_connector_attention_head_dim": HEAD_WIDTH,
            f"{modality}_connector_num_layers": 1,
            f"{modality}_connector_num_learnable_registers": 16,
            f"{modality}_hidden_dim": heads * HEAD_WIDTH,
            f"{modality}_gated_attn": newer,
        }
    return LTX2TextConnectors(
        caption_channels=TEXT_WIDTH,
        text_proj_in_factor=TEXT_LAYERS + 1,
        rope_type="split",
        per_modality_projections=newer,
        proj_bias=newer,
        **sizes,
    ).eval()


def scatter_statistics(autoencoder: Any) -> None:
    """Give latents statistics unlike 0 and 1, so that a normalisation left out or done twice shows."""
    autoencoder.latents_mean.normal_()
    autoencoder.latents_std.uniform_(0.5, 1.5)


def build_picture_autoencoder() -> AutoencoderKLLTX2Video:
    """32x32 px and 8 frames to a latent of 8 channels; causal, so one frame is one latent."""
    result = AutoencoderKLLTX2Video(
        latent_channels=VIDEO_CHANNELS,
        block_out_channels=(4, 8, 8, 16),
        layers_per_block=(1,) * 5,
        decoder_block_out_channels=(8, 16, 32),
        decoder_layers_per_block=(1,) * 4,
        spatial_compression_ratio=32,  # the class counts every stage as both spatial and temporal
        temporal_compression_ratio=8,
    ).eval()
    scatter_statistics(result)
    return result


def build_sound_autoencoder() -> AutoencoderKLLTX2Audio:
    """Both sides of 16 kHz sound, 640 samples to a latent of 2 channels by 16 mel bands."""
    result = AutoencoderKLLTX2Audio(
        base_channels=SOUND_CHANNELS * MEL_LATENTS,  # its statistics have one value a channel and band
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        latent_channels=SOUND_CHANNELS,
    ).eval()
    scatter_statistics(result)
    return result


def build_vocoder(version: Version) -> LTX2Vocoder | LTX2VocoderWithBWE:
    """Stereo at 24 kHz, or at 16 kHz extended to 48 kHz; 10 ms a mel frame either way."""
    blocks: dict[str, Any] = {"resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3]]}
    by_240: dict[str, Any] = {"upsample_factors": [6, 5, 8], "upsample_kernel_sizes": [12, 11, 16], **blocks}
    if version == "2.0":
        return LTX2Vocoder(hidden_channels=16, **by_240).eval()
    extension = {f"bwe_{name}": value for name, value in by_240.items()}
    result = LTX2VocoderWithBWE(
        hidden_channels=16,
        upsample_factors=[5, 4, 8],
        upsample_kernel_sizes=[11, 8, 16],
        bwe_hidden_channels=16,
        **blocks,
        **extension,
    ).eval()
    for name, buffer in result.mel_stft.named_buffers():
        buffer.uniform_(0 if name == "mel_basis" else -1, 1)  # released weights bring these, the class has zeros
    return result


def build_transformer(version: Version) -> LTX2VideoTransformer3DModel:
    """Two blocks of widths 32 and 16."""
    newer = version == "2.3"
    return LTX2VideoTransformer3DModel(
        in_channels=VIDEO_CHANNELS,
        out_channels=VIDEO_CHANNELS,
        num_attention_heads=VIDEO_HEADS,
        attention_head_dim=HEAD_WIDTH,
        cross_attention_dim=VIDEO_HEADS * HEAD_WIDTH,
        audio_in_channels=SOUND_CHANNELS * MEL_LATENTS,
        audio_out_channels=SOUND_CHANNELS * MEL_LATENTS,
        audio_num_attention_heads=AUDIO_HEADS,
        audio_attention_head_dim=HEAD_WIDTH,
        audio_cross_attention_dim=AUDIO_HEADS * HEAD_WIDTH,
        num_layers=2,
        caption_channels=TEXT_WIDTH,
        rope_type="split",
        gated_attn=newer,
        audio_gated_attn=newer,
        cross_attn_mod=newer,
        audio_cross_attn_mod=newer,
        use_prompt_embeddings=not newer,
        perturbed_attn=newer,
    ).eval()
