"""The daemon: it takes requests, lets the store decide, and keeps sessions, memory and operators in
order.

settings.py   what an operator can set (setting_kinds.py: how each kind is read; host_memory.py: what it got)
counters.py   what has happened, counted
sessions.py   engine processes, and how the daemon knows that one is gone
auth.py       which certificates are let in, and with which tenants
listeners.py  the sockets that engines connect to
connections.py  engines' connections: taken, proved, served in turn
service.py    a request in, a reply out; no sockets, no threads
network.py    the bytes of blocks for clients on other hosts
quotas.py     tenants' quotas, kept on disk
warm.py       the start of a server over what the last one left
scrub.py      adopted blocks, looked through in the background
daemon.py     signals, the loop
snapshot.py   the server at one moment, for metrics and status
metrics.py    counters and gauges for Prometheus
admin.py      what operators ask for and change
guard.py      what keeps web sites out of the admin API
http.py       health, metrics and the admin API
"""
