"""Where bytes are kept: host memory, disks, and services that hosts share.

memory.py         the pool in shared memory: made, filled, guarded, left or removed by the server
ownership.py      one server at a time owns the pool's directory
free_memory.py    how large a pool can be: file systems, memory limits
index_files.py    the index beside the pool, for the next server
admission.py      which blocks are worth writing to a tier
tier_address.py   addresses of tiers, such as disk:///var/lib/kvkeep?size=200GiB
disk_files.py     the files of a disk: made, locked, written, compacted
disk_log.py       the log of a disk: its format, and what replay believes
disk_index.py     which blocks are where on a disk: a second store, with its log records
disk_check.py     a check of all blocks of a disk: which come next, what was found
tier.py           what every tier beyond memory does, for callers that may wait
disk_tier.py      a disk as such a tier
checked_tier.py   a service as such a tier: frames that verify what it returns
parcels.py        several blocks in one object of a shared tier, with their checksums
encryption.py     encrypts frames and names of a service (extra: encryption)
tier_keys.py      the file of the keys for that
service_address.py  addresses of services, and credentials, which are not in them
file_tier.py      a directory that several hosts share, as such a service
sweeper.py        one host at a time keeps a tier that does not evict within its size
swept_directory.py, swept_bucket.py  such a directory, and a bucket, as the sweeper sees them
valkey.py         Valkey or Redis as such a service (extra: valkey)
s3.py             an S3-compatible object store as such a service (extra: s3)
mooncake.py       a Mooncake cluster as such a service (extra: mooncake)
opening.py        opens a shared tier by its address; how to add a kind
summaries.py      which blocks a shared tier surely lacks
clear_log.py      which tenants were cleared on a shared tier
mover.py          the process that does all input and output of a tier: jobs, and the daemon's end
mover_process.py  what runs in the process of a disk
shared_process.py what runs in the process of a shared tier
session_locks.py  which processes may still be at work in the pool
"""
