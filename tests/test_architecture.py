"""The folders say which way data flows; these tests read the imports and the documents and hold them to it."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import polaformer
from polaformer import attention
from polaformer.cli import main

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "polaformer"
# Data flows from left to right; a folder may import from itself and from what stands left of it.
FLOW = ("ops", "weights", "attention", "backbones", "data", "training", "tasks", "recipes")
# These look in from the side and may import all of the above; nothing of the above imports them.
SIDE = ("analysis", "bench")
FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc"}


def allowed(folder: str) -> set[str]:
    if folder == "cli":
        return {*FLOW, *SIDE, "cli"}
    if folder in SIDE:
        return {*FLOW, *SIDE}
    return set(FLOW[: FLOW.index(folder) + 1])


def imported_folders(path: Path) -> set[str]:
    """The folders of this library that a file imports from, at any depth of indentation."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; say the whole name"
            modules = [f"{node.module}.{alias.name}" if node.module == "polaformer" else node.module for alias in node.names]
        parts = [module.split(".") for module in modules if module]
        found |= {p[1] for p in parts if p[0] == "polaformer" and len(p) > 1}
    return found & {*FLOW, *SIDE, "cli"}


FILES = sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    folder = path.relative_to(SOURCE).parts[0]
    assert imported_folders(path) <= allowed(folder)


def test_what_stands_outside_the_order_imports_none_of_it():
    for name in ("arguments", "errors", "regular_files", "extras"):
        assert imported_folders(SOURCE / f"{name}.py") == set()


def test_the_folders_are_those_of_the_order():
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert folders == {*FLOW, *SIDE, "cli"}


WITHOUT_TORCH = ("tasks.registry", "tasks.task", "tasks.options", "recipes.registry", "training.settings", "training.timeline")


def test_recipes_tasks_and_settings_load_without_pytorch():
    modules = [
        f"polaformer.{name}" for name in (*WITHOUT_TORCH, "training.schedules", "tasks.classification.recipe", "cli.main")
    ]
    code = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_help_loads_no_command():
    code = "import sys; from polaformer.cli.main import main; main(['--help']); print([m for m in sys.modules if 'cli.' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split("'")) & {
        f"polaformer.cli.{entry.module}" for entry in main.COMMANDS.values()
    }
    assert not loaded


def test_no_code_asks_which_task_it_is():
    asked = re.compile(r"task(?:\.name)?\s*(?:==|!=|in)\s*[\"'(\[]")
    for path in FILES:
        found = asked.search(path.read_text())
        assert not found, f"{path}: {found and found[0]}"


def test_no_code_asks_which_mechanism_it_is():
    """A mechanism declares its facts; whoever needs one reads it there."""
    names = "|".join(name for name in attention.names() if name not in ("linear", "local"))  # also kinds of gates and of MLPs
    compared = rf"(?:[!=]=|(?<!for name )\bin) \(?[\"'](?:{names})[\"']|[\"'](?:{names})[\"'] (?:[!=]=|in\b)"
    asked = re.compile(rf"isinstance\([^)]*\b[A-Z]\w*Core\)|(?:getattr|hasattr)\((?:\w+\.)+core,|getattr\(core,|{compared}")
    for code in ('if name == "pola":', "'bigbird' != name", 'name in ("softmax", "linear")', "getattr(layer.core, 'seed')"):
        assert asked.search(code)
    for path in FILES:
        found = asked.search(path.read_text())
        assert not found, f"{path}: {found and found[0]}"


def test_paths_that_the_architecture_page_names_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    paths = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|cpp))\b", text)
    assert len(paths) > 60
    known = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*") if path.suffix in (".py", ".cpp")}
    files = {path.split("/")[-1] for path in known}
    for path in paths:
        assert path in known or (ROOT / path).exists() or ("/" not in path and path in files), path
    for module, name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py): (\w+)", text):
        source = (SOURCE / module if module in known else ROOT / module).read_text()
        assert re.search(rf"^\s*(?:def|class) {name}\b|^{name}\b", source, flags=re.M), (module, name)


