"""What the model sees and what a run will cost, as data, in a terminal and as pages. No model is needed.

Read in this order: tokens, show, show_text, show_terminal, show_html, plan, stats, tables, environment.
"""
