"""Encoded samples on disk, found by the content of their rows.

The store is a folder of shards, which are written once and never changed, and a manifest that names them.
"""
