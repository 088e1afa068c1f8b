"""What the model sees and what a run will cost, as data, in a terminal and as pages. No model is needed.

Read in this order: tokens, owners, origins, facts, show_media, show_columns, show, show_text, previews, show_terminal,
show_blocks, show_html, loaded, selection, diff, diff_pairs, diff_settings, diff_runs, diff_repeats, diff_terminal,
diff_html, devices, model_shape, estimate, estimate_terminal, media_counts, history, plan, stats, tables, environment,
verify_records, verify_files, verify_tokens, verify_template, verify_neutral, verify_rules, verify_policy,
verify_compared, verify_weights, verify_slots, verify_answer, verify_reading, verify_expected, verify_document,
verify_learned, verify_derived, verify_runs, verify_media, verify_structure, verify_server, verify_row, verify_kwargs,
verify_samples, verify, verify_terminal.
"""
