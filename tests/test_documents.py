"""The examples in the documents are run, each document as one program."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(("document", "least"), [("README.md", 1), ("docs/guide.md", 3)])
def test_the_examples_run(document, least, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), flags=re.M | re.S)
    assert len(blocks) >= least
    exec(compile("\n".join(blocks), document, "exec"), {})


def test_tests_that_the_documents_name_exist():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for document in ("docs/guarantees.md", "docs/paper-in-code.md"):
        text = (ROOT / document).read_text()
        named = re.findall(r"`(test_\w+)`", text)
        assert named
        missing = [name for name in named if f"def {name}(" not in tests]
        missing += [path for path in re.findall(r"`(tests/[\w/.]+)`", text) if not (ROOT / path).exists()]
        assert not missing


def defined_names(tree: ast.Module | ast.ClassDef) -> set[str]:
    """The names that a module or class defines, and those of its classes behind their name and a dot."""
    found = {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            attributes = (one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store))
            found |= {f"{node.name}.{one.attr}" for one in attributes}
            found |= {f"{node.name}.{name}" for name in defined_names(node)}
        if isinstance(node, ast.Assign):
            found |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def library_names() -> set[str]:
    """Every module of the library and every name in it, from below the package: "bench.op", "bench.op.OpResult"."""
    found = set()
    for path in (ROOT / "src" / "polaformer").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "src" / "polaformer").with_suffix("").parts).removesuffix(".__init__")
        found |= {module} | {f"{module}.{name}" for name in defined_names(ast.parse(path.read_text()))}
    return found


def renamed_to(text: str) -> list[str]:
    """The names on the right of the changelog's tables of renamed modules and names; * is each name on the left."""
    modules, names = text.split("### Renamed modules")[1].split("### Renamed names")
    found = []
    for before, now in re.findall(r"^\| (`.+`) \| (`.+`.*) \|$", modules, flags=re.M):
        stems = [name.split(".")[-1] for name in re.findall(r"`([\w.]+)`", before)]
        package = ""
        for name in re.findall(r"`([\w.*]+)`", now):
            name = package + name if name.startswith(".") else name
            package = name.rpartition(".")[0]
            found += [name.replace("*", stem) for stem in stems] if "*" in name else [name]
    for now in re.findall(r"→ ([^;|(→]+)", names):
        found += re.findall(r"`([A-Za-z_][\w.]*)`", now)
    return found


def test_names_that_the_changelog_renames_to_exist():
    known, renamed = library_names(), renamed_to((ROOT / "CHANGELOG.md").read_text())
    assert len(renamed) > 180
    endings = {name.split(".", part)[-1] for name in known for part in range(name.count(".") + 1)}
    assert not [name for name in renamed if name not in endings]


def anchors(document: Path) -> set[str]:
    """The names that links can have after #: headings in lower case, without punctuation, spaces as hyphens."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "document", ["README.md", "CHANGELOG.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md"))]
)
def test_links_lead_to_files_and_headings_that_exist(document):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", (ROOT / document).read_text()):
        path, _, anchor = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target