def test_the_test_of_imports_sees_imports():
    """It would be worthless if it found none."""
    assert imported_folders(SOURCE / "attention" / "mechanisms" / "pola.py") == {"ops", "attention"}
    assert imported_folders(SOURCE / "ops" / "polarity" / "operator.py") == {"ops"}


def test_every_file_is_named_by_its_concept():
    assert not [path for path in FILES if path.stem in FORBIDDEN_NAMES]


def test_importing_the_package_is_light_and_names_load_on_first_use():
    code = (
        "import sys, polaformer; assert 'torch' not in sys.modules, 'torch'; "
        "polaformer.polarity_attention; assert 'torch' in sys.modules; "
        "assert all(hasattr(polaformer, name) for name in polaformer.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"has no attribute 'polarty_attention'; it has .*polarity_attention"):
        _ = polaformer.polarty_attention


def test_the_version_is_said_once():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == polaformer.__version__
    assert f"## {polaformer.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_readmes_change_map_and_links_name_files_that_exist():
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (?!to \|).+ \| (.*`.+`.*) \| .+ \|$", text.split("## Change map")[1], flags=re.M)
    assert len(rows) >= 8
    named = [path for row in rows for path in re.findall(r"`(src/[^`]+|[a-z_]+\.(?:toml|txt))`", row)]
    assert len(named) >= len(rows)
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    for path in [*named, *links]:
        assert (ROOT / path).exists(), path


def test_ci_runs_the_readmes_test_command():
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "make test"
    assert re.search(r"^```sh\nmake demo .*\nmake test ", (ROOT / "README.md").read_text(), flags=re.M)


def classes_and_aliases() -> tuple[Counter[str], Counter[str]]:
    """How often a name is that of a class, and of an alias of a type, at the top level of a file."""
    classes, aliases = Counter[str](), Counter[str]()
    for node in (node for path in FILES for node in ast.parse(path.read_text()).body):
        if isinstance(node, ast.ClassDef):
            classes[node.name] += 1
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and not isinstance(node.value, ast.Call):
            aliases[node.targets[0].id] += bool(re.fullmatch(r"[A-Z]\w*[a-z]\w*", node.targets[0].id))
    return classes, aliases


def test_every_class_and_every_alias_of_a_type_has_a_name_of_its_own():
    for names in classes_and_aliases():
        assert len(names) > 20
        assert not [name for name, number in names.items() if number > 1]


# A mechanism declares what is true of it. These tables say something else: which class has the name, and how figures look.
TABLES_OF_MECHANISMS = {"attention/registry.py": 1, "analysis/attention_figures.py": 1, "analysis/figures.py": 1}


def test_no_table_states_facts_of_mechanisms_by_name():
    names = {*attention.names()}
    for path in FILES:
        tables = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Dict) and node.keys)
        keys = [{key.value if isinstance(key, ast.Constant) else None for key in table.keys} for table in tables]
        found = sum(
            one <= names and len(one) > 1 and one != {"linear", "local"} for one in keys
        )  # also kinds of gates and of MLPs
        assert found == TABLES_OF_MECHANISMS.get(str(path.relative_to(SOURCE)), 0), path


INVENTED = ("a text(?! file)", "anew", "by heart")


def test_strings_and_documents_use_the_words_that_readers_search_for():
    for path in FILES:
        strings = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        assert not [(path, word) for one in strings for word in INVENTED if re.search(rf"\b{word}\b", str(one))]
        assert not re.search(r"\b(?:MOST|LEAST)(?:_\w+)?\b", path.read_text()), f"{path}: a limit is called MAX_… or MIN_…"
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
        assert not [(path, word) for word in INVENTED if re.search(rf"\b{word}\b", text)]
