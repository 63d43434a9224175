"""Small models of transformers, seeded."""

import torch

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

TEXTS = {**SIZES, "vocab_size": 53, "max_position_embeddings": 19, "pad_token_id": 0}

GROUPED = {**TEXTS, "num_key_value_heads": 2}

IMAGES = {**SIZES, "image_size": 20, "patch_size": 5}

T5 = {"vocab_size": 53, "d_model": 24, "d_kv": 6, "d_ff": 37, "num_layers": 2, "num_heads": 4}

GPT2 = {"vocab_size": 53, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 19}

ENDS = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}

DISENTANGLED = {
    "relative_attention": True,
    "position_buckets": 8,
    "pos_att_type": ["c2p", "p2c"],
    "max_relative_positions": 16,
}

SOUNDS = {
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 37,
    "num_mel_bins": 5,
    "max_source_positions": 7,
}

MAMBA = {"vocab_size": 53, "hidden_size": 24, "num_hidden_layers": 2, "state_size": 5}

# Its class, the class of its configuration, and settings.
ARCHITECTURES = {
    "bert": ("BertModel", "BertConfig", TEXTS),
    "modernbert": ("ModernBertModel", "ModernBertConfig", {**TEXTS, **ENDS, "local_attention": 6}),
    "llama": ("LlamaModel", "LlamaConfig", GROUPED),
    "qwen3": ("Qwen3Model", "Qwen3Config", {**GROUPED, "head_dim": 6}),
    "gemma3": ("Gemma3TextModel", "Gemma3TextConfig", {**GROUPED, "head_dim": 6, "sliding_window": 5}),
    "t5": ("T5EncoderModel", "T5Config", T5),
    "gpt2": ("GPT2Model", "GPT2Config", GPT2),
    "deberta": ("DebertaV2Model", "DebertaV2Config", {**TEXTS, **DISENTANGLED}),
    "vit": ("ViTModel", "ViTConfig", IMAGES),
    "convnext": (
        "ConvNextModel",
        "ConvNextConfig",
        {"hidden_sizes": [8, 14], "depths": [1, 2], "num_stages": 2},
    ),
    "resnet": (
        "ResNetModel",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 14], "depths": [1, 2], "layer_type": "basic"},
    ),
    "whisper": ("WhisperEncoder", "WhisperConfig", SOUNDS),
    "mamba": ("MambaModel", "MambaConfig", MAMBA),
}


def architecture(name, attention="eager"):
    # Freshly initialized weights would hide bugs.
    import transformers
    from transformers.models.whisper import modeling_whisper

    model, config, settings = ARCHITECTURES[name]
    home = modeling_whisper if name == "whisper" else transformers
    torch.manual_seed(0)
    with_attention = (
        {} if name in ("deberta", "convnext", "resnet", "mamba") else {"attn_implementation": attention}
    )
    built = getattr(home, model)(getattr(transformers, config)(**settings, **with_attention)).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return built


def inputs_of(name):
    """Texts of 11, 7 and 1 tokens, images, or sounds."""
    generator = torch.Generator().manual_seed(0)
    if name == "whisper":
        return {"input_features": torch.randn(2, SOUNDS["num_mel_bins"], 14, generator=generator)}
    if name in ("vit", "convnext", "resnet"):
        size = 20 if name == "vit" else 32
        return {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}
    mask = (torch.arange(11) < torch.tensor([11, 7, 1])[:, None]).long()
    ids = torch.randint(3, 53, mask.shape, generator=generator) * mask
    return {"input_ids": ids} if name == "mamba" else {"input_ids": ids, "attention_mask": mask}
