"""The command line.

main.py       `kvkeep`: all commands, and how errors end them
serve.py      `kvkeep serve`
logs.py       what the server's log looks like
status.py     `kvkeep status`
tenants.py    `kvkeep tenants ...`, and salts that nobody sees
settings.py   `kvkeep settings ...`
demo.py       `kvkeep demo`, and the engine processes it starts (demo_engine.py)
chaos.py      `kvkeep chaos`
engine_fuzz.py `kvkeep engine-fuzz`
fuzz.py       `kvkeep fuzz`
seeds.py      runs by seed, on all cores
bench.py      `kvkeep bench ...` (machine.py: on what it ran)
remote.py     the admin API from the other side
output.py     tables for people, JSON for programs
"""
