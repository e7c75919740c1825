"""The models of a run, its tokenizer and its memory plan, as the options of a recipe describe them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch

from ligerzoo import Tokenizer
from ligerzoo.adapters import add_lora, freeze_all_but
from ligerzoo.convert import OTHER_ARCHITECTURE
from ligerzoo.convert.fields import stored_dtype
from ligerzoo.device import emulated_dtypes, hint_of_dtype, loads_as_float32
from ligerzoo.errors import ConfigError, LigerzooError
from ligerzoo.files.layout import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, TEMPLATE_FILE
from ligerzoo.files.untrusted import read_json
from ligerzoo.hub import AutoModel, AutoModelForMaskedLM, read_config
from ligerzoo.memory import ActivationPlan, apply_activation_plan, plan_activations
from ligerzoo.memory.plan import plan_checkpointing
from ligerzoo.memory.simulation import SimulationError
from ligerzoo.models import CausalLM, MaskedLM
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.optimizer_table import OPTIMIZER_NAMES, check_optimizer
from ligerzoo.parallel import initialize_sharded, keep_gathered, load_sharded, parallelize
from ligerzoo.parallel.mesh import check_mesh
from ligerzoo.text.chat_template import ChatTemplate, read_template
from ligerzoo.train import processes
from ligerzoo.train.run_options import RunOptions
from ligerzoo.train.run_state import RunState
from ligerzoo.training_setting import TrainingSetting
from ligerzoo.vision.processor import Processor, load_processor_or_tokenizer, tokenizer_of


def checkpoint_directory(model: str | Path) -> str:
    """Returns the directory of a config.json; other names of a checkpoint unchanged."""
    path = Path(model)
    return str(path.parent if path.suffix == ".json" and path.is_file() else model)


def lacks_weights(model: str | Path) -> bool:
    """Returns whether MODEL is a config.json, or a directory without weights in safetensors files."""
    directory = checkpoint_directory(model)
    has_weights = any((Path(directory) / name).exists() for name in (SINGLE_FILE, INDEX_FILE))
    return directory != str(model) or (os.path.isdir(directory) and not has_weights)


def open_model(
    model: str | Path,
    *,
    dtype: str,
    device: torch.device,
    new: bool = False,
    adapt: Callable[[CausalLM], object] | None = None,
    param_dtype: torch.dtype | None = None,
    model_class: type[LanguageModel] = CausalLM,
    arguments: Mapping[str, Any] = MappingProxyType({}),
    trained_on: torch.device | None = None,
) -> CausalLM:
    """Loads a checkpoint, or builds a model with random weights, in training mode. Several processes divide it.

    Args:
        model: hub id or directory; if `new`, also the path of a config.json, whose directory is not searched for
            weights.
        dtype: dtype of the weights; "auto" for that of the checkpoint, and float32 for random weights.
        device: device of the weights; meta for shapes alone, which are not sharded.
        new: whether a config without weights gets random weights; otherwise it is an error.
        adapt: called with the model before it is sharded, to add adapters or to freeze parameters. Several processes
            then read the whole model from memory-mapped files, which they share.
        param_dtype: dtype in which several processes compute, see `shard_model`.
        model_class: class of the model.
        arguments: further arguments of its `from_pretrained`.
        trained_on: where a model on the meta device will be trained; None for `device`. If that device emulates the
            stored dtype, "auto" is float32.
    """
    directory, is_config, mesh = checkpoint_directory(model), lacks_weights(model), processes.mesh()
    is_alone = processes.world_size() == 1 or device.type == "meta"
    build: Callable[[torch.device], CausalLM]
    if new and is_config:
        dtype = "float32" if dtype == "auto" else dtype
        config = read_config(directory)

        def build(device: torch.device) -> CausalLM:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                auto = AutoModelForMaskedLM if issubclass(model_class, MaskedLM) else AutoModel
                built = cast(CausalLM, auto.from_config(config, dtype=dtype, device=device))
            if device.type != "meta":
                built.init_weights()  # from the seed, as `initialize_sharded` does; constructors have another order
            return built
    else:
        if dtype == "auto" and (emulated := emulated_dtypes(trained_on or device)):
            stored = model_class.from_pretrained(model, dtype=dtype, device="meta", **arguments).dtype
            stored = model_class.from_pretrained(model, dtype=dtype, device="meta", **arguments).dtype
            if stored in emulated:
                dtype = "float32"
                if trained_on is not None:  # otherwise it has been said
                    processes.say(loads_as_float32(stored))

        def build(device: torch.device) -> CausalLM:
            loaded = model_class.from_pretrained(model, dtype=dtype, device=device, **arguments)
            return cast(CausalLM, loaded)  # or another model: run and recipe use what all have

    if is_alone or adapt is not None:
        built = build(device if is_alone else torch.device("cpu"))
        if adapt is not None:
            adapt(built)
        return built.train() if is_alone else parallelize(built, mesh, param_dtype=param_dtype).train()
    if new and is_config:
        built = parallelize(build(torch.device("meta")), mesh, param_dtype=param_dtype)
        initialize_sharded(built)
        return built.train()
    sharded = load_sharded(model, mesh, model_class=model_class, dtype=dtype, param_dtype=param_dtype, **arguments)
    return cast(CausalLM, sharded.train())


def open_processor(options: RunOptions, run: RunState) -> Processor | Tokenizer:
    """Loads the processor of a model that reads images; the tokenizer of other models, or if the options name one.

    Raises:
        ConfigError: The preprocessing is not supported.
        LigerzooError: See `open_template`.
    """
    processor: Processor | Tokenizer
    saved = _saved_tokenizer(options, run)
    if options.tokenizer is not None:
        processor = Tokenizer.from_pretrained(saved or options.tokenizer)
    else:
        processor = load_processor_or_tokenizer(saved or checkpoint_directory(options.model))
    template = open_template(options, run)
    if template is not None:
        tokenizer_of(processor).set_chat_template(template.source, template.where)
    return processor


def open_template(options: RunOptions, run: RunState) -> ChatTemplate | None:
    """Reads the chat template that the options name; None without one, or if the tokenizer of a checkpoint has it.

    Raises:
        ConfigError: The file cannot be read, or has changed since the run began.
        TemplateError: The template is malformed.
    """
    if options.chat_template is None:
        return None
    _refuse_other_template(options.chat_template, run.checkpoint)
    if _saved_tokenizer(options, run) is not None:
        return None
    template = ChatTemplate(read_template(options.chat_template), options.chat_template)
    template.variables  # noqa: B018 - raises if the template is malformed
    return template


def _saved_tokenizer(options: RunOptions, run: RunState) -> Path | None:
    """Returns the checkpoint to load the tokenizer from, if any.

    The checkpoint of an adapter has no config.json, which names the preprocessing.
    """
    return None if options.lora_rank and options.tokenizer is None else run.checkpoint


def _refuse_other_template(template: str, checkpoint: Path | None) -> None:
    """Refuses a file with another text than the template of a checkpoint. The file may be missing."""
    files = [] if checkpoint is None else [Path(template), checkpoint / TEMPLATE_FILE]
    texts = {read_template(file) for file in files} if all(file.exists() for file in files) else set()
    if len(texts) > 1:
        what, remedy = "the file has changed since the run began", f"Continue with the text of {files[1]}."
        raise ConfigError(what, where="option chat_template", got=template, remedy=remedy)


def open_meta_model(
    options: RunOptions, run: RunState, trained_on: torch.device | None = None, *, new: bool = False
) -> CausalLM:
    """Returns the model on the meta device, for plans, after checks of what would go wrong without an error.

    Args:
        trained_on: the device of the training.
        new: whether a config without weights is a new model, see `open_model`.

    Raises:
        ConfigError: A check fails, see `check_model`, or a new model would have an adapter.
    """
    if new and options.lora_rank is not None and lacks_weights(options.model):
        what, expected = "an adapter needs trained weights: the random ones would not be saved", "a model with weights"
        remedy = "Train all weights of a new model."
        raise ConfigError(what, where="option lora_rank", got=options.model, expected=expected, remedy=remedy)
    source, adapt = _source(options, run), adaptation(options)
    try:
        meta_model = open_model(
            source,
            dtype=options.dtype,
            device=torch.device("meta"),
            new=new,
            adapt=adapt,
            model_class=options.model_class,
            arguments=options.model_arguments,
            trained_on=trained_on,
        )
    except ConfigError as error:
        if error.what != OTHER_ARCHITECTURE:
            raise
        methods = "sft, or another one for causal language models" if options.model_class is MaskedLM else "mlm"
        raise error.replaced(remedy=f"Train it with --method {methods}.") from error
    check_model(meta_model, options.optimizer)
    return meta_model


def similar_meta_model(options: RunOptions) -> CausalLM | None:
    """Returns a model on the meta device with which a dry run goes on although the one that trains cannot be opened.

    It is that of MODEL's config.json, if there are no weights; or that of MODEL without adapters, and with all
    parameters trained. None if that fails too.
    """
    path, dtype, is_new = Path(checkpoint_directory(options.model)) / CONFIG_FILE, str(options.dtype), False
    adaptations: tuple[Callable[[CausalLM], object] | None, ...] = (None,)
    if lacks_weights(options.model):
        if not path.exists() or options.model_class not in (CausalLM, MaskedLM):
            return None
        is_new, adaptations = True, (adaptation(options), None)
        if dtype == "auto":
            dtype = str(stored_dtype(read_json(path)) or torch.float32).removeprefix("torch.")
    for adapt in adaptations:
        with suppress(LigerzooError):  # the first error says what is wrong
            return open_model(
                options.model,
                dtype=dtype,
                device=torch.device("meta"),
                new=is_new,
                adapt=adapt,
                model_class=options.model_class,
                arguments={} if is_new else options.model_arguments,
            )
    return None


def check_model(model: CausalLM, optimizer: str) -> None:
    """Makes the checks below, and refuses meshes and optimizers that cannot train the model.

    Args:
        model: the model as it will be trained, also on the meta device.
        optimizer: name of its optimizer.

    Raises:
        LigerzooError: One of them fails.
    """
    if (mesh := processes.mesh()) is not None:
        check_mesh(model, mesh)
    check_dtype(model)
    check_tied_weights(model)
    check_optimizer(optimizer, processes.world_size(), OPTIMIZER_NAMES)


def check_dtype(model: CausalLM) -> None:
    """Refuses weights in float16, in which small gradients become 0.

    Raises:
        ConfigError: A weight that trains is in float16.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            what = "cannot be trained in float16: small gradients would become 0"
            remedy = "Choose a dtype, such as --dtype bfloat16."
            raise ConfigError(what, where=name, expected="float32 or bfloat16", remedy=remedy)


