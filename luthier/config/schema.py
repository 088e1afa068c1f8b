"""The typed run description: what a config file may say, with every default and the reason for it.

Names are Hugging Face's where the thing is theirs. `luthier.config.loading.load_config` reads a YAML file into a
`RunConfig`; this module only says what is allowed. It imports neither torch nor transformers.
"""

# ruff: noqa: RUF012 (pydantic copies defaults; the base class is in another file, so ruff cannot know)

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from luthier.config import choices
from luthier.config.inputs import DataConfig, MediaConfig, ModelConfig, Section, TemplateConfig
from luthier.config.objective import ObjectiveConfig
from luthier.config.optimizers import OPTIMIZERS
from luthier.config.rollout import RolloutConfig


class AdapterConfig(Section):
    """Which weights are trained. ``adapter: lora`` is short for ``adapter: {type: lora}``."""

    shorthand = "type"

    type: Annotated[choices.AdapterType, choices.as_enum(choices.AdapterType)] = choices.AdapterType.FULL
    """``full``: all weights; ``freeze``: some layers; ``llama_pro``: new layers between the old; ``lora``, ``oft``:
    small matrices beside frozen weights; ``vera``: two vectors for each weight ([adapters.md](adapters.md))."""
    train_parts: choices.Parts = [choices.ModelPart.LANGUAGE_MODEL]
    """Of a multimodal model: ``language_model``, ``projector`` (between encoder and language model), ``tower`` (the
    encoder of images, video or audio). The others keep their weights; LoRA and OFT adapt these parts only.
    ``freeze`` names its layers and modules itself."""
    train_routers: bool = True
    """Whether the routers, which choose the experts of a token, are trained."""
    expand_layers: choices.Size | None = None
    """``llama_pro``: how many decoder layers are inserted, evenly spaced; only they are trained."""
    freeze_trainable_layers: choices.Whole | None = None
    """``freeze``: train the last n layers (negative: the first n)."""
    freeze_spread: bool = False
    """``freeze``: these n layers are the last of n groups of equal size, as LLaMA-Pro's script puts new ones between
    the old, not the last of all."""
    freeze_trainable_modules: choices.Texts = []
    """``freeze``: patterns (``fnmatch`` on parameter names) of what is trained besides, such as ``*lm_head*``; after
    ``regex:`` a regular expression that the whole name matches."""
    r: choices.Size = 16
    """Rank of LoRA's and VeRA's matrices; VeRA wants some hundreds."""
    lora_alpha: choices.Positive | None = None
    """Scale of LoRA's update; default twice the rank."""
    lora_dropout: choices.Share = 0.0
    """Share of LoRA's and VeRA's inputs that is dropped in training."""
    target_modules: choices.Texts = ["all-linear"]
    """``all-linear``, or patterns of module names, such as ``self_attn.*``; ``regex:`` before one makes it a regular
    expression that the whole name matches, as PEFT takes it."""
    target_parameters: choices.Texts = []
    """LoRA on parameters that are in no linear layer of their own, such as the fused experts
    ``mlp.experts.gate_up_proj``: ends of their names."""
    rank_pattern: dict[choices.NonEmpty, choices.Size] = {}
    """LoRA: another rank for modules whose names end so, such as ``{down_proj: 64}``."""
    alpha_pattern: dict[choices.NonEmpty, choices.Positive] = {}
    """LoRA: another ``lora_alpha`` for such modules."""
    modules_to_save: choices.Texts = []
    """Modules trained in full, in float32, and saved with the adapter, such as ``lm_head``."""
    use_rslora: bool = False
    """Scale by alpha over the root of the rank (rank-stabilized LoRA)."""
    use_dora: bool = False
    """Train the norm of each weight apart from its direction (DoRA)."""
    init_lora_weights: (
        bool
        | Literal["gaussian", "pissa", "olora", "orthogonal", "eva", "corda", "lora_ga", "loftq"]
        | Annotated[str, Field(pattern=r"^pissa_niter_[1-9]\d{0,3}$", examples=["pissa_niter_16"])]
    ) = True
    """``pissa`` starts from the principal singular directions; ``pissa_niter_16`` finds them nearly, in 16 quick steps
    or as many as you write; ``eva`` from the directions in which the inputs of each layer vary most, over the first
    rows, ``corda`` from the part of each weight that matters most to these inputs, ``lora_ga`` from the first gradient
    of each weight; ``loftq`` from what ``model.quantization`` rounds away. Where a part of the base becomes the
    adapter (``pissa``, ``olora``, ``corda``, ``lora_ga``), a plain LoRA is saved. ``false``: both matrices are random,
    so training begins with another model than its base; not for losses that compare with the model at the beginning."""
    loraplus_lr_ratio: choices.Positive | None = None
    """LoRA+: learning rate of B over that of A."""
    oft_block_size: choices.Size = 32
    """``oft``: size of the orthogonal blocks."""
    name_or_path: choices.NonEmpty | None = None
    """An existing adapter to go on from."""
    merge_first: choices.Texts = []
    """Existing adapters that are merged into the model before, in this order; any that PEFT can merge."""
    merge: bool = False
    """Also save the model with the adapter merged in, in ``merged/``."""


