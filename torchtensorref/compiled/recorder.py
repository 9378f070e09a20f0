"""What an intercepted call of a module uses, makes and leaves behind."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..memory.block import Block


class Use(NamedTuple):
    """One use of a block by an operator of a recorded call."""

    #: The operator's number in the call, from 1.
    number: int
    #: The block's place among the module's own and those it was given.
    place: int
    #: What `Access.struct` says of it.
    kind: int
    writes: bool


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written; 0 where nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


class SavedVersion:
    """A tensor that is saved for a backward pass, and how often it was written until then.

    With hooks torch itself no longer minds that it is written afterwards.
    """

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = version_of(tensor)

    def check(self) -> None:
        """Raise what torch raises where it was written afterwards."""
        tensor, version = self.tensor, version_of(self.tensor)
        if version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{tensor.dtype}, {list(tensor.shape)}] is at version "
                f"{version}; expected version {self.version} instead"
            )


class Recorder:
    """Written to by every operator while a compiled function is being learned."""

    def __init__(
        self, own: Sequence[Block], given: Sequence[Block], gradients: bool = False
    ) -> None:
        #: Whether gradients may be noted, and what was saved for them.
        self._gradients = gradients
        self._saved: set[Block] = set()
        self._saved_versions: list[weakref.ref[SavedVersion]] = []
        self._expected = {*own, *given}
        #: Where a use is noted: a block by its place among the module's own and those given.
        self._places = {block: place for place, block in enumerate((*own, *given))}
        self.op_count = 0
        #: Each use of what was there before: number of the operator, place, kind of the use.
        self.uses: list[Use] = []
        self._thread = threading.get_ident()
        #: Blocks with a higher number came into the world during the call.
        self._newest = Block(0).block_id
        self._made: dict[int, weakref.ref[Block]] = {}
        self._alive_nbytes = 0
        #: The most bytes that results took at once.
        self.most_nbytes = 0
        self._written: set[Block] = set()
        self._doubt = ""
        #: Whether an operator drew random numbers.
        self.is_random = False

    def note(self, call: Any, device: Any) -> None:
        """Note an operator before it runs."""
        if threading.get_ident() != self._thread:
            return
        if torch.is_grad_enabled() and not self._gradients:
            self._doubt = "it computes gradients"
        self.op_count += 1
        self.is_random |= call.plan.is_random
        for block in call.blocks:
            place = self._places.get(block)
            if place is not None and device is call.accelerator:
                kind = hash((call.plan.kind, block.nbytes))
                self.uses.append(Use(self.op_count, place, kind, block in call.written))
            if block in self._expected or id(block) in self._made:
                continue
            if block.block_id > self._newest:
                self.birth(block)  # made by a factory
            else:
                self._doubt = f"{call.plan.name} uses a tensor from outside"
        if "training" not in call.plan.argument_names or call.plan.argument(
            "training", call.args, call.kwargs
        ):
            # Statistics of a norm, only while it trains. What it has made itself may die.
            self._written.update(block for block in call.written if block in self._expected)
        if call.unmanaged or call.adopted or call.sparse:
            self._doubt = f"{call.plan.name} has a plain operand"
        if device is not call.accelerator and not self._runs_on_either(call):
            self._doubt = f"{call.plan.name} runs on the host"

    @staticmethod
    def _runs_on_either(call: Any) -> bool:
        """Whether an operator that the host runs gives the same numbers on the device."""
        plan = call.plan
        if plan.is_random:  # both draw from the generator of this kind of device
            return bool(call.accelerator.torch_device.type == "cpu")
        return bool(plan.reads_part)

    def birth(self, block: Block) -> None:
        """Note a fresh result."""
        if threading.get_ident() != self._thread:
            return
        nbytes = block.nbytes
        self._made[id(block)] = weakref.ref(block)
        self._alive_nbytes += nbytes
        self.most_nbytes = max(self.most_nbytes, self._alive_nbytes)
        weakref.finalize(block, self._died, id(block), nbytes).atexit = False

    def save(self, tensor: torch.Tensor) -> SavedVersion:
        """Note what autograd saves for a backward pass, as a hook of its."""
        block = getattr(tensor, "_ttr_block", None)
        if block is not None:
            self._saved.add(block)
        saved = SavedVersion(tensor)
        self._saved_versions.append(weakref.ref(saved))
        return saved

    def saved_count(self, tensor: torch.Tensor) -> int:
        """Return how often a tensor is saved for a backward pass."""
        alive = (saved for weak in self._saved_versions if (saved := weak()) is not None)
        return sum(saved.tensor is tensor for saved in alive)

    def mistrust(self, why: str) -> None:
        """Note what speaks against running the module natively."""
        if threading.get_ident() == self._thread:
            self._doubt = why

    def writes_any(self, blocks: set[Block]) -> bool:
        """Whether one of some blocks was written."""
        return bool(self._written & blocks)

    def alive(self) -> set[Block]:
        """Return what has been made and is still there."""
        return {block for reference in self._made.values() if (block := reference()) is not None}

    def _died(self, key: int, nbytes: int) -> None:
        self._alive_nbytes -= nbytes
        self._made.pop(key, None)

    def doubt(self, own: set[Block], reachable: set[Block], kept: set[Block]) -> str:
        """Say what speaks against running the module natively; empty for nothing."""
        if self._doubt:
            return self._doubt
        if self._written & own:
            return "it writes its own parameters or buffers"
        alive = self.alive()
        if any(block not in reachable and block not in self._saved for block in alive):
            return "it leaves tensors behind where neither its arguments nor its result lead"
        if any(block in kept for block in alive):
            return "it leaves tensors behind in its attributes"
        return ""
