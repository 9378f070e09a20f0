"""Products of sparse matrices that do not fit, in blocks of rows on the accelerator.

The rows of the sparse operand on the left, the same rows of what is added, and those of the result
are a tile; what is on the right stays for all tiles, or goes through the accelerator in columns.
Values are fetched from where they are at home; starts of rows are counted anew for each tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from ..base.options import settings
from ..devices.base import Device
from ..memory.block import Block
from ..memory.budget import SHORTAGES
from ..memory.eviction import HeldByOthersError
from ..memory.filling import RoomTakenError
from ..memory.manager import TensorsManager
from ..memory.plain_views import make_ref, plain_on
from ..memory.sparse import plain_sparse, sparse_over
from ..operators.blocked import sparse as cuts
from ..operators.costs import touched_nbytes
from ..operators.layouts import parts_of, sparse_of
from ..operators.plan import OpPlan
from .block_plan import MOST_OF
from .operands import Operands, analyse
from .pieces import Piece, piece_of, result_piece
from .staging import note_result

#: Runs phases 3 to 6: operands, where, and what the blocks of fresh results are appended to.
Phases = Callable[[Operands, Device, list[Block]], Any]
Range = tuple[int, int]

_CPU = torch.device("cpu")
#: Of the room, what stands on the right may take so much before it is cut in columns.
RIGHT_SHARE = 0.5
#: Tiles whose operands and results are there at once: this one, and what comes and what goes.
TILES_AT_ONCE = 2
#: Of the room, one part in so many is left free.
SLACK = 16


def product_of(operands: Operands) -> cuts.Product | None:
    """Return where the operands of a product stand that can be cut; None of anything else."""
    product = cuts.PRODUCTS.get(getattr(operands.plan.op, "op", operands.plan.op))
    product = product or cuts.PRODUCTS.get(operands.plan.op)
    if product is None or operands.unmanaged or operands.on_accelerator is not None:
        return None
    if settings.blocks == "off":
        return None
    left, right = operands.argument(product.left), operands.argument(product.right)
    if id(left) not in operands.sparse or left.layout not in (torch.sparse_coo, torch.sparse_csr):
        return None
    if left.dim() != 2 or not 1 <= right.dim() <= 2 or left.dtype is not right.dtype:
        return None
    sparse = [operands.sparse[id(x)] for x in (left, right) if id(x) in operands.sparse]
    if any(ref._ttr_parts[-1].dim() != 1 for ref in sparse):
        return None  # its elements are blocks, or rows
    if 0 in (*left.size(), *right.size()):
        return None  # there is nothing to cut
    if not all(operands.argument(name).dim() for name in product.along):
        return None  # a single number lies along no row
    if product.is_sampled and left.layout is not torch.sparse_csr:
        return None
    return product


class SparseRun:
    """One product on its way through its tiles."""

    def __init__(
        self,
        operands: Operands,
        product: cuts.Product,
        manager: TensorsManager,
        phases: Phases,
        device: Device,
        room_nbytes: int,
    ) -> None:
        self._operands = operands
        self._product = product
        self._manager = manager
        self._residency = manager.residency
        self._phases = phases
        self._device = device
        self._host = manager.residency.books.host
        #: Less than there is: what stands on the right is not to be driven out by the next rows.
        self._room_nbytes = room_nbytes - room_nbytes // SLACK
        self._label = operands.label or _CPU
        self._on_their_way: list[tuple[Any, torch.Tensor | None]] = []
        self._found: list[tuple[int, list[tuple[int, torch.Tensor]]]] = []
        self._result: torch.Tensor | None = None
        self._left: cuts.Rows
        self.tile_count = 0
        self.need_nbytes = 0
        self.why_not = ""

    @property
    def keeps_bits(self) -> bool:
        """Whether tiles of rows have the bits of the whole."""
        left = self._operands.argument(self._product.left)
        right = self._operands.argument(self._product.right)
        is_vector = right.dim() == 1 and left.layout is torch.sparse_csr
        return left.dtype in cuts.MEASURED and not is_vector

    def run(self, born: list[Block]) -> Any:
        """Run all tiles; NotImplemented, with nothing changed, where not even one row fits."""
        residency, blocks = self._residency, self._operands.blocks
        held = residency.acquire(self._host, blocks, [], 0)
        try:
            return self._run(born)
        except cuts.RowTooLargeError as error:
            self.why_not = f"even in rows: {error}"
            return NotImplemented
        finally:
            residency.release(held)
            for block in blocks:
                with residency.books.lock:
                    residency.readiness.settle_at_home(block)

    def _run(self, born: list[Block]) -> Any:
        right_is_sparse = id(self._operands.argument(self._product.right)) in self._operands.sparse
        right = self._home(self._operands.argument(self._product.right))
        with torch._C.DisableTorchFunction(), torch.no_grad():
            left = self._home(self._operands.argument(self._product.left))
            self._left = cuts.Rows(left, right_is_sparse)
            if not cuts.is_in_order(left):
                self._charge(2, *parts_of(left))
            is_sorted = not cuts.is_in_order(right)
            if is_sorted:
                right = right.coalesce()  # else the kernel would, for each tile
                self._charge(2, *parts_of(right))
        columns = self._columns(right)
        if columns is None:
            self.why_not = "columns would come in another order"
            return NotImplemented
        tiles = []
        for start, end in columns:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                plain = cuts.columns_of(right, start, end) if len(columns) > 1 else right
                self._charge(len(columns) > 1, *parts_of(plain))
                part = self._operands.argument(self._product.right)
                if len(columns) > 1 or is_sorted or self._is_part(part):
                    part = self._piece(plain)
                ranges = self._ranges(plain, (start, end))
            self._run_rows(part, ranges, (start, end))
            if self._found:
                tiles.append((start, self._of_rows(left.layout, end - start)))
        return self._wrapped(tiles, born)

    # -- how it is cut --------------------------------------------------------------------------

    def _columns(self, right: torch.Tensor) -> list[Range] | None:
        """Cut what stands on the right, where it does not leave enough room; None: it may not."""
        nbytes = sum(part.nbytes for part in parts_of(right))
        count = -(-nbytes // max(int(self._room_nbytes * RIGHT_SHARE), 1))
        if right.dim() == 1 or count <= 1:
            return [(0, right.size(-1) if right.dim() > 1 else 1)]
        is_exact = self._device.has_host_kernels and settings.blocks != "any"
        if self._product.is_sampled or (is_exact and right.layout in _UNORDERED):
            return [(0, right.size(-1))] if nbytes < self._room_nbytes else None
        length = max(right.size(1) // (count + 1), 1)
        bounds = [*range(0, right.size(1), length), right.size(1)]
        return list(itertools.pairwise(bounds))

    def _row_nbytes(self, right: torch.Tensor, columns: Range) -> torch.Tensor:
        """What each row takes at most: its elements, what is added, and its result."""
        rows, values = self._left, self._left.values
        counts = rows.starts.diff().long()
        nbytes = counts * rows.element_nbytes + rows.starts.element_size()
        item, width = values.element_size(), columns[1] - columns[0]
        for name in self._product.along:
            along = self._operands.argument(name)
            nbytes += along.size(-1) * item
        if self._product.is_sampled:
            return nbytes + counts * rows.element_nbytes
        if right.layout is torch.strided:
            return nbytes + width * item
        per_row = cuts.row_counts(right)
        products = torch.nn.functional.pad(per_row[rows.column_indices.long()].cumsum(0), (1, 0))
        most = products[rows.starts[1:].long()] - products[rows.starts[:-1].long()]
        return nbytes + most.clamp(max=width) * rows.element_nbytes

    def _is_part(self, right: Any) -> bool:
        """Whether of what stands on the right a part of its block is all that is used."""
        ref = self._operands.ref_of(right)
        return ref is not None and touched_nbytes(ref) < MOST_OF * ref._ttr_block.nbytes

    def _ranges(self, right: torch.Tensor, columns: Range) -> list[Range]:
        """Cut the rows, as many as fit beside some columns of what stands on the right."""
        right_nbytes = sum(part.nbytes for part in parts_of(right))
        row_nbytes = self._row_nbytes(right, columns)
        room_nbytes = (self._room_nbytes - right_nbytes) // TILES_AT_ONCE
        ranges = list(cuts.row_ranges(row_nbytes, room_nbytes))
        most_nbytes = max(int(row_nbytes[start:end].sum()) for start, end in ranges)
        self.need_nbytes = max(self.need_nbytes, right_nbytes + TILES_AT_ONCE * most_nbytes)
        return ranges

    # -- tiles ----------------------------------------------------------------------------------

    def _run_rows(self, right: Any, ranges: list[Range], columns: Range) -> None:
        """Run the tiles of all rows, with some columns of what stands on the right."""
        sparse = self._operands.sparse.get(id(right), right)
        blocks = list(dict.fromkeys(ref._ttr_block for ref in _refs([sparse])))
        # Else the next rows would drive it out, which has been used longer ago than these.
        held = self._residency.acquire(self._device, blocks, [], 0)
        try:
            pieces = self._pieces(ranges[0], columns)
            for number, rows in enumerate(ranges):
                self.tile_count += 1
                out = self._run_tile(pieces, right)
                pieces = self._ahead(ranges[number + 1], columns) if rows is not ranges[-1] else {}
                self._send_home(out, rows, columns)
                del out
                self._land(1)
            self._land(0)
        finally:
            self._residency.release(held)

    def _pieces(self, rows: Range, columns: Range) -> dict[str, Any]:
        """Return the pieces of a tile, by the names of the arguments they stand for."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            left = self._left.between(*rows)
            self._charge(1, parts_of(left)[0])
            pieces = {self._product.left: self._piece(left)}
            for name in self._product.along:
                plain = self._home(self._operands.argument(name))
                if plain.dim() == 2 and plain.size(0) > 1:
                    plain = plain[rows[0] : rows[1]]
                if not self._product.is_sampled and plain.dim() and plain.size(-1) > 1:
                    plain = plain[..., columns[0] : columns[1]]
                pieces[name] = self._piece(plain)
        return pieces

    def _piece(self, plain: torch.Tensor) -> Any:
        def made(part: torch.Tensor) -> Any:
            return piece_of(part, self._label, self._residency).ref

        return (
            made(plain) if plain.layout is torch.strided else sparse_over(plain, self._label, made)
        )

    def _ahead(self, rows: Range, columns: Range) -> dict[str, Any]:
        """Return the pieces of the next tile, on their way where there is room for them."""
        pieces, residency = self._pieces(rows, columns), self._residency
        for ref in _refs(pieces.values()):
            try:
                residency.evictor.make_room(self._device, ref._ttr_block.nbytes, "the next rows")
                residency.copier.fetch(ref._ttr_block, self._device)
            except (*SHORTAGES, HeldByOthersError, RoomTakenError):
                break  # it is fetched when it is needed
        return pieces

    def _run_tile(self, pieces: dict[str, Any], right: Any) -> Any:
        plan, operands = self._operands.plan, self._operands
        names = plan.argument_names
        values = {name: operands.args[i] for i, name in enumerate(names[: len(operands.args)])}
        values |= {**operands.kwargs, **pieces, self._product.right: right}
        args = tuple(values.pop(name) for name in names[: len(operands.args)])
        try:
            return self._run_operator(plan, args, values, self._device)
        except SHORTAGES:
            if self.tile_count == 1:
                raise
        # What has been done stays: this one tile runs at home.
        self._residency.books.log.note("-", plan.name, "some rows at home: no room")
        return self._run_operator(plan, args, values, self._host)

    def _run_operator(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], device: Device
    ) -> Any:
        return self._phases(analyse(plan, args, kwargs, self._manager), device, [])

    # -- results --------------------------------------------------------------------------------

    def _send_home(self, out: Any, rows: Range, columns: Range) -> None:
        """Issue the copies home of what a tile has made."""
        if out.layout is torch.strided:
            if self._result is None:
                self._result = self._new_result(out)
            part = self._result[rows[0] : rows[1]]
            part = part[:, columns[0] : columns[1]] if out.dim() == 2 else part
            piece = result_piece(out, part, self._device, self._residency)
            self._leave(piece.ref, piece)
            return
        for ref in out._ttr_parts:
            self._leave(ref, None)
        self._found.append((rows[0], out))

    def _leave(self, ref: Any, piece: Piece | None) -> None:
        replica = ref._ttr_block.readable_on(self._device)
        if replica is not None:
            self._residency.evictor.try_evict(replica, "rows of a result go home")
        self._on_their_way.append((ref, None if piece is None else piece.part))

    def _land(self, most: int) -> None:
        """Wait for results until no more than those of so many tiles are on their way."""
        per_tile = 1 if not self._found else len(self._found[-1][1]._ttr_parts)  # type: ignore[attr-defined]
        while len(self._on_their_way) > most * per_tile:
            ref, part = self._on_their_way.pop(0)
            self._residency.copier.bring_home(ref._ttr_block)
            if part is not None:
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    part.copy_(plain_on(ref, self._host))
                self._charge(1, part)

    def _new_result(self, tile: torch.Tensor) -> torch.Tensor:
        left = self._operands.argument(self._product.left)
        right = self._operands.argument(self._product.right)
        size = (left.size(0), *right.size()[1:])
        with torch._C.DisableTorchFunction():
            return torch._C._VariableFunctions.empty(size, dtype=tile.dtype)

    def _of_rows(self, layout: torch.layout, width: int) -> torch.Tensor:
        """Put the tiles of all rows together."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            tiles = [
                (start, [plain_on(part, self._host) for part in out._ttr_parts])  # type: ignore[attr-defined]
                for start, out in self._found
            ]
            layout = self._found[0][1].layout  # type: ignore[attr-defined]
            is_coalesced = layout is torch.sparse_coo and self._found[0][1].is_coalesced()  # type: ignore[attr-defined]
            self._found.clear()
            parts = cuts.stacked(tiles, layout)
            rows = self._left.starts.numel() - 1
            self._charge(1, *parts)
            return sparse_of(parts, (rows, width), layout, is_coalesced)

    def _wrapped(self, tiles: list[tuple[int, torch.Tensor]], born: list[Block]) -> Any:
        """Make the program's tensor of the result at home."""
        if self._result is not None:
            return self._ref_of(self._result, born)
        left = self._operands.argument(self._product.left)
        right = self._operands.argument(self._product.right)
        width = left.size(1) if self._product.is_sampled else right.size(1)
        size = torch.Size((left.size(0), width))
        with torch._C.DisableTorchFunction(), torch.no_grad():
            parts = cuts.joined(tiles, size)
            self._charge(len(tiles) > 1, *parts)
        first = tiles[0][1]
        is_coalesced = first.layout is torch.sparse_coo and first.is_coalesced()
        plain = sparse_of(parts, size, first.layout, is_coalesced)
        return sparse_over(plain, self._label, lambda part: self._ref_of(part, born))

    def _ref_of(self, result: torch.Tensor, born: list[Block]) -> Any:
        block = self._residency.born(result, self._host)
        if self._residency.recorder is not None:
            self._residency.recorder.birth(block)
        born.append(block)
        note_result(self._operands, self._manager, block.nbytes)
        return make_ref(result, block, self._host, self._label)

    def _charge(self, times: int, *made: torch.Tensor) -> None:
        """Let the host spend the time to read and write tensors so often."""
        self._host.charge(0, 2 * times * sum(part.nbytes for part in made), "uint8")

    def _home(self, value: Any) -> torch.Tensor:
        """Return the plain tensor at home that an operand is; its blocks are held there."""
        sparse = self._operands.sparse.get(id(value))
        if sparse is None:
            return plain_on(self._operands.ref_of(value), self._host)
        return plain_sparse(sparse, lambda part: plain_on(part, self._host))


#: The product of two of these has the columns of a row in no order.
_UNORDERED = (torch.sparse_csr, torch.sparse_csc)


def _refs(values: Any) -> list[Any]:
    """The TensorRefs among values, those that sparse ones are made of one by one."""
    return [ref for value in values for ref in getattr(value, "_ttr_parts", (value,))]
