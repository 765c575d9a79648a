"""Learning: prepare the data, step by step lower the loss, keep the best, and never lose anything."""
