"""Certificates of a test: an authority of its own, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from astraflow.lib.tls import Tls

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """Signs what it is asked to; `ca` is its own certificate."""

    def __init__(self, directory: Path, name: str = "authority"):
        if shutil.which("openssl") is None:
            pytest.skip("the openssl command is not installed: no certificates can be made")
        self._directory, self._name = directory, name
        directory.mkdir(parents=True, exist_ok=True)
        self.ca = str(self._file("pem"))
        openssl("req", "-x509", *KEY, "-keyout", str(self._file("key")), "-out", self.ca, "-days", "2", "-subj", f"/CN={name}")

    def _file(self, kind: str, whose: str = "") -> Path:
        return self._directory / f"{whose or self._name}.{kind}"

    def certificate(self, whose: str = "service", names: str = "IP:127.0.0.1,DNS:localhost", days: int = 2) -> Tls:
        """A certificate for these names with a key of its own; `days` below 0 = it has expired."""
        cert, key, request = (str(self._file(kind, whose)) for kind in ("pem", "key", "csr"))
        openssl("req", *KEY, "-keyout", key, "-out", request, "-subj", f"/CN={whose}", "-addext", f"subjectAltName={names}")
        signed = ("-CA", self.ca, "-CAkey", str(self._file("key")), "-set_serial", "1", "-copy_extensions", "copy")
        openssl("x509", "-req", "-in", request, *signed, "-days", str(days), "-out", cert)
        return Tls(cert=cert, key=key, ca=self.ca)


def openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def overrides(tls: Tls) -> tuple[str, ...]:
    """The same as overrides of a recipe."""
    return tuple(f"launch.tls.{name}={getattr(tls, name)}" for name in ("cert", "key", "ca"))
