from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_process_logs_to_its_file_and_to_standard_error_and_quiets_http_libraries(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "raas%1.log"
    program = (
        "import logging, sys; from astraflow.lib.log import setup_logging;"
        "setup_logging('raas%1', sys.argv[1]); setup_logging('raas%1', sys.argv[1]);"
        "logging.getLogger('astraflow.x').info('50%% of %s', 'it'); logging.getLogger('httpx').info('GET /status')"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=60, capture_output=True, text=True)
    for text in (done.stderr, path.read_text()):
        assert text.count("50% of it") == 1
        assert "raas%1 astraflow.x" in text
        assert "GET" not in text
    assert done.stdout == ""
