"""For tests of kvkeep and of what builds on it.

process.py  a server in a process, and programs that speak JSON
clock.py    a simulated clock
"""
