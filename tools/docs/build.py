#!/usr/bin/env python3
"""Builds the site of the documents and of the references: build.py [--set-up] FOLDER

Writes the source of the site into FOLDER/source: the Markdown files as they are, a page for each
header of include/remat, which Breathe fills from Doxygen's XML, and the pages of the Python
reference. Sphinx makes FOLDER/html of it. --set-up first installs requirements.txt into .venv-docs.
As a filter of Doxygen's, build.py --header FILE prints a header whose first comment documents the
file. Ends with 77 where Doxygen or Sphinx is missing. A warning of either is an error.
"""

import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

sys.dont_write_bytecode = True    # nothing is written into the source tree

import python_reference

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent.parent
# venv refuses a link as its folder, and a release's clone has one.
ENVIRONMENT = (ROOT / ".venv-docs").resolve()
PYTHON = ENVIRONMENT / "bin/python"
INSTALLED = ENVIRONMENT / "requirements.txt"
SKIPPED = 77
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md",
             "docs/*.md", "bench/*.md"]
PICTURES = ["docs/pictures/*.svg", "bench/plots*/*.svg"]
DARK = "@media (prefers-color-scheme: dark)"
LABELS = "Memory|Arguments|Threads|Throws|Cost|Not counted|Sources?|Examples?"


def documents():
    """The path of each document: its path in the site, without a suffix."""
    found = [str(file.relative_to(ROOT)) for pattern in DOCUMENTS
             for file in sorted(ROOT.glob(pattern))]
    return {name: "index" if name == "README.md" else name.removesuffix(".md") for name in found}


def opening(file):
    """The first sentence of the comment that opens a C++ source."""
    found = re.match(r"(?:#pragma once\n|#include .*\n)?((?://.*\n)+)",
                     (ROOT / file).read_text(encoding="utf-8"))
    words = " ".join(line.removeprefix("//").strip()
                     for line in found[1].splitlines()) if found else ""
    return re.match(r".*?[.](?=\s|$)|.*", words)[0]


def header(path):
    """A header whose opening comment documents the file, line for line the same."""
    def documented(match):
        return "/// \\file\n" + match[1].replace("//", "///")

    text = re.sub(r"^#pragma once\n((?://.*\n)+)", documented,
                  Path(path).read_text(encoding="utf-8"))
    # A paragraph each, as they begin a line.
    text = re.sub(rf"^( */// )({LABELS})(?=:| `)(:?)", r"\1<p><b>\2\3</b>", text, flags=re.M)
    # Doxygen 1.9.4 shows friends. Those with a body are operators.
    return re.sub(r"^( *)friend [^;{=]*;$", r"\1//", text, flags=re.M)


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def tidy(xml):
    """Leaves the parts of Doxygen's XML that a user may see. Members of namespaces become members
    of files, by full names."""
    trees = {file: ET.parse(file) for file in xml.glob("*.xml")}
    compounds = {each.get("id"): each for tree in trees.values()
                 for each in tree.iter("compounddef")}
    files = {each.find("location").get("file"): each for each in compounds.values()
             if each.get("kind") == "file"}

    for compound in list(compounds.values()):
        for parent in list(compound.iter()):
            for each in list(parent):
                is_private = each.get("prot") == "private" or each.get("kind",
                                                                       "").startswith("private-")
                # Sphinx's parser of C++ does not know designated initializers.
                is_designated = each.tag == "initializer" and "{." in "".join(each.itertext())
                is_deleted = "=delete" in (each.findtext("argsstring") or "") and not "".join(
                    each.find("detaileddescription").itertext()).strip()
                if is_private or is_designated or is_deleted or each.tag == "innernamespace":
                    parent.remove(each)
        for member in compound.iter("memberdef"):
            member.set("inline", "no")
        if compound.get("kind") == "namespace":
            for section in compound.findall("sectiondef"):
                for member in section.findall("memberdef"):
                    scope, name = compound.findtext("compoundname"), member.findtext("name")
                    member.find("name").text = f"{scope}::{name}"
                    there = ET.SubElement(files[member.find("location").get("file")], "sectiondef",
                                          kind=section.get("kind"))
                    there.append(member)
    for file, tree in trees.items():
        tree.write(file, encoding="utf-8", xml_declaration=True)


