"""Optimizers' steps on plain tensors, where everything they touch is on the device.

A step is a few small operators for each parameter, and nothing in it has to be decided: what it
writes stays where it is. Where memory is not short, and parameters, gradients and state are all
ready, torch's own step runs on their plain tensors instead, in a stand-in for the optimizer; then
what the stand-in has learned is noted in the optimizer. Any doubt means interception.

`torch.optim` asks hooks before each step (`register_optimizer_step_pre_hook`); this is one. As
native regions, it waits for accelerators other than `torch.cpu` until it is measured there.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_hooks

from .blocks.block import Block
from .config import settings
from .devices.base import Device
from .late_links import count_write
from .manager import tensorsManager
from .onlookers import somebody_looks
from .views import plain_on
from .world import disabled

_function_modes = torch._C._len_torch_function_stack

#: What a step makes in passing, at most, in sizes of the largest parameter; of all parameters,
#: where it takes them all at once.
PASSING = 4

_TORCH_OPTIM = os.path.dirname(optimizer_hooks.__file__)


class _UnreadyError(Exception):
    """Internal: the step has to be intercepted. Nothing has happened."""


def step_natively(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Run the step of an optimizer of torch now, on plain tensors, if nothing speaks against it.

    Returns
    -------
    tuple or None
        The arguments that leave torch's own call nothing to do; None if it has all to do.
    """
    if len(args) != 1 or kwargs or _must_be_intercepted(optimizer):
        return None
    residency: Any = tensorsManager._residency
    step = _Step(optimizer, residency, residency.main)
    if not step.run():
        return None
    tensorsManager.native.native_step_count += 1
    return (_stand_in_for(optimizer, []),), kwargs


def _must_be_intercepted(optimizer: Optimizer) -> bool:
    """Whether the step is not torch's own, somebody wants to see it, or memory is short."""
    kind: Any = type(optimizer)
    residency: Any = tensorsManager._residency
    native: Any = tensorsManager.native
    if residency is None or residency.is_pressed or residency.recorder is not None:
        return True
    if residency.main not in residency.ledgers:
        return True  # the host alone
    if not kind.__module__.startswith("torch.optim.") or not _is_torchs_own(kind.step):
        return True
    if not (native.enabled and residency.strategy.allows_regions):
        return True
    if residency.main.is_simulated or residency.main.torch_device.type != "cpu":
        # The one counts each operator; on a real accelerator a step asks tensors for their device,
        # and chooses its way by the answer: as for regions, not before it has been measured.
        return True
    if settings.check >= 2 or settings.trace or _function_modes() or somebody_looks():
        return True
    if torch.compiler.is_compiling() or optimizer.defaults.get("differentiable"):
        return True
    # Others' hooks expect to run before the step, and to find the optimizer in it.
    return (
        len(optimizer_hooks._global_optimizer_pre_hooks) > 1
        or bool(optimizer_hooks._global_optimizer_post_hooks)
        or bool(optimizer._optimizer_step_pre_hooks)
        or bool(optimizer._optimizer_step_post_hooks)
    )


