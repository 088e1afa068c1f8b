"""A run: model, adapter, stream of batches, trainer, checkpoints, results.

Read in this order: signals, result, events, schedule, loader, data, model, adapters, forward, isolation, artifacts,
checkpoint, run_folder, callbacks, arguments, trainer, assemble, generate, journal, progress, fit, plots, report_html,
report.
"""
