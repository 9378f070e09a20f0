"""Pictures, sound, and both together with text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .cases import Case, Run, backward, forward, generate, saved_and_loaded, tokens
from .text import BART, BERT, COMMON, GROUPED, T5, maker

Inputs = Callable[[], dict[str, Any]]


def picture(size: int = 32, rows: int = 2) -> Inputs:
    """Make a function that gives pictures."""
    return lambda: {"pixel_values": torch.randn(rows, 3, size, size)}


def sound(samples: int = 1600, rows: int = 2) -> Inputs:
    """Make a function that gives waves."""
    return lambda: {"input_values": torch.randn(rows, samples)}


def case(
    family: str, class_name: str, settings: dict[str, Any], inputs: Inputs, **more: Run
) -> Case:
    """A model that is called with some inputs, and trained on them."""
    runs = {"forward": forward(inputs), "backward": backward(inputs), **more}
    return Case(class_name, family, maker(class_name, settings), runs)


def untrained(
    family: str, class_name: str, settings: dict[str, Any], runs: Mapping[str, Run]
) -> Case:
    """A model that is only used."""
    return Case(class_name, family, maker(class_name, settings), runs)


VIT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 32,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "out_features": ["stage1", "stage2"],
}
RESNET = {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 2], "layer_type": "basic"}
SEGFORMER = {
    "hidden_sizes": [16, 32, 64, 64],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 4, 4],
    "decoder_hidden_size": 32,
}
MOBILE_VIT = {
    "image_size": 64,
    "hidden_sizes": [32, 48, 64],
    "neck_hidden_sizes": [8, 16, 24, 32, 40, 48, 64],
}
DETR = {
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "num_queries": 5,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 32, 32, 32],
        "depths": [1, 1, 1, 1],
        "out_features": ["stage4"],
    },
}
SAM = {
    "vision_config": {
        **VIT,
        "output_channels": 32,
        "window_size": 2,
        "global_attn_indexes": [1],
        "num_pos_feats": 16,
        "mlp_dim": 96,
    },
    "prompt_encoder_config": {"hidden_size": 32, "image_size": 32, "patch_size": 8},
    "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 48, "num_attention_heads": 4},
}


def points() -> dict[str, Any]:
    """A picture, and a point in it whose object is asked for."""
    return {
        "pixel_values": torch.randn(1, 3, 32, 32),
        "input_points": torch.rand(1, 1, 1, 2) * 32,
    }


VISION = (
    case(
        "vision",
        "ViTForImageClassification",
        VIT,
        picture(),
        **{"saved and loaded": saved_and_loaded(picture())},
    ),
    case("vision", "DeiTForImageClassification", VIT, picture()),
    case("vision", "BeitForImageClassification", VIT, picture()),
    case("vision", "Dinov2ForImageClassification", {**VIT, "mlp_ratio": 2}, picture()),
    case("vision", "SwinForImageClassification", SWIN, picture()),
    case("vision", "Swinv2ForImageClassification", SWIN, picture()),
    case(
        "vision",
        "ConvNextForImageClassification",
        {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1], "image_size": 64},
        picture(64),
    ),
    case(
        "vision",
        "ConvNextV2ForImageClassification",
        {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1], "image_size": 64},
        picture(64),
    ),
    case("vision", "ResNetForImageClassification", RESNET, picture()),
    case(
        "vision",
        "RegNetForImageClassification",
        {**RESNET, "layer_type": "y", "groups_width": 16},
        picture(),
    ),
    case("vision", "SegformerForSemanticSegmentation", SEGFORMER, picture(64)),
    case("vision", "MobileViTForImageClassification", MOBILE_VIT, picture(64)),
    case("vision", "MobileNetV2ForImageClassification", {"depth_multiplier": 0.25}, picture(64)),
    case(
        "vision",
        "PoolFormerForImageClassification",
        {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]},
        picture(64),
    ),
    case(
        "vision",
        "PvtV2ForImageClassification",
        {
            "image_size": 64,
            "hidden_sizes": [16, 32, 32, 64],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 4, 8],
        },
        picture(64),
    ),
    case(
        "vision",
        "FocalNetForImageClassification",
        {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "hidden_sizes": [16, 32]},
        picture(),
    ),
    case(
        "vision",
        "ViTMAEForPreTraining",
        {
            **VIT,
            "decoder_hidden_size": 32,
            "decoder_num_attention_heads": 4,
            "decoder_num_hidden_layers": 1,
            "decoder_intermediate_size": 48,
        },
        picture(),
    ),
    case("vision", "DetrForObjectDetection", DETR, picture(64)),
    case(
        "vision",
        "YolosForObjectDetection",
        {**VIT, "image_size": [32, 32], "num_detection_tokens": 5},
        picture(),
    ),
    case("vision", "SamModel", SAM, points),
    case(
        "vision",
        "DPTForDepthEstimation",
        {
            **VIT,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [16, 16, 32, 32],
            "fusion_hidden_size": 16,
            "num_hidden_layers": 4,
            "reassemble_factors": [4, 2, 1, 0.5],
        },
        picture(),
    ),
)

WAV2VEC2 = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 40,
    "conv_dim": [32, 32, 32],
    "conv_stride": [5, 4, 2],
    "conv_kernel": [10, 4, 2],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_length": 2,
    "classifier_proj_size": 32,
}
WHISPER = {
    **BART,
    "num_mel_bins": 16,
    "max_source_positions": 20,
    "max_target_positions": 40,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
VITS = {
    "hidden_size": 32,
    "flow_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "spectrogram_bins": 17,
    "upsample_initial_channel": 32,
    "upsample_rates": [4, 4],
    "upsample_kernel_sizes": [8, 8],
    "resblock_kernel_sizes": [3, 5],
    "resblock_dilation_sizes": [[1, 3], [1, 3]],
    "duration_predictor_filter_channels": 32,
    "prior_encoder_num_flows": 2,
    "posterior_encoder_num_wavenet_layers": 2,
    "prior_encoder_num_wavenet_layers": 2,
}
AUDIO_SPECTROGRAM = {**VIT, "num_mel_bins": 16, "max_length": 32, "patch_size": 8}


def mel(columns: int = 40) -> Inputs:
    """Make a function that gives what a speech recogniser hears."""
    return lambda: {
        "input_features": torch.randn(2, 16, columns),
        "decoder_input_ids": tokens(2, 4),
    }


def mel_alone() -> dict[str, Any]:
    """What a speech recogniser hears, without what it has said so far."""
    return {"input_features": torch.randn(2, 16, 40)}


AUDIO = (
    case(
        "audio",
        "WhisperForConditionalGeneration",
        WHISPER,
        mel(),
        **{f"generate {c}": generate(mel_alone, c) for c in ("dynamic", "static")},
    ),
    case(
        "audio",
        "Wav2Vec2ForCTC",
        WAV2VEC2,
        sound(),
        **{"saved and loaded": saved_and_loaded(sound())},
    ),
    case("audio", "HubertForCTC", WAV2VEC2, sound()),
    case("audio", "WavLMModel", WAV2VEC2, sound()),
    case("audio", "UniSpeechSatModel", WAV2VEC2, sound()),
    case("audio", "Data2VecAudioModel", WAV2VEC2, sound()),
    case(
        "audio",
        "ASTForAudioClassification",
        AUDIO_SPECTROGRAM,
        lambda: {"input_values": torch.randn(2, 32, 16)},
    ),
    untrained(
        "audio",
        "VitsModel",
        VITS,
        {"forward": forward(lambda: {"input_ids": tokens(1, 6, below=30)})},
    ),
    case(
        "audio",
        "EncodecModel",
        {
            "num_filters": 8,
            "upsampling_ratios": [4, 4],
            "hidden_size": 32,
            "codebook_size": 32,
            "target_bandwidths": [6.0],
            "sampling_rate": 2400,
        },
        lambda: {"input_values": torch.randn(2, 1, 320)},
    ),
    case(
        "audio",
        "SpeechT5ForSpeechToText",
        {
            **WAV2VEC2,
            **BART,
            "vocab_size": 99,
            "mask_time_prob": 0.0,
            "max_text_positions": 64,
            "max_speech_positions": 64,
        },
        lambda: {**sound()(), "decoder_input_ids": tokens(2, 4)},
    ),
    case(
        "audio",
        "Speech2TextForConditionalGeneration",
        {
            **BART,
            "input_feat_per_channel": 16,
            "max_source_positions": 64,
            "max_target_positions": 64,
            "conv_channels": 16,
            "input_channels": 1,
            "num_conv_layers": 2,
            "conv_kernel_sizes": [3, 3],
        },
        lambda: {"input_features": torch.randn(2, 24, 16), "decoder_input_ids": tokens(2, 4)},
    ),
)

TOWER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CLIP = {
    "text_config": {**COMMON, "projection_dim": 32},
    "vision_config": {**VIT, "projection_dim": 32},
    "projection_dim": 32,
}
BLIP_TEXT = {**COMMON, "is_decoder": True, "encoder_hidden_size": 64, "sep_token_id": 2}
IMAGE_TOKEN = 95


def picture_and_text(size: int = 32, length: int = 7) -> Inputs:
    """Make a function that gives pictures and texts."""

    def inputs() -> dict[str, Any]:
        return {**picture(size)(), "input_ids": tokens(2, length)}

    return inputs


def picture_in_text(count: int, **more: Callable[[], Any]) -> Inputs:
    """Make a function that gives texts with room for the features of a picture."""

    def inputs() -> dict[str, Any]:
        input_ids = tokens(2, count + 5)
        input_ids[:, 2 : 2 + count] = IMAGE_TOKEN
        given = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        return {**given, **{name: make() for name, make in more.items()}}

    return inputs


def writes_about_pictures(class_name: str, settings: dict[str, Any], inputs: Inputs) -> Case:
    """A model that is shown pictures and writes text."""
    return case(
        "multimodal",
        class_name,
        settings,
        inputs,
        **{f"generate {cache}": generate(inputs, cache) for cache in ("dynamic", "static")},
    )


def in_the_middle(length: int, count: int) -> torch.Tensor:
    """Two rows of zeros, with ones where a picture is."""
    kinds = torch.zeros(2, length, dtype=torch.long)
    kinds[:, 2 : 2 + count] = 1
    return kinds


def flat_patches() -> torch.Tensor:
    """Two pictures of four by four patches, as Qwen2-VL takes them."""
    return torch.randn(32, 3 * 2 * 8 * 8)


QWEN2_VL = {
    "text_config": {
        **GROUPED,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2, 3, 3],
            "rope_theta": 10000.0,
        },
    },
    "vision_config": {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 64,
        "num_heads": 4,
        "patch_size": 8,
    },
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 96,
    "vision_start_token_id": 97,
    "vision_end_token_id": 98,
}
LLAVA = {
    "vision_config": {**VIT, "model_type": "clip_vision_model", "projection_dim": 32},
    "text_config": {**GROUPED, "model_type": "llama"},
    "image_token_index": IMAGE_TOKEN,
    "image_seq_length": 16,
}


def pixels() -> torch.Tensor:
    """Two pictures."""
    return torch.randn(2, 3, 32, 32)


MULTIMODAL = (
    case(
        "multimodal",
        "CLIPModel",
        CLIP,
        picture_and_text(),
        **{"saved and loaded": saved_and_loaded(picture_and_text())},
    ),
    case(
        "multimodal",
        "SiglipModel",
        {"text_config": {**COMMON, "projection_size": 64}, "vision_config": VIT},
        picture_and_text(),
    ),
    case(
        "multimodal",
        "ChineseCLIPModel",
        {"text_config": BERT, "vision_config": VIT, "projection_dim": 32},
        picture_and_text(),
    ),
    case(
        "multimodal",
        "CLIPSegForImageSegmentation",
        {
            **CLIP,
            "reduce_dim": 16,
            "extract_layers": [0, 1],
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
            "conditional_layer": 0,
        },
        picture_and_text(),
    ),
    writes_about_pictures(
        "LlavaForConditionalGeneration", LLAVA, picture_in_text(16, pixel_values=pixels)
    ),
    writes_about_pictures(
        "Qwen2VLForConditionalGeneration",
        QWEN2_VL,
        picture_in_text(
            4,
            pixel_values=flat_patches,
            image_grid_thw=lambda: torch.tensor([[1, 4, 4]] * 2),
            mm_token_type_ids=lambda: in_the_middle(9, 4),
        ),
    ),
    writes_about_pictures(
        "PaliGemmaForConditionalGeneration",
        {
            "vision_config": {
                **VIT,
                "model_type": "siglip_vision_model",
                "projection_dim": 64,
                "vision_use_head": False,
            },
            "text_config": {**GROUPED, "head_dim": 16, "model_type": "gemma"},
            "projection_dim": 64,
            "image_token_index": IMAGE_TOKEN,
        },
        picture_in_text(16, pixel_values=pixels),
    ),
    case(
        "multimodal",
        "BlipForConditionalGeneration",
        {"text_config": BLIP_TEXT, "vision_config": VIT},
        picture_and_text(),
    ),
    case("multimodal", "GitForCausalLM", {**COMMON, "vision_config": VIT}, picture_and_text()),
    case("multimodal", "ViltModel", {**BERT, **VIT, "vocab_size": 99}, picture_and_text()),
    case(
        "multimodal",
        "AltCLIPModel",
        {"text_config": {**BERT, "project_dim": 32}, "vision_config": VIT, "projection_dim": 32},
        picture_and_text(),
    ),
    case(
        "multimodal",
        "LayoutLMv3Model",
        {
            **BERT,
            **VIT,
            "input_size": 32,
            "coordinate_size": 10,
            "shape_size": 12,
            "max_2d_position_embeddings": 64,
            "num_channels": 3,
        },
        lambda: {**picture_and_text()(), "bbox": torch.randint(0, 20, (2, 7, 2)).repeat(1, 1, 2)},
    ),
    case(
        "multimodal",
        "FlavaModel",
        {
            "image_config": VIT,
            "text_config": BERT,
            "multimodal_config": TOWER,
            "image_codebook_config": {"hidden_size": 8},
            "hidden_size": 64,
            "projection_dim": 32,
        },
        picture_and_text(),
    ),
    case(
        "multimodal",
        "ClapModel",
        {
            "text_config": {**BERT, "projection_dim": 32, "projection_hidden_act": "relu"},
            "audio_config": {
                "spec_size": 32,
                "patch_size": 4,
                "patch_stride": [4, 4],
                "num_mel_bins": 8,
                "hidden_size": 64,
                "depths": [1, 1],
                "num_attention_heads": [2, 4],
                "window_size": 4,
                "patch_embeds_hidden_size": 32,
                "projection_dim": 32,
            },
            "projection_dim": 32,
        },
        lambda: {"input_ids": tokens(), "input_features": torch.randn(2, 1, 32, 8)},
    ),
    case(
        "multimodal",
        "Pix2StructForConditionalGeneration",
        {
            "text_config": {**T5, "hidden_size": 64, "num_layers": 2},
            "vision_config": {
                "hidden_size": 64,
                "patch_embed_hidden_size": 64,
                "d_ff": 96,
                "d_kv": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "seq_len": 16,
            },
        },
        lambda: {
            "flattened_patches": torch.cat(
                [
                    torch.arange(9.0).repeat(2, 1)[..., None],
                    torch.arange(9.0).repeat(2, 1)[..., None],
                    torch.randn(2, 9, 64),
                ],
                -1,
            ),
            "decoder_input_ids": tokens(2, 4),
        },
    ),
)

TIME_SERIES = (
    case(
        "time series",
        "PatchTSTForPrediction",
        {
            "num_input_channels": 2,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
            "d_model": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "prediction_length": 8,
        },
        lambda: {"past_values": torch.randn(2, 32, 2)},
    ),
    case(
        "time series",
        "DecisionTransformerModel",
        {
            "state_dim": 5,
            "act_dim": 3,
            "hidden_size": 64,
            "n_layer": 2,
            "n_head": 4,
            "max_ep_len": 20,
        },
        lambda: {
            "states": torch.randn(2, 4, 5),
            "actions": torch.randn(2, 4, 3),
            "rewards": torch.randn(2, 4, 1),
            "returns_to_go": torch.randn(2, 4, 1),
            "timesteps": torch.arange(4).repeat(2, 1),
            "attention_mask": torch.ones(2, 4),
        },
    ),
)

CASES = (*VISION, *AUDIO, *MULTIMODAL, *TIME_SERIES)
