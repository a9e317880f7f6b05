"""The Python reference: pages of Markdown from the sources of python/remat, which need not be
built."""

import ast
import functools
import json
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "python/remat"
STUB = "_remat"
FENCE = "`" * 5    # around a name; a class has one more


@functools.cache
def parsed(module):
    """The statements of a module of the package, those under `if TYPE_CHECKING` among them."""
    file = PACKAGE / f"{module}.py" if (PACKAGE
                                        / f"{module}.py").exists() else PACKAGE / f"{module}.pyi"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return tree, [inner for each in tree.body
                  for inner in (each.body if isinstance(each, ast.If) else [each])]


def native_texts():
    """The texts of functions that the extension documents itself."""
    for file in sorted((ROOT / "python/binding").glob("*.cpp")):
        yield from re.findall(r'R"\((\w+)\(.*?\n--\n\n(.*?)\)"', file.read_text(encoding="utf-8"),
                              re.S)


def definitions(module, name):
    """The class or function that a name stands for, all overloads of it; the path of a name that is
    defined elsewhere."""
    statements = parsed(module)[1]
    if found := [each for each in statements if getattr(each, "name", None) == name]:
        return found
    for each in statements:
        if isinstance(each, ast.ImportFrom) and name in (alias.name for alias in each.names):
            return definitions(each.module, name) if each.level else f"{each.module}.{name}"
        if isinstance(each, ast.Assign) and name in map(ast.unparse, each.targets):
            native = re.search(r"\b_remat\.(\w+)", ast.unparse(each.value))
            return definitions(STUB, native[1]) if native else f"remat.{ast.unparse(each.value)}"
    raise LookupError(f"{module} does not define {name}")


def markdown(text):
    """A docstring as Markdown: parameters as a list, labels as paragraphs, indented code in a
    fence."""
    text = re.sub(r"(?:^|(?<=\n\n))((?:    .*\n|\n(?=    ))+)",
                  lambda match: f"```python\n{textwrap.dedent(match[1])}```\n", text + "\n")
    text = re.sub(r"^([a-z_]\w*(?:, [a-z_]\w*)*): ", r"\n* `\1`: ", text, flags=re.M)
    return re.sub(r"^(Memory|Arguments|Threads|Raises|Returns|Example)\b(:?)", r"\n**\1\2**", text,
                  flags=re.M)


def signature(function):
    # _Bytes: Bytes
    arguments = re.sub(r"^(self|cls)\b(, )?(/, |/$)?|\b_(?=[A-Z])", "", ast.unparse(function.args))
    return f"({arguments})" + (f" -> {ast.unparse(function.returns)}" if function.returns else "")


def entry(kind, head, text, options=""):
    return f"{FENCE}{{py:{kind}}} {head}\n{options}\n{markdown(text or '')}\n{FENCE}\n\n"


def attributes(body):
    """(name, type, default, text) of annotated names, of members of an enumeration, and of
    attributes that have a text."""
    for each, after in zip(body, [*body[1:], None]):
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(
            after.value, ast.Constant) else None
        target = each.target if isinstance(each, ast.AnnAssign) else each.targets[0] if isinstance(
            each, ast.Assign) else None
        name = target.attr if isinstance(target,
                                         ast.Attribute) and text else getattr(target, "id", "_")
        if not name.startswith("_"):
            default = "" if each.value is None or isinstance(
                target, ast.Attribute) else ast.unparse(each.value)
            yield name, ast.unparse(each.annotation) if isinstance(
                each, ast.AnnAssign) else "", default, text


def undocumented(name):
    raise LookupError(f"remat.{name} has no documentation")


def described(name, found, texts):
    """A class or function as a directive."""
    if isinstance(found, str):
        return entry("data", name, f"The same as `{found}`.")
    first = found[0]
    if not isinstance(first, ast.ClassDef):
        text = texts.get(name) or ast.get_docstring(found[-1]) or undocumented(name)
        overloads = [each for each in found
                     if any(ast.unparse(by) == "overload" for by in each.decorator_list)] or found
        heads = [f"{name}{signature(each)}" for each in overloads]
        return entry("function", heads[0], text) + "".join(
            entry("function", head, "", ":no-index:\n") for head in heads[1:])
    init = next((each for each in first.body if isinstance(each, ast.FunctionDef)
                 and each.name == "__init__"), None)
    is_for_users = init is not None and (
        first in parsed(STUB)[1] or any(ast.unparse(by) == "checked" for by in init.decorator_list))
    bases = [ast.unparse(base) for base in first.bases if not re.search(r"\b_", ast.unparse(base))]
    text = ast.get_docstring(first) or undocumented(name)
    members = ""
    for attribute, kind, default, words in [*attributes(first.body),
                                            *attributes(init.body if init else [])]:
        members += entry("attribute", attribute, words, (f":type: {kind}\n" if kind else "")
                         + (f":value: {json.dumps(default)}\n" if default else ""))
    for each in first.body:
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            if any(ast.unparse(by) == "property" for by in each.decorator_list):
                kind = f":type: {ast.unparse(each.returns)}\n" if each.returns else ""
                members += entry("property", each.name, ast.get_docstring(each), kind)
            else:
                members += entry("method", each.name + signature(each), ast.get_docstring(each))
    head = name + (re.sub(r" -> None$", "", signature(init)) if is_for_users else "")
    text += "\n\nBases: " + ", ".join(f"`{base}`" for base in bases) if bases else ""
    return f"{FENCE}`{{py:class}} {head}\n\n{markdown(text)}\n\n{members}\n{FENCE}`\n\n"


def pages():
    """Name of each page: its text."""
    package, statements = parsed("__init__")
    public = set(ast.literal_eval(next(each.value for each in statements if isinstance(
        each, ast.Assign) and ast.unparse(each.targets[0]) == "__all__")))
    texts = dict(native_texts())
    groups = {each.module: [alias.name for alias in each.names if alias.name in public]
              for each in statements
              if isinstance(each, ast.ImportFrom) and each.module != "__future__"}
    groups[STUB] = sorted(public - {name for names in groups.values() for name in names})
    result, rows = {}, ""
    for module, names in groups.items():
        if not names:
            continue
        title = "Extension" if module == STUB else module.strip("_").replace("_", "-").capitalize()
        about = "Functions of the extension module." if module == STUB else ast.get_docstring(
            parsed(module)[0])
        page = f"remat/{title.lower()}"
        head = f"# {title}\n\n```{{py:currentmodule}} remat\n```\n\n{markdown(about)}\n\n"
        result[page] = head + "".join(
            described(name, definitions(module, name), texts) for name in names)
        rows += f"| [{title}]({page}.md) | {', '.join(f'`{name}`' for name in names)} |\n"
    tree = "".join(f"{name}\n" for name in result)
    result["remat"] = ("# Python reference\n"
                       "\n"
                       f"```{{py:module}} remat\n"
                       "```\n"
                       "\n"
                       f"{markdown(ast.get_docstring(package))}\n"
                       "\n"
                       "| | |\n"
                       "|---|---|\n"
                       f"{rows}\n"
                       f"```{{toctree}}\n"
                       ":hidden:\n"
                       "\n"
                       f"{tree}```\n")
    return result
