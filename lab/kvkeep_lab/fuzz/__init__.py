"""Fuzzers: for each part that reads input, a target that turns bytes into a test of it.

targets.py  the targets, and how Atheris runs each
choices.py  an input, read as a series of choices
wire.py     frames and decoders
service.py  the server with hostile sessions
index.py    adoption of a damaged index
config.py   settings, options, params, files
http.py     the admin API
flood.py    malformed frames at full speed
server.py   the same over sockets of a real server
engine.py   random runs of the reference engine
"""