def stage(source):
    """Writes the pages of which Sphinx makes the site."""
    for document, page in documents().items():
        text = (ROOT / document).read_text(encoding="utf-8")
        text = re.sub(r"\]\(((?:\.\./)?)README\.md", r"](\1index.md", text)
        if page == "index":
            text += "\n" + (TOOLS / "navigation.md").read_text(encoding="utf-8")
        write(source / f"{page}.md", text)
    for pattern in PICTURES:
        for picture in ROOT.glob(pattern):
            text, there = picture.read_text(encoding="utf-8"), source / picture.relative_to(ROOT)
            # Readers choose light or dark on the page. A media query in a picture does not see that
            # choice.
            if DARK in text:
                write(there.with_suffix(".dark.svg"), text.replace(DARK, "@media all"))
            write(there, text.replace(DARK, "@media not all"))
    headers = sorted(file.name for file in (ROOT / "include/remat").glob("*.h")
                     if file.name != "export.h")
    for name in headers:
        title = f"remat/{name}"
        write(source / f"include/remat/{name}.rst",
              f"{title}\n{'=' * len(title)}\n\n.. doxygenfile:: {name}\n")
    rows = "".join(f"| [remat/{name}](remat/{name}.rst) | {opening(f'include/remat/{name}')} |\n"
                   for name in headers)
    pages = "".join(f"remat/{name}\n" for name in headers)
    write(source / "include/remat.md", "# C++ reference\n"
                                       "\n"
                                       "The public headers. `#include <remat/remat.h>` includes "
                                       "all that programs need.\n"
                                       "\n"
                                       "| header | |\n"
                                       "|---|---|\n"
                                       f"{rows}\n"
                                       f"```{{toctree}}\n"
                                       ":hidden:\n"
                                       "\n"
                                       f"{pages}```\n")
    for name, text in python_reference.pages().items():
        write(source / f"python/{name}.md", text)


def build(out):
    """Returns the folder with index.html, and the warnings of Doxygen or Sphinx."""
    shutil.rmtree(out, ignore_errors=True)
    try:
        stage(out / "source")
    except LookupError as error:
        return out / "html", str(error)
    write(out / "Doxyfile", (TOOLS / "Doxyfile").read_text(encoding="utf-8")
          + "".join(f"{name} = {value}\n" for name, value in {
        "INPUT": f'"{ROOT}/include/remat"', "EXCLUDE": f'"{ROOT}/include/remat/export.h"',
        "OUTPUT_DIRECTORY": f'"{out}"',
        "STRIP_FROM_PATH": f'"{ROOT}/include"',
        "FILTER_PATTERNS": f'"*.h={sys.executable} {TOOLS}/build.py --header"'}.items()))

    def said_by(*command):
        run = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                             check=False)
        return run.stderr or (f"{command[0]} ended with {run.returncode}" if run.returncode else "")

    faults = said_by("doxygen", out / "Doxyfile")
    if not faults:
        tidy(out / "xml")
        faults = said_by(PYTHON, "-B", "-m", "sphinx", "-q", "-W", "--keep-going", "-c", TOOLS,
                         "-d", out / "doctrees",
                         "-D", f"breathe_projects.remat={out}/xml", out / "source", out / "html")
    return out / "html", faults


def set_up():
    """Installs Sphinx and the packages beside it, unless these versions are there."""
    wanted = TOOLS / "requirements.txt"
    if not INSTALLED.exists() or INSTALLED.read_bytes() != wanted.read_bytes():
        print(
            "\n"
            "== Fetching Sphinx with pip into .venv-docs (about 20 MB), which makes a site of the "
            "documents", file=sys.stderr, flush=True)
        for command in ([sys.executable, "-m", "venv", "--clear", INSTALLED.parent],
                        [PYTHON, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r",
                         wanted]):
            if subprocess.run(command, check=False).returncode:
                sys.exit("Sphinx could not be installed.")
        shutil.copyfile(wanted, INSTALLED)


def missing():
    """The programs without which there is no site."""
    return [name for name, found
            in (("Doxygen", shutil.which("doxygen")), ("Sphinx", INSTALLED.exists())) if not found]


def main(arguments):
    if len(arguments) == 2 and arguments[0] == "--header":
        print(header(arguments[1]), end="")
        return 0
    if arguments[:1] == ["--set-up"]:
        set_up()
        arguments = arguments[1:]
        if not arguments:
            return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.exit(__doc__)
    if missing():
        print(
            f"There is no {' and no '.join(missing())} here, so there is no site. `./dev docs` "
            "fetches both.")
        return SKIPPED
    html, faults = build(Path(arguments[0]).resolve())
    print(faults or f"{html}/index.html", file=sys.stderr if faults else sys.stdout)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
