"""Micro-batches as they are planned become batches: read ahead, in order, by processes that are looked after."""
