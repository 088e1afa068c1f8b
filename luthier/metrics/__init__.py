"""How good answers are: metrics of what was expected and what was generated, with intervals."""
