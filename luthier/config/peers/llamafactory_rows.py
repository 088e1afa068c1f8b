"""LLaMA-Factory's keys on rows and texts: data sets, templates, lengths, media, and how answers are drawn."""

from __future__ import annotations

import math

from luthier.config import Scalar
from luthier.config.peers import config_in_cache, config_of, has_own_template
from luthier.config.peers.translation import Translator, names_of
from luthier.writing import JsonObject, counted

_SAMPLING = ("temperature", "top_p", "top_k")
_REWARDS = {"lora": "adapter", "full": "model", "api": "url"}


def read_data(reading: Translator) -> None:
    folder, names = str(reading.take("dataset_dir")), reading.take("dataset")
    held_out, most = reading.take("eval_dataset"), reading.take("max_samples")
    answers = "train.enabled" in reading.origins
    if answers and held_out is None:
        held_out, names = names, None
    if answers and held_out is None:
        reading.set("data.max_length", reading.take("cutoff_len"), "cutoff_len")
        return
    if names is None and not answers:
        reading.refuse("dataset", "no data set is named, so there is nothing to train on", "for example dataset: NAME")
        return
    for ours, key, value in (("data.use", "dataset", names), ("data.eval_use", "eval_dataset", held_out)):
        if value is None:
            continue
        if folder == "ONLINE":
            paths = [{"path": f"hub:{name}"} for name in names_of(value)]
            reading.set("data.train" if key == "dataset" else "data.eval", paths, key)
        else:
            reading.set(ours, names_of(value), key)
    is_remote = folder.startswith("REMOTE:")
    if folder != "ONLINE":
        registry = f"hub:{folder.removeprefix('REMOTE:')}" if is_remote else f"{folder}/dataset_info.json"
        reading.set("data.registry", registry, "dataset_dir")
    if most is not None:
        reading.set("data.first_rows", most, "max_samples")
    media = reading.take("media_dir")
    if media is not None or (_is_multimodal(reading) and folder != "ONLINE" and not is_remote):
        of = "dataset_dir" if media is None else "media_dir"
        reading.set("data.media_root", str(folder if media is None else media), of)
    if answers:
        reading.set("data.max_length", reading.take("cutoff_len"), "cutoff_len")
        return
    _mixture(reading, folder, names_of(names))


def _mixture(reading: Translator, folder: str, names: list[str]) -> None:
    how, shares = reading.take("mix_strategy"), reading.take("interleave_probs")
    if how in (None, "concat", "interleave_once"):
        if shares is not None:
            reading.passed["interleave_probs"] = "each row is seen once, whatever the shares of the sets"
        return
    stops = {"interleave_under": "first", "interleave_over": "all"}
    if how not in stops:
        reading.refuse("mix_strategy", f"{how} is no way to mix", f"write one of concat, {', '.join(stops)}")
        return
    reading.set("data.mixture.by", "rows", "mix_strategy")
    reading.set("data.mixture.stop", stops[how], "mix_strategy")
    if shares is None:
        return
    try:
        weights = [float(share) for share in names_of(shares)]
    except ValueError:
        weights = []
    if len(weights) != len(names):
        what = f"{shares!r} are not {counted(len(names), 'share')}, one for each of {', '.join(names)}"
        reading.refuse("interleave_probs", what, "for example interleave_probs: 0.7,0.3")
    elif folder == "ONLINE":
        for index, weight in enumerate(weights):
            reading.set(f"data.train[{index}].weight", weight, "interleave_probs")
    else:
        reading.set("data.use_weights", weights, "interleave_probs")


def _is_multimodal(reading: Translator) -> bool:
    """Whether a file is for a multimodal model: it has limits of media, or the template of such a model."""
    table = reading.peer.table
    name = reading.entries.get("template")
    is_its = isinstance(name, Scalar) and name.value in table["multimodal"]["templates"]
    return is_its or any(key in reading.entries for key in table["defaults"]["media"])


def read_template(reading: Translator) -> None:
    if reading.take("stage") == "pt" and reading.take("template") == "llama3":
        reading.set("data.document_end", "<|end_of_text|>", "template")
    if _is_multimodal(reading):
        reading.fill_in("defaults", "media")
        _whole_videos(reading)
    name, thinking = reading.take("template"), reading.take("enable_thinking")
    if name is not None:
        own = has_own_template(str(reading.take("model_name_or_path")))
        reading.read.discard("model_name_or_path")
        if own is False:
            reading.set("template.chat_template", str(name), "template")
        else:
            if own is None:  # of a model that is not here yet
                reading.set("template.chat_template", f"own_or_{name}", "template")
            reading.told.append(f"template: the model's own chat template is used, not a copy of it called {name}")
    if thinking is not None:
        reading.set("template.kwargs.enable_thinking", bool(thinking), "enable_thinking")
    reading.switch("template.kwargs.preserve_thinking", True, "preserve_thinking")
    for key, who in (("train_on_prompt", "all"), ("mask_history", "last_assistant")):
        reading.switch("template.train_on", who, key)


