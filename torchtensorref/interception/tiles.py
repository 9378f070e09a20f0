"""The tiles of an operator that runs in blocks, one after the other on the accelerator.

The operands that are cut are at home, and held there. For each tile their pieces are fetched, the
operator runs on these by phases 3 to 6 like any other, and its result is copied to where it belongs
at home. While one tile is computed, the pieces of the next one that are not there yet are on their
way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ..base.errors import TransferError
from ..devices.base import Device
from ..devices.storages import empty_bytes
from ..memory.block import Block
from ..memory.budget import SHORTAGES
from ..memory.eviction import HeldByOthersError
from ..memory.filling import RoomTakenError
from ..memory.manager import TensorsManager
from ..memory.plain_views import make_ref, plain_on, view_with
from ..operators.blocked.cut import Gather, Place, Tile
from ..operators.blocked.sizes import Tiling
from ..operators.blocked.sums import Sums
from ..operators.plan import OpPlan
from .block_plan import Plan
from .operands import Operands, analyse
from .pieces import (
    Piece,
    flattened,
    gathered_piece,
    part_of,
    piece_of,
    result_piece,
    strides_of_whole,
)
from .staging import note_result

#: Runs phases 3 to 6: operands, where, and what the blocks of fresh results are appended to.
Phases = Callable[[Operands, Device, list[Block]], Any]

_CPU = torch.device("cpu")


class UnfitError(Exception):
    """Internal: the values of the operands speak against it. Nothing has changed."""


class Run:
    """One call on its way through its tiles."""

    def __init__(
        self, plan: Plan, tiling: Tiling, manager: TensorsManager, phases: Phases, device: Device
    ) -> None:
        self._plan = plan
        self._tiling = tiling
        self._manager = manager
        self._residency = manager.residency
        self._phases = phases
        self._device = device
        self._host = self._residency.books.host
        self._operands = plan.operands
        self._label = plan.operands.label or _CPU
        #: The pieces of the last tile, and where in the operand each lies.
        self._pieces: dict[Place, tuple[Any, Piece]] = {}
        self._costs = self._residency.books.counts.costs
        self._piece_ids: list[int] = []
        #: What the operator would need as one, operands and results.
        self._whole_nbytes = plan.operands.nbytes + sum(like.nbytes for like in plan.fresh)
        self._on_their_way: list[Piece] = []
        self._has_landed = False
        inner = plan.cut.inner
        #: Where a result is the sum of what several tiles make.
        self._sums: Sums | None = None
        if inner is not None and (inner.is_always or tiling.counts()[inner.axis] > 1):
            self._sums = inner.sums(
                self._run_operator,
                inner,
                tiling.axes[inner.axis].extent,
                self._operands.plan.op,
                plan.arguments,
                [like.dtype for like in plan.fresh],
            )
        #: The fresh results at home.
        self._results: list[torch.Tensor] = []
        self.tile_count = 0

    def run(self, born: list[Block]) -> Any:
        """Run all tiles; return what the operator returns."""
        residency, plan = self._residency, self._plan
        refs = [ref for ref, _ in plan.cut_refs.values()]
        blocks = list(dict.fromkeys(ref._ttr_block for ref in refs))
        written = self._operands.written
        held = residency.acquire(self._host, blocks, written, 0)
        try:
            homes = {place: self._home(ref) for place, (ref, _) in plan.cut_refs.items()}
            for block in written:
                self._host.about_to_change(block.replicas[self._host].base)
                residency.copier.written(block, self._host)
            self._run_tiles(homes)
        finally:
            self._let_land()
            self._pieces.clear()
            self._costs.forget_parts(self._piece_ids)
            self._sums = None  # which holds us
            residency.release(held)
            for block in blocks:
                with residency.books.lock:
                    residency.readiness.settle_at_home(block)
        for block in written:
            residency.copier.has_been_written(block, self._host)
        return self._wrapped(born)

    def _home(self, ref: Any) -> torch.Tensor:
        return self._view(plain_on(ref, self._host))

    def _view(self, plain: torch.Tensor) -> torch.Tensor:
        return flattened(plain) if self._plan.cut.is_flat and plain.dim() else plain

    def _new_home(self, like: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Make the memory of a fresh result, of the dtype that its first tile has.

        Torch says it of tensors without bytes as an accelerator's kernel would have it. So it does
        the order in memory of some, which is the tile's, too (`Cut.follows_tiles`).
        """
        follows = self._plan.cut.follows_tiles
        strides = strides_of_whole(like, made) if follows else like.stride()
        with torch._C.DisableTorchFunction():
            like = torch._C._VariableFunctions.empty_strided(
                like.size(), strides, dtype=made.dtype, device="meta"
            )
        nbytes = like.untyped_storage().nbytes()
        base = self._device.home_memory(nbytes)
        base = empty_bytes(nbytes) if base is None else base
        return view_with(like, base.untyped_storage(), 0)

    # -- tiles ----------------------------------------------------------------------------------

    def _run_tiles(self, homes: dict[Place, torch.Tensor]) -> None:
        tiles = iter(self._tiling.tiles())
        first = next(tiles)
        gather = self._plan.cut.gather
        pieces = self._cut_out(homes, first) if gather is None else self._gathered(gather, homes)
        tile: Tile | None = first
        while tile is not None:
            self.tile_count += 1
            out = self._run_tile(tile, pieces)
            self._operands.has_written = bool(self._operands.written)
            following = next(tiles, None)
            is_ahead = self._tiling.has_room_ahead and following is not None
            after = self._ahead(homes, following) if is_ahead else None  # type: ignore[arg-type]
            self._send_home(out, tile, pieces)
            del pieces, out
            self._land(1)
            if after is None and following is not None:
                after = self._cut_out(homes, following)
            pieces = after or {}
            tile = following
        self._land(0)

    def _cut_out(self, homes: dict[Place, torch.Tensor], tile: Tile) -> dict[Place, Piece]:
        """Return the pieces of a tile: those of the last one, where they are the same."""
        found: dict[Place, tuple[Any, Piece]] = {}
        for place, (ref, along) in self._plan.cut_refs.items():
            where = tuple(tile[axis] if axis is not None else None for axis in along)
            before = self._pieces.get(place)
            if before is not None and before[0] == where:
                found[place] = before
                before[1].block.last_use = self._residency.books.tick
            else:
                part = part_of(homes[place], along, tile)
                piece = piece_of(part, self._label, self._residency)
                found[place] = where, piece
                self._note_part(piece, ref._ttr_block)
        self._pieces = found
        return {place: piece for place, (_, piece) in found.items()}

    def _note_part(self, piece: Piece, block: Block) -> None:
        part_id, nbytes = piece.block.block_id, self._whole_nbytes
        self._costs.note_part(part_id, block.block_id, block.nbytes, nbytes)
        self._piece_ids.append(part_id)

    def _gathered(self, gather: Gather, homes: dict[Place, torch.Tensor]) -> dict[Place, Piece]:
        """Return the pieces that stand for operands of which only a part is read."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            made = gather({name: home for (name, _), home in homes.items()})
        if made is None:
            raise UnfitError
        return {
            (name, None): gathered_piece(value, self._label, self._residency)
            for name, value in made.items()
        }

    def _ahead(self, homes: dict[Place, torch.Tensor], tile: Tile) -> dict[Place, Piece]:
        """Return the pieces of the next tile, on their way where there is room for them."""
        pieces, residency = self._cut_out(homes, tile), self._residency
        for piece in pieces.values():
            replica = piece.block.replicas.get(self._device)
            if replica is not None and replica.readable:
                continue
            try:
                residency.evictor.make_room(self._device, piece.block.nbytes, "the next block")
                residency.copier.fetch(piece.block, self._device)
            except (*SHORTAGES, HeldByOthersError, RoomTakenError):
                break  # it is fetched when it is needed
        return pieces

    def _run_tile(self, tile: Tile, pieces: dict[Place, Piece]) -> Any:
        if self._sums is not None:
            given = {name: piece.ref for (name, _), piece in pieces.items()}
            return self._sums.add({**self._plan.arguments, **given}, tile)
        args, kwargs = self._arguments(tile, pieces)
        return self._run_operator(self._operands.plan, args, kwargs)

    def _run_operator(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands = analyse(plan, args, kwargs, self._manager)
        try:
            return self._phases(operands, self._device, [])
        except SHORTAGES:
            if operands.has_written or not (self._has_landed or self._on_their_way):
                raise
        # What has been done stays: this one tile runs at home.
        self._residency.books.log.note("-", plan.name, "one block at home: no room")
        return self._phases(operands, self._host, [])

    def _arguments(
        self, tile: Tile, pieces: dict[Place, Piece]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        operands, cut = self._operands, self._plan.cut
        names = operands.plan.argument_names
        values = {name: operands.args[i] for i, name in enumerate(names[: len(operands.args)])}
        values |= operands.kwargs
        if cut.localise is not None:
            values |= cut.localise(tile)
        for (name, index), piece in pieces.items():
            if index is None:
                values[name] = piece.ref
            else:
                values[name] = list(values[name])
                values[name][index] = piece.ref
        args = tuple(values.pop(name) for name in names[: len(operands.args)])
        return args, values

    # -- results --------------------------------------------------------------------------------

    def _send_home(self, out: Any, tile: Tile, pieces: dict[Place, Piece]) -> None:
        """Issue the copies home of what a tile has made and written."""
        for place in self._plan.written():
            self._leave(pieces[place])
        fresh = self._plan.fresh
        if not fresh or out is None:
            return
        found = out if isinstance(out, (list, tuple)) else (out,)
        refs = [one for one in found if isinstance(one, torch.Tensor)]
        if not self._results:
            self._results = [
                self._new_home(like, ref) for like, ref in zip(fresh, refs, strict=True)
            ]
        for ref, result, along in zip(refs, self._results, self._plan.results, strict=True):
            part = part_of(self._view(result), along, tile)
            self._leave(result_piece(ref, part, self._device, self._residency))

    def _leave(self, piece: Piece) -> None:
        replica = piece.block.readable_on(self._device)
        if replica is not None:
            self._residency.evictor.try_evict(replica, "a block of a result goes home")
        self._on_their_way.append(piece)

    def _land(self, most: int) -> None:
        """Wait for results until no more than those of so many tiles are on their way."""
        per_tile = len(self._plan.fresh) + len(self._plan.written())
        while len(self._on_their_way) > most * per_tile:
            piece = self._on_their_way[0]
            if piece.part is None and most:
                break
            self._residency.copier.bring_home(piece.block)
            if piece.part is not None:
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    piece.part.copy_(plain_on(piece.ref, self._host))
                self._host.charge(0, 2 * piece.part.nbytes, "uint8")
            self._has_landed = True
            self._on_their_way.pop(0)

    def _let_land(self) -> None:
        """Wait for what is on its way to memory of the program's, after an error."""
        for piece in self._on_their_way:
            with suppress(TransferError):
                self._residency.copier.arrivals.wait_for_home(piece.block)

    def _wrapped(self, born: list[Block]) -> Any:
        """Make the program's tensors of the results at home."""
        operands, plan = self._operands, self._operands.plan
        if not self._results:
            twins = [operands.argument(plan.argument_names[t]) for t in plan.result_of_write]  # type: ignore[index]
            return twins[0] if len(twins) == 1 else tuple(twins) or None
        refs = iter([self._ref_of(result, born) for result in self._results])
        out = self._plan.template
        if isinstance(out, torch.Tensor):
            return next(refs)
        made = [next(refs) if isinstance(one, torch.Tensor) else one for one in out]
        return type(out)(made) if type(out) in (list, tuple) else type(out)(*made)

    def _ref_of(self, result: torch.Tensor, born: list[Block]) -> Any:
        block = self._residency.born(result, self._host)
        if self._residency.recorder is not None:
            self._residency.recorder.birth(block)
        born.append(block)
        note_result(self._operands, self._manager, block.nbytes)
        return make_ref(result, block, self._host, self._label)
