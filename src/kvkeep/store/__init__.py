"""Decides which blocks are where, who owns them, who may read or write them, and which must go.

    store.py      the state machine that the server drives: a request in, a plan out
    operators.py  quotas, limits, usage, clearing
    plans.py      limits, and what the store answers
    blocks.py     the steps in which a block changes state
    eviction.py   makes room: victims within quotas
    emptying.py   slabs that change their slot size, emptied in turns
    draining.py   slabs that wait for what is held in them, and let nothing more be held
    order.py      which leaf is evicted first
    tenants.py    usage, quotas and limits, exact
    key_index.py  a tenant's blocks by key
    departed.py   which blocks have left lately, or were refused, and why
    tree.py       blocks as chains: the longest hit, subtrees, what a lease holds
    table.py      one row a block, one column a fact, and where columns lie
    layouts.py    how big a block is and how it is cut into shards
    slabs.py      the pool's memory, cut into slots of several sizes
    records.py    tenants and layouts as the next server finds them
    seals.py      what proves a block to the next server
    adopt.py      takes over what a server left
    shrink.py     what stays of a pool that becomes smaller

Nothing here reads a clock, a socket or a file: time is an argument, and every answer is a plan that
the caller carries out. So seeded runs try thousands of orders of requests a minute."""
