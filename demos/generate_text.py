"""A Llama of 60 MB writes 32 tokens on an accelerator that holds a quarter of it.

What to watch in the table: each new token needs all the weights, so with `lru` and too small a
budget every weight is fetched again for every token, while `flow` keeps a part of them; the tokens
are those of plain torch all the same. The weights are random (seeded), so what the model writes
means nothing.
"""

from __future__ import annotations

import sys

import common

PROMPT = [[1, 17, 4, 33, 256, 12, 9, 101]]


def save_model(folder, options):
    """Make the seeded model once, so that every run loads the same files."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    config = LlamaConfig(vocab_size=4096, num_hidden_layers=options.layers, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)


def generate(options):
    """Plain Hugging Face code: nothing here knows of torchTensorRef."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = options.answers / "model"
    if common.PLAIN in options.runs:
        save_model(folder, options)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor(PROMPT)
    tokens = model.generate(prompt, max_new_tokens=options.tokens, do_sample=False, pad_token_id=0)
    return tokens, [f"Tokens: {tokens[0, prompt.shape[1] :].tolist()}"], model


if __name__ == "__main__":
    parser = common.options(__doc__, budget="15MiB")
    parser.add_argument("--tokens", type=int, default=32, help="how many to write (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the Llama (%(default)s)")
    sys.exit(common.main(generate, parser))
