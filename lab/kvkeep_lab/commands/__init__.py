"""Commands of development: `kvkeep chaos`, `kvkeep fuzz`, `kvkeep engine-fuzz` and research
benchmarks."""
