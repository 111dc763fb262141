"""`outrider distill`: train a proposer for a target."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from outrider.errors import ConfigError
from outrider.train.settings import (
    LEARNING_RATES,
    SHARE_OF_GPU,
    SIZES,
    DataSettings,
    DraftSizes,
    Eagle3Sizes,
    EvaluationSettings,
    MedusaSizes,
    MlpSizes,
    Sizes,
    TrainSettings,
)

if TYPE_CHECKING:
    from outrider.train.distill import DistillationPlan

app = typer.Typer(add_completion=False)


class DistillKind(StrEnum):
    DRAFT = "draft"
    EAGLE3 = "eagle3"
    MEDUSA = "medusa"
    MLP = "mlp"


_Settings = TypeVar("_Settings", DataSettings, TrainSettings, EvaluationSettings)
_DATA, _TRAIN, _EVALUATION = DataSettings(), TrainSettings(), EvaluationSettings()


def _of_kind(help: str) -> Any:
    """An option of only some kinds."""
    return typer.Option(help=help, show_default=False)


def _size_help(what: str, **defaults: Any) -> Any:
    values = ", ".join(f"{kind} {value}" for kind, value in defaults.items())
    return _of_kind(f"{what} Default: {values}.")


@app.command()
def distill(
    ctx: typer.Context,
    kind: Annotated[DistillKind, typer.Argument(help="What is trained.", show_default=False)],
    target: Annotated[
        str, typer.Option(help="The model it learns from, named as --model of `outrider serve`.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of state, report and checkpoint.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder of the texts, generated if missing or incomplete; may be repeated "
            "to train on several. Default: OUT/data.",
            show_default=False,
        ),
    ] = None,
    begin_from: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint of the same kind to begin with; its MLPs may be narrower.",
            show_default=False,
        ),
    ] = None,
    phase: Annotated[
        list[str] | None,
        typer.Option(
            help="Only data, train or evaluate; may be repeated. Default: all.", show_default=False
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of a GPU that writing and measuring may take.")
    ] = SHARE_OF_GPU,
    seed: Annotated[int, typer.Option(help="Of texts, weights and order.")] = 0,
    context: Annotated[
        int, typer.Option(help="Longest text in tokens, and the length of a packed row.")
    ] = _TRAIN.context,
    conversations: Annotated[
        int, typer.Option(help="How many the target writes.")
    ] = _DATA.conversations,
    held_out: Annotated[
        int, typer.Option(help="How many more it is measured on.")
    ] = _DATA.held_out,
    shard_size: Annotated[
        int, typer.Option(help="Conversations written at once, and lost by a kill.")
    ] = _DATA.shard_size,
    user_tokens: Annotated[
        int, typer.Option(help="Longest turn of a user that the target writes.")
    ] = _DATA.user_tokens,
    answer_tokens: Annotated[int, typer.Option(help="Longest answer.")] = _DATA.answer_tokens,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="JSON lines with prompts; may be repeated.", show_default=False),
    ] = None,
    documents: Annotated[
        str | None, typer.Option(help="Folder of texts.", show_default=False)
    ] = None,
    prompt_share: Annotated[
        float, typer.Option(help="Share of conversations that begin with a given prompt.")
    ] = _DATA.prompt_share,
    document_share: Annotated[
        float, typer.Option(help="Share that is about a document.")
    ] = _DATA.document_share,
    steps: Annotated[int, typer.Option(help="Steps of training.")] = _TRAIN.steps,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = _TRAIN.batch_tokens,
    learning_rate: Annotated[
        float | None,
        _size_help("Of AdamW, at its highest.", **LEARNING_RATES),
    ] = None,
    warmup: Annotated[
        int, typer.Option(help="Steps until then, at most a tenth of all.")
    ] = _TRAIN.warmup,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = _TRAIN.weight_decay,
    clip: Annotated[float, typer.Option(help="Largest norm of a step's gradient.")] = _TRAIN.clip,
    prompt_weight: Annotated[
        float, typer.Option(help="What a token of a prompt counts beside one of an answer.")
    ] = _TRAIN.prompt_weight,
    teacher_temperature: Annotated[
        float,
        typer.Option(
            help="Of the distribution that is learned; below 1 its likeliest tokens count more."
        ),
    ] = _TRAIN.teacher_temperature,
    chunk_rows: Annotated[
        int, typer.Option(help="Tokens whose logits are in memory at once.")
    ] = _TRAIN.chunk_rows,
    save_every: Annotated[
        int, typer.Option(help="Steps between saved states, and lost by a kill.")
    ] = _TRAIN.save_every,
    log_every: Annotated[
        int, typer.Option(help="Steps between points of the loss curve.")
    ] = _TRAIN.log_every,
    compile: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    layers: Annotated[
        int | None,
        _size_help(
            "Layers.",
            draft=DraftSizes().layers,
            eagle3=Eagle3Sizes().layers,
            medusa=MedusaSizes().layers,
        ),
    ] = None,
    width: Annotated[int | None, _size_help("Hidden size.", draft=DraftSizes().width)] = None,
    heads: Annotated[
        int | None,
        _size_help("Heads.", draft=DraftSizes().heads, medusa=MedusaSizes().heads),
    ] = None,
    intermediate: Annotated[
        int | None,
        _size_help("Width of its MLP.", draft=DraftSizes().intermediate, eagle3="the target's"),
    ] = None,
    target_layers: Annotated[
        str | None,
        _of_kind(
            "Of a draft: begin as these of the target's layers, such as 0,10,20,29, with its "
            "width and heads."
        ),
    ] = None,
    draft_vocab: Annotated[
        int | None,
        _size_help("Most frequent tokens it can draft.", eagle3=Eagle3Sizes().draft_vocab),
    ] = None,
    unroll: Annotated[
        int | None,
        _size_help("Own outputs in a row it learns on.", eagle3=Eagle3Sizes().unroll),
    ] = None,
    decay: Annotated[
        float | None,
        _size_help(
            "What each token further ahead counts of the one before.",
            eagle3=Eagle3Sizes().decay,
            medusa=MedusaSizes().decay,
            mlp=MlpSizes().decay,
        ),
    ] = None,
    predict: Annotated[int | None, _size_help("Tokens ahead.", mlp=MlpSizes().predict)] = None,
    inner: Annotated[
        int | None, _size_help("Width; 0 is the target's hidden size.", mlp=MlpSizes().inner)
    ] = None,
    tied: Annotated[
        bool | None, _size_help("Whether its levels share weights.", mlp="tied")
    ] = None,
    scale_input: Annotated[
        bool | None, _size_help("Whether its input is normed.", mlp="scaled")
    ] = None,
    depth: Annotated[int, typer.Option(help="At which it is measured.")] = _EVALUATION.depth,
    evaluation_tokens: Annotated[
        int, typer.Option(help="Of each text it is measured on.")
    ] = _EVALUATION.tokens,
    temperature: Annotated[
        float, typer.Option(help="Of the sampled half of them.")
    ] = _EVALUATION.temperature,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only errors.")] = False,
) -> None:
    """Train a draft model or a head on texts generated by the target."""
    _run(_plan(kind.value, ctx.params), quiet)


def _plan(kind: str, given: Mapping[str, Any]) -> DistillationPlan:
    """The plan from the options by name."""
    prompts, documents = tuple(given["prompts"] or ()), given["documents"]
    data = _picked(
        DataSettings,
        given,
        prompts=prompts,
        prompt_share=given["prompt_share"] if prompts else 0.0,
        document_share=given["document_share"] if documents else 0.0,
    )
    rate = given["learning_rate"]
    chosen = LEARNING_RATES[kind] if rate is None else rate
    train = _picked(TrainSettings, given, learning_rate=chosen)
    evaluation = _picked(EvaluationSettings, given, tokens=given["evaluation_tokens"])
    names = {field.name for sizes in SIZES.values() for field in dataclasses.fields(sizes)}
    layers = given["target_layers"]
    own = {"target_layers": None if layers is None else layer_numbers(layers)}
    sizes = sizes_of(kind, {name: given[name] for name in names} | own)
    # Imported after the options are checked: it needs torch.
    from outrider.train.distill import DistillationPlan, all_phases

    folder = Path(given["out"]).expanduser()  # releases of typer differ in what a context holds
    return DistillationPlan(
        kind=kind,
        target=given["target"],
        out=folder,
        data_folders=tuple(Path(each).expanduser() for each in given["data"] or ())
        or (folder / "data",),
        begin_from=Path(given["begin_from"]).expanduser() if given["begin_from"] else None,
        gpu_memory_utilization=given["gpu_memory_utilization"],
        data=data,
        train=train,
        sizes=sizes,
        evaluation=evaluation,
        device=given["device"],
        phases=all_phases(given["phase"] or ()),
        resume=given["resume"],
    )


def _picked(kind: type[_Settings], given: Mapping[str, Any], **changes: Any) -> _Settings:
    """Settings from the options of the same names."""
    names = [field.name for field in dataclasses.fields(kind) if field.name in given]
    return kind(**{**{name: given[name] for name in names}, **changes})


def _run(plan: DistillationPlan, quiet: bool) -> None:
    from outrider.train.distill import CHECKPOINT, distill
    from outrider.train.progress import ProgressReporter
    from outrider.train.report import PAGE

    report = distill(plan, ProgressReporter(quiet=quiet))
    if report:
        typer.echo((plan.out / PAGE).read_text(encoding="utf-8"))
        typer.echo(f"checkpoint: {plan.out / CHECKPOINT}")


def sizes_of(kind: str, given: dict[str, Any]) -> Sizes:
    """The sizes of a kind from options; None means not given."""
    chosen = {name: value for name, value in given.items() if value is not None}
    sizes_class = SIZES[kind]
    known = {field.name for field in dataclasses.fields(sizes_class)}
    for name in chosen:
        if name not in known:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} does not apply to {kind}; leave it out.")
    others = [name for name in chosen if name != "target_layers"]
    if "target_layers" in chosen and others:
        raise ConfigError(
            f"--{others[0]} is given with --target-layers, which takes all sizes from the target; "
            "leave one of them out."
        )
    sizes: Sizes = sizes_class(**chosen)
    return sizes


def layer_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--target-layers is {text!r}; give numbers with commas between them, as 0,10,20,29."
        ) from None
