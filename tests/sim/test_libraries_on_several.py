"""Programs of other libraries, unmodified, on several accelerators: from the command line."""

import importlib.util
import json

import pytest

from ..support.processes import RUN, printed_by_plain_torch, python
from ..support.sweeps import usual

LLAMA = """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=352, num_hidden_layers=6)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=320)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64)).eval()
    ids = torch.arange(1, 9).view(1, 8)
    with torch.no_grad():
        found = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        logits = model(found).logits
    print(found.tolist(), logits.double().sum().item().hex())
"""

UNET = """
    import torch
    from diffusers import DDIMScheduler, UNet2DConditionModel

    torch.manual_seed(0)
    blocks = dict(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(32, 64),
        layers_per_block=1,
    )
    model = UNet2DConditionModel(
        sample_size=8, norm_num_groups=8, cross_attention_dim=32, attention_head_dim=4, **blocks
    ).eval()
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(4)
    x, text = torch.randn(1, 4, 8, 8), torch.randn(1, 7, 32)
    with torch.no_grad():
        for t in scheduler.timesteps:
            x = scheduler.step(model(x, t, encoder_hidden_states=text).sample, t, x).prev_sample
    print(x.double().sum().item().hex(), x.abs().max().item().hex())
"""


@pytest.mark.parametrize(
    ("library", "program", "budget"),
    usual(
        [("transformers", LLAMA, "1MiB,2MiB")],
        [("diffusers", UNET, "600KiB,900KiB")],
    ),
)
def test_numbers_are_plain_torchs(script, tmp_path, library, program, budget):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    path, report = script(program), tmp_path / "report.json"
    plain = printed_by_plain_torch(path)
    both = ("--device", "sim:0,sim:1", "--budget", budget, f"--report={report}")
    ours = python(*RUN, *both, path)
    assert (ours.stdout, ours.returncode) == (plain, 0), ours.stderr
    told = json.loads(report.read_text())
    assert told["strategy"] == "venice"
    assert told["device"] == "sim:0,sim:1"
    assert told["evict_count"] > 0  # it does not fit into both of them together
