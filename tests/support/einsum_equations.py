"""Equations that others document or test their einsum with, and the sizes of operands for each.

Only equations and sizes are theirs; what is expected is computed (`naive_einsum.py`).
"""

from __future__ import annotations

Shapes = tuple[tuple[int, ...], ...]

#: torch's documentation of einsum, and its samples for tests of all operators.
TORCH_DOCUMENTED: dict[str, Shapes] = {
    "ii": ((4, 4),),
    "ii->i": ((4, 4),),
    "i,j->ij": ((5,), (4,)),
    "bij,bjk->bik": ((3, 2, 5), (3, 5, 4)),
    "...ij,...jk->...ik": ((3, 2, 5), (3, 5, 4)),
    "...ij->...ji": ((2, 3, 4, 5),),
    "bn,anm,bm->ba": ((2, 5), (3, 5, 4), (2, 4)),
    "ij,jk->ik": ((2, 3), (3, 4)),
}
TORCH_SAMPLES: dict[str, Shapes] = {
    "i->": ((3,),),
    "i,j->ij": ((3,), (4,)),
    "ij->i": ((2, 3),),
    "ij,kj->ik": ((2, 3), (1, 3)),
    "ij,Ab->ijAb": ((2, 3), (4, 4)),
    "aij,ajk->aik": ((1, 2, 3), (1, 3, 4)),
    "aij,jk->aik": ((1, 3, 4), (4, 4)),
    "ijk,ik->j": ((1, 2, 3), (1, 3)),
    "iji->j": ((1, 3, 1),),
    "i...->...": ((3, 3),),
    "...ik, ...j -> ij": ((1, 2, 3), (3,)),
}

#: torch's tests of linear algebra.
TORCH_TESTS: dict[str, Shapes] = {
    "i->": ((5,),),
    "i,i->": ((5,), (5,)),
    "i,i->i": ((5,), (5,)),
    "i,j->ij": ((5,), (7,)),
    "ij->ji": ((3, 5),),
    "ij->j": ((3, 5),),
    "ij->i": ((3, 5),),
    "ij,ij->ij": ((3, 5), (3, 5)),
    "ij,j->i": ((3, 5), (5,)),
    "ij,kj": ((3, 5), (2, 5)),
    "ij,kj->ik": ((3, 5), (2, 5)),
    "ij,ab->ijab": ((3, 5), (7, 9)),
    "Aij,Ajk->Aik": ((2, 3, 5), (2, 5, 7)),
    "ijk,jk->i": ((2, 3, 5), (3, 5)),
    "aij,jk->aik": ((2, 5, 7), (7, 9)),
    "abCd,dFg->abCFg": ((2, 3, 3, 5), (5, 4, 6)),
    "ijk,jk->ik": ((2, 3, 5), (3, 5)),
    "ijk,jk->ij": ((2, 3, 5), (3, 5)),
    "ijk,ik->j": ((2, 3, 5), (2, 5)),
    "ijk,ik->jk": ((2, 3, 5), (2, 5)),
    "ii": ((4, 4),),
    "ii->i": ((4, 4),),
    "iji->j": ((2, 3, 2),),
    "ngrg...->nrg...": ((2, 1, 3, 1, 4),),
    "i...->...": ((4, 4),),
    "ki,...k": ((5, 3), (2, 5)),
    "ki,...k->i...": ((5, 3), (2, 5)),
    "k...,jk->...": ((5, 3), (2, 5)),
    "...ik, ...j -> ...ij": ((2, 3, 5), (5,)),
    "Bik,k...j->i...j": ((2, 3, 5), (5, 3)),
    "i...j, ij... -> ...ij": ((2, 3, 5), (2, 5, 2, 3)),
    "bn,anm,bm->ba": ((5, 10), (15, 10, 20), (5, 20)),
    # how a text may be written
    " ": ((),),
    " -> ": ((),),
    " , ": ((), ()),
    " , , ": ((), (), ()),
    " , -> ": ((), ()),
    " i ": ((1,),),
    " i -> ": ((1,),),
    " i -> i ": ((1,),),
    " i , i ": ((1,), (1,)),
    " i , i -> i ": ((1,), (1,)),
    # dimensions without elements
    "i": ((0,),),
    " i j -> j": ((2, 0),),
    "ij->i ": ((2, 0),),
    " i j k  ,  k  -> i j ": ((3, 0, 6), (6,)),
    # what broadcasts
    "i,j": ((1,), (2,)),
    "i,ij->ij": ((2,), (2, 3)),
    "...": ((),),
    "...->": ((),),
    "...->...": ((),),
    " ...": ((1,),),
    " ...->": ((1,),),
    "z...->z": ((1,),),
    "Z...->...Z": ((1,),),
    "...a->": ((2, 1),),
    "a...b->ab": ((2, 2, 1),),
}

#: torch_semiring_einsum's documentation and tests.
SEMIRING_EINSUM: dict[str, Shapes] = {
    "bik,bkj->bij": ((10, 3, 5), (10, 5, 7)),
    "ik,kj->ij": ((4, 5), (5, 6)),
    "ak,ak,ak->a": ((10, 100), (10, 100), (10, 100)),
    "abce,abde,abdf->acd": ((2, 3, 5, 11), (2, 3, 7, 11), (2, 3, 7, 13)),
    "abc,b->a": ((3, 5, 7), (5,)),
    "ab,ab->a": ((7, 7), (7, 7)),
    "a,a->a": ((5,), (5,)),
    "i,i->": ((2,), (2,)),
    ",->": ((), ()),
    "->": ((),),
}

#: All of them, each once.
EVERYONES: tuple[tuple[str, Shapes], ...] = tuple(
    dict.fromkeys(
        entry
        for table in (TORCH_DOCUMENTED, TORCH_SAMPLES, TORCH_TESTS, SEMIRING_EINSUM)
        for entry in table.items()
    )
)


def spelt_out(text: str) -> str:
    """Say what an equation without `->` leaves out: `...`, then what appears once, sorted."""
    if "->" in text:
        return text
    letters = text.replace(",", "").replace(" ", "").replace("...", "")
    once = sorted(letter for letter in letters if letters.count(letter) == 1)
    return f"{text}->{'...' if '...' in text else ''}{''.join(once)}"
