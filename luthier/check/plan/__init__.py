"""What a run will cost, before any model is loaded: plans, statistics, estimates."""
