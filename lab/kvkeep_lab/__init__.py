"""What kvkeep is developed with and does not ship: simulation, chaos runs, fuzzers, research
benchmarks.

simulation/   simulated time, threads, network, server and cache; the oracle model
chaos/        whole clusters in simulated time, and as real processes, under faults; planted bugs
fuzz/         fuzzers of everything that reads input, and of the reference engine
bench/        benchmarks beyond those that operators run
commands/     `kvkeep chaos`, `kvkeep fuzz`, `kvkeep engine-fuzz` and the other benchmarks
"""
