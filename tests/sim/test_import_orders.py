"""We, torch and the libraries on it, imported in any order: torch's names are ours everywhere."""

import importlib.util
import subprocess
import sys

import pytest

from ..support.sweeps import WHOLE, usual

ORDERS = {
    "torch first": "import torch\nimport torchTensorRef\n{imports}",
    "we first": "import torchTensorRef\nimport torch\n{imports}",
    "libraries first": "{imports}\nimport torchTensorRef\nimport torch",
    "we between": "import torch\n{imports}\nimport torchTensorRef",
}

_NAMES = """
accelerate accelerate.utils diffusers diffusers.schedulers huggingface_hub numpy psutil safetensors
safetensors.torch scipy sentence_transformers sklearn tokenizers torch.optim torch.utils.data
transformers transformers.cache_utils transformers.generation.utils
transformers.modeling_attn_mask_utils transformers.models.bert.modeling_bert
transformers.models.gpt2.modeling_gpt2 transformers.models.llama.modeling_llama
transformers.models.t5.modeling_t5 tqdm
"""
LIBRARIES = _NAMES.split()
#: These know the most names of torch's; all of them: by `make sweeps`.
SOME = ("accelerate", "safetensors.torch", "torch.optim", "torch.utils.data", "transformers")

PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
{beginning}
for name in ("transformers", "accelerate", "diffusers", "sentence_transformers", "safetensors"):
    torchTensorRef.injectTo.append(name)
import torch
from torchTensorRef.inject import torch_
torchTensorRef.tensorsManager.device = "sim"
kinds = [hasattr(t, "proxyInfo") for t in (
    torch.zeros(2), torch.tensor([1.0]), torch.nn.Linear(2, 2).weight,
    torch.nn.BatchNorm1d(2).running_mean, torch.zeros(2, device="meta"))]
left = torch_.taken_names()
print(kinds, left, isinstance(torch.zeros, type(len)))
"""


# Where we come last it is after torch and the libraries, whichever of them brought the other.
@pytest.mark.parametrize(
    "order", usual(["torch first", "libraries first"], ["we first", "we between"])
)
def test_the_order_of_imports_changes_no_type(order, tmp_path):
    names = LIBRARIES if WHOLE else SOME
    there = [name for name in names if can_import(name.partition(".")[0])]
    imports = "\n".join(f"import {name}" for name in there)
    program = PROGRAM.format(beginning=ORDERS[order].format(imports=imports))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    expected = "[True, True, True, True, False] [] True\n"
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr


LAZILY = """
lazy import torch
lazy from torch import nn, rand
import sys
import torchTensorRef
was_there = "torch" in sys.modules
torchTensorRef.tensorsManager.device = "sim"
tensors = rand(2), torch.zeros(2), nn.Linear(2, 2).weight
print(was_there, [hasattr(tensor, "proxyInfo") for tensor in tensors])
"""


@pytest.mark.skipif(sys.version_info < (3, 15), reason="older Pythons import at once")
def test_names_that_are_imported_when_they_are_used(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LAZILY], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.stdout == "False [True, True, True]\n", done.stderr


def can_import(name):
    return importlib.util.find_spec(name) is not None
