#!/usr/bin/env python3
"""Makes bench/RESULTS.md and bench/plots/ of what `./dev bench` measured.

    python3 bench/page.py --begin FOLDER [ARGUMENT...]    notes the machine, and the arguments of
    all programs
    python3 bench/page.py --on-devices                    names the benchmarks that run on
    accelerators python3 bench/page.py FOLDER

With `--device NAME` among the arguments the page is bench/RESULTS-NAME.md, of those benchmarks.

FOLDER then holds, of each benchmark, NAME.jsonl (its lines) and NAME.txt (its table). Numbers come
from there alone.
"""

import datetime
import json
import pathlib
import re
import shutil
import sys
import textwrap
import time

import plot

BENCH = pathlib.Path(__file__).resolve().parent
PYTHON_BENCH = BENCH.parent / "python" / "bench"
# In the order of the page: benchmark, question, explanation.
SECTIONS = (
    ("region_cost", "What does a region cost?",
     "Nanoseconds of a chain of regions beyond a plain step and one more forward, on a tensor of "
     "one element, where bookkeeping is all that is left. `python` is "
     "`torch.utils.checkpoint(use_reentrant=False)` on the same LibTorch; `re-entrant` is a C++ "
     "`torch::autograd::Function` that runs forward without grad mode and calls backward in its "
     "backward, as programs without this library do it. All in one run, in turns."),
    ("python_region_cost", "What does a region cost in Python?",
     "The same of the Python package, beside `torch.utils.checkpoint` itself in the same process: "
     "as the drop-in, which stops recomputes where that does, and by its own interface, which "
     "stops where it pays. \"Wanted\" is what was aimed at; "
     "[METHOD.md](METHOD.md#python_region_cost-what-a-region-costs-in-python) says why some is "
     "not reached."),
    ("scale", "Does it stay so when there are many?",
     "The same overhead per unit, and the bytes that regions hold beyond the program's tensors "
     "and autograd's nodes. Plain autograd gets slower itself when a graph outgrows the caches: "
     "its step per unit stands beside it."),
    ("step_cost", "What does a whole step cost?",
     "A training step over (plain step + one forward), which is what recomputing must cost; bytes "
     "beyond what is there before the step."),
    ("budget", "What does a byte budget cost?",
     "Steps within shares of the plain peak: operator work by a frozen table of costs (1 is a "
     "plain step's), and time over the plain step's. `reverse` is the library's choice of what to "
     "drop; `dtr`, `least recent` and `size` are others, whose search is not timed."),
    ("python_budget_peers", "What does a byte budget cost beside its peers?",
     "One GPT in one process: torch's checkpoint around every block, and remat.budget; with "
     "`--compile` also torch.compile under several values of `activation_memory_budget`, each "
     "with remat.budget at the same measured peak."),
    ("gpt_step", "How fast does a GPT train, and with which peak?",
     "A step of a GPT, forward and backward, whose stages are its blocks: tokens a second, and "
     "bytes beyond what is there before. Plans are made of measured stages for a half and a "
     "quarter of what the plain step has at its peak."),
    ("python_gpt2_step", "What does a step in Python cost?",
     "Forward and backward of a small GPT2 of the package `transformers`, every block a region."),
    ("peak_bytes", "Is the peak what theory says?",
     "Stages of `sin`, whose saves are known. The program fails if one byte differs."),
    ("selective_curve", "What does a policy buy?",
     "Blocks of the demo's model, each a region, with what the policy keeps."),
    ("selective_cost", "What does a policy cost per operator?",
     "In units of a plain operator on one element."),
    ("recipes", "Where do regions go in programs that are no chain of blocks?",
     "Each program in several ways; bytes and times of a step, over the plain one's."),
    ("jacobian", "What do many gradients of one graph cost?",
     "Rows of a Jacobian by `torch::autograd::grad` with a retained graph, eight regions of real "
     "layers."),
    ("checks_cost", "What do the options cost?",
     "A step with one option changed, over the step with the defaults."),
    ("recorder_cost", "What does looking on cost?",
     "The demo's step, and the smallest regions, under a recorder."),
    ("offload", "What does it cost to keep tensors elsewhere?",
     "Time added per saved byte, by guard."),
    ("moving_cost", "What does moving to a file cost the thread that saves?",
     "Time on a core, of the calling thread and of all, per MiB, beyond the plain chain's."),
    ("tiers", "Is moving better than recomputing?",
     "Steps with the same peak: what is saved waits in a file, or is computed again. `waited`: "
     "for the file, of the step."),
    ("plan_moving", "What do plans gain that may move what is saved?",
     "The same budgets for plans that only recompute, and that may move what is saved to a file."),
    ("plan_curve", "How long does planning take?",
     "The frontier of time and memory for all budgets at once."),
    ("plan_gap", "What does a plan lose to schedules of all kinds?",
     "Step times of plans over the least of all schedules, for the same bytes; chains of four "
     "stages and a loss."),
)


