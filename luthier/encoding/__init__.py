"""Pieces become token trees, encoded once and kept in a store that is addressed by content.

Read in this order: tokenizer_files, tokenizer_spec, text_encoders, text_probe, checked_encoder, opened_template,
tokenizer, tree, expanding, pieces, owners, continuations, disk, leaves, media_items, shard, shard_reader, manifest,
naming, measuring, encoder, interface, key_index, store, participants, work_list, store_listing, store_health,
store_cleaning, store_export, keys, portions, intake, workers, resolver, units, unit_results, sharing, ray_cluster,
prepared, quarantine, collection, prepare, cuts, segments.
"""
