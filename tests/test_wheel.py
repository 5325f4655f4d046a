"""An installed wheel carries `conf/`: the lab works without the checkout."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_draws_the_default_plan_from_its_own_conf(tmp_path):
    copy = tmp_path / "source"
    for folder in ("scaling_lab", "conf"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(copy)]
    subprocess.run(build, check=True, timeout=300)
    site = tmp_path / "site"
    with zipfile.ZipFile(next(tmp_path.glob("scaling_lab-*.whl"))) as wheel:
        wheel.extractall(site)
    assert (site / "scaling_lab" / "conf" / "sharding" / "fsdp_tensor.yaml").is_file()
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); sys.argv = ['scaling-lab', 'draw']; import scaling_lab.__main__ as m; "
    )
    code += f"assert m.conf_folder().is_relative_to({str(site)!r}), m.conf_folder(); sys.exit(m.main())"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "fsdp 3" in done.stdout
