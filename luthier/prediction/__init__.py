"""What a trained run answers to rows that it was not trained on, and how good the answers are."""
