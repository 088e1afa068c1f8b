"""Micro-batches as they are planned become batches: read ahead, in order, by processes that are looked after.

Read in this order: growing, places, planning, reader, slots, messages, worker, process, prefetch, state, settings,
loader, run_settings, run_order, live_rows, live_epoch, live_plan, choosing, feed_files, feeding, feed.
"""
