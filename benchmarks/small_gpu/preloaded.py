"""Everything that seats import and that does not depend on who sits there."""

from __future__ import annotations

import contextlib
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers

from . import denoiser, seat

transformers.utils.logging.disable_progress_bar()
_ = denoiser, seat, transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM
for _name in ("accelerate", "diffusers.hooks", "peft"):
    with contextlib.suppress(ImportError):  # the cells that need it are skipped, with that reason
        __import__(_name)
