"""The command line.

main.py          `kvkeep`: all commands, and how errors end them
serve.py         `kvkeep serve`, and the server's log
admin.py         `kvkeep status`, `kvkeep drain` and `kvkeep settings ...`
tenants.py       `kvkeep tenants ...`
keygen.py        `kvkeep keygen`
certificates.py  the certificates that it makes
demo.py          `kvkeep demo`, and the engine processes it starts
bench.py         `kvkeep bench ...`
machine.py       the machine that a benchmark ran on
remote.py        requests to the admin API
output.py        tables and JSON
"""
