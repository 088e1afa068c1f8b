"""A run: stream of batches, losses and references, trainer, checkpoints, results.

Read in this order: signals, files, result, events, lost_rows, schedule, streams, set_names, live, data, references,
step_losses, losses, compared_losses, pairs, verdicts, precomputed, tower_features, objective_parts, kernel_choice,
named_reference, reference_choice, objective, artifacts, state_files, training_state, checkpoint, run_folder, callbacks,
arguments, run_stream, ranks, hooks, feature_choice, preflight, learning_rate, finite, numerics, router_balance,
trainer, assemble, generate, journal, outcome, progress, fit, plots, report_html, report.
"""
