"""Luthier fine-tunes language models and can prove what it trains on.

    result = luthier.train("run.yaml")          # or the same as a dict, or a luthier.RunConfig
    report = luthier.verify("run.yaml")         # is what training sees what inference sees?
    sample = luthier.encode(row, tokenizer)     # or piece by piece: rows, samples, batches for a loop of your own

The names of this package are all that programs need; `docs/api.md` tells what they do. They are loaded on first use, so
that ``import luthier`` costs little and needs no torch, and type checkers see them as they are.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

__version__ = "0.1.0"


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """False for what torch says of enums in torchao, which nobody but torchao can change."""
    registered = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return not (isinstance(registered, type) and registered.__module__.startswith("torchao."))


# transformers imports torchao where it is installed, and torch then logs a warning for each of its enums
logging.getLogger("torch.utils._pytree").addFilter(_is_worth_telling)

if TYPE_CHECKING:
    from luthier.check.golden import Rounding as Rounding
    from luthier.check.plan import DataPlan as DataPlan
    from luthier.check.plan import DrawingPlan as DrawingPlan
    from luthier.check.plan import HistoryCost as HistoryCost
    from luthier.check.plan import LongRow as LongRow
    from luthier.check.plan import MediaCount as MediaCount
    from luthier.check.plan import RunPlan as RunPlan
    from luthier.check.plan import SourcePlan as SourcePlan
    from luthier.check.plan.estimate import Device as Device
    from luthier.check.plan.estimate import Estimate as Estimate
    from luthier.check.plan.estimate import Memory as Memory
    from luthier.check.plan.stats import ContaminatedRow as ContaminatedRow
    from luthier.check.plan.stats import Contamination as Contamination
    from luthier.check.plan.stats import Distribution as Distribution
    from luthier.check.plan.stats import SourceStats as SourceStats
    from luthier.check.plan.stats import Stats as Stats
    from luthier.check.show.token_origins import TokenOrigin as TokenOrigin
    from luthier.check.show.view import RowView as RowView
    from luthier.check.show.view import SegmentView as SegmentView
    from luthier.check.show.view import TokenView as TokenView
    from luthier.check.verify import Check as Check
    from luthier.check.verify import CheckResult as CheckResult
    from luthier.check.verify import FailedRow as FailedRow
    from luthier.check.verify import Method as Method
    from luthier.check.verify import Token as Token
    from luthier.check.verify import VerifyReport as VerifyReport
    from luthier.check.verify import Violation as Violation
    from luthier.check.verify.run import Side as Side
    from luthier.check.verify.run import VerifyOptions as VerifyOptions
    from luthier.check.verify.run import VerifyProgress as VerifyProgress
    from luthier.collation import MediaInputs as MediaInputs
    from luthier.collation.collator import collate as collate
    from luthier.collation.collator import media_inputs as media_inputs
    from luthier.config.choices import Overflow as Overflow
    from luthier.config.choices import Packing as Packing
    from luthier.config.choices import RowKind as RowKind
    from luthier.config.choices import TokenizerBackend as TokenizerBackend
    from luthier.config.loading import RunDescription as RunDescription
    from luthier.config.loading import load_config as load_config
    from luthier.config.loss_rows import Loss as Loss
    from luthier.config.objective import Learned as Learned
    from luthier.config.objective import Objective as Objective
    from luthier.config.objective import register_loss as register_loss
    from luthier.config.objective import register_objective as register_objective
    from luthier.config.schema import GenerateConfig as GenerateConfig
    from luthier.config.schema import RunConfig as RunConfig
    from luthier.encoding import EncodeOptions as EncodeOptions
    from luthier.encoding import encode as encode
    from luthier.encoding import encode_many as encode_many
    from luthier.encoding import encode_prompt as encode_prompt
    from luthier.encoding.replies import ReplyReader as ReplyReader
    from luthier.encoding.replies import parse_reply as parse_reply
    from luthier.encoding.tokenizer import AddedTokens as AddedTokens
    from luthier.encoding.tokenizer import Tokenizer as Tokenizer
    from luthier.encoding.tokenizer import load_tokenizer as load_tokenizer
    from luthier.engines import Completion as Completion
    from luthier.engines import Engine as Engine
    from luthier.engines import Finish as Finish
    from luthier.engines import NewTokens as NewTokens
    from luthier.engines import Refusal as Refusal
    from luthier.engines import Request as Request
    from luthier.engines import Session as Session
    from luthier.engines import WeightsName as WeightsName
    from luthier.engines.http import HttpEngine as HttpEngine
    from luthier.engines.local import LocalEngine as LocalEngine
    from luthier.errors import BudgetError as BudgetError
    from luthier.errors import CheckpointError as CheckpointError
    from luthier.errors import ConfigError as ConfigError
    from luthier.errors import LoaderError as LoaderError
    from luthier.errors import LuthierError as LuthierError
    from luthier.errors import ModelError as ModelError
    from luthier.errors import PluginError as PluginError
    from luthier.errors import Problem as Problem
    from luthier.errors import RowDropped as RowDropped
    from luthier.errors import RowError as RowError
    from luthier.errors import RowForbidden as RowForbidden
    from luthier.errors import SourceError as SourceError
    from luthier.errors import StoreError as StoreError
    from luthier.errors import TemplateError as TemplateError
    from luthier.errors import TokenizerError as TokenizerError
    from luthier.errors import TrainingError as TrainingError
    from luthier.errors import UserError as UserError
    from luthier.export.checks import ExportCheck as ExportCheck
    from luthier.export.checks import ExportFinding as ExportFinding
    from luthier.export.checks import ExportProof as ExportProof
    from luthier.export.checks import ExportResult as ExportResult
    from luthier.export.model_folder import Exported as Exported
    from luthier.export.model_folder import ExportOptions as ExportOptions
    from luthier.export.model_folder import check_export as check_export
    from luthier.export.model_folder import export_run as export_run
    from luthier.ledger import Ledger as Ledger
    from luthier.library import DataStats as DataStats
    from luthier.library import FirstSample as FirstSample
    from luthier.library import Listener as Listener
    from luthier.library import Remark as Remark
    from luthier.library import Reported as Reported
    from luthier.library import Shown as Shown
    from luthier.library import plan as plan
    from luthier.library import prepare as prepare
    from luthier.library import show as show
    from luthier.library import stats as stats
    from luthier.library import train as train
    from luthier.library import verify as verify
    from luthier.loader.loader import Loader as Loader
    from luthier.loader.loader import LoaderOptions as LoaderOptions
    from luthier.loader.loader import Step as Step
    from luthier.media.families import CAT as CAT
    from luthier.media.families import Attention as Attention
    from luthier.media.families import Batching as Batching
    from luthier.media.families import Family as Family
    from luthier.media.families import FrameMarks as FrameMarks
    from luthier.media.families import MediaKind as MediaKind
    from luthier.media.families import Modules as Modules
    from luthier.media.families import OwnFrames as OwnFrames
    from luthier.media.families import PackingSupport as PackingSupport
    from luthier.media.families import Rule as Rule
    from luthier.media.families import Settings as Settings
    from luthier.media.families import SharedSlots as SharedSlots
    from luthier.media.families.table import register_family as register_family
    from luthier.metrics import Metric as Metric
    from luthier.metrics import register_metric as register_metric
    from luthier.metrics.texts import CorpusScore as CorpusScore
    from luthier.models.passes import ModelPass as ModelPass
    from luthier.objectives import Measure as Measure
    from luthier.objectives import SequenceLoss as SequenceLoss
    from luthier.objectives import measure as measure
    from luthier.objectives.loss_sums import FeedbackBaselines as FeedbackBaselines
    from luthier.objectives.loss_sums import FeedbackSettings as FeedbackSettings
    from luthier.objectives.loss_sums import TokenLoss as TokenLoss
    from luthier.objectives.loss_sums import TokenQuantities as TokenQuantities
    from luthier.objectives.loss_sums import TokenSettings as TokenSettings
    from luthier.objectives.loss_sums import token_loss_sum as token_loss_sum
    from luthier.objectives.pair_formulas import Counterparts as Counterparts
    from luthier.objectives.pair_formulas import PairBaselines as PairBaselines
    from luthier.objectives.pair_formulas import PairScores as PairScores
    from luthier.objectives.pair_formulas import PairSettings as PairSettings
    from luthier.objectives.token_scores import TokenScores as TokenScores
    from luthier.packing import UnitKind as UnitKind
    from luthier.packing.epoch import PlanSummary as PlanSummary
    from luthier.packing.epoch import SourceShare as SourceShare
    from luthier.packing.packer import plan_packs as plan_packs
    from luthier.plugins import load_plugins as load_plugins
    from luthier.prediction import TaskOptions as TaskOptions
    from luthier.prediction import evaluate_tasks as evaluate_tasks
    from luthier.prediction.comparing import AnswerPair as AnswerPair
    from luthier.prediction.comparing import MetricComparison as MetricComparison
    from luthier.prediction.comparing import PredictionComparison as PredictionComparison
    from luthier.prediction.comparing import compare_predictions as compare_predictions
    from luthier.prediction.predicting import Predicted as Predicted
    from luthier.prediction.predicting import PredictOptions as PredictOptions
    from luthier.prediction.predicting import predict as predict
    from luthier.preparation import Numbering as Numbering
    from luthier.preparation import Prepared as Prepared
    from luthier.preparation import PreparedSet as PreparedSet
    from luthier.preparation import SourceInfo as SourceInfo
    from luthier.preparation.resolver import Progress as Progress
    from luthier.presets.named_templates import Bos as Bos
    from luthier.presets.named_templates import NamedTemplate as NamedTemplate
    from luthier.presets.named_templates import SystemPrompt as SystemPrompt
    from luthier.presets.named_templates import register_template as register_template
    from luthier.records import Address as Address
    from luthier.records import Audio as Audio
    from luthier.records import AudioHeader as AudioHeader
    from luthier.records import Batch as Batch
    from luthier.records import Branch as Branch
    from luthier.records import Conversation as Conversation
    from luthier.records import Document as Document
    from luthier.records import DrawnInStep as DrawnInStep
    from luthier.records import Feedback as Feedback
    from luthier.records import Image as Image
    from luthier.records import ImageHeader as ImageHeader
    from luthier.records import LostMedia as LostMedia
    from luthier.records import Media as Media
    from luthier.records import MediaHeader as MediaHeader
    from luthier.records import MediaItem as MediaItem
    from luthier.records import Message as Message
    from luthier.records import Part as Part
    from luthier.records import PolicyTargets as PolicyTargets
    from luthier.records import Preference as Preference
    from luthier.records import Row as Row
    from luthier.records import Sample as Sample
    from luthier.records import Segment as Segment
    from luthier.records import TargetRule as TargetRule
    from luthier.records import Targets as Targets
    from luthier.records import Text as Text
    from luthier.records import Thinking as Thinking
    from luthier.records import ToolCall as ToolCall
    from luthier.records import Unit as Unit
    from luthier.records import Video as Video
    from luthier.records import VideoHeader as VideoHeader
    from luthier.rendering.replies import CallPiece as CallPiece
    from luthier.rendering.replies import ReplyDelta as ReplyDelta
    from luthier.rewards import DialogueEnvironment as DialogueEnvironment
    from luthier.rewards import Over as Over
    from luthier.rewards import verifiers_environment as verifiers_environment
    from luthier.rewards import verifiers_rows as verifiers_rows
    from luthier.sources.formats.media import MediaQueue as MediaQueue
    from luthier.sources.formats.reading import Reading as Reading
    from luthier.sources.formats.table import FormatRule as FormatRule
    from luthier.sources.formats.table import register_format as register_format
    from luthier.sources.source import RepeatedIds as RepeatedIds
    from luthier.store import SampleStore as SampleStore
    from luthier.templating import TemplateLimits as TemplateLimits
    from luthier.templating import TemplateSettings as TemplateSettings
    from luthier.training.losses import MicroLoss as MicroLoss
    from luthier.training.losses import ObjectiveParts as ObjectiveParts
    from luthier.training.losses import Stateless as Stateless
    from luthier.training.losses import StepLosses as StepLosses
    from luthier.training.losses import micro_loss as micro_loss
    from luthier.training.report import DataSummary as DataSummary
    from luthier.training.report import Ended as Ended
    from luthier.training.report import EvalRecord as EvalRecord
    from luthier.training.report import GenerationRecord as GenerationRecord
    from luthier.training.report import GenerationRound as GenerationRound
    from luthier.training.report import ModelSummary as ModelSummary
    from luthier.training.report import RunResult as RunResult
    from luthier.training.report import SourceSummary as SourceSummary
    from luthier.training.report import StepRecord as StepRecord
    from luthier.training.report.events import Note as Note
    from luthier.training.report.events import Saved as Saved
    from luthier.training.report.events import Started as Started
    from luthier.training.report.report import Report as Report
else:  # hidden from type checkers, to which a module with a `__getattr__` has every name
    from ast import ImportFrom, parse
    from functools import cache
    from importlib import import_module
    from pathlib import Path

    @cache
    def _places() -> dict[str, str]:
        """Where each public name lives, read off the imports above: they are written down once."""
        (block,) = (node for node in parse(Path(__file__).read_text(encoding="utf-8")).body if hasattr(node, "test"))
        imported = (node for node in block.body if isinstance(node, ImportFrom))
        return {alias.name: node.module for node in imported for alias in node.names}

    def __getattr__(name: str) -> object:
        if name.startswith("__") or name not in _places():
            raise AttributeError(f"module 'luthier' has no attribute {name!r}")
        return getattr(import_module(_places()[name]), name)

    def __dir__() -> list[str]:
        return sorted([*_places(), "__version__", "__doc__"])