def check_tied_weights(model: CausalLM) -> None:
    """Refuses a model whose head has become separate from the embedding, although its config ties them.

    Both would train, and the file could store only one of them.

    Raises:
        ConfigError: The weights are separate.
    """
    has_head = model.get_output_embeddings() is not None
    if model.config.tie_word_embeddings and has_head and not model.shares_head:
        what = "the head is separate from the embedding, although config.json ties them"
        remedy = "Call model.tie_weights() before the optimizer is made."
        raise ConfigError(what, where=type(model).__name__, remedy=remedy)


def open_trained_model(
    options: RunOptions, run: RunState, device: torch.device, plan: ActivationPlan | None, new: bool = False
) -> CausalLM:
    """Opens the model as it is trained: with adapters or frozen parts, sharded over processes, with its memory plan.

    Sets the seed of random weights.
    """
    torch.manual_seed(options.seed)
    source, adapt, compute = _source(options, run), adaptation(options), compute_dtype(options)
    model = open_model(
        source,
        dtype=options.dtype,
        device=device,
        new=new,
        adapt=adapt,
        param_dtype=compute,
        model_class=options.model_class,
        arguments=options.model_arguments,
    )
    if options.activation_checkpointing:
        model.gradient_checkpointing_enable()
    elif plan is not None:
        apply_activation_plan(model, plan)
        if all(processes.gather(plan.keeps_gathered)):  # GPUs differ in what is free, and all gather at once
            keep_gathered(model)
    return model


