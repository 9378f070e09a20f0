"""Who is who among the results of operators."""

from __future__ import annotations

from torchTensorRef.strategies.flow.allocation_sites import AllocationSites


def test_what_has_grown_is_known_wherever_the_cursor_has_leapt_to():
    """A cache is three times as large as it was where the program is expected to go on from."""
    sites = AllocationSites()
    sites.birth(1, 100, 0, slot=1, before=-1)
    for token in range(1, 9):
        slot = 1 + 10 * token
        sites.birth(1 + token, 100 + 40 * token, 0, slot=slot, before=slot - 10)
        sites.death(token, slot)
    assert sites.symbol_of == {9: 1}
    sites.birth(10, 460, 0, slot=91, before=1)
    assert sites.symbol_of[10] == 1
    sites.birth(11, 1000, 0, slot=101, before=1)
    assert 11 not in sites.symbol_of, "as large as neither"
    sites.forget_before(200, ())
    assert not sites._last_nbytes