def _whole_videos(reading: Translator) -> None:
    """Their limit is that of a frame. Where a family's processor counts all frames, it is that of the longest video."""
    name = reading.entries.get("template")
    if not isinstance(name, Scalar) or name.value not in reading.peer.table["multimodal"]["whole_videos"]:
        return
    pixels, frames = reading.take("video_max_pixels"), reading.take("video_maxlen")
    reading.read.discard("video_maxlen")
    if not isinstance(pixels, int) or not isinstance(frames, int):
        return
    reading.set("media.video_max_pixels", pixels * frames, "video_max_pixels")
    reading.told.append(
        f"video_max_pixels: this model counts the pixels of all frames together, {frames} × {pixels}; the frames of a "
        "short video are larger than LLaMA-Factory's"
    )


def read_lengths(reading: Translator) -> None:
    stage, packing = reading.take("stage"), reading.take("packing")
    neat, most = reading.flag("neat_packing"), reading.take("cutoff_len")
    _stretch(reading, most)
    reading.set("data.max_length", reading.entries["cutoff_len"], "cutoff_len")
    if stage == "ppo" and isinstance(most, int) and isinstance(new := reading.take("max_new_tokens"), int):
        reading.set("data.max_length", most + new, "cutoff_len")  # theirs is the prompt's alone
    of = "neat_packing" if neat else "packing" if packing is not None else "stage"
    is_packed = neat or (stage == "pt" if packing is None else packing is True)
    if stage == "pt" and is_packed:
        reading.set("train.packing", "split", of)
        reading.set("data.overflow", "split", "cutoff_len")
        return
    reading.set("train.packing", "window" if is_packed else "none", of)
    if is_packed and not neat:
        reading.told.append("packing: rows that share a pack never see each other, as with neat_packing")
    reading.set("data.overflow", "truncate" if stage == "pt" else "keep_answer", "cutoff_len")
    reading.set("data.max_drop", 0.5, "cutoff_len")  # their runs never stop for rows that are lost
    if stage == "pt":
        reading.told.append(f"cutoff_len: a text over {counted(most, 'token')} loses its end, as in LLaMA-Factory")
        return
    reading.told.append(
        f"cutoff_len: a row over {counted(most, 'token')} loses the oldest turns of its prompt, where LLaMA-Factory "
        "shortens every turn; the report counts such rows"
    )


def _stretch(reading: Translator, most: object) -> None:
    """``rope_scaling``: their factor is how often the model's own length goes into the cutoff, rounded up."""
    if (kind := reading.take("rope_scaling")) in (None, False, ""):
        return
    model = str(reading.take("model_name_or_path"))
    reading.read.discard("model_name_or_path")
    config = config_of(model) or config_in_cache(model)
    named = (config.get(key) for key in ("rope_parameters", "rope_scaling"))
    before: JsonObject = next((value for value in named if isinstance(value, dict)), {})
    length = before.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    if kind not in ("linear", "dynamic", "yarn", "llama3"):
        what = f"{kind} is no way to stretch positions"
        reading.refuse("rope_scaling", what, "write linear, dynamic, yarn or llama3")
    elif not isinstance(length, int) or not isinstance(most, int):
        what = f"the factor follows from the length that {model} was trained on, which no config.json here says"
        hint = (
            f"download it (hf download {model} config.json), or write rope_parameters, such as "
            "{rope_type: yarn, factor: 4.0, "
            "rope_theta: 1000000.0}, into model.config_overrides"
        )
        reading.refuse("rope_scaling", what, hint)
    elif most <= length:
        reading.passed["rope_scaling"] = f"the model takes {counted(length, 'position')}, and cutoff_len is {most}"
    else:
        factor = float(math.ceil(most / length))
        stretched: dict[str, object] = {"rope_type": str(kind), "factor": factor}
        if (theta := before.get("rope_theta", config.get("rope_theta"))) is not None:
            stretched["rope_theta"] = theta
        if kind != "linear":
            stretched["original_max_position_embeddings"] = length
        if kind == "llama3":
            stretched |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        reading.set("model.config_overrides.rope_parameters", stretched, "rope_scaling")
        reading.set("model.config_overrides.max_position_embeddings", int(length * factor), "rope_scaling")


def read_generation(reading: Translator) -> None:
    """How answers are drawn; their defaults hold once a file says anything of it."""
    table = reading.peer.table["defaults"]["generation"]
    if reading.take("stage") == "ppo" or not any(key in reading.entries for key in table):
        return
    reading.fill_in("defaults", "generation")
    draws, beams = reading.flag("do_sample"), reading.take("num_beams")
    reading.set("generate.do_sample", draws, "do_sample")
    for key in _SAMPLING:
        value = reading.take(key)
        if draws:
            reading.set(f"generate.{key}", value, key)
        elif key not in reading.defaults:
            reading.passed[key] = "do_sample is false, and the likeliest token is taken"
    if beams not in (None, 1):
        reading.set("generate.num_beams", beams, "num_beams")
    penalty = reading.take("length_penalty")
    if beams not in (None, 1):
        reading.set("generate.length_penalty", penalty, "length_penalty")
    elif "length_penalty" not in reading.defaults:
        reading.passed["length_penalty"] = "only a search with beams reads it, and num_beams is 1"
    if (penalty := reading.take("repetition_penalty")) not in (None, 1, 1.0):
        reading.set("generate.repetition_penalty", penalty, "repetition_penalty")
    new, whole = reading.take("max_new_tokens"), reading.take("max_length")
    if isinstance(new, int) and new > 0:
        reading.set("generate.max_new_tokens", new, "max_new_tokens")
        if "max_length" not in reading.defaults:
            reading.passed["max_length"] = "max_new_tokens says how long an answer is"
    else:
        reading.set("generate.max_length", whole, "max_length")
    reading.take("skip_special_tokens")
    if "skip_special_tokens" not in reading.defaults:
        reading.passed["skip_special_tokens"] = "answers are shown without special tokens, and their ids are kept whole"


