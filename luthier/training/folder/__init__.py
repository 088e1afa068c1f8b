"""What a run keeps on disk: its folder, checkpoints that are whole or set aside, and what it hands on."""
