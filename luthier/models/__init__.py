"""A model of transformers, made ready: loaded, adapted, divided, its packed rows kept apart, its head tapped.

Read in this order: vocabulary, parts, media_needs, attention_plan, attention, mixer_calls, mixers, reward_class,
own_pictures, own_frames, shared_slots, merged_frames, decoder_inputs, overrides, model, adapters, compiled,
sharding, quantized, attention_inputs, tower_inputs, chosen_isolation, isolation_trial, isolation, head_tap,
blank_media, routers, passes, encoders, restore.
"""
