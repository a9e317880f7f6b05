#pragma once
// Forward declarations of the public types, for headers that only pass them on.

namespace remat {

enum class CaptureCheck;
enum class CheckpointPolicy;
enum class DeterminismCheck;
enum class Phase;

class CheckpointError;
class DebugGuard;
class DisableCheckpointGuard;
class DisableSavedTensorHooksGuard;
class EarlyStopGuard;
class MemoryLimitGuard;
class MemoryMeter;
class Policy;
class SavedTensorHooksGuard;

struct CheckpointOptions;
struct ContextPair;
struct Counters;
struct PhaseInfo;
struct PolicyContext;
struct SelectiveOptions;

}  // namespace remat
