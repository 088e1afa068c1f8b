"""`luthier verify`: an independent proof, on the user's own rows, that training sees what inference would see.

Nothing here but `run` and `samples`, which fetch what is judged, imports rendering, encoding or the store.
"""
