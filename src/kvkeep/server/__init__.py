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
network.py      the bytes of blocks for clients on other hosts
quotas.py       tenants' quotas, kept on disk
scrub.py        adopted blocks, checked in the background
counters.py     what has happened, counted
status.py       the server at one moment
metrics.py      counters and gauges for Prometheus
admin.py        what operators ask for and change
http.py         the routes of health, metrics and the admin API
http_server.py  the thread, connections and TLS of the HTTP port
guard.py        who may ask the admin API for what
log_limits.py   how many log lines a peer can cause
embedded.py     a whole server inside an engine's process
"""
