"""Pieces become token trees, encoded once and kept in a store that is addressed by content.

Read in this order: tokenizer_files, tokenizer_spec, text_encoders, text_probe, checked_encoder, tokenizer, tree,
pieces, owners, encoder, interface, disk, shard, store, prepared, quarantine, workers, intake, prepare, segments.
"""
