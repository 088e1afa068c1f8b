"""A model of transformers, made ready: loaded, adapted, divided, its packed rows kept apart, its head tapped."""
