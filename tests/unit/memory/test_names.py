"""Names are looked up while other threads name something."""

import threading

import pytest
import torch
from torch import nn

from torchTensorRef.memory.names import Names

from ...support.turns import taking_turns_every


@pytest.fixture
def threads_take_turns_often():
    with taking_turns_every(1e-6):
        yield


@pytest.mark.usefixtures("threads_take_turns_often")
def test_other_threads_may_make_modules_and_optimizers_meanwhile():
    names, is_over = Names(), threading.Event()
    model = nn.Sequential(*(nn.Identity() for _ in range(50)))
    names.note_module(model)

    def make() -> None:
        while not is_over.is_set():
            made = [nn.Identity() for _ in range(50)]
            optimizers = [torch.optim.SGD([torch.zeros(1)]) for _ in range(5)]
            for optimizer in optimizers:
                names.note_optimizer(optimizer)
            for number, module in enumerate(made):
                names.note_module(module)
                model.add_module(f"more {number}", module)
            for number in range(len(made)):
                del model._modules[f"more {number}"]

    thread = threading.Thread(target=make)
    thread.start()
    try:
        for _ in range(300):
            names.look()
    finally:
        is_over.set()
        thread.join()
    assert names.of_module(model[3]) == "3"
