"""Activation checkpointing: backward computes again the tensors that autograd would save.

Three ways in. `remat.checkpoint(function, *args)` runs one call as a region. `remat.install()` puts
remat under `torch.utils.checkpoint`, for existing programs. `with remat.budget("8 GiB"):` keeps any
program within a byte budget, without regions.

    loss = remat.checkpoint(block, x, name="block 3").sum()
    loss.backward()

Threads: all functions may be called from any thread; a guard belongs to the thread that entered it.
"""

from __future__ import annotations

# first: it reports an extension that does not match
from ._extension import _remat as _remat
from . import _build

# fmt: off
from ._errors import BudgetExceeded, CheckpointError, ErrorKind, Mismatch
from ._region import Checkpointing, ValueComparison, checkpoint, checkpointed
from ._policy import (
    CheckpointPolicy, Policy, offload_names, offload_ops, policy_table, register_effect,
    save_all_but_names, save_collectives, save_effects, save_host_copies, save_matmuls, save_names,
    save_nondeterministic, save_ops, save_random, save_unrepeatable,
)
from ._paths import register_tree
from ._compiled import register_when_imported
from ._drop_in import Served, install, installed, is_installed, served, uninstall
from ._choice import ModuleChoice
from ._custom import CustomFunction, custom_function
from ._modules import (
    Applied, Checkpointed, ChosenModule, RefusedModule, UnusedRegion, apply, is_checkpointed,
    remove,
    reset_unused_regions, set_checkpoint_level, set_checkpointing, unused_regions,
)
from ._region_class import plain_class
from ._guards import (
    GeneratorTracker, Guard, MemoryLimit, StateProvider, checkpoint_level, debug,
    disable_checkpoint, disable_saved_tensors_hooks, early_stop, graph_exec_group, memory_limit,
    observe_recomputes, preserve_generator, record_allocations, recompute_cache, state_provider,
    unseen,
)
from ._offload import (
    MoveCounts, Moves, Place, TierCounts, Tiers, save_as, save_elsewhere, save_in_tiers,
    save_on_cpu,
    save_on_disk,
)
from ._observe import (
    ModuleBytes, Recorder, SavedTensor, bytes_by_module, free_bytes, regions_of, saved_tensors,
    track_origins,
)
from ._costs import ChainCost, MoveCost, MoveOptions, StageCost
from ._plan import (
    Frontier, FrontierPoint, InfeasibleBudget, Simulation, balanced_plan, checkpoint_sequential,
    free_budget, halving_plan, measure, mixed_plan, revolve_plan, run, simulate, solve,
    torch_sequential_plan,
)
from ._plan_region import PlanRegion
from ._fit import Fitted, fit
from ._budget import Budget, budget
from ._remat import (
    BudgetReport, DecisionReport, DeviceReport, EvictionReport, FailedAllocation, FileReport,
    HeldBytes, MemoryMeter, MoveReport, PhaseInfo, Plan, PolicyContext, RegionHandle, RegionReport,
    Report, checkpoint_name, counters, current_phase, default_options, is_checkpointing,
    is_checkpointing_disabled, is_recomputing, pin, save_region, set_default_options,
)

__version__ = _build.version

register_when_imported()

__all__ = [
    "Applied", "Budget", "BudgetExceeded", "BudgetReport", "ChainCost", "CheckpointError",
    "CheckpointPolicy", "Checkpointed", "Checkpointing", "ChosenModule", "CustomFunction",
    "DecisionReport", "DeviceReport", "ErrorKind", "EvictionReport", "FailedAllocation",
    "FileReport", "Fitted", "Frontier", "FrontierPoint", "GeneratorTracker", "Guard", "HeldBytes",
    "InfeasibleBudget", "MemoryLimit", "MemoryMeter", "Mismatch", "ModuleBytes", "ModuleChoice",
    "MoveCost", "MoveCounts", "MoveOptions", "MoveReport", "Moves", "PhaseInfo", "Place", "Plan",
    "PlanRegion", "Policy", "PolicyContext", "Recorder", "RefusedModule", "RegionHandle",
    "RegionReport", "Report", "SavedTensor", "Served", "Simulation", "StageCost", "StateProvider",
    "TierCounts", "Tiers", "UnusedRegion", "ValueComparison", "apply", "balanced_plan", "budget",
    "bytes_by_module", "checkpoint", "checkpoint_level", "checkpoint_name", "checkpoint_sequential",
    "checkpointed", "counters", "current_phase", "custom_function", "debug", "default_options",
    "disable_checkpoint", "disable_saved_tensors_hooks", "early_stop", "fit", "free_budget",
    "free_bytes", "graph_exec_group", "halving_plan", "install", "installed", "is_checkpointed",
    "is_checkpointing", "is_checkpointing_disabled", "is_installed", "is_recomputing", "measure",
    "memory_limit", "mixed_plan", "observe_recomputes", "offload_names", "offload_ops", "pin",
    "plain_class", "policy_table", "preserve_generator", "recompute_cache", "record_allocations",
    "regions_of", "register_effect", "register_tree", "remove", "reset_unused_regions",
    "revolve_plan", "run", "save_all_but_names", "save_as", "save_collectives", "save_effects",
    "save_elsewhere", "save_host_copies", "save_in_tiers", "save_matmuls", "save_names",
    "save_nondeterministic", "save_on_cpu", "save_on_disk", "save_ops", "save_random",
    "save_region", "save_unrepeatable", "saved_tensors", "served", "set_checkpoint_level",
    "set_checkpointing", "set_default_options", "simulate", "solve", "state_provider",
    "torch_sequential_plan", "track_origins", "uninstall", "unseen", "unused_regions",
]
# fmt: on