def open_reference(options: RunOptions, device: torch.device) -> CausalLM:
    """Loads MODEL as it was before the run, frozen."""
    dtypes = {"dtype": options.dtype, "param_dtype": compute_dtype(options)}
    return open_model(options.model, device=device, **dtypes).requires_grad_(False).eval()  # type: ignore[arg-type]


def compute_dtype(options: RunOptions) -> torch.dtype | None:
    """Returns the dtype in which a model computes, if it is not that of its weights."""
    return torch.bfloat16 if options.mixed_precision else None


def adaptation(options: RunOptions) -> Callable[[CausalLM], object] | None:
    """Returns what changes the model before it is sharded: adapters are added, or parts are frozen. None: nothing."""
    if options.lora_rank is not None:
        rank, alpha = options.lora_rank, options.lora_alpha or 2 * options.lora_rank
        targets, trained = options.lora_targets, options.new_modules
        more: dict[str, Any] = {"dropout": options.adapter_dropout, "dora": options.dora}

        def adapt(model: CausalLM) -> None:
            with option_named("targets", "option lora_targets"):
                add_lora(model, rank, alpha, targets, trained=trained, **more)

        return adapt
    if options.train_only is not None:
        parts = options.train_only

        def freeze(model: CausalLM) -> None:
            with option_named("freeze_all_but", "option train_only"):
                freeze_all_but(model, parts)

        return freeze
    # A sharded model reads all its parameters from files.
    return (lambda model: None) if options.new_modules else None


