"""Parts for tests of kvkeep and of what builds on it: a server in a process, a simulated clock."""
