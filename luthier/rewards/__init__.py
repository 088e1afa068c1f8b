"""What judges the answers that a model draws: metrics, and users' functions in processes of their own."""
