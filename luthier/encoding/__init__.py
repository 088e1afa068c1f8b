"""Pieces become token trees, encoded once and kept in a store that is addressed by content.

Read in this order: tokenizer_files, tokenizer_spec, text_encoders, text_probe, checked_encoder, tokenizer, tree,
pieces, owners, continuations, encoder, interface, disk, leaves, shard, shard_reader, manifest, naming, key_index,
store, participants, work_list, store_listing, store_health, store_cleaning, store_export, keys, portions, intake,
workers, resolver, units, unit_results, sharing, ray_cluster, prepared, quarantine, collection, prepare, cuts, segments.
"""
