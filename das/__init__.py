"""Speculative decoding for RL rollouts without a draft model.

`das` keeps the recent rollouts of each prompt in a suffix tree, drafts the next tokens of running rollouts from it, and
gives each request a draft budget. Importing it needs numpy only; the offline wing is `das.analysis`.
"""

from das._drafts import Draft, DraftTree
from das._suffix_tree import SuffixTree
from das.adaptive_budget import AdaptiveBudget
from das.budget import (
    BudgetPolicy,
    FinishedRollouts,
    FixedBudget,
    NoDraft,
    PriceBudget,
    RunningRequests,
    UnlimitedBudget,
)
from das.checked_file import StateError
from das.class_budget import LengthClassBudget
from das.confidence import Confidence
from das.drafter import Drafter
from das.hedge import Hedge
from das.history import RolloutHistory
from das.history_statistics import HistoryStatistics
from das.latency import LatencyEstimator, LatencyFit, LatencyModel, fit_latency
from das.latency_presets import LatencyPreset, latency_preset
from das.length_budget import LengthAwareBudget
from das.length_classes import LengthClass, LengthClasses
from das.lengths import LengthForecast, LengthModel
from das.makespan import optimal_budgets
from das.metrics import AcceptanceCounters, summarise
from das.rollout import Rollout, prompt_key
from das.state import SavedState, compact_state, load_state, save_state
from das.state_directory import SaveSummary
from das.step import StepDrafts, plan_step
from das.throughput_budget import ThroughputBudget

__version__ = "0.1.0"

__all__ = [
    "AcceptanceCounters",
    "AdaptiveBudget",
    "BudgetPolicy",
    "Confidence",
    "Draft",
    "DraftTree",
    "Drafter",
    "FinishedRollouts",
    "FixedBudget",
    "Hedge",
    "HistoryStatistics",
    "LatencyEstimator",
    "LatencyFit",
    "LatencyModel",
    "LatencyPreset",
    "LengthAwareBudget",
    "LengthClass",
    "LengthClassBudget",
    "LengthClasses",
    "LengthForecast",
    "LengthModel",
    "NoDraft",
    "PriceBudget",
    "Rollout",
    "RolloutHistory",
    "RunningRequests",
    "SaveSummary",
    "SavedState",
    "StateError",
    "StepDrafts",
    "SuffixTree",
    "ThroughputBudget",
    "UnlimitedBudget",
    "compact_state",
    "fit_latency",
    "latency_preset",
    "load_state",
    "optimal_budgets",
    "plan_step",
    "prompt_key",
    "save_state",
    "summarise",
]
