"""Pieces become token trees, encoded once and kept in a store that is addressed by content.

Read in this order: tokenizer_files, tokenizer, tree, pieces, encoder, disk, shard, store, prepared, quarantine,
workers, intake, prepare, segments.
"""
