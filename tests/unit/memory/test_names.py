"""Names are looked up while other threads name something."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from torchTensorRef.memory import names as names_file
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


def test_a_finalizer_inside_a_look_may_look_too(monkeypatch):
    """The collector may run a `__del__` with an operator in it while models are walked."""
    names, walk, children = Names(), names_file._modules_in, [nn.Identity()]
    model = nn.Sequential(nn.Identity())
    names.note_module(model)

    def walk_and_be_finalized(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        yield from list(walk(root))
        if children:
            child = children.pop()
            model.append(child)
            names.note_modules(model, "1", child)
            inner = threading.Thread(target=names.look, daemon=True)
            inner.start()
            inner.join(20)
            assert not inner.is_alive(), "a look waits for another"

    monkeypatch.setattr(names_file, "_modules_in", walk_and_be_finalized)
    names.look()
    assert [path for path, _ in walk(model)] == ["", "0", "1"]
    assert names._paths[id(model[1])] == "1", "what began before does not count after it"
