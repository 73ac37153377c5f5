"""The command line.

main.py          `kvkeep`: all commands, and how errors end them
serve.py         `kvkeep serve`
logs.py          the format of the server's log
status.py        `kvkeep status`
drain.py         `kvkeep drain`
tenants.py       `kvkeep tenants ...`
settings.py      `kvkeep settings ...`
keygen.py        `kvkeep keygen`
certificates.py  the certificates that it makes
demo.py          `kvkeep demo`
demo_engine.py   an engine process of the demo
bench.py         `kvkeep bench ...`
machine.py       the machine that a benchmark ran on
remote.py        requests to the admin API
output.py        tables and JSON
"""
