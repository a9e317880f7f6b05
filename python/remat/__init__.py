"""Activation checkpointing: what autograd would save is computed again in backward.

Two ways in. `remat.checkpoint(function, *args)` runs one call as a region. `remat.install()` puts remat under
`torch.utils.checkpoint`, for programs that are written already.

    loss = remat.checkpoint(block, x, name="block 3").sum()
    loss.backward()

Threads: everything here may be called from any thread; a guard is the affair of the thread that entered it.
"""

from __future__ import annotations

from ._extension import _remat  # first: it says what is wrong if the extension does not fit
from ._errors import CheckpointError, ErrorKind, Mismatch
from ._region import Checkpointing, checkpoint, checkpointed
from ._policy import (
    CheckpointPolicy,
    Policy,
    PolicyContext,
    checkpoint_name,
    offload_names,
    offload_ops,
    pin,
    save_all_but_names,
    save_matmuls,
    save_names,
    save_ops,
)
from ._drop_in import install, installed, is_installed, uninstall
from ._modules import (
    Applied,
    Checkpointed,
    ChosenModule,
    ModuleChoice,
    RefusedModule,
    apply,
    is_checkpointed,
    plain_class,
    remove,
    set_checkpoint_level,
    set_checkpointing,
)
from ._guards import (
    Guard,
    MemoryLimit,
    PhaseInfo,
    StateProvider,
    current_phase,
    debug,
    disable_checkpoint,
    disable_saved_tensors_hooks,
    early_stop,
    graph_exec_group,
    memory_limit,
    observe_recomputes,
    preserve_generator,
    recompute_cache,
    save_as,
    save_on_cpu,
    save_in_tiers,
    save_on_disk,
    state_provider,
)
from ._observe import MemoryMeter, Recorder, RegionReport, Report, SavedTensor, saved_tensors
from ._plan import (
    ChainCost,
    Frontier,
    FrontierPoint,
    InfeasibleBudget,
    Plan,
    Simulation,
    StageCost,
    balanced_plan,
    checkpoint_sequential,
    halving_plan,
    measure,
    mixed_plan,
    revolve_plan,
    run,
    simulate,
    solve,
    torch_sequential_plan,
)
from ._fit import Fitted, fit

counters = _remat.counters
is_checkpointing = _remat.is_checkpointing
is_recomputing = _remat.is_recomputing
save_region = _remat.save_region

__version__ = "0.1.0"

__all__ = [
    "Applied",
    "ChainCost",
    "CheckpointError",
    "CheckpointPolicy",
    "Checkpointed",
    "Checkpointing",
    "ChosenModule",
    "ErrorKind",
    "Fitted",
    "Frontier",
    "FrontierPoint",
    "Guard",
    "InfeasibleBudget",
    "MemoryLimit",
    "MemoryMeter",
    "Mismatch",
    "ModuleChoice",
    "PhaseInfo",
    "Plan",
    "Policy",
    "PolicyContext",
    "Recorder",
    "RefusedModule",
    "RegionReport",
    "Report",
    "SavedTensor",
    "Simulation",
    "StageCost",
    "StateProvider",
    "apply",
    "balanced_plan",
    "checkpoint",
    "checkpoint_name",
    "checkpoint_sequential",
    "checkpointed",
    "counters",
    "current_phase",
    "debug",
    "disable_checkpoint",
    "disable_saved_tensors_hooks",
    "early_stop",
    "fit",
    "graph_exec_group",
    "halving_plan",
    "install",
    "installed",
    "is_checkpointed",
    "is_checkpointing",
    "is_installed",
    "is_recomputing",
    "measure",
    "memory_limit",
    "mixed_plan",
    "observe_recomputes",
    "offload_names",
    "offload_ops",
    "pin",
    "plain_class",
    "preserve_generator",
    "recompute_cache",
    "remove",
    "revolve_plan",
    "run",
    "save_all_but_names",
    "save_as",
    "save_matmuls",
    "save_names",
    "save_on_cpu",
    "save_in_tiers",
    "save_on_disk",
    "save_ops",
    "save_region",
    "saved_tensors",
    "set_checkpoint_level",
    "set_checkpointing",
    "simulate",
    "solve",
    "state_provider",
    "torch_sequential_plan",
    "uninstall",
]
