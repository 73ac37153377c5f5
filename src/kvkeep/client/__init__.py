"""The engine's side. Nothing here raises into the engine for a server's fault, and nothing waits
past a deadline.

options.py      addresses, deadlines
hints.py        what a request can ask of the cache
transport.py    a connection to the server: made, proved, made again (a simulated one in tests)
calls.py        requests on their way, and replies that can be relied on
connection.py   a session with the server: made, kept alive, made again
outage.py       what is logged while there is no server
shared_pool.py  the lock and the memory that a session on this host holds
threads.py      threads, locks and the clock, real ones unless a simulation brings its own
requests.py     what engines ask for, and what they get back
copier.py       moves blocks between engine memory and slots on a CPU; `kvkeep.gpu` on a GPU
rank_memory.py  where one rank's part of blocks lies, in the engine and in the pool
stores.py       stores: the engine blocks that they read, and their way to the server
loads.py        loads: in the background, or in the engine's own thread
transfer.py     stores and loads for a caller that waits
scheduler.py    what an engine's scheduler needs: lookups and leases, never blocking
worker.py       what an engine's workers need: stores and loads in the background
pool_events.py  what the pool has, for engines that publish it to routers
cache.py        the small public API, `kvkeep.connect()`
"""
