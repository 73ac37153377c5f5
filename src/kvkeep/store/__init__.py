"""Decisions, without I/O: which blocks are where, whose they are, who may read or write them, which
must go.

    table.py     one row a block, one column a fact
    layouts.py   how big a block is and how it is cut into shards
    slabs.py     the pool's memory, cut into slots of several sizes
    tenants.py   usage and quotas, exact
    order.py     which leaf goes first
    tree.py      blocks as chains: keys to rows, longest hit, subtrees
    room.py      making room: victims within quotas, slabs that change their size
    store.py     the state machine that the daemon drives
    columns.py   where the index lies
    records.py   tenants and layouts, as the next server finds them
    seals.py     what proves a block to it
    adopt.py     what a server left, taken over

Nothing here reads a clock, a socket or a file: time is an argument, and every answer is a plan for
somebody else to carry out. That is what lets thousands of seeded runs a minute try to break it."""
