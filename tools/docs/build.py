#!/usr/bin/env python3
"""Builds the site of the documents and of the reference of include/remat: build.py FOLDER

Doxygen reads copies of the Markdown files that are written here, in which headings have the anchors that they have on
GitHub and links lead to pages of the site: to another document, to the reference of a public header, to a listing of any
other file. As a filter, build.py --header FILE prints a header whose first comment is the documentation of the file.
Ends with 77 where there is no Doxygen. A warning of Doxygen's is an error.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent.parent
SKIPPED = 77

# The documents, in the order in which the site shows them.
GUIDES = ["tutorial", "guide", "modules", "selective", "hooks", "custom-places", "planning", "seeing", "errors", "processes", "from-python",
          "binding", "limits", "faq"]
AROUND = ["CHANGELOG.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "bench/RESULTS.md", "bench/METHOD.md"]
FENCED = re.compile(r"(^```.*?^```$)", re.M | re.S)
CODE = re.compile(r"(`[^`\n]+`)")


def documents():
    """Path of each document: name of its page. Pages of docs/ that GUIDES does not name come last of them."""
    others = sorted(page.stem for page in (ROOT / "docs").glob("*.md") if page.stem not in GUIDES)
    found = {"README.md": "index"}
    found |= {f"docs/{name}.md": name for name in GUIDES + others if (ROOT / f"docs/{name}.md").exists()}
    return found | {name: Path(name).stem.lower() for name in AROUND if (ROOT / name).exists()}


def slugs(headings):
    """The anchors that GitHub gives the headings of a page."""
    seen = {}
    for heading in headings:
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
        seen[slug] = seen.get(slug, -1) + 1
        yield slug if seen[slug] == 0 else f"{slug}-{seen[slug]}"


class Site:
    def __init__(self, out):
        self.out, self.pages = out, documents()
        self.pictures, self.sources = {}, {}    # path: name in the site

    def target(self, link, document):
        """What a link of a document is in the site."""
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            return link
        file = os.path.relpath((ROOT / document).parent / path, ROOT) if path else document
        if file in self.pages:
            page = self.pages[file]
            return f"{page}.html" + (f"#{page}-{anchor}" if anchor else "")
        if file == "include/remat":
            return "files.html"
        if file.startswith("include/remat/"):
            return Path(file).name.replace("_", "__").replace(".", "_8") + ".html"
        self.sources[file] = "source-" + re.sub(r"[/.]", "-", file)
        return self.sources[file] + ".html"

    def prose(self, text, document):
        """A stretch of Markdown without fenced code."""
        def picture(match):
            file = os.path.relpath((ROOT / document).parent / match[2], ROOT)
            self.pictures[file] = "pictures/" + Path(file).name
            return f'<img src="{self.pictures[file]}" alt="{match[1]}">'

        text = re.sub(r"!\[([^\]]*)\]\(([^)\s]+)\)", picture, text)
        text = re.sub(r"\]\(([^)\s]+)\)", lambda match: f"]({self.target(match[1], document)})", text)
        # The bar of a table's cell needs a backslash, which Doxygen takes away outside of backticks only.
        text = CODE.sub(lambda match: match[0] if "\\|" not in match[0] else f"<code>{match[0][1:-1]}</code>", text)
        # Code at the edge of what is bold makes it two pairs of asterisks.
        pieces = CODE.split(text)
        bold = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", "\0".join(pieces[::2]), flags=re.S)
        return "".join(piece + code for piece, code in zip(bold.split("\0"), pieces[1::2] + [""]))

    def page(self, document):
        text = (ROOT / document).read_text(encoding="utf-8")
        name = self.pages[document]
        pieces = FENCED.split(text)
        anchors = slugs(re.findall(r"^#+ (.*)$", "".join(pieces[::2]), re.M))

        def heading(match):
            anchor = next(anchors)
            if match[1] == "#":
                contents = "\n\n[TOC]" if document.startswith("docs/") else ""
                return f"# {match[2]} {{#{'mainpage' if name == 'index' else name}}}{contents}"
            if name == "index":     # its headings would be in the tree beside the pages
                return f'<h1 id="{name}-{anchor}">{match[2]}</h1>\n'
            return f"{match[1]} {match[2]} {{#{name}-{anchor}}}"

        for i in range(0, len(pieces), 2):
            pieces[i] = re.sub(r"^(#+) (.*)$", heading, self.prose(pieces[i], document), flags=re.M)
        for i in range(1, len(pieces), 2):
            # What Doxygen has no colours for it would take for C++.
            pieces[i] = re.sub(r"^```(?!cpp\n)\w*\n", "```{.unparsed}\n", pieces[i])
        return "".join(pieces)

    def listing(self, path):
        """A page that shows a file of the tree, or the files of a folder with the sentence that each opens with."""
        title = f"# {path} {{#{self.sources[path]}}}\n\n"
        if (ROOT / path).is_file():
            # Doxygen takes torch.nn in Python for the namespace, which has no page.
            command = "include{lineno}" if Path(path).suffix in (".h", ".cpp") else "verbinclude"
            return f"{title}\\{command} {path}\n"
        rows = []
        for file in sorted((ROOT / path).rglob("*")):
            if file.suffix in (".h", ".cpp"):
                opening = re.match(r"(?:#pragma once\n|#include .*\n)?((?://(?: .*)?\n)+)", file.read_text(encoding="utf-8"))
                words = " ".join(line.removeprefix("//").strip() for line in opening[1].split("\n")) if opening else ""
                sentence = re.match(r".*?[.](?=\s|$)|.*", words)[0]
                for character, escaped in ("\\", "\\\\"), ("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("#", "\\#"), ("@", "\\@"):
                    sentence = sentence.replace(character, escaped)
                if sentence:    # the body of a header opens with that header
                    rows.append(f"| `{file.relative_to(ROOT)}` | {sentence} |")
        return title + "| file | |\n|---|---|\n" + "\n".join(rows) + "\n"

    def layout(self):
        """Doxygen's layout with a tree of the documents before the reference."""
        titles = {page: (ROOT / document).read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")
                  for document, page in self.pages.items()}
        def tabs(which):
            return "".join(f'<tab type="user" url="{page}.html" title="{titles[page]}"/>'
                           for document, page in self.pages.items() if which(document))
        layout = subprocess.run(["doxygen", "-l", "/dev/stdout"], capture_output=True, text=True, check=True).stdout
        mine = (tabs(lambda document: document.startswith("docs/")) + '<tab type="usergroup" url="[none]" title="The project">'
                + tabs(lambda document: document in AROUND) + "</tab>"
                '<tab type="usergroup" url="[none]" title="Reference">'
                '<tab type="filelist" visible="yes" title="Headers"/>'
                '<tab type="classlist" visible="yes" title="Classes and options"/>'
                '<tab type="user" url="namespaceremat.html" title="Functions and types"/></tab>')
        return re.sub(r"<navindex>.*</navindex>",
                      f'<navindex><tab type="mainpage" visible="yes" title="{titles["index"]}"/>{mine}</navindex>',
                      layout, flags=re.S)

    def write(self):
        shutil.rmtree(self.out, ignore_errors=True)
        pages, html = self.out / "pages", self.out / "html"
        (html / "pictures").mkdir(parents=True)
        pages.mkdir()
        for document, name in self.pages.items():
            (pages / f"{name}.md").write_text(self.page(document), encoding="utf-8")
        for path, name in list(self.sources.items()):
            (pages / f"{name}.md").write_text(self.listing(path), encoding="utf-8")
        (pages / "remat.dox").write_text("/// \\namespace remat\n/// All that a program may call or name.\n", encoding="utf-8")
        for path, name in self.pictures.items():
            shutil.copyfile(ROOT / path, html / name)
        (self.out / "layout.xml").write_text(self.layout(), encoding="utf-8")
        settings = {
            "INPUT": f'"{pages}" "{ROOT}/include/remat"', "EXCLUDE": f'"{ROOT}/include/remat/export.h"',
            "OUTPUT_DIRECTORY": f'"{self.out}"', "EXAMPLE_PATH": f'"{ROOT}"',
            "STRIP_FROM_PATH": f'"{ROOT}/include"', "STRIP_FROM_INC_PATH": f'"{ROOT}/include"',
            "USE_MDFILE_AS_MAINPAGE": f'"{pages}/index.md"',
            "FILTER_PATTERNS": f'"*.h={sys.executable} {TOOLS}/build.py --header"', "LAYOUT_FILE": f'"{self.out}/layout.xml"',
            "HTML_EXTRA_STYLESHEET": f'"{TOOLS}/style.css"', "PROJECT_NUMBER": version(),
        }
        text = (TOOLS / "Doxyfile").read_text(encoding="utf-8")
        text += "".join(f"{name} = {value}\n" for name, value in settings.items())
        (self.out / "Doxyfile").write_text(text, encoding="utf-8")


