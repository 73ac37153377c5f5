"""Clusters under faults: a plan drawn from a seed, its run, and the checks that no run may fail.

plan.py         engines, requests and faults, drawn from a seed
run.py          a run of a plan
machine.py      what a run would take from the machine
client.py       an engine process
server.py       the server process of a host
network.py      connections between them
sockets.py      the sockets that these use
mover.py        a tier's process, as the server sees it
disk.py         the disk below the server
shared.py       the tier that several hosts share
shared_service.py  the service behind it
probe.py        whether hosts share blocks when the faults are over
faults.py       faults at a moment of the run
checks.py       what must hold
truth.py        the expected bytes of every block
record.py       story, faults and findings of a run
shrink.py       makes a failing run short
mutants.py      bugs to plant
real.py         chaos with real processes
real_engine.py  an engine process of it
real_plan.py    its faults, drawn from a seed
"""
