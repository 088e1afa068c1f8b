"""A run: model, adapter, stream of batches, trainer, checkpoints, results.

Read in this order: signals, files, result, events, schedule, streams, set_names, live, data, vocabulary, attention,
model, adapters, attention_inputs, isolation, head_tap, passes, references, step_losses, losses, compared_losses,
precomputed, objective, artifacts, checkpoint, run_folder, callbacks, arguments, run_stream, trainer, assemble,
generate, journal, outcome, progress, fit, plots, report_html, report.
"""