def read_ppo(reading: Translator) -> None:
    """``stage: ppo``: the size of a step, how answers are drawn, and what judges them."""
    reading.fill_in("defaults", "ppo")
    reading.fill_in("defaults", "generation")
    rows, turns = reading.take("per_device_train_batch_size"), reading.take("gradient_accumulation_steps") or 1
    if isinstance(rows, int) and isinstance(turns, int):
        reading.set("rollout.prompts_per_step", rows * turns, "per_device_train_batch_size")
        reading.told.append(
            f"per_device_train_batch_size x gradient_accumulation_steps: a step has {counted(rows * turns, 'prompt')}, "
            "on all processes together"
        )
    reading.read.discard("per_device_train_batch_size")
    reading.set("rollout.answers", 1, "stage")
    _buffer(reading)
    reading.set("objective.kl_target", reading.take("ppo_target"), "ppo_target")
    for key, way in (("ppo_score_norm", "remove the line, or scale the reward by rollout.rewards[0].weight"),
                     ("ppo_whiten_rewards", "remove the line: advantages are whitened in each step")):  # fmt: skip
        if reading.flag(key):
            reading.refuse(key, "rewards are not normalised over a run", way)
    reading.set("rollout.max_new_tokens", reading.take("max_new_tokens"), "max_new_tokens")
    reading.set("rollout.temperature", reading.take("temperature"), "temperature")
    for key in reading.peer.table["defaults"]["generation"]:
        if key not in ("max_new_tokens", "temperature"):
            reading.take(key)
            if key not in reading.defaults:
                reading.passed[key] = "what is learned from is drawn from all tokens, by rollout.temperature"
    _reward(reading)


def _buffer(reading: Translator) -> None:
    """How often answers of the same weights are learned from: ``ppo_epochs`` passes over ``ppo_buffer_size`` steps."""
    epochs, size, steps = reading.take("ppo_epochs"), reading.take("ppo_buffer_size"), reading.take("max_steps")
    reading.set("rollout.passes", epochs, "ppo_epochs")
    reading.set("rollout.updates", size, "ppo_buffer_size")
    if isinstance(steps, int) and isinstance(size, int) and steps > 0:
        reading.set("train.max_steps", steps * size, "max_steps")
    elif steps is not None:
        reading.read.discard("max_steps")
    if isinstance(size, int) and size > 1:
        reading.told.append(
            f"ppo_buffer_size: {counted(size, 'step learns', 'steps learn')} from answers of the same weights, each "
            "from its own; LLaMA-Factory calls them all one step, so keys in steps count other steps here"
            + (f", and max_steps {steps:,} are {steps * size:,}" if isinstance(steps, int) and steps > 0 else "")
        )
    if isinstance(epochs, int) and epochs > 1:
        reading.told.append(
            f"ppo_epochs: each step learns {epochs} times from its answers before the next one does, where "
            "LLaMA-Factory goes through all answers of its buffer, and then again"
        )


def _reward(reading: Translator) -> None:
    named, kind = reading.take("reward_model"), reading.take("reward_model_type")
    adapters, bits = reading.take("reward_model_adapters"), reading.take("reward_model_quantization_bit")
    if named is None:
        reading.refuse("stage", "no reward_model is named, so nothing judges the answers", "reward_model: FOLDER")
        return
    if kind not in _REWARDS:
        reading.refuse("reward_model_type", f"{kind} is no kind of reward model", "write lora, full or api")
        return
    reward = {_REWARDS[str(kind)]: str(named)}
    if kind == "full" and adapters is not None:
        first, *others = names_of(adapters)
        if others:
            reading.refuse("reward_model_adapters", "a reward model has one adapter", "merge the others into the model")
        reward["adapter"] = first
    if kind == "full" and bits in (4, 8):
        reward["quantization"] = "nf4" if bits == 4 else "int8"
    elif bits not in (None, 4, 8):
        reading.refuse("reward_model_quantization_bit", f"{bits} bits are not there", "write 4 or 8")
    reading.set("rollout.rewards", [reward], "reward_model")
    says = {
        "lora": "an adapter with its head, as stage: rm leaves it here, on the run's own base",
        "full": "a model with its head, as stage: rm leaves it here",
        "api": "the server is asked as docs/rl.md says, and not by LLaMA-Factory's request",
    }
    reading.told.append(f"reward_model: {says[str(kind)]}")
