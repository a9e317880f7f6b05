"""Sphinx's settings for the site, and the links that only the site has: to files of the tree, to
names of the references."""

import functools
import html
import os
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from docutils import nodes
from pygments.lexers import find_lexer_class_for_filename
from sphinx import addnodes
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent.parent
sys.path.insert(0, str(TOOLS))

from build import opening

project = "remat"
release = re.search(r'REMAT_VERSION "(.*)"',
                    (ROOT / "include/remat/version.h").read_text("utf-8"))[1]
extensions = ["myst_parser", "breathe", "sphinx_copybutton"]
root_doc = "index"
html_theme = "furo"
html_title = f"remat {release}"
html_static_path = [str(TOOLS / "style.css")]
html_css_files = ["style.css"]
html_domain_indices = html_copy_source = html_show_sphinx = html_show_copyright = False
myst_heading_anchors = 4
breathe_default_project = "remat"
breathe_show_include = False
python_maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"
highlight_language = "none"
smartquotes = False
# Texts and errors in comments count as C++; several classes have an attribute `type`.
suppress_warnings = ["misc.highlighting_failure", "ref.python"]

FILE = re.compile(
    r"\b((?:docs|examples|bench|python|tests)/[\w/-]+\.(?:md|cpp|h|py))\b(?:,\s([A-Z][\w ]*\w))?")
NAME = re.compile(r"(remat\.|remat::)?([A-Za-z_][\w.:]*?)(?:\(.*\))?")


class Pictures(SphinxTransform):
    """Shows the dark copy of a picture in the dark."""

    default_priority = 500

    def apply(self):
        for image in list(self.document.findall(nodes.image)):
            dark = image["uri"].replace(".svg", ".dark.svg")
            if (Path(self.env.doc2path(self.env.docname)).parent / dark).exists():
                copy = image.deepcopy()
                image["classes"].append("only-light")
                copy["classes"].append("only-dark")
                copy["uri"] = dark
                image.parent.insert(image.parent.index(image) + 1, copy)


class HeaderOrder(SphinxTransform):
    """Sorts the descriptions of a header by their lines. Breathe puts classes after functions."""

    default_priority = 700

    def apply(self):
        if not self.env.docname.startswith("include/remat/"):
            return
        for rubric in list(self.document.findall(nodes.rubric)):    # "Public Functions"
            rubric.parent.remove(rubric)
        lines = {each.get("id"): int(each.find("location").get("line"))
                 for each in described(self.config.breathe_projects["remat"])}
        page, pieces, waiting = self.document[0], [], []
        for child in page.children:
            waiting.append(child)
            if not isinstance(child, addnodes.index):    # belongs to the next one
                ids = [each for target in child.findall(nodes.target) for each in target["ids"]
                       if each in lines]
                pieces.append((lines[ids[0]] if ids else 0, waiting))
                waiting = []
        page.children = [child for _, piece in sorted(pieces, key=lambda piece: piece[0])
                         for child in piece]


@functools.cache
def described(folder):
    """The elements of Doxygen's XML that describe a name with a line."""
    return [each for file in Path(folder).glob("*.xml") for each in ET.parse(file).iter()
            if each.tag in ("compounddef", "memberdef") and each.find("location") is not None
            and each.find("location").get("line")]


class TreeLinks(SphinxPostTransform):
    """Turns links to files, and paths in comments, into links to documents, pages of headers and
    listings; turns names in code letters into links to the references."""

    default_priority = 5    # before MyST reports links without a target

    def run(self):
        folder = os.path.dirname(self.env.docname)
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node["reftype"] == "myst" and node["refdomain"] != "doc":
                path = os.path.normpath(os.path.join(folder, node["reftarget"]))
                if (ROOT / path).exists():
                    node.replace_self(self.reference(path, node.children))
        if folder.startswith(("include", "python")):
            for node in list(self.document.findall(nodes.Text)):
                self.link_paths(node)
        objects = {each[0]: each for domain in ("cpp", "py")
                   for each in self.env.domains[domain].get_objects()}
        for node in list(self.document.findall(nodes.literal)):
            self.link_name(node, objects)

    def reference(self, path, children):
        page = path.removesuffix(".md")
        if page not in self.env.all_docs:
            self.env.remat_listed = getattr(self.env, "remat_listed", set()) | {path}
        uri = self.app.builder.get_relative_uri(self.env.docname, page)
        return nodes.reference("", "", *children, refuri=uri, internal=True)

    def link_paths(self, node):
        text, pieces, end = node.astext(), [], 0
        if isinstance(node.parent, (nodes.reference, nodes.literal)):
            return
        for match in FILE.finditer(text):
            path, heading = match.groups()
            slug = (heading or "").lower().replace(" ", "-")
            found = self.env.metadata.get(path.removesuffix(".md"), {}).get("myst_slugs",
                                                                            {}).get(slug)
            last = match.end() if found else match.end(1)
            if (ROOT / path).exists():
                target = self.reference(path, [nodes.Text(text[match.start():last])])
                target["refuri"] += f"#{found[1]}" if found else ""
                pieces += [nodes.Text(text[end:match.start()]), target]
                end = last
        if pieces:
            node.parent.replace(node, [*pieces, nodes.Text(text[end:])])

    def link_name(self, node, objects):
        match = NAME.fullmatch(node.astext())
        inside = [node.parent, node.parent.parent]
        if not match or any(isinstance(each, (nodes.reference, nodes.title)) for each in inside):
            return
        prefix, name = match.groups()
        is_python = prefix == "remat." or (not prefix and "python" in self.env.docname)
        found = objects.get(("remat." if is_python else "remat::") + name)
        if found and found[3] != self.env.docname:
            node.replace_self(make_refnode(self.app.builder, self.env.docname, found[3], found[4],
                                           node.deepcopy()))


def sentences(folder):
    """The first sentence of each C++ source, as a table. The body of a header has none: it opens
    with that header."""
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".h", ".cpp") and opening(file):
            words = re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(opening(file)))
            yield f"<tr><td><code>{file.relative_to(ROOT)}</code></td><td>{words}</td></tr>"


def listings(app):
    """A page for each file or folder that a page links and that has no page."""
    for path in sorted(getattr(app.env, "remat_listed", ())):
        file = ROOT / path
        if file.is_dir():
            body = f"<table class='docutils'>{''.join(sentences(file))}</table>"
        else:
            lexer = find_lexer_class_for_filename(path)
            body = app.builder.highlighter.highlight_block(file.read_text("utf-8"),
                                                           lexer.aliases[0] if lexer else "none")
        yield path, {"title": path, "body": f"<h1>{path}</h1>{body}"}, "page.html"


def setup(app):
    app.add_transform(Pictures)
    app.add_transform(HeaderOrder)
    app.add_post_transform(TreeLinks)
    app.connect("html-collect-pages", listings)
