"""A run: model, adapter, stream of batches, trainer, checkpoints, results.

Read in this order: signals, files, result, events, lost_rows, schedule, streams, set_names, live, data, vocabulary,
parts, media_needs, attention_plan, attention, mixer_calls, mixers, reward_class, own_pictures, own_frames,
shared_slots, merged_frames, decoder_inputs, model, adapters, compiled, sharding, quantized, attention_inputs,
tower_inputs, chosen_isolation, isolation_trial, isolation, head_tap, blank_media, passes, references, step_losses,
losses, compared_losses, pairs, verdicts, precomputed, encoders, tower_features, objective_parts, kernel_choice,
named_reference, reference_choice, objective, artifacts, checkpoint, run_folder, callbacks, arguments, run_stream,
hooks, feature_choice, restore, learning_rate, finite, trainer, assemble, generate, journal, outcome, progress, fit,
plots, report_html, report.
"""
