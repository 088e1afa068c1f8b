"""A run: model, adapter, stream of batches, trainer, checkpoints, results.

Read in this order: signals, files, result, losses, events, schedule, streams, live, data, model, adapters, forward,
isolation, artifacts, checkpoint, run_folder, callbacks, arguments, trainer, assemble, generate, journal, outcome,
progress, fit, plots,
report_html, report.
"""
