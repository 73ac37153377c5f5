"""Commands of development.

register.py     adds benchmarks to `kvkeep bench`
chaos.py        `kvkeep chaos`
fuzz.py         `kvkeep fuzz`
engine_fuzz.py  `kvkeep engine-fuzz`
seeds.py        runs by seed, on all cores
"""
