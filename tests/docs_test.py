#!/usr/bin/env python3
"""Builds the site of `./dev docs` and opens it in headless Chromium: no warning, no script error, every link leads somewhere.

Usage: docs_test.py FOLDER     where to build

A page in the browser opens index.html and each page that an opened one links, notes links and anchors, and says which lead
nowhere. It must find them in a small site that is broken. Ends with 77 where there is no Doxygen or no Chromium.
"""

import html.parser
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = 77
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# Opens the pages one after the other in a frame; the answer stands in an attribute of <html>.
CRAWL = """<!DOCTYPE html><html><body><iframe width="1200" height="900"></iframe><script>
const site = SITE, first = FIRST, faults = [], pages = new Map();
const frame = document.querySelector('iframe');
const opened = page => new Promise(done => {
  frame.onload = () => done(frame.contentDocument);
  frame.src = site + page;
});
addEventListener('load', async () => {
  const waiting = first.slice(), known = new Set(waiting);
  while (waiting.length > 0) {
    const page = waiting.shift();
    const there = await opened(page);
    if (there === null || there.location.protocol !== 'file:') {
      pages.set(page, null);
      continue;
    }
    const anchors = new Set([...there.querySelectorAll('[id], [name]')].flatMap(each => [each.id, each.getAttribute('name')]));
    const links = new Set();
    for (const link of there.querySelectorAll('a[href], area[href]')) {
      if (link.protocol !== 'file:' || link.getAttribute('href').startsWith('javascript:')) continue;
      const [path, anchor] = link.href.split('#');
      if (!path.startsWith(site)) {
        faults.push(page + ' leads out of the site: ' + link.href);
        continue;
      }
      const target = path.slice(site.length);
      links.add(target + (anchor ? '#' + decodeURIComponent(anchor) : ''));
      if (!known.has(target)) {
        known.add(target);
        waiting.push(target);
      }
    }
    for (const picture of there.images)
      if (picture.src && picture.naturalWidth === 0 && picture.offsetParent) faults.push(page + ' lacks the picture ' + picture.src);
    pages.set(page, {anchors, links});
  }
  let count = 0;
  for (const [page, content] of pages) {
    if (content === null) continue;
    for (const link of content.links) {
      ++count;
      const [target, anchor] = link.split('#');
      const there = pages.get(target);
      if (there === null) faults.push(page + ' links ' + target + ', which is not there');
      else if (anchor && !there.anchors.has(anchor)) faults.push(page + ' links ' + link + ', which has no such anchor');
    }
  }
  document.documentElement.dataset.answer = JSON.stringify({faults, pages: [...pages.keys()], links: count});
});
</script></body></html>"""


class Answer(html.parser.HTMLParser):
    """What the crawling page found."""

    def __init__(self, dom):
        super().__init__()
        self.found = None
        self.feed(dom)

    def handle_starttag(self, tag, attributes):
        if tag == "html":
            self.found = json.loads(dict(attributes).get("data-answer", "null"))


def crawl(browser, site, first, folder):
    """(what is wrong, the pages opened, how many links were followed)."""
    page = Path(folder) / "crawl.html"
    page.write_text(CRAWL.replace("SITE", json.dumps(site.as_uri() + "/")).replace("FIRST", json.dumps(first)), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0",
               "--disable-dev-shm-usage", f"--user-data-dir={folder}/profile", "--window-size=1300,1000",
               "--allow-file-access-from-files", "--virtual-time-budget=600000", "--dump-dom", page.as_uri()]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return ["the browser did not end within five minutes"], [], 0
    faults = sorted({f"the browser's console says {line.split('CONSOLE', 1)[1].strip()}"
                     for line in run.stderr.splitlines() if "CONSOLE" in line})
    found = Answer(run.stdout).found
    if found is None:
        return faults + ["the browser did not come to the last page"], [], 0
    return faults + found["faults"], found["pages"], found["links"]


def in_tree(site):
    """The pages that the tree at the left and the search lead to; its entries are made when they are unfolded."""
    targets = set()
    for script in {*site.glob("*.js"), *site.glob("search/*.js")} - {*site.glob("navtreeindex*.js")}:
        # Where each part of the tree's index begins is no entry, and may be a page that the layout leaves out.
        text = re.sub(r"var NAVTREEINDEX\s*=\s*\[.*?\]", "", script.read_text("utf-8"), flags=re.S)
        targets |= {name.removeprefix("../") for name in re.findall(r"[\"']((?:\.\./)?[\w.-]+\.html)[#\"']", text)}
    return sorted(targets)


def broken(folder):
    """A site with one fault of each kind, and words of what must be said of each."""
    site = Path(folder) / "broken"
    site.mkdir()
    (site / "index.html").write_text('<a href="other.html#there">1</a><a href="other.html#gone">2</a><a href="gone.html">3</a>'
                                     '<img src="gone.png" alt="picture">', encoding="utf-8")
    (site / "other.html").write_text('<p id="there">here</p><script>no_such_function()</script>', encoding="utf-8")
    return site, ("other.html#gone, which has no such anchor", "gone.html, which is not there", "lacks the picture", "no_such_function")


def main(out):
    sys.path.insert(0, str(ROOT / "tools/docs"))
    sys.dont_write_bytecode = True    # nothing is written into the source tree
    import build
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if shutil.which("doxygen") is None or browser is None:
        print("There is no Doxygen or no Chromium here (Debian: apt-get install doxygen chromium), so no site was opened.")
        return SKIPPED
    site, warnings = build.build(Path(out).resolve())
    if warnings:
        print(warnings)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        bad, expected = broken(folder)
        found, pages, _ = crawl(browser, bad, ["index.html"], folder)
        if not pages:
            print(f"{browser} does not run here, so no site was opened: {found}")
            return SKIPPED
        faults = [f"in a broken site nobody noticed: {words}" for words in expected if not any(words in fault for fault in found)]
        found, pages, links = crawl(browser, site, ["index.html"], folder)
        faults += found
        faults += [f"the tree or the search leads to {page}, which is not there" for page in in_tree(site) if not (site / page).exists()]
    for page in build.documents().values():
        if f"{page}.html" not in pages:
            faults.append(f"no page leads to {page}.html")
    print("\n".join(faults) if faults else f"{len(pages)} pages open without a fault, and {links} links lead where they say")
    return 1 if faults else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
