"""What several benchmarks share: conversations to measure with, processes with their costs, other tools as peers."""
