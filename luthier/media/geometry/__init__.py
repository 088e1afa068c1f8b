"""How many tokens a media item takes: pure functions of sizes and durations, as the processors compute them."""