# Benchmarks that take `--device`.
ON_DEVICES = ("region_cost", "step_cost", "gpt_step", "peak_bytes", "selective_cost",
              "selective_curve", "offload", "plan_moving",
              "recorder_cost")


def device_words(arguments):
    return [value for word, value in zip(arguments, arguments[1:]) if word == "--device"]


def device_of(arguments):
    """The device that arguments name, without its number; '' for the CPU."""
    named = device_words(arguments)
    device = named[-1].split(":")[0] if named else ""
    return "" if device == "cpu" else device


def busy_cores(seconds=2):
    """How many cores other programs keep busy."""
    def ticks():
        first, *cores = [line.split() for line in open("/proc/stat") if line.startswith("cpu")]
        numbers = list(map(int, first[1:9]))
        return sum(numbers), numbers[3] + numbers[4], len(cores)

    all_before, idle_before, _ = ticks()
    time.sleep(seconds)
    all_after, idle_after, cores = ticks()
    return cores * (1 - (idle_after - idle_before) / max(all_after - all_before, 1)), cores


def begin(folder, arguments):
    found = re.search(r"^model name\s*:\s*(.+)$", pathlib.Path("/proc/cpuinfo").read_text(), re.M)
    busy, cores = busy_cores()
    machine = {"processor": found[1] if found else "an unnamed processor", "cores": cores,
               "busy_cores": round(busy, 2),
               "date": datetime.date.today().isoformat(), "arguments": arguments}
    (folder / "machine.json").write_text(json.dumps(machine))


class Samples:
    """The JSON lines of one benchmark."""

    def __init__(self, folder, name):
        self.lines = [json.loads(line)
                      for line in (folder / f"{name}.jsonl").read_text().splitlines()]

    def select(self, **params):
        return [line for line in self.lines
                if all(line["params"].get(key) == value for key, value in params.items())]

    def one(self, **params):
        found = self.select(**params)
        if len(found) != 1:
            sys.exit(f"{len(found)} lines with {params}")
        return found[0]

    def values(self, key):
        return list(
            dict.fromkeys(line["params"][key] for line in self.lines if key in line["params"]))


def region_cost(samples):
    groups = []
    for line in samples.select(kind="overhead per region", side="remat"):
        params = line["params"]
        name = f"{params['ops']} operator" + ("s" if params["ops"] > 1 else "")
        name += "" if params["preserve_rng_state"] else ", no RNG state"
        of_work = {key: params[key] for key in ("ops", "preserve_rng_state")}
        groups.append(
            (name, [(side, samples.one(kind="overhead per region", side=side, **of_work)["min_ns"])
                              for side in samples.values("side")]))
    yield "region_cost", plot.bars("Overhead per region", "beyond plain step and one forward; one "
                                                          "element, 20 regions in a chain, "
                                                          "minima", "ns per region", groups)


def python_region_cost(samples):
    groups = [(case, [(side, samples.one(case=case, side=side)["min_ns"] / 1000)
                      for side in samples.values("side")])
              for case in samples.values("case")]
    yield "python_region_cost", plot.bars("Overhead per region in Python",
                                          "beyond plain step and one forward; four elements, 20 "
                                          "regions in a chain, minima",
                                          "us per region (logarithmic)", groups, log=True)


def python_gpt2_step(samples):
    groups = [(batch, [(side, samples.one(batch=batch, side=side)["min_ns"]
                        / samples.one(batch=batch, side="plain")["min_ns"])
                       for side in samples.values("side") if side != "plain"])
              for batch in samples.values("batch")]
    yield "python_gpt2_step", plot.bars("A step of a small GPT2 in Python",
                                        "over the plain step; minima", "ratio", groups,
                                        mark=("plain", 1))


