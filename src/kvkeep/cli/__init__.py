"""The command line.

main.py          `kvkeep`: all commands, and how errors end them
serve.py         `kvkeep serve`, and the server's log
admin.py         `kvkeep status`, `kvkeep drain` and `kvkeep settings ...`
top.py           `kvkeep top`
doctor.py        `kvkeep doctor`
doctor_host.py   its checks of the host
doctor_server.py its checks of a running server
tenants.py       `kvkeep tenants ...`
explain.py       `kvkeep explain`
tiers.py         `kvkeep tiers`
prefetch.py      `kvkeep prefetch`
verify.py        `kvkeep verify`, of a server or of a disk that none uses
plan.py          `kvkeep plan`
record.py        `kvkeep record` and `kvkeep replay`
keygen.py        `kvkeep keygen`
certificates.py  the certificates that it makes
demo.py          `kvkeep demo`
demo_hosts.py    `kvkeep demo --hosts 2`
demo_network.py  its hosts: network namespaces or loopback addresses
demo_engine.py   the engine processes that both start
bench.py         `kvkeep bench ...`
interrupts.py    Ctrl-C while a command waits
remote.py        requests to the admin API
output.py        tables and JSON
"""
