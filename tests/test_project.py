"The repository's own rules: modules follow from notebooks, notebooks are clean, imports go downward, pins agree."
import ast
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from nb_readme import render

ROOT = Path(__file__).resolve().parents[1]
NBS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
MODULES = sorted((ROOT / "dflash_nb").glob("*.py"))
by_name = {"ids": lambda p: p.name}


def default_exp(nb):
    "Module that a notebook exports, or None."
    found = [m[1] for c in nb.cells for m in [re.match(r"#\|\s*default_exp\s+(\S+)", c.source)] if m]
    return found[0] if found else None


def exported(nb):
    "Sources of the cells that reach the module."
    return [c.source for c in nb.cells if c.cell_type == "code" and re.match(r"#\|\s*exporti?\b", c.source)]


def functions(source):
    "Name and length in lines of every function in a source."
    return [(n.name, n.end_lineno - n.lineno + 1) for n in ast.walk(ast.parse(source))
            if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def without_markers(path):
    "A module's text without the ids of the cells it came from."
    return re.sub(r"# %% .*", "# %%", path.read_text())


def test_modules_are_in_sync(tmp_path):
    skip = shutil.ignore_patterns(".venv", ".git", "runs", "data", "build", "dist", "__pycache__")
    copy = Path(shutil.copytree(ROOT, tmp_path / "copy", ignore=skip))
    for path in (copy / "dflash_nb").glob("*.py"):
        path.unlink()
    out = subprocess.run([Path(sys.executable).parent / "nbdev_export"], cwd=copy, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr[-800:]
    made, kept = ({p.name: without_markers(p) for p in (root / "dflash_nb").glob("*.py")} for root in (copy, ROOT))
    differ = [name for name in made | kept if made.get(name) != kept.get(name)]
    assert not differ, f"{differ} do not follow from the notebooks: run `make sync`"


def test_readme_is_in_sync():
    assert (ROOT / "README.md").read_text() == render(nbformat.read(ROOT / "nbs/index.ipynb", 4)), "run `make readme`"


@pytest.mark.parametrize("path", NBS, **by_name)
def test_notebook_is_clean(path):
    nb = nbformat.read(path, 4)
    assert (nb.nbformat, nb.nbformat_minor) == (4, 5)
    ids = [c.id for c in nb.cells]
    assert len(set(ids)) == len(ids)
    assert "widgets" not in nb.metadata, "saved widget state"
    for c in nb.cells:
        assert c.source.strip(), f"{c.id}: an empty cell"
        if c.cell_type == "code":
            assert c.execution_count is None, f"{c.id}: an execution count"
            assert not [o for o in c.outputs if o.output_type == "error"], f"{c.id}: a stored error"
    assert path.stat().st_size <= 500_000
    assert sum(len(str(c.get("outputs", ""))) for c in nb.cells) <= 150_000, "outputs too large"


def test_files_are_small_and_ours():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    big = [f for f in files if (ROOT / f).is_file() and (ROOT / f).stat().st_size > 500_000 and not f.startswith("data/nano/")]
    assert not big, f"over 500 kB: {big}"


@pytest.mark.parametrize("path", [p for p in NBS if p.parent == ROOT / "nbs" and p.name[0].isdigit()], **by_name)
def test_notebook_reads_as_in_house_style(path):
    nb = nbformat.read(path, 4)
    first = [c.source.splitlines()[0] for c in nb.cells[:4]]
    assert re.match(r"#\|\s*default_exp", first[0]) and any(s.startswith("# ") for s in first[1:]), "first cells"
    for c in nb.cells:
        lines = c.source.splitlines()
        if c.cell_type == "markdown":
            assert not (lines[0].startswith("## ") and len(lines) > 1), f"{c.id}: headings stand alone"
            continue
        body = [x for x in lines if not x.startswith("#|")]
        bare = [x for x in body if re.match(r"(import|from) ", x)]
        whole = all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.parse("\n".join(body)).body)
        assert not bare or whole, f"{c.id}: imports share a cell with code"
    for source in exported(nb):
        for name, length in functions(source):
            assert length <= 60, f"{name} has {length} lines"


def test_imports_go_downward():
    order = {default_exp(nbformat.read(p, 4)): p.name for p in NBS if p.parent == ROOT / "nbs" and p.name[0].isdigit()}
    for name, book in order.items():
        tree = ast.parse((ROOT / "dflash_nb" / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not (node.level or (node.module or "").startswith("dflash_nb")):
                continue
            used = (node.module or "").split(".")[-1]
            assert order.get(used, "") < book, f"{book} imports {used}, which comes later"


@pytest.mark.parametrize("path", MODULES, **by_name)
def test_module_runs_on_the_oldest_python(path):
    ast.parse(path.read_text(), feature_version=(3, 10))


def test_environment_equals_the_constraints():
    pins = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if x and not x.startswith("#")]
    env = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert env["dependencies"][-1]["pip"] == pins


def test_public_names_import_without_notebook_packages():
    block = ("import sys\nclass No:\n    def find_spec(self, name, *_):\n"
             "        if name.split('.')[0] in ('ipywidgets', 'IPython', 'matplotlib', 'fastcore', 'nbdev'):\n"
             "            raise ImportError(f'{name} is blocked')\n"
             "sys.meta_path.insert(0, No())\n"
             "from dflash_nb.all import *\n"
             "print(TrainConfig().hash(), callable(load_target), callable(Trainer), callable(evaluate))\n")
    out = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr[-800:]
    assert out.stdout.split()[1:] == ["True"] * 3


def test_no_public_name_is_exported_by_two_modules():
    owners = {}
    for name in [p.stem for p in MODULES if p.stem not in ("__init__", "_modidx", "all")]:
        for public in getattr(importlib.import_module(f"dflash_nb.{name}"), "__all__", ()):
            owners.setdefault(public, []).append(name)
    assert not {k: v for k, v in owners.items() if len(v) > 1}


def test_no_code_draws_from_a_global_generator():
    calls = re.compile(r"\btorch\.(cuda\.)?manual_seed|\bnp\.random\.(?!Generator|default_rng|SeedSequence|Philox|PCG64)"
                       r"|(?<!\.)\brandom\.(random|choice|shuffle|randint|seed)\(")
    for path in MODULES:
        hits = [line for line in path.read_text().splitlines() if calls.search(line) and not line.lstrip().startswith("#")]
        assert not hits, f"{path.name}: {hits}"