def scale(samples):
    def of(unit, value):
        return [(line["params"]["count"], value(line)) for line in samples.lines
                if line.get("unit") == unit and value(line) is not None]

    units = list(dict.fromkeys(line["unit"] for line in samples.lines
                               if line.get("unit", "all of it") != "all of it"))
    series = [(f"per {unit}", of(unit, lambda line: line["min_ns"])) for unit in units]
    series.append(("plain step per sin", of(units[0], lambda line: line["plain_ns_per_unit"])))
    yield "scale_time", plot.lines("Overhead per unit against their number",
                                   "beyond plain step and one forward; one element, "
                                   "minima", "how many", "ns per unit (logarithmic)", series,
                                   log_x=True, log_y=True)
    series = [(f"per {unit}", of(unit, lambda line: line.get("bytes_per_unit"))) for unit in units]
    series = [(name, points) for name, points in series if points]
    if series:
        yield "scale_bytes", plot.lines("Bytes of bookkeeping per unit against their number",
                                        "held between forward and backward, beyond the program's "
                                        "tensors and autograd's nodes", "how many",
                                        "bytes per unit", series, log_x=True,
                                        marks=(("aim per region", 1024),
                                               ("aim per saved tensor", 256)))


def step_cost(samples):
    groups = []
    for model in samples.values("model"):
        for step in samples.values("step"):
            found = samples.select(model=model, step=step)
            if found and step not in ("one forward, then a plain step", "plain step"):
                groups.append((f"{model}: {step}",
                               [(f"threads: {line['threads']}", line["of_plain_and_forward"])
                                                    for line in found]))
    yield "step_cost", plot.bars("A checkpointed step", "over (plain step + one forward); minima",
                                 "ratio", groups,
                                 mark=("plain step + one forward", 1))


def peak_bytes(samples):
    groups = [(
        f"{line['params']['stages']} stages of {line['params']['sines']}: {line['params']['plan']}",
               [("theory", line["theory_bytes"] / line["params"]["tensor_bytes"]),
                ("measured", line["peak_bytes"] / line["params"]["tensor_bytes"])])
              for line in samples.lines]
    yield "peak_bytes", plot.bars("Peak of a step", "in tensors of one stage", "tensors", groups)


def selective_curve(samples):
    plain = samples.one(keeps="plain autograd")
    named = [(line["params"]["keeps"], line["peak_bytes"] / 1e6, line["min_ns"] / plain["min_ns"])
             for line in samples.lines if line["peak_bytes"]]
    yield "selective_curve", plot.points("What regions keep: time against memory",
                                         "a step of six transformer blocks, forward "
                                         "and backward; minima", "peak of a step [MB]",
                                         "time of a step, of plain", named,
                                         low=(None, 0.9))


def recipes(samples):
    groups = []
    for recipe in samples.values("recipe"):
        plain = samples.one(recipe=recipe, variant="plain")
        groups += [(f"{recipe}: {line['params']['variant']}",
                    [("peak", line["peak_bytes"] / plain["peak_bytes"]),
                     ("time", line["min_ns"] / plain["min_ns"])])
                   for line in samples.select(recipe=recipe) if line is not plain]
    yield "recipes", plot.bars("Programs with regions in several places",
                               "a step, over the plain one; minima", "ratio", groups,
                               mark=("plain", 1))


def jacobian(samples):
    ways = samples.values("way")
    for name, title, unit, value in (
            ("jacobian_time", "Time of rows of a Jacobian", "ms",
             lambda line: line["min_ns"] / 1e6),
            ("jacobian_peak", "Peak of rows of a Jacobian", "MB",
             lambda line: line["peak_bytes"] / 1e6)):
        series = [(way, [(line["params"]["rows"], value(line)) for line in samples.select(way=way)])
                  for way in ways]
        yield name, plot.lines(title,
                               "one forward, then a gradient by the input for each row; eight "
                               "regions", "rows", unit, series)


def checks_cost(samples):
    groups = [(variant, [(model, samples.one(model=model, variant=variant)["min_ns"] /
                          samples.one(model=model, variant="defaults")["min_ns"])
                         for model in samples.values("model")])
              for variant in samples.values("variant") if variant != "defaults"]
    yield "checks_cost", plot.bars("A step with one option changed",
                                   "over the step with the defaults; minima", "ratio", groups,
                                   mark=("defaults", 1))


