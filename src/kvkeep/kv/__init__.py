"""What is stored: names, layout and bytes of a block.

identity.py  the model and the tenant that a block belongs to
keys.py      the key of a block
shape.py     how blocks are divided into shards
parallel.py  which rank stores which shard, and which load it
runs.py      where the bytes of a block lie in engine memory
copy.py      copies between engine memory and slots
checksum.py  the checksum of a block
native.py    the C code behind copies, checksums, keys and chains
outcomes.py  what becomes of each block of a request's prompt, by name
presence.py  counts of blocks by key, by which engines see what the server lacks
"""
