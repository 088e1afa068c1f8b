"""Pieces become token trees: texts to ids, media to the tokens that stand for them."""