def plan_curve(samples):
    groups = [(line["params"]["chain"], [("ms", line["min_ns"] / 1e6)]) for line in samples.lines]
    yield "plan_curve", plot.bars("Time to find the frontier of all budgets", "minima",
                                  "ms (logarithmic)", groups, log=True)


def facts(machine, every):
    first = every["region_cost"].lines[0]
    lines = [line for samples in every.values() for line in samples.lines]

    def of_all(values):
        return ", ".join(map(str, sorted(set(values))))

    yield (f"* {machine['processor']}, {machine['cores']} cores, of which other programs kept "
           f"{machine['busy_cores']} busy when the run began; {machine['date']}.")
    commits = of_all(line["commit"] for line in lines)
    yield f"* LibTorch {first['torch']}, {first['compiler']}, `-O2 -DNDEBUG`; commit {commits}."
    yield ("* Clock: "
           f"{of_all(line['params']['clock'] for line in lines if 'clock' in line['params'])}. "
           f"Samples: {of_all(line['samples'] for line in lines if 'samples' in line)} of each.")
    if machine["busy_cores"] > 0.2:
        yield "* **The machine was not idle: times are disturbed.** Bytes and counts are exact."
    if [word for word in machine["arguments"]
        if word not in ("--device", *device_words(machine["arguments"]))]:
        yield "* A quick look: with the arguments that stand below, not the defaults."


def table_of(folder, name):
    rows = [line.rstrip() for line in (folder / f"{name}.txt").read_text().splitlines()]
    return [row for row in rows if row and not row.startswith("gradients ")]


def main():
    if sys.argv[1] == "--begin":
        return begin(pathlib.Path(sys.argv[2]), sys.argv[3:])
    if sys.argv[1] == "--on-devices":
        return print("\n".join(ON_DEVICES))
    folder = pathlib.Path(sys.argv[1])
    machine = json.loads((folder / "machine.json").read_text())
    there = {file.stem for file in BENCH.glob("*.cpp")}
    there |= {f"python_{file.stem}" for file in PYTHON_BENCH.glob("*.py")
              if "__main__" in file.read_text()}
    without = there - {name for name, _, _ in SECTIONS}
    if without:
        sys.exit(f"{', '.join(sorted(without))}: no section here")
    device = device_of(machine["arguments"])
    suffix = f"-{device.upper()}" if device else ""
    # Benchmarks in Python run only if there is a Python.
    sections = [section for section in SECTIONS
                if (not device or section[0] in ON_DEVICES)
                and (not section[0].startswith("python_")
                     or (folder / f"{section[0]}.jsonl").exists())]
    every = {name: Samples(folder, name) for name, _, _ in sections}
    plots = {}
    page = ["# What the benchmarks measured" + (f" on {device}" if device else ""), "",
            f"Made by `./dev bench{f' --device {device}' if device else ''}`; "
            "[METHOD.md](METHOD.md) says how each is measured and what it leaves out. Minima are "
            "over",
            "rounds in which everything that is compared takes turns. Every program compares "
            "gradients with plain autograd's,",
            "bit by bit unless sums are made in parts, before it takes a "
            "time.", "", *facts(machine, every), ""]
    for name, question, words in sections:
        command = " ".join(["./dev bench", name, *machine["arguments"]])
        page += [f"## {question}", "", textwrap.fill(words, 100, break_on_hyphens=False), "",
                 f"`{command}`", "", "```text", *table_of(folder, name), "```", ""]
        for file, picture in globals()[name](every[name]) if name in globals() else ():
            plots[f"{file}.svg"] = picture
            title = re.search(r'font-size="16"[^>]*>([^<]*)<', picture)[1]
            page += [f"![{title}](plots{suffix}/{file}.svg)", ""]
    # All or nothing: if a number is missing, the old page and plots stay.
    results, folder_of_plots = BENCH / f"RESULTS{suffix}.md", BENCH / f"plots{suffix}"
    results.write_text("\n".join(page).rstrip() + "\n")
    shutil.rmtree(folder_of_plots, ignore_errors=True)
    folder_of_plots.mkdir()
    for file, picture in plots.items():
        (folder_of_plots / file).write_text(picture)
    print(f"{results}, {len(plots)} plots")


if __name__ == "__main__":
    main()
