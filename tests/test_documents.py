"""The examples in the documents are run, each document as one program."""

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
