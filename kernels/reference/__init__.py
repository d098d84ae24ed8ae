"""The reference backend: plain torch in float32, the truth for all the others.

Every row's result is the same bits whatever the number of rows, chunking, page size or neighbours:

    rows.py         cutting rows into pieces of sizes that were verified to agree
    products.py     x · Wᵀ, packed by oneDNN or plain
    attention.py    attention over pages, split at fixed positions and merged in a fixed tree
    elementwise.py  norm, rope, gate: only operations that IEEE rounds exactly, and exp and sum
    invariance.py   the checks at start-up that the above rests on
"""
