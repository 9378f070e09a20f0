"""Text from a Llama of 60 MB: a program that knows torch and transformers, and nothing of us.

Run it as it is, then under a budget of a quarter of its weights, and compare what is printed:

    python demos/plain/generate.py
    torchtensorref run --budget 15MiB demos/plain/generate.py

The tokens are the same. What the second adds is on stderr: what was moved, and why.
"""

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--tokens", type=int, default=32, help="how many to write (%(default)s)")
parser.add_argument("--layers", type=int, default=4, help="of the Llama (%(default)s)")
chosen = parser.parse_args()

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1024,
    num_attention_heads=8,
    num_hidden_layers=chosen.layers,
    pad_token_id=0,
)
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)

prompt = torch.tensor([[1, 17, 4, 33, 256, 12, 9, 101]])
tokens = model.generate(prompt, max_new_tokens=chosen.tokens, do_sample=False)
weights = sum(p.numel() * p.element_size() for p in model.parameters())
print(f"{weights / 1e6:.0f} MB of weights wrote {tokens[0, prompt.shape[1] :].tolist()}")
