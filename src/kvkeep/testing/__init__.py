"""For tests of kvkeep and of what builds on it.

process.py      a server in a process, and programs that speak JSON
clock.py        a simulated clock
faulty_disk.py  the files of a disk tier, with faults
tiers.py        what every tier must do: check_tier()
"""
