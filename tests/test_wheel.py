"The wheel works outside the checkout: nano target, prompts and commands included, beside a newer fastcore."
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*args, cwd):
    out = subprocess.run([str(a) for a in args], cwd=cwd, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr[-1500:]
    return out.stdout


@pytest.mark.slow
def test_wheel_outside_the_checkout(tmp_path):
    run(sys.executable, "-m", "build", "-q", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    wheel, = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    python, bin = tmp_path / "env/bin/python", tmp_path / "env/bin"
    run(python, "-m", "pip", "install", "-q", "--no-deps", wheel, "fastcore>=2", cwd=tmp_path)
    # dependencies come from the checkout's environment; what stands in the new one wins
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (site / "deps.pth").write_text(sysconfig.get_path("purelib") + "\n")
    found = run(python, "-c", "import dflash_nb, fastcore; print(dflash_nb.__file__, fastcore.__version__)", cwd=tmp_path).split()
    assert found[0].startswith(str(site)) and int(found[1].split(".")[0]) >= 2
    code = ("from dflash_nb.all import *\n"
            "t = load_target('nano'); rows = load_chats(asset('prompts.jsonl'))\n"
            "print(t.num_layers, len(rows), len(load_chats(asset('heldout.jsonl'))))")
    assert [int(x) for x in run(python, "-c", code, cwd=tmp_path).split()[-3:]][0] == 8
    trained = run(bin / "dflash_train", "--steps", "3", "--num_draft_layers", "1", "--run_dir", "r", "--json", cwd=tmp_path)
    assert json.loads(trained.splitlines()[-1])["step"] == 3
    report = run(bin / "dflash_eval", "r", "--num_prompts", "2", "--max_new_tokens", "16", "--json", cwd=tmp_path)
    assert json.loads(report.splitlines()[-1])["lossless"]
    assert "finished" in run(bin / "dflash_status", "r", cwd=tmp_path)
