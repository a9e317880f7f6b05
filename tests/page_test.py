#!/usr/bin/env python3
"""Opens what a run draws in headless Chromium: no script error, nothing else loaded, all of it
there, labels readable.

Usage: page_test.py CHAR_TRANSFORMER     the built example, which writes a recorder's page and a
picture
       page_test.py --devices DEVICE     the tests on the stand-in for accelerators, of which a case
       writes a page

It then spoils the page in several ways and requires that each is found. Ends with 77 where there is
no Chromium.
"""

import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SKIPPED = 77
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# Measures of the page in the browser; the answer stands in an attribute of <html>.
PROBE = """<script>
addEventListener('load', () => {
  const faults = [];
  const box = element => element.getBoundingClientRect();
  const sheets = [...document.querySelectorAll('svg')];
  if (sheets.length !== NUM_PICTURES) faults.push(sheets.length + ' pictures, not NUM_PICTURES');
  for (const sheet of sheets) {
    const edge = box(sheet);
    if (edge.width < 600 || edge.height < 300) faults.push('the picture is tiny');
    const labels = [...sheet.querySelectorAll('text')].map(
      text => ({words: text.textContent, at: box(text)}));
    if (labels.length < 10) faults.push('the picture has ' + labels.length + ' labels');
    for (const {words, at} of labels) {
      if (at.width === 0 || at.height < 8) faults.push('the label "' + words + '" cannot be read');
      if (at.left < edge.left - 1 || at.right > edge.right + 1 ||
          at.top < edge.top - 1 || at.bottom > edge.bottom + 1)
        faults.push('the label "' + words + '" leaves the picture');
    }
    labels.forEach((a, i) => labels.slice(i + 1).forEach(b => {
      const across = Math.min(a.at.right, b.at.right) - Math.max(a.at.left, b.at.left);
      const down = Math.min(a.at.bottom, b.at.bottom) - Math.max(a.at.top, b.at.top);
      if (across > 1 && down > 4)
        faults.push('the labels "' + a.words + '" and "' + b.words + '" overlap');
    }));
    const areas = [...sheet.querySelectorAll('polygon')].map(box).filter(
      at => at.width > 100 && at.height > 5);
    if (areas.length === 0) faults.push('no bytes are drawn');
  }
  for (const table of document.querySelectorAll('table')) {
    const widths = new Set([...table.rows].map(row => row.cells.length));
    if (widths.size !== 1) faults.push('the rows of the table differ in length');
    if (box(table).right > innerWidth) faults.push('the table is wider than the window');
  }
  document.documentElement.dataset.faults = JSON.stringify(faults);
});
</script>"""


class Page(html.parser.HTMLParser):
    """The probe's answer, titles of what lies under the pointer, and the first cells of the table's
    rows."""

    def __init__(self, dom):
        super().__init__()
        self.faults, self.titles, self.names, self.open, self.is_first = None, [], [], None, False
        self.feed(dom)

    def handle_starttag(self, tag, attributes):
        self.open = tag
        if tag == "html":
            self.faults = json.loads(dict(attributes).get("data-faults", "null"))
        self.is_first = tag == "tr" or (self.is_first and tag == "td")

    def handle_endtag(self, tag):
        self.open = None
        self.is_first = self.is_first and tag != "td"

    def handle_data(self, text):
        if self.open == "title":
            self.titles.append(text)
        if self.open == "td" and self.is_first:
            self.names.append(text)


