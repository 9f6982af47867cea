"The bug notebooks: each has its parts, its record and guards that exist; hooks are used by nothing but notebooks."
import ast
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest

from dflash_nb import bugs

ROOT = Path(__file__).resolve().parents[1]
BOOKS = sorted(p for p in (ROOT / "nbs/bugs").glob("[0-9]*.ipynb") if p.name != "00_index.ipynb")
PARTS = ("What was seen", "The wrong way", "The harm", "The right way", "The guard", "In your own run")
GUARD = re.compile(r"tests/(test_\w+)\.py::(test_\w+)")
book = pytest.mark.parametrize("path", BOOKS, ids=lambda p: p.stem)


def cells(path):
    return nbformat.read(path, 4).cells


def functions_of(module):
    tree = ast.parse((ROOT / "tests" / f"{module}.py").read_text())
    return {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}


def no_story(path):
    return not re.match(r"(0[1-9]|1[0-2])_", path.name)


@book
def test_a_notebook_has_all_parts_in_order(path):
    if no_story(path):
        pytest.skip("a collection, not one bug")
    headings = [c.source[3:] for c in cells(path) if c.cell_type == "markdown" and c.source.startswith("## ")]
    assert [h for h in headings if h in PARTS] == list(PARTS)


@book
def test_the_first_page_has_a_lesson_and_a_picture(path):
    if no_story(path):
        pytest.skip("a collection, not one bug")
    first = cells(path)
    first = first[: next(i for i, c in enumerate(first) if c.source == "## What was seen")]
    assert any(re.match(r"# [^\n]+\n\n> .+", c.source) for c in first if c.cell_type == "markdown")
    assert any("image/png" in o.get("data", {}) for c in first if c.cell_type == "code" for o in c.outputs), "no picture"


@book
def test_the_harm_is_measured_in_a_flagged_cell_and_shown(path):
    if no_story(path):
        pytest.skip("a collection, not one bug")
    code = [c for c in cells(path) if c.cell_type == "code"]
    flagged = [c for c in code if re.match(r"#\|\s*(slow|cuda|multigpu)", c.source)]
    assert flagged and all(not re.search(r"^#\|", c.source.split("\n", 1)[1], re.M) for c in flagged if "\n" in c.source)
    shown = [o for c in code for o in c.outputs if o.output_type in ("display_data", "execute_result") and "image/png" in o.get("data", {})]
    assert shown, "no plot is stored"
    assert any("assert " in c.source for c in code if c not in flagged), "no quick cell asserts anything"


@book
def test_every_named_guard_exists(path):
    named = GUARD.findall("\n".join(c.source for c in cells(path)))
    assert named, "no guard is named"
    for module, test in named:
        assert test in functions_of(module), f"{path.name} names {module}.py::{test}, which does not exist"


@book
def test_a_record_says_when_where_and_with_what(path):
    if no_story(path):
        pytest.skip("a collection, not one bug")
    facts = json.loads((ROOT / "data/results/bugs" / f"{path.stem}.json").read_text())
    assert {"title", "guard", "spot", "date", "hardware", "versions", "command"} <= set(facts)
    module, test = GUARD.search(facts["guard"]).groups()
    assert test in functions_of(module)


def test_prose_holds_no_measured_numbers():
    "Decimals such as a tau or a difference are printed by cells; betas, shares of the recipe and versions are values, not results."
    allowed = {"0.9", "0.95", "0.98", "0.999"}
    for path in BOOKS:
        prose = "\n".join(re.sub(r"`[^`]*`", "", c.source) for c in cells(path) if c.cell_type == "markdown")
        assert set(re.findall(r"\b\d+\.\d+\b", prose)) <= allowed, path.name


def test_nothing_in_the_library_uses_a_hook():
    hooks = [n for n in bugs.__all__ if n.startswith("hook_")]
    assert len(hooks) >= 4
    for path in (ROOT / "dflash_nb").glob("*.py"):
        if path.stem not in ("bugs", "_modidx"):
            assert not re.search(r"\bbugs\b|" + "|".join(hooks), path.read_text()), f"{path.name} knows of the bugs"


def test_the_index_has_a_row_for_each_record():
    rows = bugs.bug_index()
    assert [r["notebook"] for r in rows] == [p.name for p in BOOKS if (ROOT / "data/results/bugs" / f"{p.stem}.json").exists()]
    assert all(r["bug"] and r["harm"] and r["guard"] and r["seen_on"] for r in rows)


def test_a_rehearsal_stores_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_SMOKE", "1")
    monkeypatch.setattr(bugs, "records_folder", lambda: tmp_path)
    assert bugs.sized(5, 300) == dict(seeds=2, steps=4)
    assert bugs.store_study("99_none", None) is None and bugs.store_events("99_none", tmp_path) is None and not list(tmp_path.iterdir())


def test_a_gpu_record_adds_to_the_index(tmp_path, monkeypatch):
    monkeypatch.setattr(bugs, "records_folder", lambda: tmp_path)
    monkeypatch.setattr(bugs.torch.cuda, "get_device_name", lambda: "card")
    facts = dict(title="t", guard="g", spot="s", date="2026-01-01", hardware="h", harm="slow")
    (tmp_path / "01_x.json").write_text(json.dumps(facts))
    (alone,) = bugs.bug_index()
    assert bugs.gpu_record("01_x") is None and (alone["harm"], alone["seen_on"]) == ("slow", "2026-01-01, h")
    bugs.store_gpu("01_x", "twice as slow", rows=[1])
    (both,) = bugs.bug_index()
    assert both["harm"] == "slow; twice as slow" and ", card, torch " in both["seen_on"] and bugs.gpu_record("01_x")["rows"] == [1]
    assert "card" in bugs.gpu_line(bugs.gpu_record("01_x"))


def rehearse(path, folder):
    "All CPU cells, the slow ones with few steps, in a copy whose outputs are thrown away."
    copy = folder / path.name
    copy.write_text(path.read_text())
    code = ("import sys; sys.path.insert(0, 'tests'); import re, nb_outputs; "
            "nb_outputs.SKIP = re.compile(r'^#\\s*\\|\\s*(cuda|multigpu|eval:\\s*false)\\b'); "
            f"sys.exit(0 if nb_outputs.execute({str(copy)!r}, timeout=600) else 1)")
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"DFLASH_SMOKE": "1"}, capture_output=True, text=True)


@pytest.fixture(scope="module")
def rehearsals(request, tmp_path_factory):
    "Those of all chosen notebooks, two at a time."
    name = "test_slow_cells_run_as_a_rehearsal"
    paths = [i.callspec.params["path"] for i in request.session.items if getattr(i, "originalname", "") == name]
    pool = ThreadPoolExecutor(2)
    yield {p: pool.submit(rehearse, p, tmp_path_factory.mktemp("bugs")) for p in paths if has_slow_cell(p)}
    pool.shutdown(cancel_futures=True)


def has_slow_cell(path):
    return any(c.source.startswith("#| slow") for c in cells(path))


@pytest.mark.slow
@book
def test_slow_cells_run_as_a_rehearsal(path, rehearsals):
    if not has_slow_cell(path):
        pytest.skip("no slow cell")
    out = rehearsals[path].result(timeout=800)
    assert out.returncode == 0, out.stdout[-2000:]
