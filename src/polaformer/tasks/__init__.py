"""What is learnt: for each task a loss, a metric, and a prediction."""