def _is_torchs_own(step: Any) -> bool:
    """Whether torch's hooks are around a step of torch, and not around one that somebody wraps."""
    code = getattr(vars(step).get("__wrapped__"), "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCH_OPTIM)


def _stand_in_for(optimizer: Any, groups: list[Any]) -> Any:
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    stand_in.param_groups = groups
    return stand_in


class _Step:
    """One step: the plain twins of what it touches, and what is noted afterwards."""

    def __init__(self, optimizer: Any, residency: Any, device: Device) -> None:
        self.optimizer = optimizer
        self.residency = residency
        self.device = device
        #: Of each plain twin: the TensorRef, and the version of the twin before.
        self.twins: dict[int, tuple[torch.Tensor, Any, int]] = {}
        #: Plain tensors that the program keeps in the state, by their ids.
        self.passed_on: dict[int, torch.Tensor] = {}

    def run(self) -> bool:
        """Run it; False if it has to be intercepted, and then nothing has happened.

        Whatever the step raises goes to the program; what it has written by then is noted.
        """
        entries, key = self.residency.native_blocks, (threading.get_ident(), 0)
        outer = entries.get(key)
        # Announce first, look second: who evicts does it the other way round.
        entries[key] = (*(outer or ()), *self._blocks())
        try:
            try:
                groups, state = self._exchanged()
            except _UnreadyError:
                return False
            stand_in = _stand_in_for(self.optimizer, groups)
            stand_in.state = state
            try:
                with disabled():
                    type(self.optimizer).step.__wrapped__(stand_in)
            finally:
                self._note(groups, state)
        finally:
            for twin, _, _ in self.twins.values():
                twin.grad = None
            if outer is None:
                del entries[key]
            else:
                entries[key] = outer
        return True

    def _parameters(self) -> Iterator[Any]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _blocks(self) -> Iterator[Block]:
        ref_type = tensorsManager.ref_type
        for parameter in self._parameters():
            held = self.optimizer.state.get(parameter, {})
            for tensor in (parameter, parameter.grad, *held.values()):
                if type(tensor) is ref_type:
                    yield tensor._b

    # -- before ---------------------------------------------------------------------------------

    def _exchanged(self) -> tuple[list[Any], Any]:
        """Return the groups and the state with plain twins in the place of TensorRefs."""
        groups: list[Any] = []
        state: Any = defaultdict(dict)
        largest_nbytes = all_nbytes = 0
        takes_all = False
        for group in self.optimizer.param_groups:
            twins = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                twin = self._twin(parameter)
                try:
                    twin.grad = self._twin(parameter.grad)
                except (RuntimeError, TypeError):  # its own gradient, or one of another dtype
                    raise _UnreadyError from None
                held = self.optimizer.state.get(parameter)
                if held:
                    state[twin] = {name: self._exchange(value) for name, value in held.items()}
                elif type(self.optimizer) is not torch.optim.SGD or group["momentum"]:
                    raise _UnreadyError  # the first step makes the state
                twins.append(twin)
                largest_nbytes = max(largest_nbytes, twin.nbytes)
                all_nbytes += twin.nbytes
            takes_all |= bool(group.get("foreach"))
            groups.append({**group, "params": twins})
        ledger = self.residency.ledgers[self.device]
        passing_nbytes = PASSING * (all_nbytes if takes_all else largest_nbytes)
        if ledger.resident_nbytes + passing_nbytes > ledger.budget.high_nbytes:
            raise _UnreadyError
        return groups, state

    def _exchange(self, value: Any) -> Any:
        if type(value) is tensorsManager.ref_type:
            return self._twin(value)
        if isinstance(value, (list, tuple, dict)):
            raise _UnreadyError  # may hold anything
        if isinstance(value, torch.Tensor):
            self.passed_on[id(value)] = value
        return value

    def _twin(self, ref: Any) -> torch.Tensor:
        if type(ref) is not tensorsManager.ref_type:
            raise _UnreadyError
        block = ref._b
        device = block.ready
        if not block.owned or (device is not self.device and device is not self.residency.host):
            raise _UnreadyError
        plain = ref._t if ref._d is device else plain_on(ref, device)
        if ref._d is not device or plain.is_complex() or plain.is_inference():
            raise _UnreadyError
        known = self.twins.get(id(plain))
        if known is not None and known[1] is not ref:
            raise _UnreadyError  # two parameters that share everything have one twin
        block.last_use = self.residency.tick
        self.twins[id(plain)] = (plain, ref, plain._version)
        return plain

    # -- afterwards -----------------------------------------------------------------------------

    def _note(self, groups: list[Any], state: Any) -> None:
        """Note in the optimizer what the stand-in was told, and in TensorRefs what was written."""
        self.residency.tick += 1
        for group, exchanged in zip(self.optimizer.param_groups, groups, strict=True):
            for name, value in exchanged.items():
                if name != "params":
                    group[name] = value
        for twin, held in state.items():
            parameter = self.twins[id(twin)][1]
            for name, value in held.items():
                self.optimizer.state[parameter][name] = self._original(value)
        for twin, ref, version in self.twins.values():
            for _ in range(twin._version - version):
                count_write(ref)
            if twin._version != version and not ref._b.owned:
                # Another thread has brought it home meanwhile: what came there is stale.
                self.residency.written(ref._b, self.device)

    def _original(self, value: Any) -> Any:
        known = self.twins.get(id(value))
        if known is not None and known[0] is value:
            return known[1]
        if type(value) is not torch.Tensor or id(value) in self.passed_on:
            return value
        return tensorsManager.adopt(value)
