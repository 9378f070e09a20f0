"""The Trainer of Hugging Face, three steps on a tiny model, as with plain torch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ..support.injection import assert_same_injected
from ..support.programs import COUNTS_OF_STEPS
from ..support.sweeps import in_turn

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

CONFIG: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
#: A quarter of the weights, less still of what the optimizer adds.
BUDGET_NBYTES = 12 << 10


class Sentences(torch.utils.data.Dataset):
    """Rows of tokens, always the same ones."""

    def __init__(self) -> None:
        self.rows = torch.randint(64, (16, 8), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def training(folder: Path, **settings: Any) -> Any:
    """Train, evaluate and save; returns losses, weights, optimizer state, predictions."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        seed=7,
        dataloader_pin_memory=False,
        **settings,
    )
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=Sentences(), eval_dataset=Sentences()
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(losses) == 3
    predictions = trainer.predict(Sentences()).predictions
    trainer.save_model(str(folder / "saved"))
    loaded = transformers.LlamaForCausalLM.from_pretrained(folder / "saved")
    state = trainer.optimizer.state_dict()["state"]
    return [
        [losses, norms, torch.from_numpy(predictions.copy())],
        [p.detach() for p in trainer.model.parameters()],
        [p.detach() for p in loaded.parameters()],
        [[state[key][name] for name in sorted(state[key])] for key in sorted(state)],
    ]


SETTINGS = {
    "as it comes": {},
    "accumulation, adafactor": {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.1,
        "optim": "adafactor",
    },
    "checkpointing, cosine": {
        "gradient_checkpointing": True,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
    },
}


@pytest.mark.parametrize(("name", "strategy"), in_turn(SETTINGS, ["lru", "flow"], each=1))
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_three_steps_of_the_trainer(manage, tmp_path, name, strategy):
    manager = manage(strategy, BUDGET_NBYTES)
    program = partial(training, tmp_path, **SETTINGS[name])
    assert_same_injected(program, manager, plain_because=COUNTS_OF_STEPS)
    assert manager.stats()["fetched_nbytes"] > 10 * BUDGET_NBYTES