@contextmanager
def option_named(argument: str, option: str) -> Iterator[None]:
    """Moves an error about an argument, named in its `where`, to the option that sets it."""
    try:
        yield
    except LigerzooError as error:
        if argument not in str(error.where):
            raise
        raise error.moved_to(option) from error


def plan_memory(
    options: RunOptions,
    meta_model: CausalLM,
    device: torch.device,
    *,
    frozen: CausalLM | None = None,
    accumulate: bool = False,
    images: bool = False,
) -> ActivationPlan | None:
    """Plans what backward recomputes within `activation_budget`, see `plan_activations`. None for no plan.

    Args:
        meta_model: the model as it is trained, on the meta device.
        device: where it is trained.
        frozen: a second model in memory, such as a reference or a teacher; may be on the meta device.
        accumulate: whether gradients accumulate over several micro-batches.
        images: whether the data has images. The plan leaves out the vision tower.

    Raises:
        ConfigError: a number of GiB with images.
    """
    if options.activation_budget == "none" or options.mixed_precision:
        return None
    budget, count = options.activation_budget, processes.per_copy()
    if images:
        refuse_budget_of_images(options)
    averages = 4 * sum(weight.numel() for weight in meta_model.parameters() if weight.requires_grad)
    weights = 0 if frozen is None else sum(weight.nbytes for weight in frozen.parameters())
    setting = TrainingSetting(
        batch_size=options.batch_size,
        seq_length=-(-options.seq_length // processes.context_size()),
        optimizer=options.optimizer,
        accumulate=accumulate,
        gpus=count,
    )
    try:
        if options.activation_checkpointing:
            return plan_checkpointing(meta_model, setting)
        return plan_activations(
            meta_model,
            batch_size=setting.batch_size,
            seq_length=setting.seq_length,
            budget="auto" if budget == "auto" else float(budget),
            optimizer=options.optimizer,
            accumulate=accumulate,
            gpus=count,
            device=device,
            reserved=((0 if options.ema is None else averages) + weights) // count,
        )
    except SimulationError as error:
        if budget != "auto":
            raise
        kept = ". All activations are kept; --activation-checkpointing keeps fewer."
        processes.say(f"{error}{'' if options.activation_checkpointing else kept}")
        return None


def refuse_budget_of_images(options: RunOptions) -> None:
    """Raises ConfigError for a number of GiB."""
    if options.activation_budget not in ("auto", "none"):
        what = "the memory of a vision tower is not predicted, so images have no budget"
        where, remedy = "option activation_budget", "Use --activation-checkpointing to save memory."
        raise ConfigError(what, where=where, got=options.activation_budget, expected="auto or none", remedy=remedy)


def _source(options: RunOptions, run: RunState) -> str | Path:
    """Returns what the model is loaded from: with adapters, which `RunState.load` restores, always MODEL."""
    return options.model if options.lora_rank or run.checkpoint is None else run.checkpoint


def describe_model(model: CausalLM, device: torch.device) -> str:
    """Returns a line with the size of a model, which may be on the meta device, and where it is trained.

    A second line says if its dtype is slow there.
    """
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    world = processes.world_size()
    dtypes = " and ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}))
    where = f"{device}" if world == 1 else f"{world} processes ({device.type}), mesh {processes.mesh_sizes()}"
    line = f"{type(model).__name__}: {count:,} parameters in {dtypes}, {trained:,} of them trained, on {where}"
    hint = hint_of_dtype(model.dtype, device)
    return line if hint is None else f"{line}\n{hint}"