def version():
    return re.search(r'REMAT_VERSION "(.*)"', (ROOT / "include/remat/version.h").read_text(encoding="utf-8"))[1]


def header(path):
    """A header whose opening comment documents the file, line for line the same."""
    def documented(match):
        return "/// \\file\n" + match[1].replace("//", "///")

    text = re.sub(r"^#pragma once\n((?://.*\n)+)", documented, Path(path).read_text(encoding="utf-8"))
    # A paragraph each, as they begin a line.
    text = re.sub(r"^( */// )(Memory|Arguments|Threads|Throws|Cost|Not counted|Sources?|Examples?)(?=:| `)(:?)", r"\1<p><b>\2\3</b>", text, flags=re.M)
    # Doxygen 1.9.4 links friends that it does not show. Those with a body are operators, which it does.
    return re.sub(r"^( *)friend [^;{=]*;$", r"\1//", text, flags=re.M)


def build(out):
    """The folder with index.html; Doxygen's words if it failed."""
    Site(out).write()
    run = subprocess.run(["doxygen", str(out / "Doxyfile")], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    return out / "html", run.stderr if run.returncode != 0 or run.stderr else ""


def main(arguments):
    if len(arguments) == 2 and arguments[0] == "--header":
        print(header(arguments[1]), end="")
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.exit(__doc__)
    if shutil.which("doxygen") is None:
        print("There is no Doxygen here (Debian: apt-get install doxygen), so there is no site.")
        return SKIPPED
    html, faults = build(Path(arguments[0]).resolve())
    if faults:
        print(faults, file=sys.stderr)
        return 1
    print(f"{html}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
