#!/usr/bin/env python3
"""Checks the folder tree's arrows of knowledge by the includes, the citations of Notes, and the
names and sizes of files.

    examples, bench, tests -> include <- hooks <- lib, and lib/base and lib/seam below hooks

Inside lib a folder includes only lower ones (FOLDERS), and only through their doors (DOORS). A
header and its source are one room: no include cycle of rooms crosses a folder, and none inside one
has more than three. Members are defined in the folder that declares them. What LibTorch may change
from version to version stands in lib/seam only (UNSTABLE). No text for users cites a Rule by its
number. Faults fail the test; sizes above the aims are printed as warnings.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREES = ("include", "hooks", "lib", "tests", "examples", "bench")

# The files of the project that each tree may include.
MAY_INCLUDE = {
    "include": {"include"},
    "hooks": {"include", "hooks"},  # and lib/base and lib/seam
    "lib": {"include", "hooks", "lib"},
    "tests": {"include", "tests"},
    "examples": {"include", "examples"},
    "bench": {"include", "bench", "examples"},
}
# The headers of LibTorch that public headers may include: nothing heavier than ATen/core/Tensor.h.
LIGHT = re.compile(
    r"(ATen/core/(Tensor|TensorBase|Generator|List|Dict|ivalue|operator_name|function_schema)\.h"
    r"|c10/.+\.h)")
WITH_MODULES = {"apply.h", "sequential.h", "module.h"}
AVOIDED = {"utils", "util", "helpers", "helper", "misc", "manager", "common"}
AIMS = {".h": 250, ".cpp": 400}

# The folders of lib, lowest first, and the headers through which others may enter one; None:
# through each.
DOORS = {
    "base": None,
    "seam": None,
    "tensor": None,
    "scope": None,
    "rng": {"device_claims", "device_rng", "draws", "recompute_draws"},
    "state": {"buffer", "early_guards", "module_paths", "module_state", "parameter_names",
              "streams", "surroundings", "user_state"},
    "frame": {"active_recomputes", "ahead", "filler", "forward_scope", "frame", "frame_scope",
              "inputs", "keeper", "layers", "mismatch", "recorded_frame", "region"},
    "entry": set(),
    "move": None,
    "selective": {"call_record", "dispatch", "op_traits", "policy_rule"},
    "observe": {"counted_memory", "memory_source", "recording"},
    "budget": set(),
    "plan": set(),
    "apply": set(),
}
# Above the core, and what a folder of hooks is part of. The layers are those of lib/meson.build.
LAYERS = ["move", "selective", "observe", "budget", "plan", "apply"]
HOOKS = {"pack": "core", "depot": "move", "host": "move", "disk": "move"}
FOLDERS = list(DOORS)
# The planner is above the runtime, but uses the public headers, and what measuring and moving need.
PLAN_MAY_INCLUDE = {"base", "seam", "scope", "rng", "move", "selective", "plan"}

# LibTorch's private members, names of nodes, bridges between versions. Each pattern with where it
# may stand besides.
UNSTABLE = {
    r"__has_include": set(),
    r"requires \{ *impl\.": set(),
    r"get_autograd_meta|AutogradMeta|DifferentiableViewMeta": set(),
    r"(->|\.)(grad_fn_|requires_grad_|cpp_hooks_list_|post_acc_grad_hooks_|grad_accumulator_"
    r"|fw_grad_)\b": set(),
    r"(node|fn\(\)|edge\.function)(\.|->)name\(\) [=!]=": set(),
    r"CppNode": set(),
    r"engine_\b|mt19937": set(),
    r"_mutable_data_ptr_no_checks|release_data_and_set_meta": set(),
    r"CompiledNodeArgs|retrieve_unpack_hook_data|SafePyObject|PyInterpreter"
    r"|TorchDispatchMode\b": set(),
    r"set_default_engine|VariableHooksInterface|ThreadLocalPythonObjects": set(),
    r"is_training_\b|module\.name_\b": set(),
    r"AnyModuleHolder|AnyModulePlaceholder": set(),
    r"TORCH_WARN": set(),  # seam::warn has the words for it
    r"\.what\(\)[^;]*(find|==|starts_with)": set(),
}
MAX_CYCLE = 3

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)
NOTE = re.compile(r"Note \[([^\]]+)\]")
NOTE_HEAD = re.compile(r"^\s*(?:///?|\*)\s*Note \[([^\]]+)\]", re.M)


def tree_of(path):
    parts = path.resolve().relative_to(ROOT).parts
    return parts[0] if parts[0] in TREES else None


def target_of(source, bracket, name):
    """The file of the project that an include names, or None."""
    folders = [ROOT, ROOT / "include"]
    if bracket == '"':
        folders.insert(0, source.parent)
    for folder in folders:
        candidate = (folder / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(ROOT) and tree_of(candidate):
            return candidate
    return None


def include_faults(source, text):
    tree = tree_of(source)
    for bracket, name in INCLUDE.findall(text):
        target = target_of(source, bracket, name)
        if target is not None:
            if tree == "hooks" and folder_of(target) in ("base", "seam"):
                continue
            if tree_of(target) not in MAY_INCLUDE[tree]:
                yield f"{tree} must not know {tree_of(target)}: includes {name}"
            continue
        if bracket == '"':
            yield f'"{name}" is no file of the project'
        if name.startswith("catch2/") and "support" not in source.parts:
            yield "only tests/support includes Catch2"
        if name.startswith("fmt/") and source.suffix == ".h" and tree == "include":
            yield "fmt is private: not in a public header"
        if name.startswith("nlohmann/") and source.suffix == ".h":
            yield "nlohmann-json is private: not in a header"
        if tree == "include" and "/" in name and not LIGHT.fullmatch(name):
            if not (source.name in WITH_MODULES and name.startswith("torch/nn")):
                yield f"too heavy for a public header: {name}"
        if tree in ("hooks", "lib") and name == "torch/torch.h":
            yield "torch/torch.h is too heavy for the library"
        if name == "Python.h" and tree != "tests":
            yield "the library must not need Python"


def folder_of(path):
    """The folder of lib that a file lies in, or None."""
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "lib" and len(parts) == 3 and parts[1] in DOORS else None


def room_of(path):
    return str(path.relative_to(ROOT).with_suffix(""))


def layer_of(path):
    """The layer that a file of lib or hooks belongs to, or None."""
    parts = path.relative_to(ROOT).parts
    if parts[0] == "hooks":
        return HOOKS.get(parts[1])
    folder = folder_of(path)
    return None if folder is None else folder if folder in LAYERS else "core"


def layer_faults(source, text):
    """No file knows a layer above its own."""
    order = ["core", *LAYERS]
    own = layer_of(source)
    for bracket, name in INCLUDE.findall(text) if own else ():
        target = target_of(source, bracket, name)
        layer = layer_of(target) if target is not None else None
        if layer is not None and order.index(layer) > order.index(own):
            yield f"the layer {own} must not know the layer {layer}: includes {name}"


def lib_faults(source, text):
    """The faults of an include of one file of lib: the order of folders, and unstable words outside
    the seam."""
    own = folder_of(source)
    where = str(source.relative_to(ROOT))
    if own is None:
        if where.startswith("lib/") and "/pch/" not in where:
            yield "lies in no folder of lib"
        return
    for bracket, name in INCLUDE.findall(text):
        target = target_of(source, bracket, name)
        folder = folder_of(target) if target is not None else None
        if folder is None or folder == own:
            continue
        is_above = FOLDERS.index(folder) > FOLDERS.index(own)
        if is_above or (own == "plan" and folder not in PLAN_MAY_INCLUDE):
            yield f"lib/{own} must not know lib/{folder}: includes {name}"
        elif DOORS[folder] is not None and target.stem not in DOORS[folder]:
            yield f"{name} is no door of lib/{folder}"


def unstable_faults(source, text):
    where = str(source.relative_to(ROOT))
    if not where.startswith(("lib/", "hooks/")) or where.startswith("lib/seam/"):
        return
    code = re.sub(r"//[^\n]*", "", text)
    for pattern, allowed in UNSTABLE.items():
        found = re.search(pattern, code)
        if found and where not in allowed:
            yield f"`{found.group(0)}` belongs into lib/seam"


STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')


def rule_faults(source, text):
    """Rules have numbers for those who work on the code. Users are told what they say."""
    if tree_of(source) not in ("include", "hooks", "lib", "examples", "bench"):
        return
    for number, line in enumerate(text.split("\n"), 1):
        for literal in STRING.findall(line.split("//")[0]):
            if re.search(r"\b[Rr]ules? \d", literal):
                yield f"a text for users cites a Rule by its number (line {number})"


def cycles(texts):
    """Sets of rooms of lib and hooks that include each other in a circle."""
    arrows = {}
    for source, text in texts.items():
        if tree_of(source) not in ("lib", "hooks"):
            continue
        room = arrows.setdefault(room_of(source), set())
        for bracket, name in INCLUDE.findall(text):
            target = target_of(source, bracket, name)
            if target is not None and tree_of(target) in ("lib", "hooks") and room_of(
                target) != room_of(source):
                room.add(room_of(target))

    def reached(start):
        seen, waiting = set(), [start]
        while waiting:
            for following in arrows.get(waiting.pop(), ()):
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return seen

    below = {room: reached(room) for room in arrows}
    found = {frozenset(other for other in below[room] if room in below.get(other, ()))
             for room in arrows
             if room in below[room]}
    return [sorted(circle) for circle in found]


def cycle_faults(texts):
    for circle in cycles(texts):
        if len({Path(room).parent for room in circle}) > 1:
            yield f"an include cycle across folders: {', '.join(circle)}"
        elif len(circle) > MAX_CYCLE:
            yield f"an include cycle of {len(circle)} rooms: {', '.join(circle)}"


CLASS = re.compile(r"^(?:class|struct)\s+(?:REMAT_API\s+)?(\w+)(?:\s+final)?\s*(?:[:{]|$)", re.M)
MEMBER = re.compile(
    r"^(?!\s|//|#|using|namespace|return|static_assert)[^\n;=]*?\b(\w+)::~?\w+\s*\(", re.M)


def definition_faults(texts):
    """Members are defined in the folder of lib or hooks that declares their class."""
    declared = {}
    for source, text in texts.items():
        if tree_of(source) in ("lib", "hooks") and source.suffix == ".h":
            for name in CLASS.findall(text):
                declared.setdefault(name, set()).add(source.parent)
    for source, text in texts.items():
        if tree_of(source) not in ("lib", "hooks") or source.suffix != ".cpp":
            continue
        for name in sorted(set(MEMBER.findall(text))):
            if name in declared and source.parent not in declared[name]:
                folder = next(iter(declared[name])).relative_to(ROOT)
                where = source.relative_to(ROOT)
                yield f"{where}: defines members of {name}, which {folder} declares"


def note_faults(texts):
    """Each Note that is cited or written exists exactly once."""
    written, cited = {}, {}
    for source, text in texts.items():
        heads = NOTE_HEAD.findall(text)
        for title in heads:
            written.setdefault(title, []).append(source)
        for title in NOTE.findall(text):
            cited.setdefault(title, set()).add(source)
    for title, sources in sorted(cited.items()):
        places = written.get(title, [])
        if len(places) != 1:
            where = ", ".join(str(s.relative_to(ROOT)) for s in (places or sorted(sources)))
            yield f"Note [{title}] is written {len(places)} times: {where}"


def main():
    faults, warnings, texts = [], [], {}
    for tree in TREES:
        for source in sorted((ROOT / tree).rglob("*")):
            if source.suffix not in (".h", ".cpp"):
                continue
            text = source.read_text(encoding="utf-8")
            texts[source] = text
            where = source.relative_to(ROOT)
            for check in (include_faults, layer_faults, lib_faults, unstable_faults, rule_faults):
                faults += [f"{where}: {fault}" for fault in check(source, text)]
            if AVOIDED & set(re.split(r"[_/.]", str(where))):
                faults.append(
                    f"{where}: the name says nothing (utils, helpers, misc, manager, common)")
            # The body of a header may open with that header, whose sentence it shares.
            lines = text.split("\n")
            opens_with_header = source.suffix == ".cpp" and f'/{source.stem}.h"' in lines[0]
            if not opens_with_header and not any(line.startswith("//") for line in lines[:3]):
                faults.append(f"{where}: does not open with a sentence that says what it is")
            lines = text.count("\n")
            if tree != "tests" and lines > AIMS[source.suffix]:
                warnings.append(f"{where}: {lines} lines, the aim is {AIMS[source.suffix]}")
    faults += [*note_faults(texts), *cycle_faults(texts), *definition_faults(texts)]
    for warning in warnings:
        print("warning:", warning)
    for fault in faults:
        print(fault)
    if not texts:
        faults.append("no sources found")
    print(f"{len(texts)} files, {len(faults)} faults, {len(warnings)} warnings")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
