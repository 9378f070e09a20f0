"""Diffusion: the networks of diffusers, and whole pipelines made of tiny ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import transformers

from .cases import Case, Run, backward, forward, perturbed, saved_and_loaded
from .senses import Inputs
from .text import COMMON, T5

MISSING = "" if importlib.util.find_spec("diffusers") else "diffusers is not installed"


def network(class_name: str, settings: dict[str, Any], inputs: Inputs, **more: Run) -> Case:
    """One network of diffusers."""
    runs = {"forward": forward(inputs), "backward": backward(inputs), **more}
    return Case(class_name, "diffusion", lambda: part(class_name, **settings), runs, MISSING)


def part(class_name: str, **settings: Any) -> Any:
    """Make one network of diffusers with weights of its own."""
    import diffusers

    return perturbed(getattr(diffusers, class_name)(**settings))


def drawn(**shapes: tuple[int, ...]) -> dict[str, Any]:
    """Draw a tensor of each shape, in order."""
    return {name: torch.randn(shape) for name, shape in shapes.items()}


UNET = {
    "sample_size": 16,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
CONDITIONED = {
    **UNET,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 64,
    "attention_head_dim": 4,
}
VAE = {
    "block_out_channels": (16, 32),
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
    "norm_num_groups": 8,
    "latent_channels": 4,
    "sample_size": 16,
}
DIT = {
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "in_channels": 4,
    "num_layers": 2,
    "sample_size": 8,
    "num_embeds_ada_norm": 10,
}
SD3 = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 64,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 128,
    "pos_embed_max_size": 16,
}
FLUX = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 64,
    "axes_dims_rope": (4, 4, 8),
}
PIXART = {
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "num_layers": 2,
    "sample_size": 8,
    "cross_attention_dim": 32,
    "caption_channels": 64,
    "use_additional_conditions": False,
}


def flux_inputs() -> dict[str, Any]:
    """A picture of four by four patches and a text of five tokens."""
    return {
        **drawn(hidden_states=(2, 16, 16), encoder_hidden_states=(2, 5, 64)),
        **drawn(pooled_projections=(2, 64)),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.randint(4, (16, 3)).float(),
        "txt_ids": torch.zeros(5, 3),
    }


NETWORKS = (
    network(
        "UNet2DModel",
        {
            **UNET,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        lambda: {**drawn(sample=(2, 3, 16, 16)), "timestep": 5},
    ),
    network(
        "UNet2DConditionModel",
        CONDITIONED,
        lambda: {
            **drawn(sample=(2, 4, 16, 16), encoder_hidden_states=(2, 5, 64)),
            "timestep": torch.tensor([5, 9]),
        },
        **{
            "saved and loaded": saved_and_loaded(
                lambda: {
                    **drawn(sample=(2, 4, 16, 16), encoder_hidden_states=(2, 5, 64)),
                    "timestep": 5,
                }
            )
        },
    ),
    network(
        "ControlNetModel",
        {
            key: value
            for key, value in {
                **CONDITIONED,
                "conditioning_embedding_out_channels": (8, 16),
            }.items()
            if key not in ("sample_size", "up_block_types")
        },
        lambda: {
            **drawn(sample=(2, 4, 8, 8), encoder_hidden_states=(2, 5, 64)),
            **drawn(controlnet_cond=(2, 3, 16, 16)),
            "timestep": 5,
        },
    ),
    network("AutoencoderKL", VAE, lambda: drawn(sample=(2, 3, 16, 16))),
    network(
        "VQModel",
        {**VAE, "latent_channels": 3, "num_vq_embeddings": 32},
        lambda: drawn(sample=(2, 3, 16, 16)),
    ),
    network(
        "AutoencoderTiny",
        {
            "encoder_block_out_channels": (16, 16),
            "decoder_block_out_channels": (16, 16),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
        lambda: drawn(sample=(2, 3, 16, 16)),
    ),
    network(
        "DiTTransformer2DModel",
        DIT,
        lambda: {
            **drawn(hidden_states=(2, 4, 8, 8)),
            "timestep": torch.tensor([3, 4]),
            "class_labels": torch.tensor([1, 2]),
        },
    ),
    network(
        "SD3Transformer2DModel",
        SD3,
        lambda: {
            **drawn(hidden_states=(2, 4, 8, 8), encoder_hidden_states=(2, 5, 64)),
            **drawn(pooled_projections=(2, 128)),
            "timestep": torch.tensor([3, 4]),
        },
    ),
    network("FluxTransformer2DModel", FLUX, flux_inputs),
    network(
        "PixArtTransformer2DModel",
        PIXART,
        lambda: {
            **drawn(hidden_states=(2, 4, 8, 8), encoder_hidden_states=(2, 5, 64)),
            "timestep": torch.tensor([3, 4]),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    network(
        "SanaTransformer2DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": 64,
            "sample_size": 8,
        },
        lambda: {
            **drawn(hidden_states=(2, 4, 8, 8), encoder_hidden_states=(2, 5, 64)),
            "timestep": torch.tensor([3, 4]),
        },
    ),
    network(
        "WanTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 64,
            "freq_dim": 32,
            "ffn_dim": 64,
            "num_layers": 2,
        },
        lambda: {
            **drawn(hidden_states=(1, 4, 3, 8, 8), encoder_hidden_states=(1, 5, 64)),
            "timestep": torch.tensor([3]),
        },
    ),
    network(
        "UNet1DModel",
        {
            "sample_size": 64,
            "block_out_channels": (32, 32, 64),
            "extra_in_channels": 64,
        },
        lambda: {**drawn(sample=(2, 2, 512)), "timestep": 5},
    ),
)


# -- whole pipelines -------------------------------------------------------------------------------


def pipeline(family: str, make: Callable[[], Any], run: Run) -> Case:
    """A pipeline, used once."""
    return Case(family, "pipeline", make, {"pictures": run}, MISSING)


def quiet_pipeline(kind: str, **parts: Any) -> Any:
    """Make a pipeline of diffusers that shows no progress."""
    import diffusers

    made = getattr(diffusers, kind)(**parts)
    made.set_progress_bar_config(disable=True)
    return made


def embedded(shapes: dict[str, tuple[int, ...]], **options: Any) -> Run:
    """Ask a pipeline for a picture of drawn embeddings: its tokenizers would be a download."""

    def run(made: Any) -> Any:
        asked = {"num_inference_steps": 2, "output_type": "np", **options}
        generator = torch.Generator().manual_seed(3)
        return made(**drawn(**shapes), **asked, generator=generator).images

    return run


def ddpm() -> Any:
    """Pictures from noise alone."""
    import diffusers

    unet = part(
        "UNet2DModel",
        **UNET,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return quiet_pipeline("DDPMPipeline", unet=unet, scheduler=diffusers.DDPMScheduler())


def stable_diffusion() -> Any:
    """A text encoder, a conditioned network and a decoder."""
    import diffusers

    return quiet_pipeline(
        "StableDiffusionPipeline",
        vae=part("AutoencoderKL", **VAE),
        text_encoder=clip_text("CLIPTextModel"),
        tokenizer=WordTokenizer(),
        unet=part("UNet2DConditionModel", **CONDITIONED),
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def stable_diffusion_xl() -> Any:
    """Two text encoders and a network that is told the size."""
    import diffusers

    unet = part(
        "UNet2DConditionModel",
        **{**CONDITIONED, "cross_attention_dim": 128},
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=8 * 6 + 32,
    )
    return quiet_pipeline(
        "StableDiffusionXLPipeline",
        vae=part("AutoencoderKL", **VAE),
        text_encoder=clip_text("CLIPTextModel"),
        text_encoder_2=clip_text("CLIPTextModelWithProjection"),
        tokenizer=WordTokenizer(),
        tokenizer_2=WordTokenizer(),
        unet=unet,
        scheduler=diffusers.EulerDiscreteScheduler(),
        add_watermarker=False,
    )


def stable_diffusion_3() -> Any:
    """A transformer that joins picture and text, and three text encoders."""
    import diffusers

    return quiet_pipeline(
        "StableDiffusion3Pipeline",
        transformer=part("SD3Transformer2DModel", **SD3),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=part("AutoencoderKL", **VAE, shift_factor=0.1),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        text_encoder_3=None,
        tokenizer_3=None,
    )


def flux() -> Any:
    """The transformer with one stream for both in its later layers."""
    import diffusers

    return quiet_pipeline(
        "FluxPipeline",
        transformer=part("FluxTransformer2DModel", **FLUX),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=part("AutoencoderKL", **VAE, shift_factor=0.1),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
    )


def pixart() -> Any:
    """A transformer over patches, with a T5 that reads."""
    import diffusers

    settings = transformers.T5Config(**T5)
    return quiet_pipeline(
        "PixArtAlphaPipeline",
        tokenizer=WordTokenizer(),
        text_encoder=perturbed(transformers.T5EncoderModel(settings)),
        vae=part("AutoencoderKL", **VAE),
        transformer=part("PixArtTransformer2DModel", **PIXART),
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )


def dit() -> Any:
    """A transformer that is told a class."""
    import diffusers

    return quiet_pipeline(
        "DiTPipeline",
        transformer=part(
            "DiTTransformer2DModel", **{**DIT, "out_channels": 8, "num_embeds_ada_norm": 1000}
        ),
        vae=part("AutoencoderKL", **VAE),
        scheduler=diffusers.DDIMScheduler(),
    )


def clip_text(class_name: str) -> Any:
    """Make a text encoder for a pipeline."""
    settings = transformers.CLIPTextConfig(**COMMON, projection_dim=32)
    return perturbed(getattr(transformers, class_name)(settings))


class WordTokenizer:
    """Stands for a tokenizer, which would be a download: words become numbers by their letters."""

    model_max_length = 8
    added_tokens_encoder: ClassVar[dict[str, int]] = {}

    def __call__(self, text: Any, **options: Any) -> Any:
        texts = [text] if isinstance(text, str) else text
        rows = [[1, *(5 + sum(map(ord, word)) % 80 for word in line.split()), 2] for line in texts]
        rows = [(row + [0] * self.model_max_length)[: self.model_max_length] for row in rows]
        input_ids = torch.tensor(rows)
        return transformers.BatchEncoding(
            {"input_ids": input_ids, "attention_mask": (input_ids > 0).long()}
        )

    def tokenize(self, text: str) -> list[str]:
        """The words."""
        return text.split()

    def batch_decode(self, rows: Any) -> list[str]:
        return [str(row) for row in rows]


def prompted(**options: Any) -> Run:
    """Ask a pipeline for the picture of a text."""

    def run(made: Any) -> Any:
        asked = {"num_inference_steps": 2, "output_type": "np", "height": 16, "width": 16}
        generator = torch.Generator().manual_seed(3)
        return made("a cat on a mat", **{**asked, **options}, generator=generator).images

    return run


def of_classes(made: Any) -> Any:
    """Ask a pipeline for the picture of a class."""
    generator = torch.Generator().manual_seed(3)
    return made([1, 2], num_inference_steps=2, output_type="np", generator=generator).images


SD3_SHAPES = {
    "prompt_embeds": (1, 5, 64),
    "pooled_prompt_embeds": (1, 128),
    "negative_prompt_embeds": (1, 5, 64),
    "negative_pooled_prompt_embeds": (1, 128),
}
SMALL = {"height": 16, "width": 16}
PIPELINES = (
    pipeline("DDPMPipeline", ddpm, embedded({})),
    pipeline("StableDiffusionPipeline", stable_diffusion, prompted()),
    pipeline("StableDiffusionXLPipeline", stable_diffusion_xl, prompted()),
    pipeline("StableDiffusion3Pipeline", stable_diffusion_3, embedded(SD3_SHAPES, **SMALL)),
    pipeline(
        "FluxPipeline",
        flux,
        embedded({"prompt_embeds": (1, 5, 64), "pooled_prompt_embeds": (1, 64)}, **SMALL),
    ),
    pipeline(
        "PixArtAlphaPipeline",
        pixart,
        prompted(use_resolution_binning=False, clean_caption=False, negative_prompt=""),
    ),
    pipeline("DiTPipeline", dit, of_classes),
)

CASES = (*NETWORKS, *PIPELINES)
