"""Checkpoints in the layouts that the models were published in, made from diffusers' by the way back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

H3_HEADS = 4
H3_NAMES = {
    "token_refiner.refiner_blocks.": "token_refiner.blocks.",
    "time_embedder.linear_1.": "time_embedder.proj_in.",
    "time_embedder.linear_2.": "time_embedder.proj_out.",
    "context_embedder.": "condition_proj.",
    "norm_out.norm.": "final_layer.norm.",
    "norm_out.linear.": "final_layer.adaln_proj.linear.",
    ".attn.norm_q.": ".attn.q_norm.",
    ".attn.norm_k.": ".attn.k_norm.",
    ".attn.to_out.0.": ".attn.out_proj.",
    ".ff.net.0.proj.": ".mlp.fc1.",
    ".ff.net.2.": ".mlp.fc2.",
}
H3_STARTS = {
    "audio_proj_in.": "audio_patch_proj.",
    "proj_in.": "video_patch_proj.",
    "audio_proj_out.": "final_layer.audio_out.",
    "proj_out.": "final_layer.video_out.",
    "transformer_blocks.": "blocks.",
}
LTX2_NAMES = {
    "av_cross_attn_video_scale_shift.": "av_ca_video_scale_shift_adaln_single.",
    "av_cross_attn_video_a2v_gate.": "av_ca_a2v_gate_adaln_single.",
    "av_cross_attn_audio_scale_shift.": "av_ca_audio_scale_shift_adaln_single.",
    "av_cross_attn_audio_v2a_gate.": "av_ca_v2a_gate_adaln_single.",
    "video_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_video",
    "audio_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_audio",
    "prompt_adaln.": "prompt_adaln_single.",
    "time_embed.": "adaln_single.",
    "proj_in.": "patchify_proj.",
    "norm_q.": "q_norm.",
    "norm_k.": "k_norm.",
}


def weights_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a diffusers folder."""
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in safetensors.torch.load_file(path).items()
    }


def original_h3(state: Mapping[str, Tensor], *, interleaved: bool = False) -> dict[str, Tensor]:
    """Fused q/k/v, gate before value, the names of the release, and a buffer that diffusers computes itself."""
    result: dict[str, Tensor] = {"rope.inv_freq": torch.ones(4)}
    for name, tensor in state.items():
        if ".ff.net.0.proj." in name:
            value, gate = tensor.chunk(2)
            result[h3_name(name)] = torch.cat([gate, value])
        elif ".to_q." in name:
            parts = [state[name.replace("to_q", side)] for side in ("to_q", "to_k", "to_v")]
            heads = torch.stack([part.unflatten(0, (H3_HEADS, -1)) for part in parts], dim=1).flatten(0, 2)
            result[h3_name(name.replace("to_q", "qkv_proj"))] = heads if interleaved else torch.cat(parts)
        elif not re.search(r"\.to_[kv]\.", name):
            result[h3_name(name)] = tensor.clone()
    return result


def h3_name(name: str) -> str:
    """What the release calls a tensor."""
    start = next((new for new in H3_STARTS if name.startswith(new)), "")
    return H3_STARTS.get(start, "") + replaced(name.removeprefix(start), H3_NAMES)


def original_ltx2(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names of the release, beside autoencoders and connectors as in the one published file."""
    result = {"vae.decoder.conv_in.weight": torch.ones(2), "vocoder.conv.weight": torch.ones(2)}
    result["model.diffusion_model.video_embeddings_connector.proj.weight"] = torch.ones(2)
    named = {f"model.diffusion_model.{replaced(name, LTX2_NAMES)}": tensor.clone() for name, tensor in state.items()}
    return result | named


def replaced(name: str, names: Mapping[str, str]) -> str:
    """A name with all of these parts renamed."""
    for new, old in names.items():
        name = name.replace(new, old)
    return name
