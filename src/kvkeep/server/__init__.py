"""The daemon: it takes requests, lets the store decide, and serves operators over HTTP.

settings.py     what an operator can set
startup.py      what the host gives, and what the last server left
daemon.py       signals, the loop
listeners.py    the sockets that engines connect to
connections.py  engines' connections: accepted, authenticated, served in turn
auth.py         which certificates may connect, and with which tenants
sessions.py     engine processes: how the daemon knows that one is gone, and which share blocks
limits.py       how fast one client may go
service.py      a request in, a reply out; no sockets, no threads
request_spans.py  the spans of requests that are traced
pool_events.py  which blocks come and go, for engines that publish that to routers
network.py      the bytes of blocks for clients on other hosts
movement.py     blocks between memory and the tiers below it
clearing.py     many tenants cleared in memory and on disks, some a turn
write_behind.py  which blocks in memory are written to a tier next
fair_queue.py   what waits to be written: tenants have turns
lower_tier.py   what movement asks of one tier below memory
disk.py         a disk as such a tier
shared.py       a tier that several hosts share as such a tier
promotions.py   whose turn it is to read from a tier
prefetches.py   prefetches that operators ask for, and their share of memory
verification.py the check of all blocks on a disk
quotas.py       tenants' quotas, kept on disk
scrub.py        adopted blocks, checked in the background
counters.py     what has happened, counted
attribution.py  why the store lacked what a lookup asked for
recording.py    requests, recorded without what tells whose they are
explain.py      what the last requests were served from, and why the rest missed
figures.py      what the cache gave: tokens and time saved
status.py       the server at one moment
metrics.py      counters and gauges for Prometheus
admin.py        what operators ask for and change
http.py         the routes of health, metrics and the admin API
http_server.py  the thread, connections and TLS of the HTTP port
dashboard.py    for browsers; its files are in dashboard_files/
guard.py        who may ask the admin API for what
log_limits.py   how many log lines a peer can cause
embedded.py     a whole server inside an engine's process
"""
