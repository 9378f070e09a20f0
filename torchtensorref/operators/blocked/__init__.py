"""How operators may be cut into blocks: a rule per operator, and how large the blocks are.

`cut.py` says what a cut is, `table.py` which operators have a rule, `sizes.py` how large the tiles
are that fit a budget and move least. `interception/blocks.py` carries it out.

May import: base, operators.
"""
