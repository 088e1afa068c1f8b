"""Which segments share a row, and in which order the rows come: plans, made of integers only."""