class TrainConfig(Section):
    """How it is learned; Hugging Face's names and meanings."""

    enabled: bool = True
    """``false``: the description is of a model that answers, and of rows that it answers (``data.eval``), if any;
    nothing is trained, and no training data is needed."""
    num_train_epochs: choices.Epochs = 3.0
    """Passes over the training data; 0.5 is half a pass."""
    max_steps: choices.Count | None = None
    """Stop after this many optimizer steps; overrides ``num_train_epochs``."""
    packing: Annotated[choices.Packing, choices.as_enum(choices.Packing)] = choices.Packing.WINDOW
    """``window``: sequences share rows of ``data.max_length`` tokens, isolated from each other, packed some thousands
    at a time while others are still to come; ``best_fit``: all at once; ``split``: plain text cut into full rows;
    ``none``: padded ([packing.md](packing.md))."""
    shared_prompts: bool | Literal["auto"] = "auto"
    """Compute once what sequences of a row have in common: the prompt of two answers that are compared (``rm``,
    ``dpo``, ``kto``), and the turns before an answer where the template rewrites history (``sft``). ``auto``: wherever
    rows are packed, unless the attention is FlashAttention's own."""
    per_device_train_batch_size: choices.Size = 1
    """Rows (packs, or padded sequences) per device and micro-batch."""
    pad_to_multiple_of: choices.Tokens = 1
    """Rows of a batch, packed or padded, are filled up to a multiple of this many tokens. With the value of
    ``data.max_length`` all have one length, as pipelines and compiled models want it."""
    gradient_accumulation_steps: choices.Size = 1
    """Micro-batches per optimizer step."""
    tokens_per_step: choices.Count | None = None
    """Instead: a step goes on until it has at least this many tokens, on all devices together."""
    learning_rate: choices.Rate = 2e-5
    """Highest learning rate of the schedule. LoRA usually wants about ten times the rate of full training."""
    learning_rates: dict[Annotated[choices.RatePart, choices.as_enum(choices.RatePart)], choices.Rate] = {}
    """Another highest rate for parts of the model: ``embedding``, ``output_layer``, ``router`` (of experts),
    ``projector``, ``tower``; ``adapter.loraplus_lr_ratio`` is that of LoRA's B ([optimizers.md](optimizers.md))."""
    layer_decay: choices.Fraction = 1.0
    """Below 1: each decoder layer has this much of the rate of the layer above it, and the embedding of the first."""
    lr_scheduler_type: Literal[choices.SCHEDULERS] = "cosine"  # type: ignore[valid-type]
    """How the learning rate falls after the warmup."""
    lr_scheduler_kwargs: dict[str, Any] = {}
    """Further settings of the schedule, such as ``{min_lr_rate: 0.1}``."""
    warmup_steps: choices.ShareOrCount = 0.03
    """Steps over which the learning rate rises: a share of all steps below 1, else a number of steps."""
    optim: Literal[tuple(OPTIMIZERS)] = "adamw_torch"  # type: ignore[valid-type]
    """An optimizer by transformers' name, or ``muon``, ``badam``, ``adam_mini`` ([optimizers.md](optimizers.md))."""
    optim_args: choices.OptimizerSettings = {}
    """Settings of this optimizer alone, such as ``{rank: 64}`` of ``galore_adamw``; ``rank=64,scale=0.5`` can be
    written too ([optimizers.md](optimizers.md))."""
    offload: Annotated[
        list[Annotated[choices.Offload, choices.as_enum(choices.Offload)]], BeforeValidator(choices.as_list)
    ] = []
    """What is kept in the CPU's memory: ``optimizer`` (states and updates), ``activations`` (what the backward pass
    needs). Less memory of the GPU and more time; the numbers stay the same."""
    weight_decay: choices.NonNegative = 0.0
    """Decay of all weights but biases and norms."""
    adam_beta1: choices.Share = 0.9
    """Adam's memory of gradients."""
    adam_beta2: choices.Share = 0.999
    """Adam's memory of squared gradients."""
    adam_epsilon: choices.Positive = 1e-8
    """Adam's guard against division by zero."""
    router_aux_loss_coef: choices.NonNegative | None = None
    """Weight of the loss that balances the load of experts, over all tokens of a step ([objectives.md](objectives.md));
    default that of the model's config, 0 none."""
    max_grad_norm: choices.NonNegative = 1.0
    """Gradients are scaled down to this norm; 0 leaves them alone."""
    precision: Annotated[choices.Precision, choices.as_enum(choices.Precision)] = choices.Precision.AUTO
    """Numeric type of the computation. ``auto``: bf16 where the device has it, else fp32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    neftune_noise_alpha: choices.Positive | None = None
    """Strength of noise on embeddings (NEFTune). It is divided by the root of a row's length, as transformers does:
    packed rows are longer than single ones, and get less noise."""
    torch_compile: bool = False
    """Compile each decoder layer with torch. Rows of one length (``pad_to_multiple_of``) suit it best. What is told
    where segments begin (attention ``luthier_segments``, recurrent layers) runs between the graphs, as it is."""
    head_kernel: Annotated[choices.HeadKernel, choices.as_enum(choices.HeadKernel)] = choices.HeadKernel.AUTO
    """What computes losses from the hidden states of targets: ``chunked``, our own; ``liger``, Liger's kernel, once it
    has given the same loss and gradients on the run's first row; ``auto``: Liger's on a GPU where the package is
    installed and does so ([objectives.md](objectives.md))."""


class EvalConfig(Section):
    """When and how the model is evaluated on the held-out rows."""

    strategy: Annotated[choices.Strategy, choices.as_enum(choices.Strategy)] = choices.Strategy.EPOCH
    """When to evaluate, if there is eval data."""
    steps: choices.Interval = 500
    """Optimizer steps between evaluations, for ``strategy: steps``; below 1 a share of all steps."""
    per_device_eval_batch_size: choices.Size = 1
    """Rows per device in evaluation."""
    generate_rows: choices.Natural = 0
    """Answer this many held-out rows, as the section ``generate`` says (by greedy search), before and after training,
    and report exact match. With ``objective: rl`` also at each evaluation, and with the rewards of these answers and of
    ``rollout.answers`` that are drawn to each row."""
    metrics: choices.Texts = []
    """What else is measured of these answers: names of metrics ([predict.md](predict.md#metrics)), as ``rougeL`` or
    ``regex:#### (-?\\d+)``."""
    max_new_tokens: choices.Tokens | None = None
    """Longest answer in such a generation, in tokens. Default: ``generate.max_new_tokens``."""
    early_stopping_patience: choices.Count | None = None
    """Stop when ``metric_for_best_model`` has not improved for this many evaluations."""
    early_stopping_threshold: choices.NonNegative = 0.0
    """How much better counts as an improvement."""
    metric_for_best_model: Literal["loss", "perplexity", "token_accuracy", "accuracy"] = "loss"
    """What decides which checkpoint is the best, and what the schedules ``reduce_lr_on_plateau`` and ``greedy`` go by;
    ``accuracy`` is that of pairs and verdicts."""
    load_best_model_at_end: bool = False
    """End with the best checkpoint instead of the last."""


JUDGE_PLACES = ("question", "answer", "expected", "low", "high")  # what a prompt of a judge may name in braces


class JudgeConfig(Section):
    """The metric ``judge``: a model behind a server gives answers a score ([predict.md](predict.md#a-judge))."""

    shorthand = "url"

    url: choices.NonEmpty | None = None
    """The server, which speaks OpenAI's chat interface (``http://localhost:8000``), as vLLM, SGLang, llama.cpp and
    ``luthier serve`` do. Default: none, and there is no metric ``judge``."""
    model: choices.NonEmpty | None = None
    """Name of the model that judges. Default: the first that the server lists."""
    prompt: choices.NonEmpty | None = None
    """What the judge is asked. ``{answer}`` has to stand in it; ``{question}``, ``{expected}``, ``{low}`` and
    ``{high}`` may. A paragraph with ``{expected}`` is left out for a row that holds no answer. Default: the one in
    [predict.md](predict.md#a-judge)."""
    low: choices.Signed = 1.0
    """Lowest score."""
    high: choices.Signed = 10.0
    """Highest score. What lies outside of the scale is counted, and is no score."""
    max_new_tokens: choices.Tokens = 512
    """Longest reply of the judge, in tokens."""
    token_env: choices.NonEmpty | None = None
    """The environment variable that holds the server's token."""
    timeout: choices.Positive = 60.0
    """Seconds that a reply may take; an answer whose reply is late is counted, and has no score."""
    batch_size: choices.Size = 8
    """Answers that the server is asked about at a time."""

    @model_validator(mode="after")
    def _a_prompt_and_a_scale(self) -> Self:
        named = {"answer"} if self.prompt is None else set(re.findall(r"\{([a-z_]+)\}", self.prompt))
        if strange := sorted(named - set(JUDGE_PLACES)):
            raise ValueError(f"prompt names {{{strange[0]}}}, which is none of {', '.join(JUDGE_PLACES)}")
        if "answer" not in named:
            raise ValueError("prompt has no {answer}, so that every answer would be judged alike")
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}")
        return self


class GenerateConfig(Section):
    """How answers are generated; transformers' names. What the model's own ``generation_config.json`` says of sampling,
    penalties and lengths is not followed, only its stop tokens are; a run tells what it passes over."""

    max_new_tokens: choices.Tokens = 256
    """Longest answer, in tokens."""
    max_length: choices.Tokens | None = None
    """Longest prompt and answer together, in tokens."""
    do_sample: bool = False
    """Draw tokens by their probability instead of taking the likeliest."""
    temperature: choices.Temperature | None = None
    """Of sampling: below 1 likely tokens become likelier."""
    top_p: choices.AboveZero | None = None
    """Of sampling: only the likeliest tokens that together have this probability."""
    top_k: choices.Count | None = None
    """Of sampling: only this many of the likeliest tokens."""
    min_p: choices.Proportion | None = None
    """Of sampling: only tokens with at least this share of the likeliest one's probability."""
    seed: choices.Seed | None = None
    """Of sampling. Default: ``runtime.seed``. Training draws its own numbers, which are not touched."""
    num_beams: choices.Size = 1
    """Beams of the search; 1 is greedy search or sampling."""
    length_penalty: choices.Signed | None = None
    """Of beams: above 0 long answers are preferred, below 0 short ones."""
    repetition_penalty: choices.Penalty | None = None
    """Above 1, tokens that already occur become less likely."""
    no_repeat_ngram_size: choices.Count | None = None
    """No sequence of this many tokens occurs twice."""
    stop_strings: choices.Texts = []
    """Texts that end an answer, which ends before them. Stop tokens of the tokenizer and the template end it too."""
    stop_token_ids: list[choices.Natural] = []
    """Further ids that end an answer."""


class ServeConfig(Section):
    """Limits of ``luthier serve``: a request over one of them is refused, with the number ([serve.md](serve.md))."""

    max_body: choices.Count = 20_000_000
    """Largest request, in bytes; images and audio in it count as base64 writes them."""
    max_context: choices.Tokens | None = None
    """Longest prompt and answer together, in tokens. Default: what the model's config says, else 32768."""
    max_tokens: choices.Tokens = 4096
    """Longest answer that may be asked for, in tokens; a request without a length gets ``generate.max_new_tokens``."""
    max_samples: choices.Size = 16
    """Most answers to one request (``n``)."""
    max_requests: choices.Size = 64
    """Most requests that are answered or wait at a time."""
    max_media: choices.Size = 16
    """Most images, videos and audio of a request."""
    max_pixels: choices.Count = 50_000_000
    """Most pixels of all images of a request together."""
    timeout: choices.Positive = 600.0
    """Seconds from a request's first byte to the last of its answer."""
    hosts: choices.Texts = []
    """Names that clients may call the server by, beside addresses and this machine's own (their ``Host`` header)."""


RUN_CONFIG = "run_config.json"  # the resolved description of a run, in its folder


class OutputConfig(Section):
    """Where results go."""

    dir: choices.PathLike = Path("output")
    """Folder of the run: checkpoints, the final model, logs, report."""
    overwrite: bool = False
    """Start anew in a folder that already holds a run: all that it left is deleted, its predictions too."""
    resume: choices.NonEmpty = "auto"
    """``auto``: go on from the newest whole checkpoint in ``dir``, if any; ``never``; or a checkpoint's path. From
    another folder the log up to it is brought along, and ``dir`` must hold no other run."""
    save_strategy: Annotated[choices.Strategy, choices.as_enum(choices.Strategy)] = choices.Strategy.EPOCH
    """When to save a checkpoint."""
    save_steps: choices.Interval = 500
    """Optimizer steps between checkpoints, for ``save_strategy: steps``; below 1 a share of all steps."""
    save_total_limit: choices.Count | None = 3
    """Keep this many checkpoints, the newest; ``null`` keeps all."""
    save_only_model: bool = False
    """Leave optimizer state out of checkpoints; such a run cannot be resumed."""


class ExportConfig(Section):
    """How ``luthier export`` writes a trained run as a model folder for others."""

    dir: choices.PathLike | None = None
    """Folder of the exported model; ``--to`` wins over it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the exported weights. ``auto``: the one that the run has them in."""
    max_shard_gb: choices.Positive = 5.0
    """Most gigabytes that a file of weights has; a larger model is written as several files."""
    format: Literal["hf", "gguf"] = "hf"
    """``hf``: a folder as transformers and vLLM load it; ``gguf``: one file for llama.cpp."""
    quantize: Literal["int8", "fp8", "w8a8", "fp8_dynamic", "w4a16"] | None = None
    """Linear layers in fewer bits: ``int8`` or ``fp8`` by torchao, as transformers loads them; ``w8a8``, ``w4a16`` or
    ``fp8_dynamic`` as compressed-tensors, as vLLM loads them, by llmcompressor. Embeddings, the output layer and
    routers keep ``dtype``. Default: nothing is quantized."""
    llmcompressor: choices.PathLike | None = None
    """The Python of an environment in which llmcompressor is installed, such as ``llmc/bin/python``."""
    calibration_rows: choices.Count = 256
    """Most of the run's rows that ``w8a8`` and ``w4a16`` are calibrated on, in the ids of training."""
    outtype: Literal["f32", "f16", "bf16", "q8_0"] = "bf16"
    """Type of the weights in a GGUF file."""
    llama_cpp: choices.PathLike | None = None
    """A clone of llama.cpp with its converter. Default: the converter is fetched once, by pip."""
    pre_tokenizer: choices.NonEmpty | None = None
    """llama.cpp's name for the way in which the tokenizer cuts texts into words (``qwen2``, ``llama-bpe`` …), for
    a GGUF file. Default: the name by which its converter knows it, or the one that fits ``tokenizer.json``."""
    modelfile: bool = False
    """Write a Modelfile for Ollama beside a GGUF file ([export.md](export.md#ollama))."""
    push: choices.NonEmpty | None = None
    """A repository on the Hub (``NAME/MODEL``) that the folder is uploaded to once it is proven and in place."""
    public: bool = False
    """Create a new repository as a public one."""

    @model_validator(mode="after")
    def _quantized_once(self) -> Self:
        if self.quantize is not None and self.format != "hf":
            raise ValueError(f"quantize: {self.quantize} is for format hf; a GGUF file has outtype: q8_0 instead")
        if self.outtype != "bf16" and self.format != "gguf":
            raise ValueError(f"outtype: {self.outtype} is of weights in GGUF files; set format: gguf, or dtype")
        if self.public and self.push is None:
            raise ValueError("public is about the repository that push names; set push: NAME/MODEL")
        if self.quantize in ("w8a8", "fp8_dynamic", "w4a16") and self.llmcompressor is None:
            raise ValueError(
                f"quantize: {self.quantize} is done by llmcompressor, in an environment of its own; "
                "set llmcompressor: to the path of its Python"
            )
        if self.llmcompressor is not None and self.quantize not in ("w8a8", "fp8_dynamic", "w4a16"):
            raise ValueError("llmcompressor writes w8a8, fp8_dynamic and w4a16; set quantize to one of them")
        if self.modelfile and self.format != "gguf":
            raise ValueError("modelfile: Ollama reads GGUF files; set format: gguf")
        if self.pre_tokenizer is not None and self.format != "gguf":
            raise ValueError("pre_tokenizer is written into GGUF files alone; set format: gguf")
        return self


class TrackingConfig(Section):
    """What is logged, and where to."""

    report_to: Annotated[list[Literal[choices.TRACKERS]], BeforeValidator(choices.as_list)] = []  # type: ignore[valid-type]
    """Trackers by transformers' names: tensorboard, wandb, mlflow, comet_ml, trackio, swanlab … They get every
    number of the log, transformers' arguments, and the settings that the run description gives. A tracker that fails
    at its beginning ends the run; if one fails later, the run says so and goes on without it."""
    run_name: choices.NonEmpty | None = None
    """Name of the run in trackers."""
    logging_steps: choices.Count = 1
    """Optimizer steps between log lines."""
    progress: bool = True
    """Show a progress bar."""


class RuntimeConfig(Section):
    """The machine."""

    seed: choices.Seed = 42
    """Fixes the order of rows, samples of rows, and random weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: a GPU if there is one."""
    dataloader_num_workers: choices.Processes = 0
    """Processes that collate batches. Text batches cost less than a message between processes. Here, as of ``threads``
    and ``data.workers``, eight times as many as there are cores are the most (32 on a small machine)."""
    threads: choices.Threads | None = None
    """CPU threads for torch; default: all cores."""
    sharding: Annotated[choices.Sharding, choices.as_enum(choices.Sharding)] = choices.Sharding.NONE
    """What several processes hold of the model: ``none``, all of it each; ``fsdp``, a share of weights, gradients and
    optimizer state ([packing.md](packing.md), section 8)."""
    rank_timeout: choices.Positive = 1800.0
    """Seconds that a rank waits for the others, one of which may save or answer questions meanwhile, before it gives
    them up and names the one that hangs."""


class RunConfig(Section):
    """A whole run."""

    model: ModelConfig
    data: DataConfig
    template: TemplateConfig = TemplateConfig()
    media: MediaConfig = MediaConfig()
    train: TrainConfig = TrainConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    adapter: AdapterConfig = AdapterConfig()
    eval: EvalConfig = EvalConfig()
    generate: GenerateConfig = GenerateConfig()
    judge: JudgeConfig = JudgeConfig()
    serve: ServeConfig = ServeConfig()
    rollout: RolloutConfig = RolloutConfig()
    output: OutputConfig = OutputConfig()
    export: ExportConfig = ExportConfig()
    tracking: TrackingConfig = TrackingConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @property
    def goes_by_metric(self) -> bool:
        """Whether ``eval.metric_for_best_model`` decides something: a checkpoint, the end, or the learning rate."""
        chosen = self.eval.load_best_model_at_end or self.eval.early_stopping_patience is not None
        return chosen or self.train.lr_scheduler_type in choices.FOLLOWS_MEASURE
