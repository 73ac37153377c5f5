"""The engine's side. Nothing here raises into the engine for a server's fault, and nothing waits
past a deadline.

options.py      addresses, deadlines
hints.py        what a request may say about the cache in its kv_transfer_params
transport.py    a connection to the server: made, proved, made again (a simulated one in tests)
calls.py        requests on their way, and what became of them
replies.py      what a server's replies must be like before anyone relies on them
connection.py   a session with the server: made, kept, made again
keeper.py       a thread that keeps connections alive while the engine does something else
outage.py       what is said while there is no server
fence.py        the lock and the memory that a session on this host holds
threads.py      threads, locks and the clock, real ones unless a simulation brings its own
turns.py        a lock that threads have in turn
requests.py     what engines ask for
copier.py       who moves blocks between engine memory and slots, on a CPU; `kvkeep.gpu` on a GPU
sources.py      the engine blocks that a store reads
rank_memory.py  where one rank's part of blocks lies, in the engine and in the pool
piece_store.py  the store of one piece of blocks
at_once.py      a load in the engine's own thread
departures.py   stores that wait for their copies
loading.py      loads of some requests' blocks
transfer.py     blocks between engine memory and the server, on either data plane
scheduler.py    what an engine's scheduler needs: lookups and leases, never blocking
worker.py       what an engine's workers need: stores and loads in the background
cache.py        the small public API, `kvkeep.connect()`
"""
