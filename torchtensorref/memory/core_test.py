"""The self-test of the library in C++: one operator and its result, before all relies on it."""

from __future__ import annotations

from typing import Any

import torch

from ..base.activation import disabled

#: The dispatch keys that TensorRefs carry in C++, which torch itself leaves alone: one above
#: autograd, and one below it.
BOTH_KEYS = ("DeferredInit", "Fake")

_add = torch.ops.aten.add.Tensor


class _Here:
    """Stands for a device that runs operators at once."""

    has_virtual_clock = is_witness = False


def fault_of(library: Any) -> str:
    """Say what is wrong with the library; "" if nothing is: then torch calls it from now on."""
    for name in BOTH_KEYS:
        if torch._C._dispatch_has_backend_fallback(torch._C._dispatch_key_parse(name)):
            return f"torch uses the dispatch key {name} itself"
    library.open()
    fault = ""
    try:
        fault = _fault_in_a_sum(library)
    except Exception as error:  # whatever it is: without the library everything runs, too
        fault = f"{type(error).__name__}: {error}"
    if fault:
        library.close()
    return fault


def _fault_in_a_sum(library: Any) -> str:
    """Say what is wrong with two sums; "" if nothing is.

    One of ready operands runs without Python and is counted, a second one, of operands that are
    not ready, is handed over. Leaves nothing behind.
    """
    handed_over: list[str] = []

    def dispatch(op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        handed_over.append(op.name())
        return plain

    device, ledger, books = _Here(), library.LedgerBase(), library.BooksBase()
    library.set_maker(library.BlockBase)
    library.set_up(dispatch, dispatch, _description, lambda plain, where: None, None, None)
    ledger.high_nbytes = 1 << 20
    ledger.count_for(device)
    books.ready_on = (device,)
    with disabled():
        plain = torch.tensor([1.0, -2.0, 0.1])
    block = library.BlockBase()
    block.nbytes, block.ready = plain.nbytes, device
    ref = library.make_ref(plain, block, device, plain.device)
    with disabled(), torch._C.DisableTorchFunction():
        result = ref + ref
        looks = library.is_ref(result) and not library.is_ref(plain)
        is_right = torch.equal(library.attributes()["_ttr_plain"].__get__(result), plain + plain)
        counted_nbytes = ledger.newborn_nbytes
        del result
        block.ready = None
        _ = ref + ref
    books.ready_on = ()
    if not (looks and is_right and block.users == 0):
        return "its self-test gave a wrong result"
    if (counted_nbytes, ledger.newborn_nbytes) != (plain.nbytes, 0):
        return "its self-test counted wrong"
    return "" if handed_over == ["aten::add.Tensor"] else "its self-test did not reach Python"


def _description(name: str, overload: str) -> dict[str, Any]:
    """What is known of the operator of the test: the same as its plan says."""
    assert (name, overload) == ("aten::add", "Tensor"), (name, overload)
    return {
        "op": _add,
        "may_be_ready": True,
        "is_view": False,
        "counts_lists": False,
        "makes_dense": True,
        "is_seen_above": False,
        "shares": False,
        "minds_labels": False,
        "is_for_host": False,
        "minds_stand_ins": False,
        "comes_in_parts": False,
        "is_recorded_inside": False,
        "conditions": (),
        "writes_then": False,
        "peak": 0,
        "writes": (),
        "twins": (-1,),
    }
