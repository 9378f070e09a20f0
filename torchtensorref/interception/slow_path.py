"""One operator on its way through the six phases: analyse, place, fetch, run, commit, wrap."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ..base.options import settings
from ..devices.base import Device
from ..memory.block import Block
from ..memory.budget import SHORTAGES
from ..memory.plain_views import make_ref, parts_of, plain_on, replace_metadata, view_with
from ..memory.ref import TensorRef
from ..operators.costs import operator_cost
from .device_labels import exchange_device, is_guest
from .fallback import Ladder
from .reference_check import Shadow

_SetExcluded = torch._C._SetExcludeDispatchKeyGuard
_CONJUGATE = torch._C._dispatch_key_parse("Conjugate")
_NEGATIVE = torch._C._dispatch_key_parse("Negative")


class OpCall(Ladder):
    """One operator on its way through the six phases."""

    __slots__ = ()

    def run(self) -> Any:
        """Take the operator through the phases and return its result."""
        plan = self.plan
        if plan.handler is not None:
            result = plan.handler(self)
            if result is not NotImplemented:
                return result
        self.analyse()
        if any(self._is_other_subclass(kind) for kind in map(type, self.special)):
            return NotImplemented
        if plan.is_true_view and type(self.args[0]) is TensorRef:
            return self.view()
        device = self.place()
        self.residency.books.tick += 1
        self.residency.books.counts.op_count += 1
        self.residency.feed.tell_uses(device, self.blocks, self.written, self.plan.number)
        if self.residency.recorder is not None:
            self.residency.recorder.note(self, device)
        try:
            return self._run_down_the_ladder(device)
        finally:
            self._after()

    # -- fetch, run, commit, wrap ---------------------------------------------------------------

    def run_on(self, device: Device) -> Any:
        """Fetch the operands to a device, run there, commit what was written, wrap the results."""
        residency = self.residency
        expected_nbytes = self._expected_nbytes(device)
        held = residency.acquire(device, self.blocks, self.written, expected_nbytes)
        try:
            self.plain_of: dict[int, torch.Tensor] = {}
            for ref in self.refs:
                if id(ref) not in self.plain_of:
                    self.plain_of[id(ref)] = plain_on(ref, device)
            args = [self._plain(arg) for arg in self.args]
            kwargs = {name: self._plain(arg) for name, arg in self.kwargs.items()}
            if self.plan.has_device:
                asked = exchange_device(self.plan, device, self.accelerator, args, kwargs)
                self.label = asked or self.label
            if self.guests is not None or (self.plan.reads_at_home and not device.has_host_kernels):
                self._put_where_they_are_read(device, args, kwargs)
            out = self._execute(device, args, kwargs)
            if self.guests is not None:
                self.guests.send_back(self._written_arguments())
            return self._wrap(out, device)
        finally:
            residency.release(held)
            with residency.books.lock:
                for block in self.blocks:
                    if device.is_host:
                        residency.settle_at_home(block)
                    else:
                        residency.set_ready(block, device)

    def _put_where_they_are_read(
        self, device: Device, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        """Exchange operands that a kernel reads elsewhere than where it runs."""
        guests = self.guests
        if guests is not None:

            def at_hand(value: Any) -> Any:
                return guests.on(value, device) if is_guest(value, self.accelerator) else value

            args[:] = tree_map_only(torch.Tensor, at_hand, args)
            kwargs.update(tree_map_only(torch.Tensor, at_hand, kwargs))
        for name in self.plan.reads_at_home:
            original = self.plan.argument(name, self.args, self.kwargs)
            home = self.manager.ownership.plain_at_home(self.foreign.get(id(original), original))
            if name in kwargs:
                kwargs[name] = home
            else:
                args[self.plan.argument_names.index(name)] = home

    def _written_arguments(self) -> list[Any]:
        names = self.plan.write_names
        return tree_leaves([self.plan.argument(name, self.args, self.kwargs) for name in names])

    def _plain(self, value: Any) -> Any:
        if type(value) is TensorRef:
            return self.plain_of[id(value)]
        if isinstance(value, torch.Tensor):
            ref = self.foreign.get(id(value))
            return value if ref is None else self.plain_of[id(ref)]
        if type(value) is list:
            return [self._plain(part) for part in value]
        if type(value) is tuple:
            return tuple(self._plain(part) for part in value)
        return value

    def _execute(self, device: Device, args: list[Any], kwargs: dict[str, Any]) -> Any:
        reads = [block.replicas[device].base for block in self.blocks]
        writes = [block.replicas[device].base for block in self.written]
        device.before_operator(reads, writes)
        shadow = Shadow(self.plan, args, kwargs) if settings.shadow else None
        if settings.trace >= 3:
            self.residency.books.log.note("-", self.plan.name, f"on {device.name}")
        try:
            out = self._call_kernel(args, kwargs)
        finally:
            # Also after an exception: a kernel may have written part of what it writes.
            for block in self.written:
                self.residency.copier.written(block, device)
            if self.plan.counts_lists:
                self.plan.count_writes(self.args, self.kwargs)
        if shadow is not None:
            shadow.compare(out, device)
        if device.has_virtual_clock or device.is_host:
            flops, nbytes, dtype = operator_cost(self.plan, args, kwargs, out)
            device.after_operator(reads, writes, flops=flops, nbytes=nbytes, dtype_name=dtype)
        if device.has_virtual_clock and not self.plan.returns_tensors:
            device.record().synchronize()  # the program reads a number: the host waits for it
        return out

    def _call_kernel(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if any(plain.is_complex() for plain in self.plain_of.values()):
            # Under dispatch torch looks at no key above it, so a kernel that conjugates lazily and
            # calls another operator would read the bytes as they are: linalg_pinv was wrong so.
            with _SetExcluded(_CONJUGATE, False), _SetExcluded(_NEGATIVE, False):
                return self.plan.op(*args, **kwargs)
        return self.plan.op(*args, **kwargs)

    def _wrap(self, out: Any, device: Device) -> Any:
        for name in self.plan.write_names if not self.plan.is_flat else ():
            lists = self.plan.argument(name, self.args, self.kwargs)
            for original in lists if isinstance(lists, (list, tuple)) else ():
                self._follow_metadata(original, device)
        twins = self.plan.result_of_write
        if isinstance(out, torch.Tensor):
            return self._wrap_one(out, device, twins[0] if twins else None)
        if isinstance(out, (list, tuple)):
            wrapped = [
                self._wrap_one(part, device, twins[i] if i < len(twins) else None)
                if isinstance(part, torch.Tensor)
                else self._wrap(part, device)
                for i, part in enumerate(out)
            ]
            return type(out)(wrapped) if type(out) in (list, tuple) else type(out)(*wrapped)
        return out

    def _wrap_one(self, plain: torch.Tensor, device: Device, twin: int | None) -> Any:
        if twin is not None:
            name = self.plan.argument_names[twin]
            original = self.plan.argument(name, self.args, self.kwargs)
            if isinstance(original, torch.Tensor):
                self._follow_metadata(original, device)
                return original
        if plain.layout is not torch.strided or plain.is_nested:
            return self._unmanaged(plain)
        if plain.is_quantized or plain.is_mkldnn:
            return self._unmanaged(plain)
        if type(plain) not in (torch.Tensor, torch.nn.Parameter):
            return plain
        if plain.device != device.torch_device:
            there = self._device_of(plain)
            if there is None:
                return plain
            device = there
        for ref in self.refs:
            mine = self.plain_of[id(ref)]
            if mine is plain:
                return self._original_of(ref)
        source = self._aliased(plain)
        label = self.label or torch.device("cpu")
        if source is not None:
            return make_ref(plain, source, device, label)
        if plain._is_zerotensor() or not plain.untyped_storage().resizable():
            plain = plain.clone()
        try:
            block = self.residency.born(plain, device)
        except SHORTAGES as error:
            if not self.written:
                raise
            # What it has written cannot be written again, so it cannot run again: the result is
            # there, and goes home.
            self._note_shortage(error)
            plain, device = plain.cpu(), self.residency.books.host
            block = self.residency.born(plain, device)
        self._note_birth(block)
        return make_ref(plain, block, device, label)

    def _device_of(self, plain: torch.Tensor) -> Device | None:
        """Where a result lies that a kernel has made elsewhere than where it ran."""
        if plain.is_cpu:
            return self.residency.books.host
        is_there = plain.device == self.accelerator.torch_device
        return self.accelerator if is_there else None

    def _unmanaged(self, plain: torch.Tensor) -> torch.Tensor:
        """A result that stays plain, and may be made of the operands' own memory.

        Then it is made again of memory that stays where it is as long as the result lives.
        """
        parts = {part.untyped_storage()._cdata for part in parts_of(plain)}
        mine = {plain.untyped_storage()._cdata for plain in self.plain_of.values()}
        if parts.isdisjoint(mine) or self.plan.writes:
            return plain

        def held(value: Any) -> Any:
            if type(value) is TensorRef:
                return self.manager.ownership.exposed_plain(
                    value, f"part of what {self.plan.name} made"
                )
            return value

        again: torch.Tensor = self.plan.op(
            *tree_map(held, self.args), **tree_map(held, self.kwargs)
        )
        return again

    def _original_of(self, ref: Any) -> Any:
        """The program's own tensor for an operand that came back: a plain one stays plain."""
        for value in (*self.args, *self.kwargs.values()):
            for part in value if isinstance(value, (list, tuple)) else (value,):
                if part is ref or self.foreign.get(id(part)) is ref:
                    return part
        return ref

    def _aliased(self, plain: torch.Tensor) -> Block | None:
        """The operand's block whose storage a result shares, if it does."""
        key = plain.untyped_storage()._cdata
        for ref in self.refs:
            if self.plain_of[id(ref)].untyped_storage()._cdata == key:
                block: Block = ref._ttr_block
                return block
        return None

    def _follow_metadata(self, original: Any, device: Device) -> None:
        """Where an operator changed sizes in place (`t_`, `out=`), change them too."""
        ref: Any = original if type(original) is TensorRef else self.foreign.get(id(original))
        if ref is None:
            return
        plain = self.plain_of[id(ref)]
        if plain.size() == ref.size() and plain.stride() == ref.stride():
            same_bits = plain.is_conj() == ref.is_conj() and plain.is_neg() == ref.is_neg()
            if same_bits and plain.storage_offset() == ref.storage_offset():
                return
        block = ref._ttr_block
        replica = block.replicas[device]
        if plain.untyped_storage().nbytes() != replica.nbytes:
            grown = view_with(plain, plain.untyped_storage().clone(), plain.storage_offset())
            plain.untyped_storage().resize_(replica.nbytes)
            block, plain = self.residency.born(grown, device), grown
        if ref is original:
            replace_metadata(ref, make_ref(plain, block, device, ref.device))
        else:
            original.set_(plain)

    def _expected_nbytes(self, device: Device) -> int:
        """What the results are expected to take: what they took the last time."""
        if device.is_host:
            return 0
        return self.manager.expected_results.get(self._result_key(), 0)

    def _result_key(self) -> tuple[Any, ...]:
        return (self.plan.number, *(ref.size() for ref in self.refs[:3]))

    def _note_birth(self, block: Block) -> None:
        if self.residency.recorder is not None:
            self.residency.recorder.birth(block)
        self.born.append(block)
        expected = self.manager.expected_results
        if len(expected) > 4096:
            expected.clear()
        expected[self._result_key()] = block.nbytes

    # -- views ----------------------------------------------------------------------------------

    def view(self) -> Any:
        """Pure address arithmetic: needs a replica to look at, and moves nothing."""
        ref = self.args[0]
        block: Block = ref._ttr_block
        residency = self.residency
        with residency.books.lock:
            device = self._where_readable(block)
            out = self.plan.op(plain_on(ref, device), *self.args[1:], **self.kwargs)
            if block.ready is None and device is residency.books.ready_device:
                residency.set_ready(block, device)
        if type(out) in (list, tuple):
            return type(out)(make_ref(part, block, device, ref.device) for part in out)
        return make_ref(out, block, device, ref.device)

    def _where_readable(self, block: Block) -> Device:
        if block.readable_on(self.accelerator) is not None:
            return self.accelerator
        for replica in block.readable_replicas():
            return replica.device
        self.residency.copier.bring_home(block)
        return self.residency.books.host

    # -- afterwards -----------------------------------------------------------------------------

    def _after(self) -> None:
        """Let the strategy give back, write back and look ahead; tell it who died."""
        self.residency.feed.tell_deaths()
        if self.residency.books.accelerators:
            self.residency.after_operator(self.accelerator, [*self.blocks, *self.born])
        if settings.check >= 2:
            self.manager.check()
