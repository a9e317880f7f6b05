#pragma once
// Forward declarations of the public types, for headers that only pass them on.

namespace remat {

enum class CaptureCheck;
enum class CheckpointPolicy;
enum class DeterminismCheck;
enum class InputMode;
enum class Phase;
enum class Transforms;

class CheckpointError;
class CheckpointLevelGuard;
class DebugGuard;
class DisableCheckpointGuard;
class DisableSavedTensorHooksGuard;
class EarlyStopGuard;
class MemoryLimitGuard;
class MemoryMeter;
class Place;
class Policy;
class RegionHandle;
class SaveElsewhereGuard;
class SavedTensorHooksGuard;
class StoredContents;

struct CheckpointOptions;
struct ContextPair;
struct Counters;
struct PhaseInfo;
struct PolicyContext;
struct SaveElsewhereOptions;
struct SelectiveOptions;
struct SourceLocation;
struct ValueComparison;

}  // namespace remat
