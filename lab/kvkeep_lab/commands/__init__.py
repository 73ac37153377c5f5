"""Commands of development.

register.py     adds them to `kvkeep`
chaos.py        `kvkeep chaos`
fuzz.py         `kvkeep fuzz`
engine_fuzz.py  `kvkeep engine-fuzz`
seeds.py        runs by seed, on all cores
"""
