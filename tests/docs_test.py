#!/usr/bin/env python3
"""Builds the site of `./dev docs` and opens it in headless Chromium: no warning, no script error,
every link leads somewhere, the search finds pages.

Usage: docs_test.py FOLDER     where to build

A page in the browser opens index.html and each page that an opened one links, notes links and
anchors, and says which lead nowhere. It must find them in a small site that is broken. Ends with 77
where there is no Doxygen, Sphinx or Chromium.
"""

import html.parser
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = 77
FIRST = ["index.html", "search.html?q=early+stop"]
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
    if (page.includes('?q=')) {
      for (let i = 0; i < 100 && !there.querySelector('#search-results li a'); ++i)
        await new Promise(done => setTimeout(done, 100));
      if (!there.querySelector('#search-results li a')) faults.push(page + ' finds nothing');
    }
    const anchors = new Set([...there.querySelectorAll('[id], [name]')].flatMap(
      each => [each.id, each.getAttribute('name')]));
    const links = new Set();
    for (const link of there.querySelectorAll('a[href], area[href]')) {
      if (link.protocol !== 'file:') continue;
      if (link.getAttribute('href').startsWith('javascript:')) continue;
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
      if (picture.src && picture.naturalWidth === 0 && picture.offsetParent)
        faults.push(page + ' lacks the picture ' + picture.src);
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
      else if (anchor && !there.anchors.has(anchor))
        faults.push(page + ' links ' + link + ', which has no such anchor');
    }
  }
  document.documentElement.dataset.answer = JSON.stringify(
    {faults, pages: [...pages.keys()], links: count});
});
</script></body></html>"""


class Answer(html.parser.HTMLParser):
    """The faults that the crawling page found."""

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
    page.write_text(CRAWL.replace("SITE", json.dumps(site.as_uri() + "/")).replace(
        "FIRST", json.dumps(first)), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
               "--v=0",
               "--disable-dev-shm-usage", f"--user-data-dir={folder}/profile",
               "--window-size=1300,1000",
               "--allow-file-access-from-files", "--virtual-time-budget=600000", "--dump-dom",
               page.as_uri()]
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


def broken(folder):
    """A site with one fault of each kind, and words of what must be said of each."""
    site = Path(folder) / "broken"
    site.mkdir()
    (site / "index.html").write_text('<a href="other.html#there">1</a><a '
                                     'href="other.html#gone">2</a><a href="gone.html">3</a><img '
                                     'src="gone.png" alt="picture">', encoding="utf-8")
    (site / "search.html").write_text('<ul id="search-results"></ul>', encoding="utf-8")
    (site / "other.html").write_text('<p id="there">here</p><script>no_such_function()</script>',
                                     encoding="utf-8")
    return site, ("other.html#gone, which has no such anchor", "gone.html, which is not there",
                  "lacks the picture", "no_such_function",
                  "finds nothing")


def main(out):
    sys.path.insert(0, str(ROOT / "tools/docs"))
    sys.dont_write_bytecode = True    # nothing is written into the source tree
    import build
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if build.missing() or browser is None:
        print(
            f"There is no {' and no '.join(build.missing() or ['Chromium'])} here, so no site was "
            "opened.")
        return SKIPPED
    site, warnings = build.build(Path(out).resolve())
    if warnings:
        print(warnings)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        bad, expected = broken(folder)
        found, pages, _ = crawl(browser, bad, FIRST, folder)
        if not pages:
            print(f"{browser} does not run here, so no site was opened: {found}")
            return SKIPPED
        faults = [f"in a broken site nobody noticed: {words}" for words in expected
                  if not any(words in fault for fault in found)]
        found, pages, links = crawl(browser, site, FIRST, folder)
        faults += found
    # a form leads there
    made = {str(page.relative_to(site)) for page in site.rglob("*.html")} - {"search.html"}
    faults += [f"no page leads to {page}" for page in sorted(made - set(pages))]
    faults += [f"there is no page of {document}" for document, page in build.documents().items()
               if f"{page}.html" not in made]
    print("\n".join(faults) if faults
          else f"{len(pages)} pages open without a fault, and {links} links lead where they say")
    return 1 if faults else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