def opened(browser, page, folder):
    """(what the page looks like to a script, what the browser says on its console)."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
               "--v=0",
               "--disable-dev-shm-usage", f"--user-data-dir={folder}/profile",
               "--window-size=1200,900",
               "--virtual-time-budget=3000", "--dump-dom", page.as_uri()]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return Page(""), ["nothing: it did not end within two minutes"]
    console = [line.split("CONSOLE", 1)[1] for line in run.stderr.splitlines() if "CONSOLE" in line]
    return Page(run.stdout), console


def faults_of(browser, text, folder, rows=(), devices=()):
    """The faults of a page, as lines; `rows` are the regions that it must list and draw, also
    on each of `devices`."""
    page = Path(folder) / "page.html"
    probe = PROBE.replace("NUM_PICTURES", str(1 + len(devices)))
    page.write_text(text.replace("</body>", probe + "</body>"), encoding="utf-8")
    seen, console = opened(browser, page, folder)
    faults = [f"the browser's console says {line.strip()}" for line in console]
    # Chromium does not tell scripts what it loads from files.
    loads = re.findall(r"<[^>]*\b(?:src|href)=[^>]*>|@import[^;]*|url\([^)]*", text)
    faults += [f"the page loads {name}" for name in loads]
    if seen.faults is None:
        return faults + ["the page did not come as far as the end of its body"]
    faults += seen.faults
    for name in rows:
        if name not in seen.names:
            faults.append(f"the table does not list {name}")
        for what in ("forward", "recompute"):
            for where in ("", *(f" on {device}" for device in devices)):
                if not any(re.match(rf"{name} {what}{where}: [\d.]+ ms", title)
                           for title in seen.titles):
                    faults.append(f"no bar shows {name} {what}{where}")
    return faults


def spoiled(page):
    """(what is wrong, a word that the fault found must have, the page with it)."""
    label = re.search(r"<text [^>]*>[^<]*inputs kept</text>", page).group()
    yield "a script that throws", "console", page.replace("<h1>",
                                                          "<script>no_such_function()</script><h1>")
    yield "a label twice", "overlap", page.replace(label, label + label)
    yield "a label outside", "leaves", page.replace(label, label.replace('y="', 'y="-'))
    yield "a picture that is not there", "picture", re.sub(r"<svg.*</svg>", "", page, flags=re.S)
    yield "a cell too few", "differ in length", page.replace("</td></tr>",
                                                             "</td></tr><tr><td>more</td></tr>", 1)
    yield "a region too few", "does not list", re.sub(r"<tr><td>block.*?</tr>", "", page,
                                                      flags=re.S)
    yield "a file beside it", "loads", page.replace("<h1>", '<img src="no-such-file.png"><h1>')


def of_devices(browser, program, folder):
    """The faults of the page of a run on two devices."""
    page = Path(folder) / "devices.html"
    subprocess.run([program, "[page]"], env={**os.environ, "REMAT_TEST_PAGE": str(page)},
                   capture_output=True, check=True)
    text, devices = page.read_text(encoding="utf-8"), ("far:0", "far:1")
    faults = faults_of(browser, text, folder, rows=("block",), devices=devices)
    if not any("far:1" in fault for fault in
               faults_of(browser, text.replace("forward on far:1", "on far:1"), folder,
                         rows=("block",), devices=devices)):
        faults.append("a device without bars was not found")
    if text.count("given out by the allocator") != len(devices) or text.count("<polyline") != len(
        devices):
        faults.append("the pictures of devices lack the line of their allocators")
    return faults


def main(program, has_devices=False):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(
            "There is no Chromium here (Debian: apt-get install chromium), so no page was opened.")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        empty = faults_of(browser, "<!DOCTYPE html><html><body><p>nothing</p></body></html>",
                          folder)
        if not any("pictures" in fault for fault in empty):
            print(f"{browser} does not run here, so no page was opened: {empty}")
            return SKIPPED
        if has_devices:
            faults = of_devices(browser, program, folder)
            print("\n".join(faults) if faults else "the page of two devices opens without a fault")
            return 1 if faults else 0
        run = subprocess.run([program, "--small", "--out", folder], capture_output=True, text=True,
                             check=False)
        if run.returncode != 0:
            print(run.stdout + run.stderr)
            return 1
        page = (Path(folder) / "char_transformer_step.html").read_text(encoding="utf-8")
        faults = [f"the page: {fault}"
                  for fault in faults_of(browser, page, folder, rows=("group", "block"))]
        budget = (Path(folder) / "char_transformer_budget.html").read_text(encoding="utf-8")
        faults += [f"the page of a budget: {fault}" for fault in faults_of(browser, budget, folder)]
        for words in ("Operators under a byte budget", "<td>aten::mm.default</td>", ">budget: "):
            if words not in budget:
                faults.append(f"the page of a budget does not show {words}")
        picture = (Path(folder) / "char_transformer_memory.svg").read_text(encoding="utf-8")
        faults += [f"the picture: {fault}"
                   for fault in faults_of(
                       browser, f"<!DOCTYPE html><html><body>{picture}</body></html>", folder)]
        for what, word, text in spoiled(page):
            if text == page:
                faults.append(f"{what} could not be made: the page has changed, so must this test")
            elif not any(word in fault
                         for fault in faults_of(browser, text, folder, rows=("group", "block"))):
                faults.append(f"{what} was not found")
    print("\n".join(faults) if faults
          else "the page and the picture open without a fault, and spoiled pages are found")
    return 1 if faults else 0


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--devices":
        sys.exit(main(sys.argv[2], has_devices=True))
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
