"""Text: decoders, mixtures of experts, state spaces, encoders, encoder-decoders."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import transformers

from .cases import Case, Run, backward, forward, generate, perturbed, saved_and_loaded, tokens

#: Every cache that `generate` can be asked for by name and that needs no other library.
CACHES = ("dynamic", "static", "offloaded", "offloaded_static")
#: Names that still work and now mean the same as `static` and `offloaded_static`.
OLD_NAMES = (
    "sliding_window",
    "hybrid",
    "hybrid_chunked",
    "offloaded_hybrid",
    "offloaded_hybrid_chunked",
)

COMMON: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}


def prompt() -> dict[str, Any]:
    """Two rows of tokens; the first row is padded at its left."""
    input_ids = tokens()
    mask = (input_ids >= 0).long()
    mask[0, :2] = 0
    return {"input_ids": input_ids, "attention_mask": mask}


def encoder_decoder_inputs() -> dict[str, Any]:
    """What an encoder-decoder takes for one step of training."""
    return {**prompt(), "decoder_input_ids": tokens(2, 4)}


def maker(class_name: str, settings: dict[str, Any], config_name: str = "") -> Callable[[], Any]:
    """Make a function that builds a model of a class with seeded weights from a tiny config."""

    def make() -> Any:
        kind = getattr(transformers, class_name)
        config = (
            getattr(transformers, config_name)(**settings)
            if config_name
            else kind.config_class(**settings)
        )
        return perturbed(kind(config))

    return make


def decoder(
    class_name: str,
    settings: dict[str, Any],
    *,
    family: str = "text decoder",
    caches: Iterable[str] = CACHES,
    more: dict[str, Run] | None = None,
) -> Case:
    """A model that writes text, with every cache it takes."""
    runs = {"forward": forward(prompt), "backward": backward(prompt, use_cache=False)}
    for cache in caches:
        runs[f"generate {cache}"] = generate(prompt, cache)
    return Case(class_name, family, maker(class_name, settings), {**runs, **(more or {})})


def encoder(class_name: str, settings: dict[str, Any], **more: Run) -> Case:
    """A model that reads text."""
    runs = {"forward": forward(prompt), "backward": backward(prompt)}
    return Case(class_name, "text encoder", maker(class_name, settings), {**runs, **more})


def sequence_to_sequence(
    class_name: str, settings: dict[str, Any], *, caches: Iterable[str] = ("dynamic", "static")
) -> Case:
    """A model that reads one text and writes another."""
    runs = {
        "forward": forward(encoder_decoder_inputs),
        "backward": backward(encoder_decoder_inputs, use_cache=False),
    }
    for cache in caches:
        runs[f"generate {cache}"] = generate(prompt, cache)
    return Case(class_name, "encoder-decoder", maker(class_name, settings), runs)


def ways_to_write() -> dict[str, Run]:
    """Other ways to choose the next token than the best one."""
    saved = saved_and_loaded(prompt)
    return {
        "saved and loaded": saved,
        "generate sampled": generate(prompt, do_sample=True, top_k=20, top_p=0.9),
        "generate beams": generate(prompt, num_beams=3),
        "generate without cache": generate(prompt, use_cache=False),
        **{f"generate {name}": generate(prompt, name) for name in OLD_NAMES},
        **quantized(),
    }


def quantized() -> dict[str, Run]:
    """Write with a cache in four bits, where the library that packs it is installed."""
    if importlib.util.find_spec("optimum.quanto") is None:
        return {}
    settings = {"backend": "quanto", "nbits": 4, "q_group_size": 16, "residual_length": 4}
    return {"generate quantized": generate(prompt, "quantized", cache_config=settings)}


GPT2 = {
    "vocab_size": 99,
    "n_positions": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SLIDING = {**GROUPED, "head_dim": 16, "sliding_window": 4}
ALTERNATING = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}

DECODERS = (
    decoder("LlamaForCausalLM", GROUPED, more=ways_to_write()),
    # All its layers are sliding, and then transformers cannot offload a static cache.
    decoder("MistralForCausalLM", {**GROUPED, "sliding_window": 4}, caches=CACHES[:3]),
    decoder("Qwen2ForCausalLM", GROUPED),
    decoder("Qwen3ForCausalLM", {**GROUPED, "head_dim": 16}),
    decoder("GemmaForCausalLM", {**GROUPED, "head_dim": 16}),
    decoder("Gemma2ForCausalLM", SLIDING),
    decoder("Gemma3ForCausalLM", ALTERNATING),
    decoder("Cohere2ForCausalLM", ALTERNATING),
    decoder("Phi3ForCausalLM", GROUPED),
    decoder("PhiForCausalLM", GROUPED),
    decoder("StableLmForCausalLM", GROUPED),
    decoder("Starcoder2ForCausalLM", GROUPED),
    decoder("OlmoForCausalLM", GROUPED),
    decoder("Olmo2ForCausalLM", GROUPED),
    decoder("GraniteForCausalLM", GROUPED),
    decoder("SmolLM3ForCausalLM", GROUPED),
    decoder("GlmForCausalLM", {**GROUPED, "head_dim": 16}),
    decoder("CohereForCausalLM", GROUPED),
    decoder("NemotronForCausalLM", GROUPED),
    decoder("GPT2LMHeadModel", GPT2, more={"saved and loaded": saved_and_loaded(prompt)}),
    decoder(
        "GPTNeoForCausalLM",
        {
            "vocab_size": 99,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        caches=("dynamic", "offloaded"),
    ),
    decoder("GPTNeoXForCausalLM", COMMON),
    decoder("GPTJForCausalLM", {**GPT2, "rotary_dim": 8}),
    decoder("GPTBigCodeForCausalLM", GPT2),
    decoder("CodeGenForCausalLM", {**GPT2, "rotary_dim": 8, "n_ctx": 64}),
    decoder(
        "BloomForCausalLM",
        {**GPT2, "hidden_size": 64},
        caches=("dynamic", "offloaded"),
    ),
    decoder("FalconForCausalLM", {**COMMON, "alibi": False}, caches=("dynamic", "static")),
    decoder(
        "MptForCausalLM",
        {"vocab_size": 99, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
        caches=("dynamic", "offloaded"),
    ),
    decoder(
        "OPTForCausalLM",
        {**COMMON, "ffn_dim": 96, "word_embed_proj_dim": 64},
    ),
    decoder(
        "XGLMForCausalLM",
        {
            "vocab_size": 99,
            "d_model": 64,
            "ffn_dim": 96,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        caches=("dynamic", "offloaded"),
    ),
)

EXPERT_MODELS = (
    decoder(
        "MixtralForCausalLM",
        {**GROUPED, "num_local_experts": 4},
        family="mixture of experts",
    ),
    decoder("Qwen2MoeForCausalLM", {**EXPERTS, "num_experts": 4}, family="mixture of experts"),
    decoder(
        "Qwen3MoeForCausalLM",
        {**EXPERTS, "num_experts": 4, "head_dim": 16},
        family="mixture of experts",
    ),
    decoder("OlmoeForCausalLM", {**EXPERTS, "num_experts": 4}, family="mixture of experts"),
    decoder(
        "GptOssForCausalLM",
        {**ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
        family="mixture of experts",
    ),
    decoder(
        "GraniteMoeForCausalLM",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
        family="mixture of experts",
    ),
    decoder(
        "DeepseekV3ForCausalLM",
        {
            **EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
        },
        family="mixture of experts",
    ),
)

STATE_SPACES = (
    decoder(
        "MambaForCausalLM",
        {**COMMON, "state_size": 8, "conv_kernel": 4, "time_step_rank": 4},
        family="state space",
        caches=("dynamic",),
    ),
    decoder(
        "Mamba2ForCausalLM",
        {**COMMON, "state_size": 8, "head_dim": 16, "num_heads": 8, "n_groups": 2, "chunk_size": 4},
        family="state space",
        caches=("dynamic",),
    ),
    decoder(
        "FalconMambaForCausalLM",
        {**COMMON, "state_size": 8, "conv_kernel": 4, "time_step_rank": 4},
        family="state space",
        caches=("dynamic",),
    ),
    decoder(
        "BambaForCausalLM",
        {
            **GROUPED,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_chunk_size": 4,
            "mamba_n_groups": 1,
            "attn_layer_indices": [1],
        },
        family="state space",
        caches=("dynamic",),
    ),
    decoder(
        "RecurrentGemmaForCausalLM",
        {
            **GROUPED,
            "num_hidden_layers": 3,
            "lru_width": 64,
            "attention_window_size": 8,
            "head_dim": 16,
        },
        family="state space",
        caches=("dynamic",),
    ),
    decoder(
        "Lfm2ForCausalLM",
        {**GROUPED, "layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
        family="state space",
        caches=("dynamic",),
    ),
)

BERT = {**COMMON, "type_vocab_size": 2}
ENCODERS = (
    encoder("BertForMaskedLM", BERT, **{"saved and loaded": saved_and_loaded(prompt)}),
    encoder("RobertaForSequenceClassification", BERT),
    encoder(
        "DistilBertModel",
        {"vocab_size": 99, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4},
    ),
    encoder("AlbertForMaskedLM", {**BERT, "embedding_size": 16}),
    encoder("ElectraForPreTraining", {**BERT, "embedding_size": 32}),
    encoder("DebertaV2Model", {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    encoder("MPNetModel", BERT),
    encoder("XLMRobertaForTokenClassification", BERT),
    encoder(
        "ModernBertForMaskedLM",
        {**COMMON, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
    ),
    encoder("RoFormerModel", BERT),
    encoder("NystromformerModel", {**BERT, "num_landmarks": 7, "segment_means_seq_len": 7}),
    encoder("ConvBertModel", {**BERT, "embedding_size": 32}),
    encoder("SqueezeBertModel", {**BERT, "embedding_size": 64}),
    encoder("EsmModel", {**BERT, "mask_token_id": 3}),
    encoder("FNetModel", {**BERT}),
    encoder(
        "LongformerModel", {**BERT, "attention_window": [4, 4], "max_position_embeddings": 128}
    ),
    encoder("BigBirdModel", {**BERT, "block_size": 2, "attention_type": "original_full"}),
    encoder(
        "XLNetLMHeadModel",
        {"vocab_size": 99, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96},
    ),
)

T5 = {"vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
T5 = {**T5, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
BART = {
    "vocab_size": 99,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
ENCODER_DECODERS = (
    sequence_to_sequence("T5ForConditionalGeneration", T5),
    sequence_to_sequence("MT5ForConditionalGeneration", T5),
    sequence_to_sequence("LongT5ForConditionalGeneration", {**T5, "local_radius": 4}),
    sequence_to_sequence(
        "SwitchTransformersForConditionalGeneration",
        {**T5, "num_experts": 4, "expert_capacity": 8},
        caches=(),
    ),
    sequence_to_sequence("BartForConditionalGeneration", BART),
    sequence_to_sequence("MBartForConditionalGeneration", BART),
    sequence_to_sequence("PegasusForConditionalGeneration", BART),
    sequence_to_sequence("MarianMTModel", {**BART, "forced_eos_token_id": None}),
    sequence_to_sequence("M2M100ForConditionalGeneration", BART),
    sequence_to_sequence("BlenderbotForConditionalGeneration", BART),
    sequence_to_sequence(
        "LEDForConditionalGeneration",
        {**BART, "attention_window": 4, "max_encoder_position_embeddings": 64},
        caches=("dynamic",),
    ),
)

CASES = (*DECODERS, *EXPERT_MODELS, *STATE_SPACES, *ENCODERS, *ENCODER_DECODERS)
