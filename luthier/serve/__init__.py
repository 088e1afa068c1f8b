"""A trained run behind HTTP, as OpenAI's interface has it; prompts are made as training makes them."""
