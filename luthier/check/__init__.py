"""What the model sees and what a run will cost, as data, in a terminal and as pages. No model is needed."""
